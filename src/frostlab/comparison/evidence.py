"""Everything a comparison found, as plain values: what verdicts, tables and pages are made from."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from frostlab.comparison.plan import Plan, Rules, confounds, rules_for
from frostlab.comparison.statistics import holm, mcnemar, paired, spread
from frostlab.comparison.verdict import Records, Verdict, contrasts, judge, why_unpaired
from frostlab.flow.measurements import Flow, flows_of
from frostlab.recipe.recipe import METRICS
from frostlab.records.folder import REPORTED, SCORES, RunRecord, read_scores
from frostlab.text import effect, markdown, mean_and_std, number

_RANDOM = ("oelm-random-matched", "oelm-random")


def gather(
    plan: Plan,
    folder: Path,
    records: Records,
    *,
    look: int,
    tuning: list[dict[str, Any]],
    timing: dict[str, Any] | None,
    rounds: Records,
    jobs: int,
) -> dict[str, Any]:
    """All evidence: runs, pairs, spreads, verdicts for every metric, times."""
    refused = _refused(plan, records)
    named = {name: [str(one) for one in found] for name, found in plan.confounds().items()}
    metrics = METRICS[plan.recipe_of(plan.baseline, plan.seeds[0]).data.task]
    primary = plan.rules.metric
    verdicts = {
        metric: _judge(plan, _rules_of(plan.rules, metric, look), records, refused, named)
        for metric in (primary, *(metric for metric in metrics if metric != primary))
    }
    return {
        "schema": 1,
        "plan": plan.model_dump(mode="json"),
        "baseline": plan.baseline.name,
        "look": look,
        "jobs": jobs,
        "caution": next((r.result.caution for r in records.values()), None),
        "pairs": sum(
            records[arm.name, seed].status == records[plan.baseline.name, seed].status == "finished"
            for arm in plan.others
            for seed in plan.seeds
        ),
        "confounds": named,
        "tuning": tuning,
        "arms": {arm.name: _arm(plan, arm.name, records, folder, metrics) for arm in plan.arms},
        "refused_pairs": refused,
        "verdicts": {
            metric: {name: verdict.to_dict() for name, verdict in found.items()}
            for metric, found in verdicts.items()
        },
        "contrasts": contrasts(plan, records, _rules_of(plan.rules, primary, look)),
        "orthogonality": _orthogonality(plan, records, refused, look),
        "mcnemar": _mcnemar(plan, records, refused),
        "subjects": subject_tests(plan, records, refused),
        "flow": gradient_flow(plan, records),
        "timing": timing,
        "rounds": _rounds(plan, rounds),
    }


def _rules_of(rules: Rules, metric: str, look: int) -> Rules:
    """The plan's rules for its own metric; another metric's are by the way."""
    if metric == rules.metric:
        return rules.model_copy(update={"look": look})
    return rules_for(metric, alpha=rules.alpha, looks=rules.looks, look=look)


def _refused(plan: Plan, records: Records) -> list[dict[str, Any]]:
    """The runs that must not be paired with the baseline's, and why."""
    found = []
    first = records[plan.baseline.name, plan.seeds[0]].digests.data
    for arm in plan.others:
        for seed in plan.seeds:
            one, other = records[plan.baseline.name, seed], records[arm.name, seed]
            if one.status == other.status == "finished":
                reason = why_unpaired(one, other, plan.vary)
                if one.digests.data != first:
                    reason = f"the data are no longer those of seed {plan.seeds[0]}"
                if reason is not None:
                    found.append({"arm": arm.name, "seed": seed, "reason": reason})
    return found


def _judge(
    plan: Plan,
    rules: Rules,
    records: Records,
    refused: Sequence[dict[str, Any]],
    named: Mapping[str, Sequence[str]],
) -> dict[str, Verdict]:
    names = [arm.name for arm in plan.arms]
    values, failed = _values(plan, names, rules.metric, records, refused)
    return judge(values, plan.baseline.name, rules, confounds=named, failed=failed)


def _values(
    plan: Plan,
    names: Sequence[str],
    metric: str,
    records: Records,
    refused: Sequence[dict[str, Any]],
) -> tuple[dict[str, dict[int, float]], dict[str, list[int]]]:
    """A metric by arm and seed of what finished and may be paired; and the seeds that failed."""
    unpaired = {(each["arm"], each["seed"]) for each in refused}
    values: dict[str, dict[int, float]] = {name: {} for name in names}
    failed: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        for seed in plan.seeds:
            record = records[name, seed]
            value = record.metrics.get(metric)
            if record.status != "finished" or value is None:
                failed[name].append(seed)
            elif (name, seed) not in unpaired:
                values[name][seed] = value
    return values, failed


def _orthogonality(
    plan: Plan, records: Records, refused: Sequence[dict[str, Any]], look: int
) -> dict[str, Any] | None:
    """OELM against random values of the same scale if that arm is there, else of another."""
    names = [arm.name for arm in plan.arms]
    random = next((name for name in _RANDOM if name in names), None)
    if "oelm" not in names or random is None:
        return None
    pairs = ((seed, records[random, seed], records["oelm", seed]) for seed in plan.seeds)
    apart = [
        {"arm": "oelm", "seed": seed}
        for seed, one, other in pairs
        if one.status == other.status == "finished" and why_unpaired(one, other)
    ]
    values, failed = _values(plan, ["oelm", random], plan.rules.metric, records, [*refused, *apart])
    arms = {arm.name: plan.recipe_of(arm, 0) for arm in plan.arms}
    tuned = [tune.key for tune in plan.tune]
    found = [str(c) for c in confounds(arms[random], arms["oelm"]) if c.key not in tuned]
    rules = _rules_of(plan.rules, plan.rules.metric, look)
    return judge(values, random, rules, confounds={"oelm": found}, failed=failed)["oelm"].to_dict()


def _arm(
    plan: Plan, name: str, records: Records, folder: Path, metrics: Sequence[str]
) -> dict[str, Any]:
    mine = {seed: records[name, seed] for seed in plan.seeds}
    finished = [record for record in mine.values() if record.status == "finished"]
    return {
        "runs": [_run(seed, record, folder) for seed, record in mine.items()],
        "metrics": {
            metric: vars(spread(known))
            for metric in metrics
            if (known := [v for r in finished if (v := r.metrics[metric]) is not None])
        } if finished else {},
        "parameters": next((asdict(record.result.parameters) for record in finished), None),
        "seconds": vars(spread([_clock(record, "total_seconds") for record in finished]))
        if finished else None,
    }  # fmt: skip


def _run(seed: int, record: RunRecord, folder: Path) -> dict[str, Any]:
    result = record.result
    return {
        "seed": seed,
        "folder": str(record.folder.relative_to(folder)),
        "status": result.status,
        "error": result.error,
        "attempts": 1 + len(list(record.folder.glob("result-*.json"))),
        "metrics": record.metrics or None,
        "best": asdict(result.best),
        "last": result.last,
        "steps": result.steps,
        "stages": [asdict(stage) for stage in result.stages],
        "clocks": {key: asdict(result.clocks)[key] for key in (
            "total_seconds", "train_seconds", "validation_seconds", "epoch_seconds", "step_ms"
        )},
        "weights_digest": result.weights_digest,
        "recipe_digest": result.recipe_digest,
    }  # fmt: skip


def _clock(record: RunRecord, name: str) -> float:
    return float(getattr(record.result.clocks, name))


def _mcnemar(
    plan: Plan, records: Records, refused: Sequence[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """For every pair of runs with predictions; it compares two models, not two treatments."""
    unpaired = {(each["arm"], each["seed"]) for each in refused}
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in plan.others:
        for seed in plan.seeds:
            right = [_right(records[name, seed]) for name in (arm.name, plan.baseline.name)]
            if None not in right and (arm.name, seed) not in unpaired:
                each = vars(mcnemar(right[0], right[1]))  # type: ignore[arg-type]
                found.setdefault(arm.name, []).append({"seed": seed, **each})
    return found


def _right(record: RunRecord) -> list[bool] | None:
    try:
        kept = json.loads((record.folder / "predictions.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return [label == taken for label, taken in zip(kept["labels"], kept["classes"], strict=True)]


def _rounds(plan: Plan, rounds: Records) -> dict[str, Any]:
    """Seconds of every whole run that alternated with the others, paired by round."""
    if not rounds:
        return {}
    seconds = {
        arm.name: [
            _clock(rounds[arm.name, number], "total_seconds") for number in range(plan.rounds)
        ]
        for arm in plan.arms
    }
    base = seconds[plan.baseline.name]
    return {
        name: {
            "seconds": mine,
            "paired": None if name == plan.baseline.name else asdict(paired(mine, base, log=True)),
            "finished": all(rounds[name, n].status == "finished" for n in range(plan.rounds)),
        }
        for name, mine in seconds.items()
    }


Table = dict[int, dict[str, float]]  # z by seed and subject


def subject_tests(
    plan: Plan, records: Records, refused: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """By split and arm: paired over subjects with the baseline, and over seeds with ridge.

    A subject counts once, with its mean z over the seeds that both arms have. Nothing where runs
    have no scores of recordings.
    """
    unpaired = {(each["arm"], each["seed"]) for each in refused}
    read = {
        (arm.name, seed): read_scores(records[arm.name, seed].folder)
        for arm in plan.arms
        for seed in plan.seeds
        if (records[arm.name, seed].folder / SCORES).exists() and (arm.name, seed) not in unpaired
    }
    found = {}
    for split in (s for s in REPORTED if any(s in scores for scores in read.values())):
        kept = {key: scores[split] for key, scores in read.items() if split in scores}
        found[split] = _split(plan, kept)
    return found


def _split(plan: Plan, scores: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    base, tests, beside = plan.baseline.name, {}, {}
    for arm in plan.arms:
        mine = {seed: each for (name, seed), each in scores.items() if name == arm.name}
        reached = [[each[who].summary.mean for each in mine.values()] for who in ("model", "ridge")]
        beside[arm.name] = asdict(paired(*reached))
        if arm.name != base:
            theirs = {seed: each for (name, seed), each in scores.items() if name == base}
            both = [seed for seed in mine if seed in theirs]
            tables = ({s: _z(each[s]["model"]) for s in both} for each in (mine, theirs))
            tests[arm.name] = _test(*tables)
    adjusted = holm({name: math.nan if t["p"] is None else t["p"] for name, t in tests.items()})
    return {
        "subjects": {name: test | {"p_adjusted": adjusted[name]} for name, test in tests.items()},
        "ridge": beside,
    }


def _z(scores: Any) -> dict[str, float]:
    """Fisher's z of every subject: what may be averaged, and tested."""
    from frostlab.envelopes.correlation import fisher

    return {each.subject: float(fisher(each.r)) for each in scores.subjects}


def _test(ours: Table, theirs: Table) -> dict[str, Any]:
    """Subjects as pairs: the t test on z, and Wilcoxon's signed ranks on r."""
    from scipy import stats

    names = sorted(next(iter(ours.values()), {}))
    a, b = (
        np.array([np.mean([seed[name] for seed in table.values()]) for name in names])
        for table in (ours, theirs)
    )
    found = paired(a, b)
    apart = np.tanh(a) - np.tanh(b)
    signed = float(stats.wilcoxon(apart).pvalue) if len(names) > 1 and apart.any() else None
    return {
        "n": len(names),
        "seeds": len(ours),
        "better": int((a > b).sum()),
        "r": float(np.tanh(a.mean()) - np.tanh(b.mean())) if names else None,
        "z": asdict(found),
        "p": None if math.isnan(found.p) else found.p,
        "p_signed": signed,
    }


def subjects_page(evidence: dict[str, Any]) -> str:
    """The tests as a part of a comparison's page; nothing where there are none."""
    parts = []
    for split, found in evidence.get("subjects", {}).items():
        rows = [
            [name, f"{t['better']} of {t['n']}", number(t["r"]), effect(t["z"]), number(t["p"]),
             number(t["p_signed"]), number(t["p_adjusted"])]
            for name, t in found["subjects"].items()
        ]  # fmt: skip
        head = ["arm", "subjects better", "r", "z [95 %]", "p", "p signed ranks", "p (Holm)"]
        ridge = [[name, effect(each), number(each["p"])] for name, each in found["ridge"].items()]
        parts.append(
            f"### {split}\n\n{markdown(head, rows)}\n\n"
            f"{markdown(['arm', 'r − ridge, over seeds [95 %]', 'p'], ridge)}"
        )
    if not parts:
        return ""
    said = (
        f"Against {evidence['baseline']}, a subject a pair: its mean Fisher z over the seeds. "
        "`report`: other recordings of subjects trained on; `unseen`: subjects not trained on. "
        "The ridge decoder is the same for every seed."
    )
    return "\n\n".join(["## Subjects", said, *parts])


_FRONT = (0, 1)  # layers
_SAID = {
    "front_ratio": "front/output gradient",
    "weight_change": "front weight change",
    "update": "front update/weight",
}


def gradient_flow(plan: Plan, records: Records) -> dict[str, Any]:
    """By arm, what the last stage of its watched runs measured, and its ratio to the baseline's.

    Nothing where runs were not watched.
    """
    if plan.recipe_of(plan.baseline, plan.seeds[0]).watch is None:
        return {}
    measured = {
        arm.name: {
            seed: _measure(records[arm.name, seed].folder)
            for seed in plan.seeds
            if records[arm.name, seed].status == "finished"
        }
        for arm in plan.arms
    }
    base = measured[plan.baseline.name]
    return {
        name: {quantity: _quantity(mine, base, quantity) for quantity in _SAID}
        for name, mine in measured.items()
    }


def _measure(folder: Path) -> dict[str, float]:
    flow = list(flows_of(folder).values())[-1]
    ends = flow.ends()
    found = {
        "front_ratio": ends.front_ratio,
        "weight_change": ends.weight_change,
        "update": _update(flow),
    }
    return {name: value for name, value in found.items() if math.isfinite(value) and value > 0}


def _update(flow: Flow) -> float:
    """The median over reports of the median update/weight of the front's parts."""
    front = [i for i, part in enumerate(flow.parts) if part.layer in _FRONT]
    steps = []
    for report in flow.reports:
        known = [r for r in map(report.ratio, front) if not math.isnan(r)]
        steps += [median(known)] if known else []
    return median(steps) if steps else math.nan


def _quantity(
    mine: Mapping[int, dict[str, float]], base: Mapping[int, dict[str, float]], name: str
) -> dict[str, Any]:
    values = {seed: found[name] for seed, found in mine.items() if name in found}
    both = [seed for seed in values if name in base.get(seed, {})]
    ratio = paired([values[s] for s in both], [base[s][name] for s in both], log=True)
    return {
        "spread": vars(spread(list(values.values()))) if values else None,
        "against": None if mine is base else asdict(ratio),
    }


def gradients_page(evidence: dict[str, Any]) -> str:
    """The measurements as a part of a comparison's page; nothing where there are none."""
    found = evidence.get("flow", {})
    if not found:
        return ""
    head = ["arm", *(cell for said in _SAID.values() for cell in (said, "ratio [95 %]"))]
    rows = [
        [name, *(cell for each in quantities.values()
                 for cell in (mean_and_std(each["spread"]), effect(each["against"])))]
        for name, quantities in found.items()
    ]  # fmt: skip
    said = (
        "Means over seeds, and ratios to the baseline paired over them. Front: layers 0 and 1. "
        "Gradients are the largest of each tensor at the last measured step, as the source took "
        "them; update/weight is the median over the front's parts and all measured steps."
    )
    return f"## Gradients\n\n{said}\n\n{markdown(head, rows)}"

"""Everything a comparison found, as plain values: what verdicts, tables and pages are made from."""

import json
from frostlab.compare.verdict import Records
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frostlab.compare.confounds import confounds
from frostlab.compare.contrasts import contrasts
from frostlab.compare.gradients import gradient_flow
from frostlab.compare.plan import Plan
from frostlab.compare.rules import Rules, rules_for
from frostlab.compare.sameness import why_unpaired
from frostlab.compare.statistics import mcnemar, paired, spread
from frostlab.compare.subjects import subject_tests
from frostlab.compare.verdict import Verdict, judge
from frostlab.recipe import METRICS
from frostlab.records.record import RunRecord

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
        "caution": next((r.result["caution"] for r in records.values()), None),
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
    first = records[plan.baseline.name, plan.seeds[0]].digests["data"]
    for arm in plan.others:
        for seed in plan.seeds:
            one, other = records[plan.baseline.name, seed], records[arm.name, seed]
            if one.status == other.status == "finished":
                reason = why_unpaired(one, other, plan.vary)
                if one.digests["data"] != first:
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
            if (known := [r.metrics[metric] for r in finished if r.metrics[metric] is not None])
        } if finished else {},
        "parameters": next((record.result["parameters"] for record in finished), None),
        "seconds": vars(spread([_clock(record, "total_seconds") for record in finished]))
        if finished else None,
    }  # fmt: skip


def _run(seed: int, record: RunRecord, folder: Path) -> dict[str, Any]:
    result = record.result
    return {
        "seed": seed,
        "folder": str(record.folder.relative_to(folder)),
        "status": result["status"],
        "error": result["error"],
        "attempts": 1 + len(list(record.folder.glob("result-*.json"))),
        "metrics": record.metrics or None,
        "best": result["best"],
        "last": result["last"],
        "steps": result["steps"],
        "stages": result.get("stages", []),  # runs from before there were any
        "clocks": {key: result["clocks"][key] for key in (
            "total_seconds", "train_seconds", "validation_seconds", "epoch_seconds", "step_ms"
        )},
        "weights_digest": result["weights_digest"],
        "recipe_digest": result["recipe_digest"],
    }  # fmt: skip


def _clock(record: RunRecord, name: str) -> float:
    return float(record.result["clocks"][name])


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

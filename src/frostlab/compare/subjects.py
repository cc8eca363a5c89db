"""Decoders of envelopes compared over subjects, and with the ridge decoder of every run."""

import math
from frostlab.compare.verdict import Records
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from frostlab.compare.plan import Plan
from frostlab.compare.statistics import holm, paired
from frostlab.compare.words import effect, markdown
from frostlab.records.record import RunRecord
from frostlab.records.scores import REPORTED, SCORES, read_scores
from frostlab.records.words import number

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
    from frostlab.scoring.correlation import fisher

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

"""Tests of EEG decoders: an arm against the baseline by subject, and against ridge by seed.

An arm is a variant of the compared recipe; ridge is a linear decoder of the same recordings.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from frostlab.comparison.evidence import Effect, RefusedPair, SplitTests, SubjectTest, stored
from frostlab.comparison.plan import Plan
from frostlab.comparison.statistics import holm, paired
from frostlab.envelopes.scores_json import REPORTED, SCORES
from frostlab.records.folder import RunRecord
from frostlab.storage import finite
from frostlab.typed import read

Records = Mapping[tuple[str, int], RunRecord]  # (arm, seed) → run


def subject_tests(
    plan: Plan, records: Records, refused: Iterable[RefusedPair]
) -> dict[str, SplitTests]:
    """Test EEG decoders on each split: against the baseline by subject, against ridge by seed.

    Each subject counts once, with its mean Fisher z over the seeds that the arm and the baseline
    share. Runs of other tasks have no file of scores and are skipped.
    """
    left_out = {(pair.arm, pair.seed) for pair in refused}
    scores = {
        (arm.name, seed): record.envelope_scores()[0]
        for arm in plan.arms
        for seed in plan.seeds
        if (arm.name, seed) in records.keys() - left_out
        and ((record := records[arm.name, seed]).folder / SCORES).exists()
    }
    tests = {}
    for split in REPORTED:
        of_split = {key: splits[split] for key, splits in scores.items() if split in splits}
        if of_split:
            tests[split] = _split_tests(plan, of_split)
    return tests


def _split_tests(plan: Plan, scores: Mapping[tuple[str, int], Mapping[str, Any]]) -> SplitTests:
    """Run the tests of one split, given the scores of `model` and `ridge` by arm and seed."""
    by_arm = {
        arm.name: {seed: decoders for (name, seed), decoders in scores.items() if name == arm.name}
        for arm in plan.arms
    }
    ridge = {
        arm: stored(Effect, paired(*(
            [decoders[decoder].summary.mean for decoders in by_seed.values()]
            for decoder in ("model", "ridge")
        )))
        for arm, by_seed in by_arm.items()
    }  # fmt: skip
    tests = {}
    for arm in plan.others:
        treated, base = by_arm[arm.name], by_arm[plan.baseline.name]
        both = [seed for seed in treated if seed in base]
        tests[arm.name] = _subject_test(
            [_subject_z(treated[seed]["model"]) for seed in both],
            [_subject_z(base[seed]["model"]) for seed in both],
        )
    adjusted = holm(
        {arm: math.nan if (p := test["p"]) is None else p for arm, test in tests.items()}
    )
    return SplitTests(
        subjects={
            arm: read(SubjectTest, finite(test | {"p_adjusted": adjusted[arm]}), "subjects")
            for arm, test in tests.items()
        },
        ridge=ridge,
    )


def _subject_z(scores: Any) -> dict[str, float]:
    """Return Fisher's z by subject; unlike r, it is close to normal, so it can be averaged."""
    from frostlab.envelopes.correlation import fisher_z

    return {score.subject: float(fisher_z(score.r)) for score in scores.subjects}


def _subject_test(
    arm: Sequence[dict[str, float]], base: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Compare an arm with the baseline by subject: t test on z, signed-rank test on r.

    Each item of `arm` and `base` holds the z by subject of one seed.
    """
    from scipy import stats

    subjects = sorted(arm[0]) if arm else []
    a, b = (
        np.array([np.mean([z[subject] for z in by_seed]) for subject in subjects])
        for by_seed in (arm, base)
    )
    test = paired(a, b)
    gaps = np.tanh(a) - np.tanh(b)
    has_ranks = len(subjects) > 1 and gaps.any()
    return {
        "n": len(subjects),
        "seeds": len(arm),
        "better": int((a > b).sum()),
        "r": float(np.tanh(a.mean()) - np.tanh(b.mean())) if subjects else None,
        "z": asdict(test),
        "p": None if math.isnan(test.p) else test.p,
        "p_signed": float(stats.wilcoxon(gaps).pvalue) if has_ranks else None,
    }

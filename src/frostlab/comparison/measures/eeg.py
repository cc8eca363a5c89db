"""EEG decoders in a comparison: how they differ by subject, and their r on short segments.

An arm is a variant of the compared recipe; ridge is a linear decoder of the same recordings. r is
the correlation of decoded and true speech envelope. Segments last 60 s, as in the Auditory EEG
Challenge, whose score is a weighted mean of r over subjects (see `segments_section`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from frostlab.comparison.evidence import (
    SEGMENTS,
    Effect,
    Evidence,
    Quantity,
    RefusedPair,
    SplitTests,
    SubjectTest,
    Summary,
    stored,
)
from frostlab.comparison.judging.statistics import holm, paired, spread
from frostlab.comparison.plan import Plan
from frostlab.envelopes.challenge import challenge_scores
from frostlab.envelopes.scores_json import REPORTED, SCORES
from frostlab.records.folder import RunRecord
from frostlab.storage import finite
from frostlab.text import NONE, escaped, markdown
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
        (arm.name, seed): record.envelope_scores[0]
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
    """Compare an arm with the baseline, paired by subject: t test on z, signed-rank test on r.

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


# Segments


def segment_scores(
    plan: Plan, records: Records, refused: Iterable[RefusedPair]
) -> dict[str, dict[str, Quantity]]:
    """Summarize r of segments and the challenge's score by arm; empty without EEG.

    Differences to the baseline are paired by seed.
    """
    left_out = {(pair.arm, pair.seed) for pair in refused}
    measured: dict[str, dict[int, dict[str, float]]] = {arm.name: {} for arm in plan.arms}
    for (arm, seed), record in records.items():
        if arm not in measured or (arm, seed) in left_out:
            continue
        if not (record.folder / SCORES).exists():
            continue
        scores, _ = record.envelope_scores
        challenge = challenge_scores(scores)["model"]
        values = {"score": challenge.score}
        for group, segments in (("seen", challenge.seen), ("unseen", challenge.unseen)):
            if segments is not None:
                values |= {group: segments.mean, f"{group}_std": segments.std}
        measured[arm][seed] = {name: x for name, x in values.items() if x is not None}
    if not any(measured.values()):
        return {}
    base = measured[plan.baseline.name]
    return {
        arm: {name: _quantity(by_seed, base, name) for name in SEGMENTS}
        for arm, by_seed in measured.items()
    }


def _quantity(
    own: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]], name: str
) -> Quantity:
    values = {seed: scores[name] for seed, scores in own.items() if name in scores}
    both = [seed for seed in values if name in base.get(seed, {})]
    against = None
    if own is not base and both:
        against = stored(Effect, paired(*([side[seed][name] for seed in both]
                                          for side in (own, base))))  # fmt: skip
    return Quantity(stored(Summary, spread(list(values.values()))) if values else None, against)


def segments_section(evidence: Evidence) -> str:
    """Return the section of comparison.md on segments; empty without EEG."""
    if not evidence.segments:
        return ""
    rows = [
        [arm, _spread(quantities, "seen"), _spread(quantities, "unseen"),
         _over_seeds(quantities["score"].summary), _difference(quantities["score"].against)]
        for arm, quantities in evidence.segments.items()
    ]  # fmt: skip
    head = ["arm", "subjects trained on", "subjects not trained on", "score over seeds",
            "score − baseline's [95 %]"]  # fmt: skip
    note = (
        "r of segments of 60 s, as in the Auditory EEG Challenge of 2023: a subject's r is the "
        "mean over its segments (a shorter recording is one segment), and the columns show the "
        "mean ± standard deviation over subjects, averaged over seeds. The score is 2/3 of the "
        "first mean + 1/3 of the second; here with its standard deviation over seeds. Differences "
        f"from {escaped(evidence.baseline)} are paired by seed. No verdict is drawn from them."
    )
    return f"{markdown(head, rows)}\n\n{note}"


def _spread(quantities: Mapping[str, Quantity], group: str) -> str:
    mean, std = quantities[group].summary, quantities[f"{group}_std"].summary
    if mean is None or mean.mean is None:
        return NONE
    return f"{mean.mean:.3f}" + ("" if std is None or std.mean is None else f" ± {std.mean:.3f}")


def _over_seeds(summary: Summary | None) -> str:
    if summary is None or summary.mean is None:
        return NONE
    return f"{summary.mean:.4f}" + ("" if summary.std is None else f" ± {summary.std:.4f}")


def _difference(effect: Effect | None) -> str:
    if effect is None or effect.effect is None:
        return NONE
    if effect.low is None or effect.high is None:
        return f"{effect.effect:+.4f}"
    return f"{effect.effect:+.4f} [{effect.low:+.4f}, {effect.high:+.4f}]"

"""EEG decoders on segments of 60 s, as in the Auditory EEG Challenge: each arm's r and score.

An arm is a variant of the compared recipe. r is the correlation of decoded and true speech
envelope; the score is a weighted mean of r over subjects (see `segments_section`).
"""

from collections.abc import Iterable, Mapping

from frostlab.comparison.evidence import (
    SEGMENTS,
    Effect,
    Evidence,
    Quantity,
    RefusedPair,
    Summary,
    stored,
)
from frostlab.comparison.plan import Plan
from frostlab.comparison.statistics import paired, spread
from frostlab.envelopes.challenge import challenge_scores
from frostlab.envelopes.scores_json import SCORES
from frostlab.records.folder import RunRecord
from frostlab.text import NONE, escaped, markdown

Records = Mapping[tuple[str, int], RunRecord]  # (arm, seed) → run


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
        scores, _ = record.envelope_scores()
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
            "score − baseline [95 %]"]  # fmt: skip
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

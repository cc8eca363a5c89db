"""Two decoders on the same recordings, paired by subject."""

from dataclasses import dataclass

import numpy as np

from frostlab.errors import BadInput
from frostlab.scoring.correlation import fisher, fisher_mean
from frostlab.scoring.scores import EnvelopeScores


@dataclass(frozen=True)
class SubjectPairs:
    """Ours − theirs over subjects.

    `difference` is that of the mean r by Fisher's z. `z`, `low`, `high` and `p` are of the paired
    t test on z; `p_signed` is Wilcoxon's signed-rank test on r. None where subjects are too few.
    """

    subjects: int
    better: int  # subjects for whom ours is higher
    difference: float
    median: float
    z: float
    low: float | None
    high: float | None
    p: float | None
    p_signed: float | None


def subject_z(scores: EnvelopeScores) -> dict[str, float]:
    """Fisher's z of every subject: what may be averaged, and tested."""
    return {each.subject: float(fisher(each.r)) for each in scores.subjects}


def pair_subjects(
    ours: EnvelopeScores, theirs: EnvelopeScores, confidence: float = 0.95
) -> SubjectPairs:
    """Compare two decoders that were scored on exactly the same recordings."""
    from scipy import stats  # takes seconds to load, and only this needs it

    _check(ours, theirs)
    mine, other = subject_z(ours), subject_z(theirs)
    a, b = (np.array([each[name] for name in mine]) for each in (mine, other))
    r_a, r_b = np.tanh(a), np.tanh(b)
    z, n = a - b, len(a)
    low = high = p = p_signed = None
    if n > 1:
        mean, error = float(z.mean()), float(z.std(ddof=1) / np.sqrt(n))
        reach = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
        low, high = mean - reach, mean + reach
        # Equal differences have no spread to test against: scipy would warn and answer NaN.
        same = error <= 1e-12 * max(1.0, abs(mean))
        p = (0.0 if abs(mean) > 1e-12 else 1.0) if same else float(stats.ttest_rel(a, b).pvalue)
        p_signed = float(stats.wilcoxon(r_a - r_b).pvalue) if (r_a != r_b).any() else 1.0
    return SubjectPairs(
        subjects=n,
        better=int((z > 0).sum()),
        difference=float(fisher_mean(r_a) - fisher_mean(r_b)),
        median=float(np.median(r_a - r_b)),
        z=float(z.mean()),
        low=low,
        high=high,
        p=p,
        p_signed=p_signed,
    )


def _check(ours: EnvelopeScores, theirs: EnvelopeScores) -> None:
    mine, other = (
        {each.name: (each.subject, each.samples) for each in scores.recordings}
        for scores in (ours, theirs)
    )
    for name in sorted({*mine, *other}):
        if name not in mine or name not in other:
            raise BadInput(f"pairs need the same recordings: {name} is on one side only")
        if mine[name] != other[name]:
            raise BadInput(
                f"pairs need the same recordings: {name} is {mine[name]} and {other[name]}"
            )

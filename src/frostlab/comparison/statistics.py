"""Statistics of values that are paired by seed: effects, intervals, tests and detectable effects.

`arm` and `base` hold the values of two arms of a comparison, in the same order of seeds. A verdict
rests on two tests of their differences: a paired t test, and a sign-flip test. The sign-flip test
asks how often the mean would be as large if every difference had a random sign.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special
from scipy.optimize import brentq

from frostlab.errors import BadInput

Numbers = NDArray[np.float64]

POWER = 0.8  # probability of finding the smallest detectable effect
NAN = math.nan
_FEWEST_FLIPPED = 6  # pairs; with 5, the sign-flip p is at least 0.0625
_MOST_EXACT = 16  # pairs; with more, only a sample of the sign patterns is tried
_SIGN_DRAWS = 2**15  # size of that sample
_AT_ONCE = 2**22  # number of sums that are held in memory at once
_POWER_DRAWS = 4_000  # number of simulated experiments
_MOST_SIMULATED = 10  # pairs; with more, the sign-flip test costs only about 1 % of power


@dataclass(frozen=True)
class Paired:
    """The effect of an arm against the baseline, over the seeds that both have.

    `effect` is the mean of arm − base or, on the log scale, the ratio of the geometric means.
    `low` and `high` bound the effect with confidence 1 − alpha. `std` is the standard deviation of
    the differences or, on the log scale, of the log ratios. `smallest_seen` is the effect that the
    t test detects with 80 % power, given n and std; on the log scale, it is a ratio − 1. `p`
    belongs to the t test, and `p_flip` to the sign-flip test.
    """

    n: int
    log: bool
    alpha: float
    effect: float
    low: float
    high: float
    p: float
    p_flip: float | None
    std: float
    smallest_seen: float


def paired(arm: ArrayLike, base: ArrayLike, *, alpha: float = 0.05, log: bool = False) -> Paired:
    """Compare paired values with a t test and, with at least 6 pairs, a sign-flip test."""
    differences, rounding = _differences(arm, base, log)
    n = len(differences)
    untransform = _exp if log else float
    if n < 2:
        effect = untransform(differences[0]) if n else NAN
        return Paired(n, log, alpha, effect, NAN, NAN, NAN, None, NAN, NAN)
    mean, std, p = (float(x) for x in t_test(differences, rounding))
    half_width = special.stdtrit(n - 1, 1 - alpha / 2) * std / math.sqrt(n)
    smallest = seen_by_t(n, alpha) * std
    return Paired(
        n=n,
        log=log,
        alpha=alpha,
        effect=untransform(mean),
        low=untransform(mean - half_width),
        high=untransform(mean + half_width),
        p=p,
        p_flip=float(flip_p(differences, n * rounding)) if n >= _FEWEST_FLIPPED else None,
        std=std,
        smallest_seen=untransform(smallest) - 1 if log else smallest,
    )


def t_test(differences: Numbers, rounding: float = 0.0) -> tuple[Numbers, Numbers, Numbers]:
    """Return mean, standard deviation and two-sided p of the t test along the last axis.

    A mean or standard deviation of at most `rounding` counts as zero. If all differences are equal,
    p is 1 if they are zero, and 0 otherwise.
    """
    n = differences.shape[-1]
    mean, std = differences.mean(-1), differences.std(-1, ddof=1)
    mean = np.where(np.abs(mean) <= rounding, 0.0, mean)
    std = np.where(std <= rounding, 0.0, std)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / (std / math.sqrt(n))
    p = np.where(std == 0, np.where(mean == 0, 1.0, 0.0), 2 * special.stdtr(n - 1, -t))
    return mean, std, p


@cache
def signs(n: int) -> Numbers:
    """Return sign patterns for n differences, one pattern per row.

    For up to 16 differences, these are all patterns that keep the first sign. The other half would
    only negate their sums, which a two-sided test counts alike. For more than 16 differences, the
    patterns are a random sample with a fixed seed.
    """
    if n <= _MOST_EXACT:
        bits = np.arange(2 ** (n - 1))[:, None] >> np.arange(n)[::-1] & 1
        patterns = (1 - 2 * bits).astype(np.float64)
    else:
        patterns = np.random.default_rng(n).choice(np.array([-1.0, 1.0]), (_SIGN_DRAWS, n))
    patterns.setflags(write=False)
    return patterns


def flip_p(differences: Numbers, rounding: float = 0.0) -> Numbers:
    """Return the two-sided p of a sign-flip permutation test of the mean along the last axis.

    The test tries all sign patterns of up to 16 pairs, and a random sample for more pairs. A sum
    within `rounding` of the observed sum counts as equal to it.
    """
    n = differences.shape[-1]
    rows = differences.reshape(-1, n)
    patterns = signs(n)
    counts = np.empty(len(rows))
    step = max(1, _AT_ONCE // len(patterns))
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        slack = rounding + 1e-12 * np.abs(chunk).sum(-1, keepdims=True)
        observed = np.abs(chunk.sum(-1, keepdims=True)) - slack
        counts[start : start + step] = (np.abs(chunk @ patterns.T) >= observed).sum(-1)
    extra = 0 if n <= _MOST_EXACT else 1  # count the observed signs as part of the sample
    p = (counts + extra) / (len(patterns) + extra)
    return p.reshape(differences.shape[:-1])


def smallest_flip_p(n: int) -> float:
    """Return the smallest p that the sign-flip test can give for n pairs."""
    return 2.0 ** (1 - n) if n <= _MOST_EXACT else 1 / (1 + _SIGN_DRAWS)


def flips_can_decide(n: int, level: float) -> bool:
    """Return whether n pairs are enough for the sign-flip test to be significant at this level."""
    return n >= _FEWEST_FLIPPED and smallest_flip_p(n) <= level


def holm(p_by_name: Mapping[str, float]) -> dict[str, float]:
    """Return Holm's adjusted p values; a NaN stays NaN, but counts as one of the tests."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    order = sorted(p_by_name, key=lambda name: (math.isnan(p_by_name[name]), p_by_name[name]))
    for i, name in enumerate(order):
        if not math.isnan(p_by_name[name]):
            largest = max(largest, min(1.0, (len(order) - i) * p_by_name[name]))
        adjusted[name] = NAN if math.isnan(p_by_name[name]) else largest
    return {name: adjusted[name] for name in p_by_name}


@dataclass(frozen=True)
class Spread:
    """Mean and spread of one arm's values; `low` and `high` are the smallest and the largest.

    `cv` is the coefficient of variation, std / |mean|.
    """

    n: int
    mean: float
    std: float
    cv: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Summarize one arm's values; statistics that are not defined are NaN."""
    numbers = _finite(values, "values")
    if not len(numbers):
        return Spread(0, NAN, NAN, NAN, NAN, NAN)
    mean = float(numbers.mean())
    std = float(numbers.std(ddof=1)) if len(numbers) > 1 else NAN
    cv = std / abs(mean) if mean else NAN
    return Spread(len(numbers), mean, std, cv, float(numbers.min()), float(numbers.max()))


@dataclass(frozen=True)
class McNemar:
    """Counts of examples that both, one or neither of two models predicted correctly, with p."""

    both: int
    arm_only: int
    base_only: int
    neither: int
    p: float


def mcnemar(arm_right: ArrayLike, base_right: ArrayLike) -> McNemar:
    """Run McNemar's exact test on the examples that only one of two models predicted correctly.

    The test compares two trained models, not two treatments, so no verdict uses it.
    """
    arm, base = np.asarray(arm_right, bool), np.asarray(base_right, bool)
    if arm.ndim != 1 or arm.shape != base.shape:
        raise BadInput(
            "both models must predict the same examples, but the shapes are "
            f"{arm.shape} and {base.shape}"
        )
    arm_only, base_only = int((arm & ~base).sum()), int((base & ~arm).sum())
    fewer, differing = min(arm_only, base_only), arm_only + base_only
    p = min(1.0, 2 * float(special.bdtr(fewer, differing, 0.5)))
    return McNemar(int((arm & base).sum()), arm_only, base_only, int((~arm & ~base).sum()), p)


@dataclass(frozen=True)
class NonInferiority:
    """The non-inferiority test: is an arm at most `limit` times as bad as the baseline?

    `ratio` is the ratio of the geometric means, `low` and `high` are the ends of its interval, and
    `reason` explains an answer of "not shown" that the interval does not explain.
    """

    answer: Literal["yes", "no", "not shown"]
    limit: float
    n: int
    ratio: float
    low: float
    high: float
    reason: str | None = None


def noninferior(
    arm: ArrayLike, base: ArrayLike, limit: float, *, lower_is_better: bool, alpha: float = 0.05
) -> NonInferiority:
    """Test arm ≤ limit × base if lower is better, and arm ≥ base / limit if higher is better.

    The answer is "yes" if the whole interval of arm / base, with confidence 1 − alpha, is within
    the limit, "no" if the whole interval is beyond it, and "not shown" otherwise.
    """
    if not limit >= 1:
        raise BadInput(f"limit {limit:g} of non-inferiority must be 1 or more, e.g. 1.05")
    values = np.concatenate([_finite(arm, "arm"), _finite(base, "base")])
    if (values <= 0).any():
        reason = f"a ratio needs values above 0, but one value is {values.min():g}"
        return NonInferiority("not shown", limit, len(values) // 2, NAN, NAN, NAN, reason)
    pair = paired(arm, base, alpha=alpha, log=True)
    if pair.n < 2:
        reason = f"an interval needs at least 2 paired seeds, not {pair.n}"
        return NonInferiority("not shown", limit, pair.n, pair.effect, NAN, NAN, reason)
    if lower_is_better:
        inside, beyond = pair.high <= limit, pair.low > limit
    else:
        inside, beyond = pair.low >= 1 / limit, pair.high < 1 / limit
    answer: Literal["yes", "no", "not shown"] = "yes" if inside else "no" if beyond else "not shown"
    return NonInferiority(answer, limit, pair.n, pair.effect, pair.low, pair.high)


def _differences(arm: ArrayLike, base: ArrayLike, log: bool) -> tuple[Numbers, float]:
    """Return arm − base (or log arm − log base), and a bound on the rounding error of each."""
    arm_values, base_values = _finite(arm, "arm"), _finite(base, "base")
    if len(arm_values) != len(base_values):
        raise BadInput(
            "arm and base must have the same number of values, "
            f"not {len(arm_values)} and {len(base_values)}"
        )
    if not len(arm_values):
        return arm_values, 0.0
    if log:
        if min(arm_values.min(), base_values.min()) <= 0:
            least = min(arm_values.min(), base_values.min())
            raise BadInput(f"the log scale needs values above 0, but one value is {least:g}")
        arm_values, base_values = np.log(arm_values), np.log(base_values)
    size = max(np.abs(arm_values).max(), np.abs(base_values).max(), 1.0 if log else 0.0)
    return arm_values - base_values, 4 * float(np.finfo(float).eps * size)


def _finite(values: ArrayLike, name: str) -> Numbers:
    numbers = np.asarray(values, float)
    if numbers.ndim != 1 or not np.isfinite(numbers).all():
        raise BadInput(f"{name} must be a list of finite numbers, not {values!r}")
    return numbers


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf  # math.exp overflows near 710


@cache
def seen_by_t(n: int, alpha: float) -> float:
    """Return the mean, in standard deviations, that a t test of n pairs detects with 80 % power."""
    critical = special.stdtrit(n - 1, 1 - alpha / 2)

    def excess_power(effect: float) -> float:
        shift = effect * np.sqrt(n)
        # The probability of a significant result with the wrong sign; scipy gives NaN near 0.
        wrong_sign = np.nan_to_num(special.nctdtr(n - 1, shift, -critical))
        return 1 - special.nctdtr(n - 1, shift, critical) + wrong_sign - POWER

    high = 1.0
    while excess_power(high) < 0:
        high *= 2
    return float(brentq(excess_power, 0.0, high, xtol=1e-10))


@cache
def seen_by_rule(n: int, level: float, arms: int = 1) -> float:
    """Return the mean, in standard deviations, that the verdict's rule detects with 80 % power.

    The rule requires that both the t test and the sign-flip test find a difference. The t test uses
    the strictest level of Holm's correction, level / arms. For up to 10 pairs, the power is
    simulated with normally distributed differences from a fixed seed. For more pairs, and for too
    few pairs for the sign-flip test, the power of the t test alone is used.
    """
    least = seen_by_t(n, level / arms)
    if n > _MOST_SIMULATED or not flips_can_decide(n, level):
        return least
    noise = np.random.default_rng(0).standard_normal((_POWER_DRAWS, n))
    patterns = signs(n)
    flipped_sums, shifts = noise @ patterns.T, patterns.sum(-1)
    mean, std = noise.mean(-1), noise.std(-1, ddof=1)
    critical = special.stdtrit(n - 1, 1 - level / arms / 2)

    def excess_power(effect: float) -> float:
        by_t = np.abs(mean + effect) * np.sqrt(n) > critical * std
        observed = n * np.abs(mean + effect)[by_t, None] - 1e-9
        p = (np.abs(flipped_sums[by_t] + effect * shifts) >= observed).mean(-1)
        return np.count_nonzero(p <= level) / _POWER_DRAWS - POWER

    low, high = least, 2 * least
    if excess_power(low) >= 0:
        return least
    while excess_power(high) < 0:
        high *= 2
    for _ in range(12):  # bisection
        middle = (low + high) / 2
        low, high = (middle, high) if excess_power(middle) < 0 else (low, middle)
    return high

"""Statistics of values that are paired by seed: effects, intervals and detectable effects.

`arm` and `base` hold the values of two arms (variants of one recipe), in the same order of seeds.
The interval of their difference is a t interval. Whether an arm is called better or worse follows
from this interval, so a statement and its interval always agree. If settings were tuned, each arm
was trained with several choices (combinations of values of these settings), and the interval is
about the difference between the arm's best choice and the baseline's best choice.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from frostlab.errors import BadInput

Numbers = NDArray[np.float64]

# The seeds of a comparison could have shown other standard deviations. At the effect that
# `could_have_found` returns, the mean power over them is at least POWER, and the power for 96 % of
# them is at least LEAST_POWER.
POWER = 0.8
LEAST_POWER = 0.5
NAN = math.nan
_ANYTIME_VARIANCE = 1.0  # variance of the prior in `anytime_critical`
_SKEW_DRAWS = 20_000  # simulated comparisons behind the limit of the skewness


@dataclass(frozen=True)
class Paired:
    """The effect of an arm against the baseline, over the seeds that both have.

    `effect` is the mean of arm − base or, on the log scale, the ratio of the geometric means.
    `low` and `high` bound the effect with confidence 1 − alpha, and `p` is the largest alpha for
    which the t interval includes zero (or the ratio 1). `std` is the standard deviation of the
    differences or, on the log scale, of the log ratios. Numbers that need two pairs are NaN if
    there are fewer pairs.
    """

    n: int
    log: bool
    alpha: float
    effect: float
    low: float
    high: float
    p: float
    std: float

    def without_bound(self, above: bool) -> "Paired":
        """Return the effect without its upper bound if `above`, else without its lower bound.

        If the other bound does not exclude zero (or the ratio 1), p is at least alpha.
        """
        none = 1.0 if self.log else 0.0
        low, high = self.low, self.high
        if above:
            high, is_shown = math.inf, low > none
        else:
            low, is_shown = 0.0 if self.log else -math.inf, high < none
        p = self.p if is_shown else max(self.p, self.alpha)
        return replace(self, low=low, high=high, p=p)


@dataclass(frozen=True)
class Bounds:
    """The mean difference of two arms with its interval, as arrays over independent comparisons."""

    mean: Numbers
    low: Numbers
    high: Numbers
    p: Numbers
    std: Numbers


def bounds(
    arm: Numbers,
    base: Numbers,
    critical: float,
    arm_tried: Sequence[Numbers] = (),
    base_tried: Sequence[Numbers] = (),
    *,
    lower_is_better: bool = False,
    rounding: float = 0.0,
) -> Bounds:
    """Compare two arms along the last axis, in which their seeds have the same order.

    `arm` and `base` hold one result per seed, such as accuracy. If settings were tuned, a choice is
    one combination of values of these settings; for each seed, `arm` and `base` hold the result of
    the choice that is best over all *other* seeds, and `arm_tried` and `base_tried` hold the
    results of every choice. The interval is about the difference between the truly best choices, so
    that luck in choosing cannot look like an effect. It is made of two sets of t intervals:

    - `arm` minus each choice of the baseline. If higher is better, the lowest of their lower ends
      is the lower end. It holds for the baseline's truly best choice, which is among them.
    - Each choice of the arm minus `base`. The highest of their upper ends is the upper end.

    If lower is better, the first set gives the upper end and the second set the lower end.

    A mean or standard deviation of at most `rounding` counts as zero.
    """
    against_base = [arm - base, *(arm - tried for tried in base_tried)]
    against_arm = [arm - base, *(tried - base for tried in arm_tried)]
    lower, upper = (against_arm, against_base) if lower_is_better else (against_base, against_arm)
    below = [_t_ends(differences, critical, rounding) for differences in lower]
    above = [_t_ends(differences, critical, rounding) for differences in upper]
    p_higher = np.max([ends.p_higher for ends in below], axis=0)
    p_lower = np.max([ends.p_lower for ends in above], axis=0)
    return Bounds(
        mean=below[0].mean,
        low=np.min([ends.low for ends in below], axis=0),
        high=np.max([ends.high for ends in above], axis=0),
        p=np.minimum(1.0, 2 * np.minimum(p_higher, p_lower)),
        std=below[0].std,
    )


@dataclass(frozen=True)
class _Ends:
    mean: Numbers
    std: Numbers
    low: Numbers
    high: Numbers
    p_higher: Numbers  # one-sided p of a mean above 0
    p_lower: Numbers  # one-sided p of a mean below 0


def _t_ends(differences: Numbers, critical: float, rounding: float) -> _Ends:
    n = differences.shape[-1]
    mean, std = differences.mean(-1), differences.std(-1, ddof=1)
    mean = np.where(np.abs(mean) <= rounding, 0.0, mean)
    std = np.where(std <= rounding, 0.0, std)
    half_width = critical * std / math.sqrt(n)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = mean / (std / math.sqrt(n))
    degenerate = std == 0  # all differences are equal
    p_higher = np.where(degenerate, np.where(mean > 0, 0.0, 1.0), special.stdtr(n - 1, -t))
    p_lower = np.where(degenerate, np.where(mean < 0, 0.0, 1.0), special.stdtr(n - 1, t))
    return _Ends(mean, std, mean - half_width, mean + half_width, p_higher, p_lower)


def paired(
    arm: ArrayLike,
    base: ArrayLike,
    *,
    alpha: float = 0.05,
    log: bool = False,
    arm_tried: Sequence[ArrayLike] = (),
    base_tried: Sequence[ArrayLike] = (),
    lower_is_better: bool = False,
    critical: float | None = None,
) -> Paired:
    """Compare paired values by a t interval with confidence 1 − alpha.

    `arm_tried` and `base_tried` hold the results of every choice that was tried in tuning, as for
    `bounds`; the direction of the metric matters only for them. `critical` replaces the quantile of
    Student's t in the interval, not in p.
    """
    values, rounding = _on_scale([arm, base, *arm_tried, *base_tried], log)
    n = len(values[0])
    back = _exp if log else float
    if n < 2:
        effect = back(float(values[0][0] - values[1][0])) if n else NAN
        return Paired(n, log, alpha, effect, NAN, NAN, NAN, NAN)
    if critical is None:
        critical = t_critical(n, alpha)
    split = 2 + len(arm_tried)
    compared = bounds(
        values[0], values[1], critical, values[2:split], values[split:],
        lower_is_better=lower_is_better, rounding=rounding,
    )  # fmt: skip
    return Paired(
        n=n,
        log=log,
        alpha=alpha,
        effect=back(float(compared.mean)),
        low=back(float(compared.low)),
        high=back(float(compared.high)),
        p=float(compared.p),
        std=float(compared.std),
    )


@cache
def t_critical(n: int, alpha: float) -> float:
    """Return the half-width of a t interval in standard errors, for n pairs."""
    return float(special.stdtrit(n - 1, 1 - alpha / 2))


@cache
def anytime_critical(n: int, alpha: float) -> float:
    """Return the half-width in standard errors of an interval for any number of looks.

    A look is one analysis of the results.

    The interval holds all effects for which the Bayes factor of the t statistic is below 1 / alpha.
    To test a value, the true effect (in standard deviations) gets a normal prior around this value,
    and the standard deviation the prior 1 / std, under which the Bayes factor is a martingale.
    So the intervals of all looks contain the truth with a probability of at least 1 − alpha,
    whenever one stops. With few pairs no effect can be excluded, and the half-width is infinite.
    """
    if n < 2:
        return math.inf
    growth = 1 + n * _ANYTIME_VARIANCE
    bound = (math.sqrt(growth) / alpha) ** (2 / n)
    if bound >= growth:
        return math.inf
    return math.sqrt((n - 1) * (bound - 1) / (1 - bound / growth))


def skewness(values: Numbers) -> Numbers:
    """Return the third standardized moment along the last axis; 0 if all values are equal."""
    centred = values - values.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        skew = (centred**3).mean(-1) / variance**1.5
    return np.where(variance > 0, skew, 0.0)


@cache
def skew_limit(n: int, arms: int, share: float) -> float:
    """Return the limit above which the mean skewness of several arms' differences is notable.

    With normal noise and a common baseline, the mean skewness exceeds the limit in a fraction
    `share` of comparisons. The quantile is simulated with a fixed seed.
    """
    noise = np.random.default_rng([n, arms]).standard_normal((_SKEW_DRAWS, arms + 1, n))
    mean_skew = skewness(noise[:, 1:] - noise[:, :1]).mean(-1)
    return float(np.quantile(mean_skew, 1 - share))


@dataclass(frozen=True)
class Pool:
    """The differences of several arms from one baseline, each an array over seeds."""

    baseline: str
    differences: tuple[Numbers, ...]

    @property
    def skewness(self) -> float:
        """The mean skewness of the arms."""
        return float(np.mean([skewness(arm) for arm in self.differences]))

    def variance(self, own: Numbers) -> tuple[float, int]:
        """Return the variance of `own`, pooled over arms like it, and its degrees of freedom.

        Arms are alike if their variances differ by less than a factor of 4.
        """
        least, most = own.var(ddof=1) / 4, own.var(ddof=1) * 4
        alike = [arm for arm in self.differences if least < arm.var(ddof=1) < most] or [own]
        freedom = sum(len(arm) - 1 for arm in alike)
        pooled = sum((len(arm) - 1) * float(arm.var(ddof=1)) for arm in alike) / freedom
        return pooled, freedom


def differences(arm: ArrayLike, base: ArrayLike, log: bool) -> Numbers:
    """Return arm − base, or log arm − log base."""
    (arm_values, base_values), _ = _on_scale([arm, base], log)
    return arm_values - base_values


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
    numbers = _finite(values)
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


def over_examples(arm_right: ArrayLike, base_right: ArrayLike, alpha: float) -> Paired:
    """Estimate the difference in accuracy for new seeds and new examples of the same population.

    `arm_right` and `base_right` say for each seed (row) and test example (column) whether the
    prediction was correct. Seeds and examples are crossed random effects, and both contribute to
    the variance of the mean. Degrees of freedom are Satterthwaite's. `std` in the result is the
    standard error times the square root of the number of seeds.
    """
    arm, base = np.asarray(arm_right, float), np.asarray(base_right, float)
    if arm.ndim != 2 or arm.shape != base.shape or min(arm.shape) < 2:
        raise BadInput(
            "both arms must predict the same examples with at least 2 seeds, but the shapes are "
            f"{arm.shape} and {base.shape}"
        )
    difference = arm - base
    seeds, examples = difference.shape
    by_seed, by_example = difference.mean(1), difference.mean(0)
    mean = float(difference.mean())
    residual = difference - by_seed[:, None] - by_example + mean
    interaction = (residual**2).sum() / ((seeds - 1) * (examples - 1)) / (seeds * examples)
    of_seeds, of_examples = by_seed.var(ddof=1) / seeds, by_example.var(ddof=1) / examples
    variance = float(max(of_seeds + of_examples - interaction, of_seeds, of_examples))
    if variance == 0:
        return Paired(seeds, False, alpha, mean, mean, mean, 1.0 if mean == 0 else 0.0, 0.0)
    freedom = variance**2 / (of_seeds**2 / (seeds - 1) + of_examples**2 / (examples - 1))
    half_width = float(special.stdtrit(freedom, 1 - alpha / 2)) * math.sqrt(variance)
    p = 2 * float(special.stdtr(freedom, -abs(mean) / math.sqrt(variance)))
    std = math.sqrt(variance * seeds)
    return Paired(seeds, False, alpha, mean, mean - half_width, mean + half_width, p, std)


def probability_of_improvement(arm: ArrayLike, base: ArrayLike, lower_is_better: bool) -> float:
    """Return how often a run of the arm beats a run of the baseline, over all pairs of runs.

    A tie counts as one half.
    """
    arm_values, base_values = _finite(arm), _finite(base)
    gaps = arm_values[:, None] - base_values
    gaps = -gaps if lower_is_better else gaps
    return float(((gaps > 0) + 0.5 * (gaps == 0)).mean()) if gaps.size else NAN


def probability_above(limit: float, mean: float, std_of_mean: float, freedom: int) -> float:
    """Return the posterior probability of an effect above a limit, under a flat prior.

    The posterior is Student's t around the mean, if the variance was estimated with `freedom`
    degrees of freedom.
    """
    if std_of_mean == 0:
        return float(mean > limit)
    return float(special.stdtr(freedom, (mean - limit) / std_of_mean))


def _on_scale(values: Sequence[ArrayLike], log: bool) -> tuple[list[Numbers], float]:
    """Return the values (or their logs), and a bound on the rounding error of a difference."""
    numbers = [_finite(own) for own in values]
    if len({len(own) for own in numbers}) > 1:
        other = next(len(own) for own in numbers if len(own) != len(numbers[0]))
        raise BadInput(
            f"arm and base must have the same number of values, not {len(numbers[0])} and {other}"
        )
    if not len(numbers[0]):
        return numbers, 0.0
    if log:
        least = min(own.min() for own in numbers)
        if least <= 0:
            raise BadInput(f"the log scale needs values above 0, but one value is {least:g}")
        numbers = [np.log(own) for own in numbers]
    size = max(*(float(np.abs(own).max()) for own in numbers), 1.0 if log else 0.0)
    return numbers, 4 * float(np.finfo(float).eps * size)


def _finite(values: ArrayLike) -> Numbers:
    numbers = np.asarray(values, float)
    if numbers.ndim != 1 or not np.isfinite(numbers).all():
        raise BadInput(f"values must be a list of finite numbers, not {values!r:.80}")
    return numbers


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf  # math.exp overflows near 710


def power_of_t(effect: ArrayLike, n: int, critical: float) -> Numbers:
    """Return the power of a t test of n pairs; `effect` is in standard deviations."""
    shift = np.asarray(effect, float) * math.sqrt(n)
    # The probability of a significant result with the wrong sign; scipy gives NaN near 0.
    wrong_sign = np.nan_to_num(special.nctdtr(n - 1, shift, -critical))
    return np.asarray(1 - special.nctdtr(n - 1, shift, critical) + wrong_sign)


@cache
def effect_found(n: int, alpha: float, power: float) -> float:
    """Return the effect, in standard deviations, that a t test of n pairs finds with this power."""
    critical = t_critical(n, alpha)
    return _root(lambda effect: float(power_of_t(effect, n, critical)) - power)


@cache
def could_have_found(n: int, alpha: float) -> float:
    """Return the effect that n pairs could have found, in *estimated* standard deviations.

    The estimate of few pairs is often far below the true standard deviation. The returned effect
    is the smallest that meets two conditions: averaged over the estimates that could have occurred,
    the power of the test is at least 80 %; and for 96 % of these estimates it is at least 50 %.
    """
    freedom = n - 1
    shares = (np.arange(400) + 0.5) / 400
    estimates = np.sqrt(2 * special.gammaincinv(freedom / 2, shares) / freedom)
    smallest = math.sqrt(2 * special.gammaincinv(freedom / 2, 0.04) / freedom)
    critical = t_critical(n, alpha)

    def excess_power(factor: float) -> float:
        return float(power_of_t(factor * estimates, n, critical).mean()) - POWER

    return max(_root(excess_power), effect_found(n, alpha, LEAST_POWER) / smallest)


def _root(excess: Callable[[float], float]) -> float:
    """Return where an increasing function that starts below 0 crosses 0."""
    from scipy.optimize import brentq  # imported here because it is slow to import

    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-10))

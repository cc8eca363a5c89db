"""Paired statistics over seeds: effects, intervals and p values, never a warning."""

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

FEWEST = 6  # pairs; with 5 the smallest p is 0.0625
MOST = 16  # pairs of which every flip is tried; beyond, a sample of them
_SIGN_DRAWS = 2**15
_AT_ONCE = 2**22  # sums held in memory


@cache
def signs(n: int) -> Numbers:
    """Ways to flip n differences, a row each; the first is never flipped, as p is two-sided."""
    if n <= MOST:
        bits = np.arange(2 ** (n - 1))[:, None] >> np.arange(n)[::-1] & 1
        found = (1 - 2 * bits).astype(np.float64)
    else:
        found = np.random.default_rng(n).choice(np.array([-1.0, 1.0]), (_SIGN_DRAWS, n))
    found.setflags(write=False)
    return found


def flip_p(differences: Numbers, rounding: float = 0.0) -> Numbers:
    """Two-sided p of the mean along the last axis: exact to 16 pairs, then a seeded sample.

    Sums nearer than `rounding` to the one seen count as equal to it.
    """
    n = differences.shape[-1]
    rows = differences.reshape(-1, n)
    ways = signs(n)
    counted = np.empty(len(rows))
    step = max(1, _AT_ONCE // len(ways))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        slack = rounding + 1e-12 * np.abs(part).sum(-1, keepdims=True)
        seen = np.abs(part.sum(-1, keepdims=True)) - slack
        counted[start : start + step] = (np.abs(part @ ways.T) >= seen).sum(-1)
    extra = 0 if n <= MOST else 1  # the signs as they are belong to the sample
    p = (counted + extra) / (len(ways) + extra)
    return p.reshape(differences.shape[:-1])


def smallest_flip_p(n: int) -> float:
    """The smallest p that n pairs can give."""
    return 2.0 ** (1 - n) if n <= MOST else 1 / (1 + _SIGN_DRAWS)


NAN = math.nan


@dataclass(frozen=True)
class Paired:
    """An arm against the baseline over the seeds both have.

    `effect` is the mean of arm − base; on log scale the ratio of their geometric means. `low` and
    `high` bound it with confidence 1 − alpha. `smallest_seen` is what the t test finds in 80 of
    100 comparisons of this size and spread; on log scale a ratio − 1. `std` is that of the
    differences, on log scale of the log ratios.
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
    """Compare values of the same seeds: the paired t test, and sign flips from 6 pairs on."""
    differences, rounding = _differences(arm, base, log)
    n = len(differences)
    back = _exp if log else float
    if n < 2:
        effect = back(differences[0]) if n else NAN
        return Paired(n, log, alpha, effect, NAN, NAN, NAN, None, NAN, NAN)
    mean, std, p = (float(x) for x in t_test(differences, rounding))
    reach = special.stdtrit(n - 1, 1 - alpha / 2) * std / math.sqrt(n)
    least = seen_by_t(n, alpha) * std
    return Paired(
        n=n,
        log=log,
        alpha=alpha,
        effect=back(mean),
        low=back(mean - reach),
        high=back(mean + reach),
        p=p,
        p_flip=float(flip_p(differences, n * rounding)) if n >= FEWEST else None,
        std=std,
        smallest_seen=back(least) - 1 if log else least,
    )


def t_test(differences: Numbers, rounding: float = 0.0) -> tuple[Numbers, Numbers, Numbers]:
    """Mean, standard deviation and two-sided p of the t test along the last axis.

    What is smaller than `rounding` is zero: equal differences give p 1 if they are zero, else 0.
    """
    n = differences.shape[-1]
    mean, std = differences.mean(-1), differences.std(-1, ddof=1)
    mean = np.where(np.abs(mean) <= rounding, 0.0, mean)
    std = np.where(std <= rounding, 0.0, std)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / (std / math.sqrt(n))
    p = np.where(std == 0, np.where(mean == 0, 1.0, 0.0), 2 * special.stdtr(n - 1, -t))
    return mean, std, p


def holm(p_by_name: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p values; a p that is NaN counts as one of the family, and stays NaN."""
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
    """How one arm's values lie: `low` and `high` are the smallest and the largest of them."""

    n: int
    mean: float
    std: float
    cv: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Mean, standard deviation and coefficient of variation of one arm's values."""
    found = _finite(values, "values")
    if not len(found):
        return Spread(0, NAN, NAN, NAN, NAN, NAN)
    mean = float(found.mean())
    std = float(found.std(ddof=1)) if len(found) > 1 else NAN
    cv = std / abs(mean) if mean else NAN
    return Spread(len(found), mean, std, cv, float(found.min()), float(found.max()))


@dataclass(frozen=True)
class McNemar:
    """Two trained models on the same examples: who alone was right how often, and p."""

    both: int
    arm_only: int
    base_only: int
    neither: int
    p: float


def mcnemar(arm_right: ArrayLike, base_right: ArrayLike) -> McNemar:
    """The exact test on examples that one model got right and the other wrong.

    It compares two trained models, not two treatments: for information, never for a verdict.
    """
    arm, base = np.asarray(arm_right, bool), np.asarray(base_right, bool)
    if arm.ndim != 1 or arm.shape != base.shape:
        raise BadInput(f"examples must be the same on both sides, not {arm.shape} and {base.shape}")
    mine, theirs = int((arm & ~base).sum()), int((base & ~arm).sum())
    p = min(1.0, 2 * float(special.bdtr(min(mine, theirs), mine + theirs, 0.5)))
    return McNemar(int((arm & base).sum()), mine, theirs, int((~arm & ~base).sum()), p)


@dataclass(frozen=True)
class NonInferiority:
    """Whether the arm is at most `limit` times as bad as the baseline, with its interval."""

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
    """Ask for arm ≤ limit × base where lower is better, arm ≥ base / limit where higher is.

    Yes if the whole 1 − alpha interval of the ratio is within the limit, no if all is beyond.
    """
    if not limit >= 1:
        raise BadInput(f"limit {limit:g} of non-inferiority must be 1 or more, e.g. 1.05")
    values = np.concatenate([_finite(arm, "arm"), _finite(base, "base")])
    if (values <= 0).any():
        reason = f"a ratio needs values above 0, and {values.min():g} is among them"
        return NonInferiority("not shown", limit, len(values) // 2, NAN, NAN, NAN, reason)
    found = paired(arm, base, alpha=alpha, log=True)
    if found.n < 2:
        reason = f"{found.n} paired seeds give no interval"
        return NonInferiority("not shown", limit, found.n, found.effect, NAN, NAN, reason)
    if lower_is_better:
        inside, beyond = found.high <= limit, found.low > limit
    else:
        inside, beyond = found.low >= 1 / limit, found.high < 1 / limit
    answer: Literal["yes", "no", "not shown"] = "yes" if inside else "no" if beyond else "not shown"
    return NonInferiority(answer, limit, found.n, found.effect, found.low, found.high)


def _differences(arm: ArrayLike, base: ArrayLike, log: bool) -> tuple[Numbers, float]:
    """Arm − base, of logs on log scale, and how far rounding alone can move one of them."""
    ours, theirs = _finite(arm, "arm"), _finite(base, "base")
    if len(ours) != len(theirs):
        raise BadInput(
            f"pairs need as many values in arm as in base, not {len(ours)}, {len(theirs)}"
        )
    if not len(ours):
        return ours, 0.0
    if log:
        if min(ours.min(), theirs.min()) <= 0:
            least = min(ours.min(), theirs.min())
            raise BadInput(f"log scale needs values above 0, and {least:g} is among them")
        ours, theirs = np.log(ours), np.log(theirs)
    size = max(np.abs(ours).max(), np.abs(theirs).max(), 1.0 if log else 0.0)
    return ours - theirs, 4 * float(np.finfo(float).eps * size)


def _finite(values: ArrayLike, side: str) -> Numbers:
    found = np.asarray(values, float)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise BadInput(f"{side} must be a list of finite numbers, not {values!r}")
    return found


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


POWER = 0.8
_POWER_DRAWS = 4_000
_SAME = 10  # pairs; with more the sign-flip test costs about 1 % and is left out


@cache
def seen_by_t(n: int, alpha: float) -> float:
    """What the paired t test sees, in standard deviations of the differences."""
    edge = special.stdtrit(n - 1, 1 - alpha / 2)

    def lacking(effect: float) -> float:
        shift = effect * np.sqrt(n)
        wrong_way = np.nan_to_num(special.nctdtr(n - 1, shift, -edge))  # NaN where it vanishes
        return 1 - special.nctdtr(n - 1, shift, edge) + wrong_way - POWER

    high = 1.0
    while lacking(high) < 0:
        high *= 2
    return float(brentq(lacking, 0.0, high, xtol=1e-10))


@cache
def seen_by_rule(n: int, level: float, arms: int = 1) -> float:
    """What the whole rule sees: the t test at Holm's strictest, and the sign-flip test beside it.

    Up to 10 pairs it is found by simulating normal differences, the same at every call.
    """
    least = seen_by_t(n, level / arms)
    if n > _SAME or not flips_count(n, level):
        return least
    noise = np.random.default_rng(0).standard_normal((_POWER_DRAWS, n))
    ways = signs(n)
    swung, shifts = noise @ ways.T, ways.sum(-1)
    mean, std = noise.mean(-1), noise.std(-1, ddof=1)
    edge = special.stdtrit(n - 1, 1 - level / arms / 2)

    def lacking(effect: float) -> float:
        by_t = np.abs(mean + effect) * np.sqrt(n) > edge * std
        seen = n * np.abs(mean + effect)[by_t, None] - 1e-9
        p = (np.abs(swung[by_t] + effect * shifts) >= seen).mean(-1)
        return np.count_nonzero(p <= level) / _POWER_DRAWS - POWER

    low, high = least, 2 * least
    if lacking(low) >= 0:
        return least
    while lacking(high) < 0:
        high *= 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if lacking(middle) < 0 else (low, middle)
    return high


def flips_count(n: int, level: float) -> bool:
    """Whether n pairs are enough for the sign-flip test to have a say at this level."""
    return n >= FEWEST and smallest_flip_p(n) <= level

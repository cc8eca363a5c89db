"""The smallest effect that a number of seeds finds in 80 of 100 comparisons."""

from functools import cache

import numpy as np
from scipy import special
from scipy.optimize import brentq

from frostlab.compare.flips import FEWEST, signs, smallest_flip_p

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

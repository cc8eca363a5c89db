"""The sign-flip test: were the signs of the differences chance, how often would they do this?"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

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

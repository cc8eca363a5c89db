"""Simulate how often verdicts are wrong where the truth is known: false alarms and coverage.

Each comparison has a baseline and two arms drawn alike, paired by seed. With two arms a false alarm
is any arm called different, after Holm's correction. Coverage is that of a nominal 95 % interval of
one arm's effect. The differences are `pairs`: of two draws, so that a skew of both cancels; or
`alone`: single draws, as if all the noise were the arm's.

    python benchmarks/calibration.py [--comparisons 20000]
"""

import argparse
from collections.abc import Callable

import numpy as np
from scipy import special

from common import report
from frostlab.comparison.statistics import flip_p, seen_by_rule, seen_by_t, t_test

LEVEL = 0.05
RESAMPLES = 1_000
CHUNK = 500
EXAMPLES = 200
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

KINDS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "skewed": lambda rng, shape: rng.standard_exponential(shape) - 1,
    "heavy-tailed": lambda rng, shape: rng.standard_t(3, shape),
    "discrete": lambda rng, shape: (rng.binomial(EXAMPLES, 0.9, shape) - 0.9 * EXAMPLES) / EXAMPLES,
}


def differences(kind: str, how: str, rng: np.random.Generator, trials: int, n: int) -> np.ndarray:
    """Return arm − baseline of two arms, shape (trials, 2, n), where the true difference is 0."""
    draw = KINDS[kind]
    if how == "alone":
        return draw(rng, (trials, 2, n))
    values = draw(rng, (trials, 3, n))
    return values[:, 1:] - values[:, :1]


def by_holm(p: np.ndarray) -> np.ndarray:
    """Return which of two arms are called different after Holm's correction."""
    smaller = p.min(-1, keepdims=True)
    adjusted = np.where(p == smaller, 2 * p, np.maximum(2 * smaller, p))
    return adjusted <= LEVEL


def bootstrap_covers(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whether the percentile bootstrap's interval of the mean holds 0."""
    n, covered = rows.shape[-1], []
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        weights = rng.multinomial(n, [1 / n] * n, (len(chunk), RESAMPLES)) / n
        means = np.einsum("trn,tn->tr", weights, chunk)
        low, high = np.quantile(means, [LEVEL / 2, 1 - LEVEL / 2], axis=1)
        covered.append((low <= 0) & (high >= 0))
    return np.concatenate(covered)


def calibration(kind: str, how: str, n: int, trials: int) -> dict[str, object]:
    rng = np.random.default_rng([n, list(KINDS).index(kind), how == "alone"])
    rows = differences(kind, how, rng, trials, n)
    rounding = 1e-12 if kind == "discrete" else 0.0
    mean, std, p = t_test(rows, rounding)
    flips = flip_p(rows, rounding) if n >= 6 else np.ones_like(p)
    agreed = flips <= LEVEL if n >= 6 else np.ones_like(p, bool)
    reach = special.stdtrit(n - 1, 1 - LEVEL / 2) * std / np.sqrt(n)
    covered = bootstrap_covers(rows[:, 0], rng)

    def rate(called: np.ndarray) -> float:
        return round(float(np.mean(called)), 4)

    return {
        "data": kind,
        "differences": how,
        "seeds": n,
        "comparisons": trials,
        "false_alarms_one_arm": {
            "t": rate(p[:, 0] <= LEVEL),
            "flips": rate(flips[:, 0] <= LEVEL) if n >= 6 else None,
            "rule": rate((p[:, 0] <= LEVEL) & agreed[:, 0]),
            "bootstrap": rate(~covered),
        },
        "false_alarms_two_arms": {
            "t": rate(by_holm(p).any(-1)),
            "flips": rate(by_holm(flips).any(-1)) if n >= 6 else None,
            "rule": rate((by_holm(p) & agreed).any(-1)),
        },
        "coverage": {
            "t": rate(np.abs(mean[:, 0]) <= reach[:, 0] + rounding),
            "bootstrap": rate(covered),
        },
    }


def power(n: int, trials: int) -> dict[str, object]:
    """Return how often one arm's effect of the detectable size is found, for normal noise."""
    rows = np.random.default_rng(n).standard_normal((trials, n))
    by_t, by_rule = seen_by_t(n, LEVEL), seen_by_rule(n, LEVEL)
    rates = {}
    for name, effect in (("seen_by_t", by_t), ("seen_by_rule", by_rule)):
        seen = t_test(rows + effect)[2] <= LEVEL
        agreed = seen & (flip_p(rows + effect) <= LEVEL) if n >= 6 else seen
        rates[name] = {
            "effect": round(effect, 3),
            "t": round(float(seen.mean()), 4),
            "rule": round(float(agreed.mean()), 4),
        }
    return {"data": "normal", "seeds": n, "comparisons": trials, "found": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=20_000)
    options = parser.parse_args()
    for kind in KINDS:
        for how in ("pairs", "alone"):
            for n in (5, 6, 8, 12):
                report("calibration", calibration(kind, how, n, options.comparisons))
    for n in (5, 6, 8, 12):
        report("calibration power", power(n, options.comparisons))


if __name__ == "__main__":
    main()

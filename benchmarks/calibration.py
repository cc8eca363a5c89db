"""Attack the verdicts of comparisons with simulated results of which the truth is known.

Every attack goes through the code that judges real comparisons, and gives two rates: `ours`, and
`usual`, of the usual analysis of the same numbers (a t test per pair of arms with Holm's
correction over the arms, runs that failed dropped, one learning rate per arm from two other seeds).

    python benchmarks/calibration.py [--pages 4000] [--only words]
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from scipy import stats

from common import report
from frostlab.comparison.judging.statistics import (
    anytime_critical,
    bounds,
    effect_found,
    holm,
    over_examples,
    paired,
    power_of_t,
    t_critical,
)
from frostlab.comparison.judging.verdict import Scores, Statement, Verdict, judge
from frostlab.comparison.plan import Rules, alpha_spent, scale_of

ACCURACY = Rules(metric="accuracy", lower_is_better=False)
CALLED = ("better", "worse")
Row = dict[str, object]


def page(
    values: np.ndarray, pairs: list[tuple[int, int]], rules: Rules = ACCURACY
) -> list[Verdict]:
    """Judge a page: `values` are (arms, seeds), the baseline first; `pairs` are its statements."""
    arms = {str(i): Scores(dict(enumerate(row))) for i, row in enumerate(values.tolist())}
    statements = {f"{a} {b}": Statement(str(a), str(b)) for a, b in pairs}
    return list(judge(arms, statements, rules).values())


def against_baseline(arms: int) -> list[tuple[int, int]]:
    return [(arm, 0) for arm in range(1, arms + 1)]


def by_holm(values: np.ndarray, pairs: list[tuple[int, int]]) -> bool:
    """Whether t tests with Holm's correction over the pairs find any difference."""
    p = {f"{a} {b}": paired(values[a], values[b]).p for a, b in pairs}
    return any(adjusted <= 0.05 for adjusted in holm(p).values())


def rate(hits: list[bool] | np.ndarray) -> float:
    return round(100 * float(np.mean(hits)), 2)


def any_called(verdicts: list[Verdict]) -> bool:
    return any(verdict.word in CALLED for verdict in verdicts)


def words(pages: int) -> Iterator[Row]:
    """No arm differs: how often does any statement of a page say so, or any interval miss?"""
    layouts = {
        "2 arms and a question between them": (2, [(2, 1)]),
        "6 arms and 5 contrasts between them": (6, [(i, i + 1) for i in range(1, 6)]),
    }
    for layout, (arms, contrasts) in layouts.items():
        for n in (5, 6, 8, 12):
            rng = np.random.default_rng([1, arms, n])
            called, missed, usual = [], [], []
            for _ in range(pages):
                values = 0.7 + 0.02 * rng.standard_normal((arms + 1, n))
                verdicts = page(values, against_baseline(arms) + contrasts)
                called.append(any_called(verdicts))
                missed.append(any(not v.paired.low <= 0 <= v.paired.high for v in verdicts))
                # One correction for the arms and another one for the questions.
                usual.append(by_holm(values, against_baseline(arms)) or by_holm(values, contrasts))
            yield {"page": layout, "seeds": n, "ours": rate(called), "usual": rate(usual),
                   "an interval misses": rate(missed), "nominal": 5}  # fmt: skip


def skew(pages: int) -> Iterator[Row]:
    """Noise of the differences as skewed as an exponential: words that do not mention it."""
    for arms in (1, 6):
        for n in (5, 6, 8, 12):
            rng = np.random.default_rng([2, arms, n])
            unflagged, called, usual, flagged = [], [], [], []
            for _ in range(pages):
                values = np.zeros((arms + 1, n))
                values[1:] = rng.standard_exponential((arms, n)) - 1
                verdicts = page(values, against_baseline(arms))
                unflagged.append(any(v.word in CALLED and v.skewed is None for v in verdicts))
                called.append(any_called(verdicts))
                usual.append(by_holm(values, against_baseline(arms)))
                normal = rng.standard_normal((arms + 1, n))
                flagged.append(page(normal, against_baseline(arms))[0].skewed is not None)
            yield {"arms": arms, "seeds": n, "ours": rate(unflagged), "usual": rate(usual),
                   "with the note": rate(called), "noted though normal": rate(flagged)}  # fmt: skip


def margin(pages: int) -> Iterator[Row]:
    """Arms whose true cost is exactly the margin: how often is any called within it?"""
    rules = Rules(metric="perplexity", **scale_of("perplexity"), margin=1.05)
    for arms in (1, 6):
        for n in (6, 12):
            rng = np.random.default_rng([3, arms, n])
            wrong, usual = [], []
            for _ in range(pages):
                logs = 3 + 0.02 * rng.standard_normal((arms + 1, n))
                logs[1:] += math.log(1.05)
                verdicts = page(np.exp(logs), against_baseline(arms), rules)
                wrong.append(
                    any(v.margin is not None and v.margin.answer == "yes" for v in verdicts)
                )
                ends = [paired(np.exp(logs[a]), np.exp(logs[0]), log=True).high
                        for a in range(1, arms + 1)]  # fmt: skip
                usual.append(min(ends) <= 1.05)
            yield {"arms": arms, "seeds": n, "ours": rate(wrong), "usual": rate(usual),
                   "nominal": 2.5}  # fmt: skip


def seen(pages: int) -> Iterator[Row]:
    """The true power at the effect that a page says it could have found."""
    for statements in (1, 3, 6):
        for n in (5, 6, 8, 12):
            rng = np.random.default_rng([4, statements, n])
            std = math.sqrt(2)  # of the difference of two arms
            critical = t_critical(n, 0.05 / statements)
            ours, usual = [], []
            for _ in range(pages):
                first, *_ = page(rng.standard_normal((statements + 1, n)),
                                 against_baseline(statements))  # fmt: skip
                ours.append(float(power_of_t(first.could_have_seen / std, n, critical)))
                least = effect_found(n, 0.05 / statements, 0.8) * first.paired.std
                usual.append(float(power_of_t(least / std, n, critical)))
            yield {"statements": statements, "seeds": n,
                   "ours": rate(ours), "ours below 50": rate(np.array(ours) < 0.5),
                   "usual": rate(usual), "usual below 50": rate(np.array(usual) < 0.5)}  # fmt: skip


def power(pages: int) -> Iterator[Row]:
    """How often an effect of 1.5 standard deviations of the difference is found."""
    for statements in (1, 3):
        for n in range(5, 13):
            exact = float(power_of_t(1.5, n, t_critical(n, 0.05 / statements)))
            yield {"statements": statements, "seeds": n, "ours": round(100 * exact, 1)}


def population(pages: int) -> Iterator[Row]:
    """Arms that are equal in the population, judged on 600 fixed examples with 12 seeds."""
    seeds, examples = 12, 600
    for tilt in (0.05, 0.1, 0.15):
        rng = np.random.default_rng([5, int(100 * tilt)])
        here, both = [], []
        for _ in range(pages // 4):
            lean = rng.normal(0, tilt, examples)  # how much better the arm is on each example
            arm = rng.random((seeds, examples)) < 0.8 + lean
            base = rng.random((seeds, examples)) < 0.8 - lean
            fixed, other = paired(arm.mean(1), base.mean(1)), over_examples(arm, base, 0.05)
            here.append(not fixed.low <= 0 <= fixed.high)
            both.append(not other.low <= 0 <= other.high)
        yield {"seeds": seeds, "examples": examples, "spread over examples": tilt,
               "these examples (usual)": rate(here), "ours": rate(both)}  # fmt: skip


def chosen_by_others(table: np.ndarray) -> np.ndarray:
    """The value of each seed under the setting that the other seeds choose."""
    others = table.sum(-1, keepdims=True) - table
    return np.take_along_axis(table, others.argmax(-2)[..., None, :], -2)[..., 0, :]


def tuning(pages: int) -> Iterator[Row]:
    """Equal arms, each tuned over three rates; the outer rates are worse by `fall` deviations."""
    trials = 5 * pages
    for n in (6, 8, 12, 20):
        for fall in (0.25, 0.5, 1.0, 2.0):
            rng = np.random.default_rng([6, n, int(100 * fall)])
            means = -np.array([fall, 0.0, fall])[:, None]

            def table(shift: float = 0.0, rng: np.random.Generator = rng,
                      means: np.ndarray = means, n: int = n) -> np.ndarray:  # fmt: skip
                return means + shift + rng.standard_normal((trials, 3, n))

            def called(arm: np.ndarray, base: np.ndarray, n: int = n) -> np.ndarray:
                found = bounds(
                    chosen_by_others(arm), chosen_by_others(base), t_critical(n, 0.05),
                    [arm[:, r] for r in range(3)], [base[:, r] for r in range(3)],
                )  # fmt: skip
                return (found.low > 0) | (found.high < 0)

            arm, base = table(), table()
            rates = [(means + rng.standard_normal((trials, 3, 2))).mean(-1).argmax(-1)
                     for _ in range(2)]  # fmt: skip
            naive = [np.take_along_axis(side, best[:, None, None], 1)[:, 0]
                     for side, best in zip((arm, base), rates, strict=True)]  # fmt: skip
            p = stats.ttest_rel(*naive, axis=1).pvalue
            effect = effect_found(n, 0.05, 0.8) * math.sqrt(2)
            yield {"seeds": n, "fall": fall, "runs an arm": 3 * n, "ours": rate(called(arm, base)),
                   "usual": rate(p <= 0.05),
                   "power at 80 % of one rate": rate(called(table(effect), table()))}  # fmt: skip


def shapes(pages: int) -> Iterator[Row]:
    """A flat arm against a peaked baseline with the same best: longer grids, and all in one."""
    trials = 2 * pages
    for n in (6, 12, 20):
        for settings in (3, 5, 9):
            rng = np.random.default_rng([9, n, settings])
            peaked = -np.abs(np.arange(settings) - settings // 2)[:, None].astype(float)
            arm = rng.standard_normal((trials, settings, n))
            base = peaked + rng.standard_normal((trials, settings, n))
            chosen = chosen_by_others(arm), chosen_by_others(base)
            level = 0.05 * min(1, 3 / settings)  # as the verdict divides it
            rows = [arm[:, r] for r in range(settings)], [base[:, r] for r in range(settings)]
            found = bounds(*chosen, t_critical(n, level), *rows)
            usual = bounds(*chosen, t_critical(n, 0.05), *rows)
            yield {
                "seeds": n,
                "settings": settings,
                "ours": rate((found.low > 0) | (found.high < 0)),
                "at the whole level": rate((usual.low > 0) | (usual.high < 0)),
            }


def missing(pages: int) -> Iterator[Row]:
    """Equal arms, of which one loses its worst runs: dropped, the rest looks better."""
    for lost in (1, 2, 3):
        rng = np.random.default_rng([7, lost])
        ours, usual = [], []
        for _ in range(pages):
            base, arm = 0.7 + 0.02 * rng.standard_normal((2, 12))
            gone = set(np.argsort(arm)[:lost].tolist())
            kept = [s for s in range(12) if s not in gone]
            scores = {
                "base": Scores(dict(enumerate(base))),
                "arm": Scores({s: arm[s] for s in kept}, dict.fromkeys(gone, "diverged")),
            }
            verdict = judge(scores, {"x": Statement("arm", "base")}, ACCURACY)["x"]
            ours.append(verdict.word == "better")
            test = paired(arm[kept], base[kept])
            usual.append(test.low > 0)
        yield {"seeds": 12, "diverged": lost, "ours": rate(ours), "usual": rate(usual)}
    rules = Rules(metric="accuracy", **scale_of("accuracy"), margin=1.1)
    for lost in (1, 2, 3):
        rng = np.random.default_rng([10, lost])
        ours, within = [], []
        for _ in range(pages):
            base, arm, third = 0.95 + 0.002 * rng.standard_normal((3, 12))
            kept = range(lost, 12)
            failed = Scores({s: base[s] for s in kept}, dict.fromkeys(range(lost), "failed"))
            scores = {"base": failed, "arm": Scores(dict(enumerate(arm)))}
            ours.append(judge(scores, {"x": Statement("arm", "base")}, rules)["x"].word in CALLED)
            # Both arms diverge at the same seeds, a third arm is far worse, and the cost is 1.15 ×.
            shared = dict.fromkeys(range(lost), "diverged")
            scores = {
                "base": Scores({s: base[s] for s in kept}, shared),
                "arm": Scores({s: arm[s] - 0.0075 for s in kept}, shared),
                "third": Scores(dict(enumerate(third - 0.45))),
            }
            margin = judge(scores, {"x": Statement("arm", "base")}, rules)["x"].margin
            within.append(margin is not None and margin.answer == "yes")
        yield {
            "seeds": 12,
            "failed in the baseline": lost,
            "ours": rate(ours),
            "diverged in both: a cost of 1.15 × called within 1.1 ×": rate(within),
        }


def looks(pages: int) -> Iterator[Row]:
    """Equal arms, looked at again and again in new folders: any look that finds a difference."""
    trials = 10 * pages
    rng = np.random.default_rng(8)
    data = rng.standard_normal((trials, 24))
    mixed = 0.6 * data + 0.8 * rng.standard_normal((trials, 24))  # another metric of the same runs

    def p(values: np.ndarray) -> np.ndarray:
        return bounds(values, np.zeros_like(values), 1.0).p

    chosen = [np.array(rng.choice(24, 8, replace=False)) for _ in range(5)]
    ways: Mapping[str, list[np.ndarray]] = {
        "6, 9 and 12 seeds, each in a new folder": [p(data[:, :n]) for n in (6, 9, 12)],
        "another metric": [p(data[:, :8]), p(mixed[:, :8])],
        "five chosen lists of 8 seeds": [p(data[:, seeds]) for seeds in chosen],
        "a failed run that comes back": [p(data[:, :7]), p(data[:, :8])],
    }
    for way, values in ways.items():
        spent = [x <= alpha_spent(0.05, k, 1) for k, x in enumerate(values, 1)]
        planned = [x <= alpha_spent(0.05, k, 2) for k, x in enumerate(values, 1)]
        yield {"way": way, "ours": rate(np.any(spent, 0)), "said to be at most":
               round(100 * sum(alpha_spent(0.05, k, 1) for k in range(1, len(values) + 1)), 2),
               "planned": rate(np.any(planned, 0)),
               "usual": rate(np.any([x <= 0.05 for x in values], 0))}  # fmt: skip
    excluded, usual = np.zeros((2, trials), bool)
    for n in range(5, 25):
        part = data[:, :n]
        t = np.abs(part.mean(-1)) / (part.std(-1, ddof=1) / math.sqrt(n))
        excluded |= t > anytime_critical(n, 0.05)
        usual |= t > t_critical(n, 0.05)
    yield {"way": "after every seed from 5 to 24", "anytime interval": rate(excluded),
           "usual": rate(usual)}  # fmt: skip
    for n in (6, 8, 12, 20, 50):
        wider = anytime_critical(n, 0.05) / t_critical(n, 0.05)
        found = float(power_of_t(effect_found(n, 0.05, 0.8), n, anytime_critical(n, 0.05)))
        yield {
            "way": "what an anytime interval costs",
            "seeds": n,
            "times as wide": round(wider, 2),
            "power where the usual has 80": round(100 * found, 1),
        }


ATTACKS: dict[str, Callable[[int], Iterator[Row]]] = {
    "words": words,
    "skew": skew,
    "margin": margin,
    "seen": seen,
    "power": power,
    "population": population,
    "tuning": tuning,
    "shapes": shapes,
    "missing": missing,
    "looks": looks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=4_000)
    parser.add_argument("--only", choices=ATTACKS)
    options = parser.parse_args()
    for name in [options.only] if options.only else ATTACKS:
        for row in ATTACKS[name](options.pages):
            report(f"attack: {name}", {**row, "pages": options.pages})


if __name__ == "__main__":
    main()

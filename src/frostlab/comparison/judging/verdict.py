"""Verdicts on pairs of arms: one word and one sentence about the interval of their difference.

An arm is a variant of a recipe that was trained with several seeds. A statement compares it with
another arm, the baseline, on the same seeds. All statements of a comparison form one family: their
intervals hold simultaneously, with the confidence that the rules ask for. An arm is better or worse
if its interval excludes zero (or the ratio 1) and no other word, such as "confounded", applies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from frostlab.comparison.judging.statistics import (
    Numbers,
    Paired,
    Pool,
    anytime_critical,
    could_have_found,
    differences,
    paired,
    probability_above,
    probability_of_improvement,
    skew_limit,
    skewness,
    t_critical,
)
from frostlab.comparison.judging.wording import Answer, effect_text, excluded_costs, size_text
from frostlab.comparison.plan import LEAST_SEEDS, Rules
from frostlab.errors import BadInput, nearest
from frostlab.text import enumerated

Word = Literal[
    "better", "worse", "no difference found", "identical", "at chance", "did not finish",
    "too few seeds", "confounded", "unproven",
]  # fmt: skip
# The words by class, with their meanings, in the documentation's order.
JUDGED: dict[Word, str] = {  # read off the interval
    "better": "the whole interval of the effect is in favour of the arm",
    "worse": "the whole interval of the effect is to the arm's disadvantage",
    "no difference found": (
        "the interval contains zero (or the ratio 1); the sentence says, as far as known, which "
        "costs it excludes and which true difference would be found in 8 of 10 such comparisons"
    ),
}
_NEITHER: dict[Word, str] = {  # neither read off the interval nor doubtful
    "identical": "the reported weights of both arms are the same for every seed",
    "at chance": "no difference is found, and neither arm is shown to beat chance",
}
DOUBTFUL: dict[Word, str] = {  # shown in red
    "did not finish": f"fewer than {LEAST_SEEDS} pairs finished, though enough were planned",
    "too few seeds": f"fewer than {LEAST_SEEDS} pairs; a seed that neither arm finished is no pair",
    "confounded": "a setting differs that is not part of the comparison",
    "unproven": "the sentence says why the values prove nothing",
}
MEANINGS = JUDGED | _NEITHER | DOUBTFUL
SHOWING_COST: tuple[Word, ...] = (*JUDGED, "identical")  # the interval shows what the arm costs
NO_VALUE: tuple[Word, ...] = ("did not finish", "unproven")  # the effect is not known
UNKNOWN = ("failed", "did not finish")  # reasons for a missing run that may not be the arm's fault
_USUAL_GRID = 3  # if tuning tried n > 3 combinations, the false-alarm rate is multiplied by 3 / n
_SKEW_SHARE = 0.22  # mean skewness of the arms is notable if normal noise has it in fewer cases
_SKEW_SHARE_OF_ONE = 0.1  # the same for the skewness of one of several arms
Values = Mapping[int, float]  # seed → value


@dataclass(frozen=True)
class Scores:
    """The values of one arm's runs.

    A seed in `missing` has a run without a value; `missing` gives the reason, such as "diverged".
    If settings were tuned, `tried` holds the results of every combination of their values, and
    `values` the results of the combination that was chosen for each seed.
    """

    values: Values
    missing: Mapping[int, str] = field(default_factory=dict)
    tried: tuple[Values, ...] = ()

    @property
    def seeds(self) -> set[int]:
        """The seeds that have a run, whether it has a value or not."""
        return {*self.values, *self.missing}

    def lost(self, seed: int) -> str | None:
        """Return why a seed has no finite value, or None if it has one."""
        if seed in self.missing:
            return self.missing[seed]
        value = self.values[seed]
        return None if math.isfinite(value) else f"ended with {value}"


@dataclass(frozen=True)
class Statement:
    """Two arms that are compared, and the facts about them other than their values."""

    arm: str
    baseline: str
    confounds: tuple[str, ...] = ()  # settings that differ and are not compared
    together: tuple[str, ...] = ()  # what differs on purpose, if several things
    unproven: str | None = None  # why the values prove nothing
    identical: bool = False  # whether both arms report the same weights for every seed
    at_chance: bool = False  # whether neither arm is shown to have learned more than chance
    about: str = "these test examples"  # what the values were measured on
    population: Paired | None = None  # the effect for other test examples of the same population
    retry: str = "the same command tries them again"  # advice about runs that failed


@dataclass(frozen=True)
class Margin:
    """The margin (the largest acceptable cost against the baseline), compared with the interval.

    A cost is how much worse the arm is. `answer` is "yes" if the interval excludes costs above the
    margin, "no" if it holds only such costs, and "not shown" in all other cases, if a run is
    missing, and after any word but better, worse, no difference found and identical.
    """

    answer: Answer
    limit: float  # the margin as in `Rules`
    cost: float  # the margin in the unit of the effect, as a cost: a ratio, or a difference
    largest: float | None  # the largest cost in the interval, like `cost`; None: unbounded
    probability_above: float | None  # posterior probability of a cost above the margin


@dataclass(frozen=True)
class Verdict:
    """The verdict on one statement, and the numbers behind it.

    `could_have_seen` is the effect that such a comparison finds with a probability of at least 80 %
    (see `could_have_found`), in the metric's unit or, on the log scale, as a ratio − 1. It is None
    if the interval is unbounded or has no width, and with fewer than `LEAST_SEEDS` pairs.
    """

    arm: str
    baseline: str
    metric: str
    word: Word
    sentence: str
    family: int  # number of statements whose intervals hold simultaneously
    paired: Paired | None
    could_have_seen: float | None
    margin: Margin | None
    anytime: tuple[float, float] | None  # interval that holds however often one looks
    improvement: float | None  # how often a run of the arm beats a run of the baseline
    population: Paired | None
    skewed: float | None  # skewness of the differences, if it is high enough for a warning
    missing: dict[str, int]  # arm → how many of its paired runs have no finite value
    together: tuple[str, ...]  # what differs on purpose, if several things
    notes: tuple[str, ...] = ()


def judge(
    arms: Mapping[str, Scores],
    statements: Mapping[str, Statement],
    rules: Rules,
    family: int | None = None,
) -> dict[str, Verdict]:
    """Return name → verdict for every statement.

    `family` is the number of all statements of the comparison, if there are more than these. Each
    interval has a confidence of at least 1 − `rules.level` / family, so all of them hold together
    with confidence 1 − `rules.level`. The level is the false-alarm rate of this look, which is one
    analysis of the results.
    """
    _check(arms, statements, rules)
    size = family or len(statements)
    worst = _worst(arms, rules)
    cases = {
        name: _Case(statement, arms[statement.arm], arms[statement.baseline], rules, size, worst)
        for name, statement in statements.items()
    }
    pool = _pool(list(cases.values()))
    return {name: case.verdict(pool) for name, case in cases.items()}


def _check(arms: Mapping[str, Scores], statements: Mapping[str, Statement], rules: Rules) -> None:
    """Refuse unknown arms, missing runs with a value, and values ≤ 0 on the log scale."""
    for statement in statements.values():
        for name in (statement.arm, statement.baseline):
            if name not in arms:
                raise BadInput(f"`{name}` is not among the arms{nearest(name, arms)}")
        if statement.arm == statement.baseline:
            raise BadInput(f"`{statement.arm}` is compared with itself")
    for name, scores in arms.items():
        if both := sorted(set(scores.missing) & set(scores.values)):
            raise BadInput(f"seed {both[0]} of `{name}` is missing and has a value")
        for values in (scores.values, *scores.tried):
            for seed, value in values.items():
                if rules.log and value <= 0:
                    raise BadInput(
                        f"seed {seed} of `{name}` has {rules.metric} {value:g}: "
                        "on the log scale, values must be above 0"
                    )


def _worst(arms: Mapping[str, Scores], rules: Rules) -> float | None:
    """Return the worst finite value of all runs, which stands for a run that is missing."""
    values = [
        value
        for scores in arms.values()
        for by_seed in (scores.values, *scores.tried)
        for value in by_seed.values()
        if math.isfinite(value)
    ]
    return (max if rules.lower_is_better else min)(values, default=None)


def _pool(cases: Sequence["_Case"]) -> Pool | None:
    """Pool the differences from one baseline, of arms with enough pairs and no missing run."""
    baseline = cases[0].statement.baseline if cases else ""
    same = [
        case.differences
        for case in cases
        if case.statement.baseline == baseline and case.n >= LEAST_SEEDS and not case.missing
    ]
    return Pool(baseline, tuple(same)) if same else None


class _Case:
    """One statement with its numbers, from which the word and the sentence follow."""

    def __init__(
        self,
        statement: Statement,
        arm: Scores,
        base: Scores,
        rules: Rules,
        family: int,
        worst: float | None,
    ) -> None:
        self.statement, self.rules, self.family = statement, rules, family
        lost = {seed for seed in arm.seeds & base.seeds if arm.lost(seed) and base.lost(seed)}
        self.seeds, self.lost = sorted(arm.seeds & base.seeds - lost), sorted(lost)
        self.left_out = {
            statement.arm: sorted(arm.seeds - base.seeds),
            statement.baseline: sorted(base.seeds - arm.seeds),
        }
        self.why = {
            name: {seed: why for seed in self.seeds if (why := scores.lost(seed))}
            for name, scores in ((statement.arm, arm), (statement.baseline, base))
        }
        self.missing = {name: len(reasons) for name, reasons in self.why.items() if reasons}
        self.finished = len(
            set(self.seeds) - {seed for reasons in self.why.values() for seed in reasons}
        )
        tried = max(len(arm.tried), len(base.tried))
        self.level = rules.level / family * min(1.0, _USUAL_GRID / max(1, tried))
        self.arm_values = [
            _filled(values, self.seeds, worst) for values in (arm.values, *arm.tried)
        ]
        self.base_values = [
            _filled(values, self.seeds, worst) for values in (base.values, *base.tried)
        ]
        self.pair = self._pair(None)

    @property
    def n(self) -> int:
        return len(self.seeds)

    def _pair(self, critical: float | None) -> Paired | None:
        """Compare the values, in which the worst of all runs stands for each missing run.

        A missing run may be worse than the worst that finished. So if one arm misses more runs than
        the other, the interval is unbounded on the side that is to its disadvantage.
        """
        if not self.arm_values[0]:
            return None
        pair = paired(
            self.arm_values[0], self.base_values[0], alpha=self.level, log=self.rules.log,
            arm_tried=self.arm_values[1:],
            base_tried=self.base_values[1:],
            lower_is_better=self.rules.lower_is_better, critical=critical,
        )  # fmt: skip
        more = self.missing.get(self.statement.arm, 0) - self.missing.get(
            self.statement.baseline, 0
        )
        if more == 0 or pair.n < 2:
            return pair
        return pair.without_bound(above=(more > 0) == self.rules.lower_is_better)

    @property
    def differences(self) -> Numbers:
        return differences(self.arm_values[0], self.base_values[0], self.rules.log)

    def verdict(self, pool: Pool | None) -> Verdict:
        skewed = self._skewed(pool)
        word, reason = self._word()
        margin = self._margin(pool, word)
        statement = self.statement
        return Verdict(
            arm=statement.arm,
            baseline=statement.baseline,
            metric=self.rules.metric,
            word=word,
            sentence=self._sentence(word, reason, margin, skewed),
            family=self.family,
            paired=self.pair,
            could_have_seen=self.could_have_seen,
            margin=margin,
            anytime=self._anytime(),
            improvement=self._improvement(),
            population=self.population,
            skewed=skewed,
            missing=self.missing,
            together=statement.together,
            notes=tuple(self._notes(word)),
        )

    def _word(self) -> tuple[Word, str]:
        """Return the word, and the reason for a word that is not read off the interval."""
        statement, pair = self.statement, self.pair
        if statement.confounds:
            return "confounded", ", ".join(statement.confounds)
        if statement.unproven:
            return "unproven", statement.unproven
        if self.n < LEAST_SEEDS:
            return "too few seeds", ""
        if self.finished < LEAST_SEEDS or pair is None:
            return "did not finish", ""
        if failed := self._failed():
            return "unproven", failed
        if statement.identical:
            return "identical", ""
        if pair.std == 0:
            if pair.effect == self._none:
                return (
                    "unproven",
                    "both runs of every pair have the same value, so no noise is seen",
                )
            size = effect_text(pair).partition(" (")[0]
            return (
                "unproven",
                f"all {self.n} differences are equal ({size}); noise is not like that",
            )
        if pair.low > self._none:
            return ("worse" if self.rules.lower_is_better else "better"), ""
        if pair.high < self._none:
            return ("better" if self.rules.lower_is_better else "worse"), ""
        return ("at chance" if statement.at_chance else "no difference found"), ""

    def _failed(self) -> str:
        """Return the reason why runs that failed leave the difference unknown, or ""."""
        return "; ".join(
            f"{len(failed)} of {self.n} runs of {name} {enumerated(sorted(set(failed)))}, so the "
            f"values are not known; {self.statement.retry}"
            for name, reasons in self.why.items()
            if (failed := [why for why in reasons.values() if why in UNKNOWN])
        )

    @property
    def _none(self) -> float:
        """The effect of no difference: the ratio 1 or the difference 0."""
        return 1.0 if self.rules.log else 0.0

    def _sentence(
        self, word: Word, reason: str, margin: Margin | None, skewed: float | None
    ) -> str:
        arm, baseline = self.statement.arm, self.statement.baseline
        on = f"on {self.rules.metric} ({self.statement.about})"
        numbers = f"{self._numbers()}{self._missing_text()}"
        if word in ("better", "worse"):
            ending = self._small_effect() + self._together() + self._skew_text(skewed)
            return f"{arm} is {word} than {baseline} {on}: {numbers}{ending}."
        if word == "no difference found":
            costs = margin and excluded_costs(margin.answer, margin.largest, self.rules)
            gap = (seen := self.could_have_seen) and size_text(seen, self.rules.log)
            power = gap and f"a true difference of {gap} would be found in 8 of 10 such comparisons"
            ending = "".join(f"; {part}" for part in (costs, power) if part) + self._together()
            return f"no difference found between {arm} and {baseline} {on}: {numbers}{ending}."
        text = {
            "identical": f"{arm} and {baseline} are identical: they report the same weights "
            f"for every seed, so their difference had no effect; {numbers}.",
            "at chance": f"{arm} and {baseline} are at chance {on}: neither is shown to have "
            f"learned anything; {numbers}.",
            "did not finish": f"{arm} against {baseline} {on}: only {self.finished} of {self.n} "
            f"pairs finished{self._missing_text()}; at least {LEAST_SEEDS} are needed.",
            "too few seeds": f"too few seeds to judge {arm} against {baseline} {on}: {numbers}; "
            f"at least {LEAST_SEEDS} are needed.",
            "confounded": f"{arm} is confounded by {reason} {on}: {numbers}; "
            "the arms should not differ in this.",
            "unproven": f"{arm} against {baseline} {on} is unproven ({reason}): {numbers}.",
        }
        return text[word]

    def _numbers(self) -> str:
        n = f"{self.n} paired seed{'s' * (self.n != 1)}"
        return f"{effect_text(self.pair, self.family, self.rules.level)}, {n}"

    def _missing_text(self) -> str:
        """Return the part of the sentence about runs without a finite value, or ""."""
        return "".join(
            f"; {len(reasons)} of {self.n} runs of {name} "
            f"{enumerated(sorted(set(reasons.values())))}, "
            "and each counts as the worst value of all runs"
            for name, reasons in self.why.items()
            if reasons
        )

    def _together(self) -> str:
        together = self.statement.together
        if not together:
            return ""
        names = enumerated(together)
        return f"; {names} differ together, so none of them alone is shown to be the cause"

    def _skew_text(self, skewed: float | None) -> str:
        if skewed is None:
            return ""
        return (
            f"; the differences have a long tail towards the other side of zero (skewness "
            f"{skewed:+.2g}; up to 1 in 3 normal samples have it), so rare runs may undo the effect"
        )

    def _small_effect(self) -> str:
        """Return the part of the sentence about an effect below `minimum_effect`, or ""."""
        least = self.rules.minimum_effect
        if least is None or self.pair is None:
            return ""
        ends = [self.pair.low, self.pair.high]
        if self.rules.log:
            ends = [math.log(end) if 0 < end < math.inf else math.inf for end in ends]
        small = max(map(abs, ends)) < (math.log1p(least) if self.rules.log else least)
        size = size_text(least, self.rules.log)
        return f"; smaller than the smallest effect of interest, {size}" if small else ""

    def _skewed(self, pool: Pool | None) -> float | None:
        """Return the skewness if it is notable: a long tail towards the other side of zero.

        Noise with such a tail makes a t interval too short on that side, most of all if no run of
        the tail was drawn. So the mean skewness over arms counts too, and a moderate one is enough.
        """
        if self.pair is None or self.n < LEAST_SEEDS or not math.isfinite(self.pair.std):
            return None
        sign = -1.0 if self.pair.effect > self._none else 1.0
        own, is_one_of_many = float(skewness(self.differences)), False
        if pool is not None and pool.baseline == self.statement.baseline:
            arms = len(pool.differences)
            if sign * pool.skewness > skew_limit(self.n, arms, _SKEW_SHARE):
                return pool.skewness
            is_one_of_many = arms > 1
        share = _SKEW_SHARE_OF_ONE if is_one_of_many else _SKEW_SHARE
        return own if sign * own > skew_limit(self.n, 1, share) else None

    @property
    def could_have_seen(self) -> float | None:
        """The effect that could have been found, from the wider half of the interval."""
        if self.pair is None or self.n < LEAST_SEEDS or not self.pair.std:
            return None
        ends = [self.pair.effect, self.pair.low, self.pair.high]
        if not all(0 < end < math.inf if self.rules.log else math.isfinite(end) for end in ends):
            return None
        effect, low, high = (math.log(end) for end in ends) if self.rules.log else ends
        standard_error = max(effect - low, high - effect) / t_critical(self.n, self.level)
        least = could_have_found(self.n, self.level) * standard_error * math.sqrt(self.n)
        return math.expm1(min(least, 700)) if self.rules.log else least  # expm1 overflows near 710

    @property
    def population(self) -> Paired | None:
        """The effect for other test examples; its interval contains that for the examples used."""
        population, pair = self.statement.population, self.pair
        if population is None or pair is None:
            return None
        low, high = min(population.low, pair.low), max(population.high, pair.high)
        return replace(population, low=low, high=high, p=max(population.p, pair.p))

    def _margin(self, pool: Pool | None, word: Word) -> Margin | None:
        """Compare the interval with the margin; None if one of them is unknown."""
        limit, pair = self.rules.margin, self.pair
        if limit is None or pair is None or pair.n < 2:
            return None
        lost = self.why[self.statement.baseline]
        finished = [
            x for s, x in zip(self.seeds, self.base_values[0], strict=True) if s not in lost
        ]
        if not finished:
            return None
        cost = self.rules.margin_as_cost(fmean(finished))
        # Turn the effect into a cost, of which more is worse.
        effect, low, high = pair.effect, pair.low, pair.high
        if self.rules.log and not self.rules.lower_is_better:
            effect, low, high = (1 / end if end else math.inf for end in (effect, high, low))
        elif not self.rules.lower_is_better:
            effect, low, high = -effect, -high, -low
        answer: Answer = "yes" if high <= cost else "no" if low > cost else "not shown"
        if self.missing or word not in SHOWING_COST:
            answer = "not shown"
        return Margin(
            answer=answer,
            limit=limit,
            cost=cost,
            largest=high if math.isfinite(high) else None,
            probability_above=self._probability_above(cost, effect, pool),
        )

    def _probability_above(self, cost: float, effect: float, pool: Pool | None) -> float | None:
        """Return the posterior probability of a cost above the margin; None if it is unknown."""
        if self.missing or self.n < LEAST_SEEDS or self.pair is None:
            return None
        variance, freedom = self.pair.std**2, self.n - 1
        if pool is not None and pool.baseline == self.statement.baseline:
            variance, freedom = pool.variance(self.differences)
        if self.rules.log:
            if not (0 < effect < math.inf):
                return None
            cost, effect = math.log(cost), math.log(effect)
        return probability_above(cost, effect, math.sqrt(variance / self.n), freedom)

    def _anytime(self) -> tuple[float, float] | None:
        """Return the interval that holds however often one looks; None with too few pairs."""
        critical = anytime_critical(self.n, self.level)
        if self.n < LEAST_SEEDS:
            return None
        if critical == math.inf:
            return (0.0 if self.rules.log else -math.inf), math.inf
        pair = self._pair(critical)
        return None if pair is None else (pair.low, pair.high)

    def _improvement(self) -> float | None:
        arm, base = self.arm_values[0], self.base_values[0]
        if not arm:
            return None
        return probability_of_improvement(arm, base, self.rules.lower_is_better)

    def _notes(self, word: Word) -> list[str]:
        notes = [
            f"{name}, seed {seed}: {reason}"
            for name, reasons in self.why.items()
            for seed, reason in reasons.items()
        ]
        notes += [f"seeds that only {name} has are left out: {', '.join(map(str, seeds))}"
                  for name, seeds in self.left_out.items() if seeds]  # fmt: skip
        if self.lost:
            notes.append(
                f"seeds that neither arm finished are left out: {', '.join(map(str, self.lost))}"
            )
        history = self.rules.history()
        notes += [history] if history else []
        if self.statement.unproven and self.statement.confounds:
            notes.append(f"unproven: {self.statement.unproven}")
        least, seen = self.rules.minimum_effect, self.could_have_seen
        if (
            word == "no difference found"
            and least is not None
            and seen is not None
            and seen > least
        ):
            size = size_text(least, self.rules.log)
            notes.append(f"an effect of interest, {size}, may have been missed")
        population = self.population
        if population is not None and math.isfinite(population.low):
            ends = f"{population.low:+.4g} to {population.high:+.4g}"
            notes.append(
                "for other test examples of the same kind: "
                f"{population.effect:+.4g} ({100 * (1 - population.alpha):.4g} %: {ends})"
                + ("; a difference is not shown for them"
                   if word in ("better", "worse") and population.low <= 0 <= population.high
                   else "")
            )  # fmt: skip
        return notes


def _filled(values: Values, seeds: Sequence[int], worst: float | None) -> list[float]:
    """Return the values in the order of the seeds, with `worst` for a missing one.

    If no run of any arm has a value, `worst` is None, and the list is empty.
    """
    if worst is None:
        return []
    numbers = [values.get(seed, math.nan) for seed in seeds]
    return [float(number) if math.isfinite(number) else worst for number in numbers]

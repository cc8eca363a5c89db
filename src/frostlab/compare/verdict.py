"""Verdicts: one word and one sentence for each arm, from values by seed and the rules."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from frostlab.compare.pairing import Values, check, usable_values, without_partner
from frostlab.compare.power import flips_count, seen_by_rule
from frostlab.compare.rules import LEAST_SEEDS, Rules
from frostlab.compare.sentences import effect_of, probability, seeds_of, size_of
from frostlab.compare.statistics import NonInferiority, Paired, holm, noninferior, paired
from frostlab.records.record import RunRecord

Word = Literal[
    "better", "worse", "no difference found", "too few seeds", "confounded", "unproven"
]  # fmt: skip
Records = Mapping[tuple[str, int], RunRecord]  # by arm and seed
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Verdict:
    """What can be said of one arm on one metric, and what it rests on.

    `could_have_seen` is the effect that the whole rule finds in 80 of 100 comparisons of this size
    and spread, in the metric's unit or, on log scale, as a ratio − 1.
    """

    arm: str
    baseline: str
    metric: str
    word: Word
    sentence: str
    paired: Paired | None
    p_adjusted: float | None
    could_have_seen: float | None
    noninferior: NonInferiority | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not a number, or not finite, is None."""
        return _plain(asdict(self))


def judge(
    arms: Mapping[str, Values],
    baseline: str,
    rules: Rules,
    *,
    confounds: Mapping[str, Sequence[str]] = _NONE,
    failed: Mapping[str, Sequence[int]] = _NONE,
    unproven: Mapping[str, str] = _NONE,
) -> dict[str, Verdict]:
    """Judge every arm against the baseline on the rules' metric, over the seeds both have.

    Holm's family is every arm, also one without a verdict of its own: it was fixed before the first
    run. `failed` names seeds without a value, `unproven` says why an arm's values prove nothing.
    """
    check(arms, baseline, confounds, failed, unproven)
    family = {arm: (arm, baseline) for arm in arms if arm != baseline}
    return judge_family(
        arms, family, rules, "arms", confounds=confounds, failed=failed, unproven=unproven
    )


def judge_family(
    arms: Mapping[str, Values],
    family: Mapping[str, tuple[str, str]],
    rules: Rules,
    things: str,
    *,
    confounds: Mapping[str, Sequence[str]] = _NONE,
    failed: Mapping[str, Sequence[int]] = _NONE,
    unproven: Mapping[str, str] = _NONE,
) -> dict[str, Verdict]:
    """Judge pairs of arms, each under a name, Holm over all of them.

    `things` is what a sentence calls the pairs; `confounds` and `unproven` go by their names.
    """
    usable, lost = usable_values(arms, failed, rules)
    found = {name: _pair(usable[a], usable[b], rules) for name, (a, b) in family.items()}
    adjusted = holm({name: math.nan if pair is None else pair.p for name, pair in found.items()})
    verdicts = {}
    for name, pair in found.items():
        arm, baseline = family[name]
        case = _Case(arm, baseline, rules, pair, adjusted[name], len(found), things)
        answer = _noninferior(usable[arm], usable[baseline], rules)
        notes = [*lost.get(baseline, ()), *lost.get(arm, ())]
        notes += without_partner(arm, baseline, arms, failed)
        history = rules.history()
        notes += [history] if history else []
        if reason := unproven.get(name):
            notes += [f"unproven: {reason}"]
            answer = answer and replace(answer, answer="not shown", reason=f"unproven: {reason}")
        if mixed := confounds.get(name, ()):
            notes += [f"confounded by {', '.join(mixed)}"]
            answer = answer and replace(
                answer, reason="; ".join(filter(None, (answer.reason, notes[-1])))
            )
        word, sentence, more = case.decided(tuple(mixed), reason)
        verdicts[name] = Verdict(
            arm=arm,
            baseline=baseline,
            metric=rules.metric,
            word=word,
            sentence=sentence,
            paired=pair,
            p_adjusted=None if math.isnan(adjusted[name]) else adjusted[name],
            could_have_seen=case.could_have_seen,
            noninferior=answer,
            notes=(*notes, *more),
        )
    return verdicts


@dataclass(frozen=True)
class _Case:
    """One arm's numbers on the way to a word."""

    arm: str
    baseline: str
    rules: Rules
    pair: Paired | None
    p: float
    arms: int
    things: str

    @property
    def n(self) -> int:
        return self.pair.n if self.pair else 0

    @property
    def could_have_seen(self) -> float | None:
        if self.pair is None or self.n < LEAST_SEEDS:
            return None
        least = seen_by_rule(self.n, self.rules.level, self.arms) * self.pair.std
        return math.expm1(min(least, 700)) if self.rules.log else least

    def decided(
        self, mixed: tuple[str, ...], unproven: str | None
    ) -> tuple[Word, str, tuple[str, ...]]:
        """The word, its sentence, and notes."""
        on = f"on {self.rules.metric}"
        p = probability(self.p, self.arms, self.things)
        numbers = f"{effect_of(self.pair)}, {p}, {seeds_of(self.n)}"
        if mixed:
            said = f"{self.arm} is confounded by {', '.join(mixed)} {on}: {numbers}; "
            return "confounded", said + "the treatment is not all that differs.", ()
        if unproven:
            said = f"{self.arm} against {self.baseline} {on} is unproven, {unproven}: {numbers}."
            return "unproven", said, ()
        if self.pair is None or self.n < LEAST_SEEDS:
            said = f"too few seeds to judge {self.arm} against {self.baseline} {on}: {numbers}; "
            return "too few seeds", said + f"{LEAST_SEEDS} is the least.", ()
        by_t, by_flips = self.p <= self.rules.level, self._by_flips()
        if by_t and by_flips is not False:
            higher = self.pair.effect > (1 if self.rules.log else 0)
            word: Word = "worse" if higher == self.rules.lower_is_better else "better"
            said = f"{self.arm} is {word} than {self.baseline} {on}: {numbers}"
            return word, f"{said}{self._small()}.", self._silent_flips()
        said = f"no difference found between {self.arm} and {self.baseline} {on}: {numbers}"
        seen = self.could_have_seen or 0.0
        said += self._disagreement(by_t, by_flips)
        said += f"; could have seen ≥ {size_of(seen, self.rules.log)}."
        return "no difference found", said, self._missed(seen)

    def _by_flips(self) -> bool | None:
        """What the sign-flip test says, unadjusted: Holm would leave 6 seeds nothing to say."""
        if self.pair is None or self.pair.p_flip is None:
            return None
        return (
            self.pair.p_flip <= self.rules.level if flips_count(self.n, self.rules.level) else None
        )

    def _disagreement(self, by_t: bool, by_flips: bool | None) -> str:
        assert self.pair is not None
        alone = self.pair.p <= self.rules.level  # Holm made the difference, not the flips
        if by_flips is None or by_flips == by_t or (by_flips and alone):
            return ""
        yes, no = ("t", "sign-flip") if by_t else ("sign-flip", "t")
        flips = f"sign-flip p = {self.pair.p_flip:.3g}"
        return f"; the {yes} test sees one and the {no} test does not ({flips}): they disagree"

    def _silent_flips(self) -> tuple[str, ...]:
        if flips_count(self.n, self.rules.level):
            return ()
        at = f"at {self.rules.level:.4g}"
        return (
            f"{self.n} pairs are too few for the sign-flip test {at}: the t test decided alone",
        )

    def _small(self) -> str:
        least = self.rules.minimum_effect
        if least is None or self.pair is None:
            return ""
        if self.rules.log:
            small = abs(math.log(self.pair.effect)) < math.log1p(least)
        else:
            small = abs(self.pair.effect) < least
        said = f"; smaller than the smallest effect of interest, {size_of(least, self.rules.log)}"
        return said if small else ""

    def _missed(self, seen: float) -> tuple[str, ...]:
        least = self.rules.minimum_effect
        if least is None or seen <= least:
            return ()
        return (f"an effect of interest, {size_of(least, self.rules.log)}, may have been missed",)


def _pair(arm: Values, base: Values, rules: Rules) -> Paired | None:
    seeds = sorted(set(arm) & set(base))
    if not seeds:
        return None
    values = [arm[seed] for seed in seeds], [base[seed] for seed in seeds]
    return paired(*values, alpha=rules.level, log=rules.log)


def _noninferior(arm: Values, base: Values, rules: Rules) -> NonInferiority | None:
    if rules.noninferior is None:
        return None
    seeds = sorted(set(arm) & set(base))
    answer = noninferior(
        [arm[seed] for seed in seeds],
        [base[seed] for seed in seeds],
        rules.noninferior,
        lower_is_better=rules.lower_is_better,
        alpha=rules.level,
    )
    if len(seeds) >= LEAST_SEEDS:
        return answer
    reason = f"{seeds_of(len(seeds))}; {LEAST_SEEDS} is the least"
    return replace(answer, answer="not shown", reason=reason)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

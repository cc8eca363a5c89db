"""Verdicts: one word and one sentence per arm, from values by seed and the plan's rules."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from frostlab.comparison.plan import LEAST_SEEDS, Rules
from frostlab.comparison.statistics import (
    NonInferiority,
    Paired,
    flips_can_decide,
    holm,
    noninferior,
    paired,
    seen_by_rule,
)
from frostlab.errors import BadInput, nearest
from frostlab.storage import finite

Word = Literal[
    "better", "worse", "no difference found", "too few seeds", "confounded", "unproven"
]  # fmt: skip
# The meaning of every word, for the documentation and for pages, in the documentation's order.
MEANINGS: dict[Word, str] = {
    "better": (
        "the t test finds a difference in favour of the arm; "
        "the sign-flip test does not contradict it"
    ),
    "worse": (
        "the t test finds a difference to the arm's disadvantage; "
        "the sign-flip test does not contradict it"
    ),
    "no difference found": (
        "the tests find no difference; "
        "the sentence gives the smallest effect they could have detected"
    ),
    "too few seeds": f"fewer than {LEAST_SEEDS} pairs of runs",
    "confounded": "a setting differs that is not part of the comparison",
    "unproven": (
        "the runs differ in more than the compared settings, or the timing cannot be trusted"
    ),
}
Values = Mapping[int, float]  # by seed
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Verdict:
    """The verdict on one arm for one metric, and the numbers behind it.

    `could_have_seen` is the effect that the whole rule detects with 80 % power at this size and
    spread, in the metric's unit or, on the log scale, as a ratio − 1.
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
        """Return plain values for JSON, with None for a number that is not finite."""
        values: dict[str, Any] = finite(asdict(self))
        return values


def judge(
    arms: Mapping[str, Values],
    baseline: str,
    rules: Rules,
    *,
    confounds: Mapping[str, Sequence[str]] = _EMPTY,
    failed: Mapping[str, Sequence[int]] = _EMPTY,
    unproven: Mapping[str, str] = _EMPTY,
) -> dict[str, Verdict]:
    """Judge every arm against the baseline on the rules' metric, over the seeds that both have.

    Holm's correction counts every arm, even an arm with too few values, because the arms were
    fixed before the first run. `failed` lists the seeds without a value by arm. `unproven` gives
    the reason why an arm's values prove nothing.
    """
    _check_names(arms, baseline, confounds, failed, unproven)
    family = {arm: (arm, baseline) for arm in arms if arm != baseline}
    return judge_family(
        arms, family, rules, "arms", confounds=confounds, failed=failed, unproven=unproven
    )


def judge_family(
    arms: Mapping[str, Values],
    family: Mapping[str, tuple[str, str]],
    rules: Rules,
    members: str,
    *,
    confounds: Mapping[str, Sequence[str]] = _EMPTY,
    failed: Mapping[str, Sequence[int]] = _EMPTY,
    unproven: Mapping[str, str] = _EMPTY,
) -> dict[str, Verdict]:
    """Judge named pairs of arms, with Holm's correction over all pairs.

    `members` is the word for the pairs in sentences. The keys of `family`, `confounds` and
    `unproven` are the names of the pairs.
    """
    usable, lost_seed_notes = _usable_values(arms, failed, rules)
    pairs = {name: _pair(usable[a], usable[b], rules) for name, (a, b) in family.items()}
    adjusted = holm({name: math.nan if pair is None else pair.p for name, pair in pairs.items()})
    verdicts = {}
    for name, pair in pairs.items():
        arm, baseline = family[name]
        case = _Case(arm, baseline, rules, pair, adjusted[name], len(pairs), members)
        limit = _noninferior(usable[arm], usable[baseline], rules)
        notes = [*lost_seed_notes.get(baseline, ()), *lost_seed_notes.get(arm, ())]
        notes += _notes_on_unpaired_seeds(arm, baseline, arms, failed)
        history = rules.history()
        notes += [history] if history else []
        if reason := unproven.get(name):
            notes += [f"unproven: {reason}"]
            limit = limit and replace(limit, answer="not shown", reason=f"unproven: {reason}")
        if mixed := confounds.get(name, ()):
            notes += [f"confounded by {', '.join(mixed)}"]
            limit = limit and replace(
                limit, reason="; ".join(filter(None, (limit.reason, notes[-1])))
            )
        word, sentence, more_notes = case.decide(tuple(mixed), reason)
        verdicts[name] = Verdict(
            arm=arm,
            baseline=baseline,
            metric=rules.metric,
            word=word,
            sentence=sentence,
            paired=pair,
            p_adjusted=None if math.isnan(adjusted[name]) else adjusted[name],
            could_have_seen=case.could_have_seen,
            noninferior=limit,
            notes=(*notes, *more_notes),
        )
    return verdicts


@dataclass(frozen=True)
class _Case:
    """The numbers of one pair of arms, which decide its word and sentence."""

    arm: str
    baseline: str
    rules: Rules
    pair: Paired | None
    p: float  # after Holm's correction
    family_size: int
    members: str

    @property
    def n(self) -> int:
        return self.pair.n if self.pair else 0

    @property
    def could_have_seen(self) -> float | None:
        if self.pair is None or self.n < LEAST_SEEDS:
            return None
        least = seen_by_rule(self.n, self.rules.level, self.family_size) * self.pair.std
        return math.expm1(min(least, 700)) if self.rules.log else least

    def decide(
        self, mixed: tuple[str, ...], unproven: str | None
    ) -> tuple[Word, str, tuple[str, ...]]:
        """Return the word, its sentence and further notes."""
        arm, baseline, on = self.arm, self.baseline, f"on {self.rules.metric}"
        p = _p_text(self.p, self.family_size, self.members)
        numbers = f"{_effect_text(self.pair)}, {p}, {_seeds_text(self.n)}"
        if mixed:
            sentence = f"{arm} is confounded by {', '.join(mixed)} {on}: {numbers}; "
            return "confounded", f"{sentence}the treatment is not all that differs.", ()
        if unproven:
            sentence = f"{arm} against {baseline} {on} is unproven, {unproven}: {numbers}."
            return "unproven", sentence, ()
        if self.pair is None or self.n < LEAST_SEEDS:
            sentence = f"too few seeds to judge {arm} against {baseline} {on}: {numbers}; "
            return "too few seeds", f"{sentence}{LEAST_SEEDS} is the least.", ()
        by_t, by_flips = self.p <= self.rules.level, self._by_flips()
        if by_t and by_flips is not False:
            higher = self.pair.effect > (1 if self.rules.log else 0)
            word: Word = "worse" if higher == self.rules.lower_is_better else "better"
            sentence = f"{arm} is {word} than {baseline} {on}: {numbers}"
            return word, f"{sentence}{self._small_effect()}.", self._note_without_flips()
        seen = self.could_have_seen or 0.0
        sentence = (
            f"no difference found between {arm} and {baseline} {on}: {numbers}"
            f"{self._disagreement(by_t, by_flips)}; could have seen ≥ "
            f"{_size_text(seen, self.rules.log)}."
        )
        return "no difference found", sentence, self._note_on_missed_effect(seen)

    def _by_flips(self) -> bool | None:
        """Return whether the sign-flip test finds a difference; None if there are too few pairs.

        Its p is not adjusted, because after Holm's correction 6 seeds could never be significant.
        """
        if self.pair is None or self.pair.p_flip is None:
            return None
        can_decide = flips_can_decide(self.n, self.rules.level)
        return self.pair.p_flip <= self.rules.level if can_decide else None

    def _disagreement(self, by_t: bool, by_flips: bool | None) -> str:
        assert self.pair is not None
        alone = self.pair.p <= self.rules.level  # the t test finds it before Holm's correction
        if by_flips is None or by_flips == by_t or (by_flips and alone):
            return ""
        yes, no = ("t", "sign-flip") if by_t else ("sign-flip", "t")
        flips = f"sign-flip p = {self.pair.p_flip:.3g}"
        return f"; the {yes} test sees one and the {no} test does not ({flips}): they disagree"

    def _note_without_flips(self) -> tuple[str, ...]:
        if flips_can_decide(self.n, self.rules.level):
            return ()
        at = f"at {self.rules.level:.4g}"
        return (
            f"{self.n} pairs are too few for the sign-flip test {at}: the t test decided alone",
        )

    def _small_effect(self) -> str:
        least = self.rules.minimum_effect
        if least is None or self.pair is None:
            return ""
        if self.rules.log:
            small = abs(math.log(self.pair.effect)) < math.log1p(least)
        else:
            small = abs(self.pair.effect) < least
        text = (
            f"; smaller than the smallest effect of interest, {_size_text(least, self.rules.log)}"
        )
        return text if small else ""

    def _note_on_missed_effect(self, seen: float) -> tuple[str, ...]:
        least = self.rules.minimum_effect
        if least is None or seen <= least:
            return ()
        return (
            f"an effect of interest, {_size_text(least, self.rules.log)}, may have been missed",
        )


def _check_names(
    arms: Mapping[str, Values],
    baseline: str,
    confounds: Mapping[str, Sequence[str]],
    failed: Mapping[str, Sequence[int]],
    unproven: Mapping[str, str],
) -> None:
    """Refuse unknown arms, a baseline without other arms, and a failed seed that has a value."""
    if baseline not in arms:
        raise BadInput(f"baseline `{baseline}` is not among the arms{nearest(baseline, arms)}")
    if len(arms) < 2:
        raise BadInput(f"baseline `{baseline}` is the only arm; a comparison needs another")
    parameters = {"confounds": confounds, "failed": failed, "unproven": unproven}
    for parameter, mapping in parameters.items():
        for arm in mapping:
            if arm not in arms or (arm == baseline and parameter != "failed"):
                hint = nearest(arm, arms)
                raise BadInput(f"{parameter} names `{arm}`, which is not an arm to judge{hint}")
    for arm, seeds in failed.items():
        if both := sorted(set(seeds) & set(arms[arm])):
            raise BadInput(f"seed {both[0]} of `{arm}` failed and has a value: it cannot be both")


def _usable_values(
    arms: Mapping[str, Values], failed: Mapping[str, Sequence[int]], rules: Rules
) -> tuple[dict[str, dict[int, float]], dict[str, list[str]]]:
    """Return the finite values by arm and seed, and a note by arm on the seeds without one."""
    usable, lost_seed_notes = {}, {}
    for arm, values in arms.items():
        usable[arm] = {seed: value for seed, value in values.items() if math.isfinite(value)}
        for seed, value in usable[arm].items():
            if rules.log and value <= 0:
                raise BadInput(
                    f"seed {seed} of `{arm}` has {rules.metric} {value:g}: "
                    "on log scale values must be above 0"
                )
        lost = [str(seed) for seed in sorted(failed.get(arm, ()))]
        lost += [f"{seed} ({values[seed]})" for seed in sorted(set(values) - set(usable[arm]))]
        if lost:
            effect = "fewer pairs, and the verdict holds for runs that finished"
            lost_seed_notes[arm] = [f"failed seeds of {arm}: {', '.join(lost)}: {effect}"]
    return usable, lost_seed_notes


def _notes_on_unpaired_seeds(
    arm: str, baseline: str, arms: Mapping[str, Values], failed: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return notes on the seeds that only one of the two arms was run with."""
    arm_seeds = {*arms[arm], *failed.get(arm, ())}
    base_seeds = {*arms[baseline], *failed.get(baseline, ())}
    notes = []
    for name, seeds in ((arm, arm_seeds - base_seeds), (baseline, base_seeds - arm_seeds)):
        if seeds:
            listed = ", ".join(str(seed) for seed in sorted(seeds))
            notes.append(f"seeds of {name} without a partner, left out: {listed}")
    return notes


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
    limit = noninferior(
        [arm[seed] for seed in seeds],
        [base[seed] for seed in seeds],
        rules.noninferior,
        lower_is_better=rules.lower_is_better,
        alpha=rules.level,
    )
    if len(seeds) >= LEAST_SEEDS:
        return limit
    reason = f"{_seeds_text(len(seeds))}; {LEAST_SEEDS} is the least"
    return replace(limit, answer="not shown", reason=reason)


def _effect_text(pair: Paired | None) -> str:
    """Format the effect and its interval: "+0.012 (95 %: +0.004 to +0.02)" or "0.93 × (…)"."""
    if pair is None:
        return "no pair of values"
    number, effect = ("{:.4g}", "{:.4g} ×") if pair.log else ("{:+.4g}", "{:+.4g}")
    if pair.n < 2:
        return effect.format(pair.effect)
    level = f"{100 * (1 - pair.alpha):.4g} %"
    ends = f"{number.format(pair.low)} to {number.format(pair.high)}"
    return f"{effect.format(pair.effect)} ({level}: {ends})"


def _p_text(p: float, family_size: int, members: str) -> str:
    """Format the p value, with the size of the family that it was adjusted for."""
    if math.isnan(p):
        return "no p"
    text = "p < 0.0001" if p < 0.0001 else f"p = {p:.3g}"
    return f"{text} after Holm over {family_size} {members}" if family_size > 1 else text


def _seeds_text(n: int) -> str:
    return f"{n} paired seed{'s' * (n != 1)}"


def _size_text(effect: float, log: bool) -> str:
    """Format the size of an effect: "0.012", or "3.4 %" for a ratio."""
    return f"{100 * effect:.3g} %" if log else f"{effect:.3g}"

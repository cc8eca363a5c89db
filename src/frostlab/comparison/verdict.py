"""Verdicts on arms: one word and one sentence per arm, from its values by seed and the rules.

An arm is a variant of a recipe that was trained with several seeds, and is compared with another
arm, the baseline, on the same seeds. An arm is better or worse if the t test finds a difference
after Holm's correction, and the sign-flip test, where it can decide, finds it too.
"""

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

    `could_have_seen` is the smallest effect that the t test and the sign-flip test both find with
    80 % power, given the number of pairs and the standard deviation of their differences. It is in
    the metric's unit or, on the log scale, a ratio − 1.
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
        """Return the values as JSON types, with None for a number that is not finite."""
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
    fixed before the first run.

    Args:
        arms: the metric's values by arm and seed.
        confounds: by arm, the settings that differ from the baseline but are not compared.
        failed: by arm, the seeds without a value.
        unproven: by arm, the reason why its values prove nothing.
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

    `family` maps each name to an arm and its baseline. `confounds` and `unproven` have the same
    keys; the keys of `arms` and `failed` are arms. `members` is the word for the pairs in
    sentences, such as "arms" or "questions".
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
        if confounding := confounds.get(name, ()):
            notes += [f"confounded by {', '.join(confounding)}"]
            limit = limit and replace(
                limit, reason="; ".join(filter(None, (limit.reason, notes[-1])))
            )
        word, sentence, more_notes = case.decide(tuple(confounding), reason)
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
    """The numbers of one pair of arms, from which the word and the sentence follow."""

    arm: str
    baseline: str
    rules: Rules
    pair: Paired | None
    p: float  # after Holm's correction
    family_size: int  # number of pairs in Holm's correction
    members: str  # word for these pairs in sentences

    @property
    def n(self) -> int:
        return self.pair.n if self.pair else 0

    @property
    def could_have_seen(self) -> float | None:
        if self.pair is None or self.n < LEAST_SEEDS:
            return None
        least = seen_by_rule(self.n, self.rules.level, self.family_size) * self.pair.std
        return math.expm1(min(least, 700)) if self.rules.log else least  # expm1 overflows near 710

    def decide(
        self, confounding: tuple[str, ...], unproven: str | None
    ) -> tuple[Word, str, tuple[str, ...]]:
        """Return the word, its sentence and further notes.

        `confounding` lists the confounds; `unproven` is the reason why the values prove nothing.
        """
        arm, baseline, on = self.arm, self.baseline, f"on {self.rules.metric}"
        p = _p_text(self.p, self.family_size, self.members)
        numbers = f"{_effect_text(self.pair)}, {p}, {_seeds_text(self.n)}"
        if confounding:
            sentence = f"{arm} is confounded by {', '.join(confounding)} {on}: {numbers}; "
            return "confounded", f"{sentence}more than the treatment differs.", ()
        if unproven:
            sentence = f"{arm} against {baseline} {on} is unproven ({unproven}): {numbers}."
            return "unproven", sentence, ()
        if self.pair is None or self.n < LEAST_SEEDS:
            sentence = f"too few seeds to judge {arm} against {baseline} {on}: {numbers}; "
            return "too few seeds", f"{sentence}at least {LEAST_SEEDS} are needed.", ()
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

        The p of this test is not adjusted: with 6 seeds it is at least 0.03125, so after Holm's
        correction over two arms it could never be below 0.05.
        """
        if self.pair is None or self.pair.p_flip is None:
            return None
        can_decide = flips_can_decide(self.n, self.rules.level)
        return self.pair.p_flip <= self.rules.level if can_decide else None

    def _disagreement(self, by_t: bool, by_flips: bool | None) -> str:
        """Return the part of the sentence about tests that disagree, or "".

        A t test that is significant without Holm's correction does not contradict the sign flips.
        """
        assert self.pair is not None
        uncorrected = self.pair.p <= self.rules.level
        if by_flips is None or by_flips == by_t or (by_flips and uncorrected):
            return ""
        yes, no = ("t", "sign-flip") if by_t else ("sign-flip", "t")
        flips = f"sign-flip p = {self.pair.p_flip:.3g}"
        return f"; the {yes} test finds a difference, but the {no} test does not ({flips})"

    def _note_without_flips(self) -> tuple[str, ...]:
        if flips_can_decide(self.n, self.rules.level):
            return ()
        at = f"at {self.rules.level:.4g}"
        return (
            f"{self.n} pairs are too few for the sign-flip test {at}: the t test decided alone",
        )

    def _small_effect(self) -> str:
        """Return the part of the sentence about an effect below `minimum_effect`, or ""."""
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
    """Refuse unknown arms, a baseline without other arms, and failed seeds that have a value."""
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
    """Return the finite values by arm and seed, and by arm a note on its seeds without a value."""
    usable, lost_seed_notes = {}, {}
    for arm, values in arms.items():
        usable[arm] = {seed: value for seed, value in values.items() if math.isfinite(value)}
        for seed, value in usable[arm].items():
            if rules.log and value <= 0:
                raise BadInput(
                    f"seed {seed} of `{arm}` has {rules.metric} {value:g}: "
                    "on the log scale, values must be above 0"
                )
        lost = [str(seed) for seed in sorted(failed.get(arm, ()))]
        lost += [f"{seed} ({values[seed]})" for seed in sorted(set(values) - set(usable[arm]))]
        if lost:
            consequence = "the verdict rests on the runs that finished"
            lost_seed_notes[arm] = [f"failed seeds of {arm}: {', '.join(lost)}; {consequence}"]
    return usable, lost_seed_notes


def _notes_on_unpaired_seeds(
    arm: str, baseline: str, arms: Mapping[str, Values], failed: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return notes on the seeds that only one of the two arms has."""
    arm_seeds = {*arms[arm], *failed.get(arm, ())}
    base_seeds = {*arms[baseline], *failed.get(baseline, ())}
    notes = []
    for name, seeds in ((arm, arm_seeds - base_seeds), (baseline, base_seeds - arm_seeds)):
        if seeds:
            listed = ", ".join(str(seed) for seed in sorted(seeds))
            notes.append(f"seeds that only {name} has are left out: {listed}")
    return notes


def _pair(arm: Values, base: Values, rules: Rules) -> Paired | None:
    seeds = sorted(set(arm) & set(base))
    if not seeds:
        return None
    values = [arm[seed] for seed in seeds], [base[seed] for seed in seeds]
    return paired(*values, alpha=rules.level, log=rules.log)


def _noninferior(arm: Values, base: Values, rules: Rules) -> NonInferiority | None:
    """Test non-inferiority if the rules set a limit; too few pairs give the answer "not shown"."""
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
    reason = f"{_seeds_text(len(seeds))}; at least {LEAST_SEEDS} are needed"
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

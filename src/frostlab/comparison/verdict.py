"""Verdicts: one word and one sentence for each arm, from values by seed and the rules."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from frostlab.comparison.plan import LEAST_SEEDS, Contrast, Plan, Rules
from frostlab.comparison.statistics import (
    NonInferiority,
    Paired,
    flips_count,
    holm,
    noninferior,
    paired,
    seen_by_rule,
)
from frostlab.errors import BadInput, nearest
from frostlab.records.folder import RunRecord
from frostlab.records.schema import Digests, EpochEvent, ResumeEvent, StartEvent

Values = Mapping[int, float]


def check(
    arms: Mapping[str, Values],
    baseline: str,
    confounds: Mapping[str, Sequence[str]],
    failed: Mapping[str, Sequence[int]],
    unproven: Mapping[str, str],
) -> None:
    """Refuse names that are no arm, one arm alone, and a seed that failed with a value."""
    if baseline not in arms:
        raise BadInput(f"baseline `{baseline}` is not among the arms{nearest(baseline, arms)}")
    if len(arms) < 2:
        raise BadInput(f"baseline `{baseline}` is the only arm; a comparison needs another")
    said = {"confounds": confounds, "failed": failed, "unproven": unproven}
    for what, mapping in said.items():
        for arm in mapping:
            if arm not in arms or (arm == baseline and what != "failed"):
                raise BadInput(f"{what} names `{arm}`, which is no arm here{nearest(arm, arms)}")
    for arm, seeds in failed.items():
        if both := sorted(set(seeds) & set(arms[arm])):
            raise BadInput(f"seed {both[0]} of `{arm}` failed and has a value: it cannot be both")


def usable_values(
    arms: Mapping[str, Values], failed: Mapping[str, Sequence[int]], rules: Rules
) -> tuple[dict[str, dict[int, float]], dict[str, list[str]]]:
    """Finite values, and a note for each arm of the seeds that gave none."""
    usable, lost = {}, {}
    for arm, values in arms.items():
        usable[arm] = {seed: value for seed, value in values.items() if math.isfinite(value)}
        for seed, value in usable[arm].items():
            if rules.log and value <= 0:
                said = f"seed {seed} of `{arm}` has {rules.metric} {value:g}"
                raise BadInput(f"{said}: on log scale values must be above 0")
        wild = {
            seed: f"{seed} ({value})" for seed, value in values.items() if seed not in usable[arm]
        }
        names = [str(seed) for seed in sorted(failed.get(arm, ()))]
        names += [wild[seed] for seed in sorted(wild)]
        if names:
            kept = "fewer pairs, and what is said holds for runs that finished"
            lost[arm] = [f"failed seeds of {arm}: {', '.join(names)}: {kept}"]
    return usable, lost


def without_partner(
    arm: str, baseline: str, arms: Mapping[str, Values], failed: Mapping[str, Sequence[int]]
) -> list[str]:
    """A note of seeds that only one side was run with."""
    ours = {*arms[arm], *failed.get(arm, ())}
    theirs = {*arms[baseline], *failed.get(baseline, ())}
    notes = []
    for name, seeds in ((arm, ours - theirs), (baseline, theirs - ours)):
        if seeds:
            listed = ", ".join(str(seed) for seed in sorted(seeds))
            notes.append(f"seeds of {name} without a partner, left out: {listed}")
    return notes


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


_SHAPE = ("device", "precision", "processes", "threads")


def why_unpaired(one: RunRecord, other: RunRecord, vary: Iterable[str] = ()) -> str | None:
    """The first thing that keeps two runs from being a pair, or None.

    Where arms vary in their model, they begin with other weights.
    """
    models_vary = any(key.partition(".")[0] == "model" for key in vary)
    return next(_differences(one, other, weights=not models_vary), None)


def _differences(one: RunRecord, other: RunRecord, weights: bool) -> Iterator[str]:
    if one.result.seed != other.result.seed:
        yield f"the seeds differ ({one.result.seed} and {other.result.seed})"
    mine, theirs = one.digests, other.digests
    if mine.data != theirs.data:
        yield f"the data differ ({mine.data} and {theirs.data})"
    if weights:
        yield from _other_weights(mine, theirs)
    for epoch, (a, b) in enumerate(zip(_orders(one), _orders(other), strict=False)):
        if a != b:
            yield f"the order of examples differs in epoch {epoch + 1} ({a} and {b})"
    for key in _SHAPE:
        ours = sorted({str(getattr(event, key)) for event in _begun(one)})
        others = sorted({str(getattr(event, key)) for event in _begun(other)})
        if ours != others:
            yield f"{key} differs ({' then '.join(ours)} and {' then '.join(others)})"


def _other_weights(mine: Digests, theirs: Digests) -> Iterator[str]:
    touched = {*mine.touched, *theirs.touched}
    for key, value in mine.weights.items():
        if key not in touched and theirs.weights.get(key) != value:
            yield f"the initial weights of {key} differ, which neither treatment touches"
    strange = [key for key in theirs.weights if key not in {*mine.weights, *touched}]
    if strange:
        yield f"only one has the weights {strange[0]}"


def _orders(record: RunRecord) -> list[str]:
    return [event.order for event in record.events(EpochEvent)]


def _begun(record: RunRecord) -> list[StartEvent | ResumeEvent]:
    return [*record.events(StartEvent), *record.events(ResumeEvent)]


def contrasts(plan: Plan, records: Records, rules: Rules) -> list[dict[str, Any]]:
    """Every question with its verdict; Holm over those that ask for the same thing."""
    answered: dict[str, dict[str, Any]] = {}
    for of in ("value", "gain"):
        asked = [contrast for contrast in plan.contrasts if contrast.of == of]
        if asked:
            answered |= _family(plan, asked, records, rules)
    return [contrast.model_dump() | answered[contrast.question] for contrast in plan.contrasts]


def _family(
    plan: Plan, asked: list[Contrast], records: Records, rules: Rules
) -> dict[str, dict[str, Any]]:
    values, failed = _values(plan, asked, records, rules)
    arms = {arm.name: arm for arm in plan.arms}
    apart = {c.question: _apart(plan, c, records) for c in asked}
    mixed = {c.question: plan.between(arms[c.against], arms[c.arm]) for c in asked}
    verdicts = judge_family(
        values,
        {contrast.question: (contrast.arm, contrast.against) for contrast in asked},
        rules.model_copy(update={"noninferior": None}),
        "questions",
        confounds={question: [str(one) for one in found] for question, found in mixed.items()},
        failed=failed,
        unproven={question: reason for question, reason in apart.items() if reason},
    )
    return {question: verdict.to_dict() for question, verdict in verdicts.items()}


def _values(
    plan: Plan, asked: list[Contrast], records: Records, rules: Rules
) -> tuple[dict[str, dict[int, float]], dict[str, list[int]]]:
    """What each arm gave at each seed, and the seeds that gave nothing."""
    names = {name for contrast in asked for name in (contrast.arm, contrast.against)}
    found = {
        name: {seed: _value(records[name, seed], rules, asked[0].of) for seed in plan.seeds}
        for name in names
    }
    values = {
        name: {seed: value for seed, value in each.items() if value is not None}
        for name, each in found.items()
    }
    failed = {
        name: [s for s, value in each.items() if value is None] for name, each in found.items()
    }
    return values, failed


def _apart(plan: Plan, contrast: Contrast, records: Records) -> str | None:
    """Why the runs of a contrast are no pairs, if any is not."""
    for seed in plan.seeds:
        one, other = records[contrast.against, seed], records[contrast.arm, seed]
        if one.status == other.status == "finished":
            reason = why_unpaired(one, other, plan.vary)
            if reason is not None:
                return f"seed {seed}: {reason}"
    return None


def _value(record: RunRecord, rules: Rules, of: str) -> float | None:
    """A run's result; or what its last stage made of its first one's, where stages are chosen."""
    if record.status != "finished":
        return None
    if of == "value":
        return record.metrics.get(rules.metric)
    bests = [s.best.value for s in record.result.stages if s.best.value is not None]
    return float(bests[-1] / bests[0] if rules.log else bests[-1] - bests[0])


def effect_of(pair: Paired | None) -> str:
    """The effect and its interval: "+0.012 (95 %: +0.004 to +0.02)", as a ratio "0.93 ×"."""
    if pair is None:
        return "no pair of values"
    shown = "{:.4g} ×" if pair.log else "{:+.4g}"
    if pair.n < 2:
        return shown.format(pair.effect)
    level = f"{100 * (1 - pair.alpha):.4g} %"
    return f"{shown.format(pair.effect)} ({level}: {' to '.join(_ends(pair))})"


def probability(p: float, count: int, things: str) -> str:
    """The p value, and over how many arms or questions it was adjusted."""
    if p != p:
        return "no p"
    shown = "p < 0.0001" if p < 0.0001 else f"p = {p:.3g}"
    return f"{shown} after Holm over {count} {things}" if count > 1 else shown


def seeds_of(n: int) -> str:
    """ "6 paired seeds"."""
    return f"{n} paired seed{'s' * (n != 1)}"


def size_of(effect: float, log: bool) -> str:
    """An effect without its sign: "0.012", or "3.4 %" of a ratio."""
    return f"{100 * effect:.3g} %" if log else f"{effect:.3g}"


def _ends(pair: Paired) -> tuple[str, str]:
    shown = "{:.4g}" if pair.log else "{:+.4g}"
    return shown.format(pair.low), shown.format(pair.high)

"""The words a part can be called, and every threshold that decides between them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from frostlab.flow.measurements import PartFacts, Report

if TYPE_CHECKING:
    from frostlab.flow.measurements import Flow


LEARNING, SLOW, STILL = "learning", "slow", "not learning"
EXPLODING, FROZEN, SCALED = "exploding", "frozen on purpose", "scaled away by the optimizer"
DECAYING, MOVED = "moved by weight decay alone", "frozen, yet moved"
UNKNOWN = "not measured yet"
WORDS = (LEARNING, SLOW, STILL, EXPLODING, FROZEN, SCALED, DECAYING, MOVED, UNKNOWN)


@dataclass(frozen=True)
class Rules:
    """The thresholds.

    Ratios are update/weight, without what weight decay explains, and as they would be at the
    highest learning rate of the flow; medians over the last reports.
    """

    window: int = 5  # reports
    fewest: int = 2  # reports before a part is said to stand still: zeros hold others up at first
    still: float = 1e-6  # below: not learning, if others move
    asleep: float = 1e-9  # below, everywhere: nothing learns
    decayed: float = 2.0  # times what decay alone would move: up to here decay may explain it
    drowned: float = 1e-4  # gradient, of its sum with decay: below, normalised decay explains it
    slow: float = 0.01  # of the median of its peers
    apart: float = 1e-3  # of the median of all others, for parts that are not alike
    vanishing: float = 1e-4  # gradient, of the largest in the model: the cause is named
    underflow: float = 1e-12  # the smallest gradient, of the largest: a zero then vanished too
    leap: float = 1.0  # update/weight above: exploding
    growth: float = 1e3  # times the gradient of the first report, part and whole: exploding
    scale: float = 10.0  # times the gradients of both layers beside it, steadily
    steady: float = 0.5  # largest departure of the logarithm of that factor
    alike: float = 2.0  # times the update/weight of its peers: no more than this is "alike"
    saturated: float = 0.5  # share of activations: named as a cause
    steady_reports: int = 4  # fewer do not tell a steady factor
    peers: int = 2  # fewer are no peers: all other parts are asked
    normalising: tuple[str, ...] = (
        "Adam",
        "AdamW",
        "KernelAdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "RMSprop",
        "Adagrad",
        "Adafactor",
        "Lion",
        "Muon",
    )


@dataclass(frozen=True)
class PartVerdict:
    """A word for a part, why, and what to try."""

    word: str
    why: str
    hint: str = ""

    @property
    def accident(self) -> bool:
        """Whether the part fails to learn though nobody asked for that."""
        return self.word in (STILL, DECAYING)

    @property
    def alarming(self) -> bool:
        """Whether somebody should look."""
        return self.word not in (LEARNING, FROZEN, SCALED, UNKNOWN)


class Evidence:
    """A flow's last reports, with what the rules ask of them."""

    def __init__(self, flow: "Flow", rules: Rules) -> None:
        self.flow, self.rules = flow, rules
        self.reports = flow.reports[-rules.window :]
        self.highest = [  # learning rate of every group; later groups are not in early reports
            max(known(r.rates[g] for r in flow.reports if g < len(r.rates)), default=0.0)
            for g in range(len(flow.groups))
        ]
        self.learning = [i for i, part in enumerate(flow.parts) if part.state == "trainable"]
        begun = flow.reports[:1]  # what begins at zero moves far, relative to what it is, for long
        self.measures = {i for i in self.learning if any(r.of("weight", i) > 0 for r in begun)}
        self.ratios = {i: _middle(self._learned(r, i) for r in self.reports) for i in self.learning}
        self.sizes = {i: _middle(r.of("gradient", i) for r in self.reports) for i in self.learning}

    @property
    def enough(self) -> bool:
        """Whether more than a first step was measured, in which much is zero by design."""
        return len(self.reports) >= self.rules.fewest

    @property
    def asleep(self) -> bool:
        """Whether nothing moves at all."""
        ratios = known(self.ratios.values())
        return bool(ratios) and max(ratios) < self.rules.asleep

    def _learned(self, report: Report, part: int) -> float:
        """Update over weight, as it would be at the highest learning rate, and without decay.

        Where decay explains what moved, the gradient says how much was learned at most; where
        decay was added to the gradient, how much of the sum it was.
        """
        facts, ratio = self.flow.parts[part], report.ratio(part)
        if report.of("weight", part) == report.of("update", part) == 0.0:
            ratio = 0.0
        groups = [g for g in facts.groups if g < len(report.rates) and report.rates[g] >= 0.0]
        if not groups:
            return ratio
        group = max(groups, key=lambda g: report.rates[g] * self.flow.groups[g].decay)
        rate, told = report.rates[group], self.flow.groups[group]
        if rate <= 0.0:
            return math.nan
        size, weight = report.of("gradient", part), report.of("weight", part)
        normalises = self.flow.optimizer in self.rules.normalising
        if told.coupled and told.decay and weight > 0.0 and not math.isnan(size):
            share = size / (size + told.decay * weight)
            ratio *= 1.0 if normalises and share > self.rules.drowned else share
        elif 0.0 < ratio <= self.rules.decayed * rate * told.decay:
            moved = size / (1.0 - min(told.momentum, 0.99))
            if normalises:
                spread = math.sqrt(facts.elements)
                moved = spread * (size / (size + told.eps * spread) if size else 0.0)
            ratio = min(ratio, rate * moved / weight)
        return ratio * self.highest[group] / rate

    def alike(self, part: int) -> list[float]:
        """The ratios of the other parts that play the same role and learn."""
        word = self.flow.parts[part].peers
        return self._measures(i for i in self.learning
                              if i != part and self.flow.parts[i].peers == word)  # fmt: skip

    def others(self, part: int) -> list[float]:
        """The ratios of everything else that learns."""
        return self._measures(i for i in self.learning if i != part)

    def _measures(self, parts: Iterable[int]) -> list[float]:
        return known(self.ratios[i] for i in parts if i in self.measures)

    def rate(self, part: PartFacts) -> float:
        """The largest learning rate a part had in the last reports."""
        rates = (r.rates[g] for r in self.reports for g in part.groups if g < len(r.rates))
        return max(known(rates), default=math.nan)

    def vanishes(self, part: int) -> bool:
        """Whether its gradient is lost on the way; zero is, where others are hardly above it."""
        sizes = [x for x in known(self.sizes.values()) if x > 0]
        own = self.sizes[part] or min(sizes, default=0.0) * 0.1
        limit = self.rules.vanishing if self.sizes[part] else self.rules.underflow
        return bool(sizes) and own < limit * max(sizes)

    def layer_factors(self, part: PartFacts, side: int) -> list[float]:
        """How much larger the gradients of its layer are than of one beside it, as logarithms.

        One number a report, the median over roles; none where there is no such layer.
        """
        if part.layer is None:
            return []
        places = {(p.stack, p.layer, p.peers): i for i, p in enumerate(self.flow.parts)}
        pairs = [
            (i, places[stack, layer + side, peers])
            for (stack, layer, peers), i in places.items()
            if (stack, layer) == (part.stack, part.layer) and layer is not None
            and (stack, layer + side, peers) in places
        ]  # fmt: skip
        found = []
        for report in self.reports:
            sizes = [(report.of("gradient", i), report.of("gradient", j)) for i, j in pairs]
            factors = [math.log(a / b) for a, b in sizes if a > 0 and b > 0]
            found += [median(factors)] if factors else []
        return found

    def unreached(self, part: PartFacts) -> list[str]:
        """Tensors that got no gradient in any of the last reports."""
        return [n for n in part.learning if all(n in r.unreached for r in self.reports)]


def cause_of(seen: Evidence, i: int, part: PartFacts) -> tuple[str, str]:
    """Why a part hardly moves, and what to try."""
    size, rules = seen.sizes[i], seen.rules
    largest = max(known(seen.sizes.values()), default=math.nan)
    stuck = {n: s for n, s in seen.reports[-1].saturated.items() if s > rules.saturated}
    rates = known(seen.rate(p) for p in seen.flow.parts)
    if size == 0.0 and not seen.vanishes(i):
        why = "its gradient is exactly zero"
        hint = "look for dead units, a mask, or a gate that is shut"
    elif seen.rate(part) < rules.slow * max(rates, default=0.0):
        return (f"its learning rate is {seen.rate(part):.1e}, the largest {max(rates):.1e}",
                "look at its group in the optimizer")  # fmt: skip
    elif seen.vanishes(i):
        how = f"{size / largest:.1e} of the largest" if size else "until it is zero"
        why = f"its gradient vanishes, {how}"
        hint = "add a residual path or norms; a gradient scale of 3.0 or lr 2e-4 helps a little"
        if seen.flow.optimizer in rules.normalising:
            hint += f", though {seen.flow.optimizer} undoes a scale"
        else:
            hint += f"; AdamW divides by a gradient's size, {seen.flow.optimizer} does not"
    elif part.dtype in ("bfloat16", "float16"):
        return (
            f"updates are lost in rounding: its weights are {part.dtype}",
            "keep weights in float32 and compute under autocast",
        )
    else:
        return f"its gradient is {size:.1e}", "a larger learning rate for it"
    if stuck:
        name, share = max(stuck.items(), key=lambda item: item[1])
        why += f"; {share:.0%} of what `{name}` puts out is saturated"
        hint = "draw smaller weights, put a norm before it, or use another activation"
    return why, hint


def known(numbers: Iterable[float]) -> list[float]:
    """Those that are numbers."""
    return [x for x in numbers if not math.isnan(x)]


def _middle(numbers: Iterable[float]) -> float:
    found = known(numbers)
    return median(found) if found else math.nan


def judge(flow: "Flow", rules: Rules) -> dict[str, PartVerdict]:
    """Give every part its verdict."""
    evidence = Evidence(flow, rules)
    return {part.name: _judge(evidence, i, part) for i, part in enumerate(flow.parts)}


def _judge(seen: Evidence, i: int, part: PartFacts) -> PartVerdict:
    if part.name in seen.flow.moved:
        return PartVerdict(
            MOVED,
            "a frozen tensor of it is no longer what it was",
            "look for writes through .data, or an optimizer that still holds it",
        )
    if part.state != "trainable":
        proof = ", and its bits did not change" if seen.flow.verified else ""
        fixed = part.state == "fixed"
        return PartVerdict(
            FROZEN, f"{'the architecture fixes it' if fixed else 'it requires no gradient'}{proof}"
        )
    if not seen.reports:
        return PartVerdict(UNKNOWN, "no step has been measured yet")
    for rule in (_broken, _left_out, _decaying, _still, _exploding, _slow, _scaled):
        if (found := rule(seen, i, part)) is not None:
            return found
    if math.isnan(seen.ratios[i]):
        return PartVerdict(
            UNKNOWN, "no step in which it has a learning rate above 0 has been measured yet"
        )
    return PartVerdict(LEARNING, f"a step moves it by {seen.ratios[i]:.1e} of its weights")


def _broken(seen: Evidence, i: int, part: PartFacts) -> PartVerdict | None:
    step = next((r.step for r in seen.flow.reports if i in r.broken), None)
    if step is None:
        return None
    return PartVerdict(
        EXPLODING,
        f"NaN or infinity, first seen at step {step}",
        "lower the learning rate, clip at 1.0, or look at the loss of that batch",
    )


def _left_out(seen: Evidence, i: int, part: PartFacts) -> PartVerdict | None:
    """What cannot learn, whatever its numbers are."""
    if part.missing:
        return PartVerdict(
            STILL,
            f"{_some(part.missing, part)} missing from the optimizer",
            "build the optimizer from model.parameters(), after freezing",
        )
    if cut := seen.unreached(part):
        return PartVerdict(
            STILL,
            f"no gradient arrives: {_some(cut, part)} detached from the loss",
            "look for detach(), no_grad(), or an output that the loss does not use",
        )
    some = any(rate > 0 for r in seen.reports for rate in r.rates)
    never = seen.enough and not any(seen.highest)
    if seen.rate(part) == 0.0 and (some or never):
        return PartVerdict(STILL, "its learning rate is 0", "look at its group in the optimizer")
    return None


def _decaying(seen: Evidence, i: int, part: PartFacts) -> PartVerdict | None:
    masked = all(r.of("gradient", i) == 0.0 < r.of("update", i) for r in seen.reports)
    if masked and seen.enough and not seen.vanishes(i):
        return PartVerdict(
            DECAYING,
            "its gradient is exactly zero, and the optimizer still moves it "
            f"by {seen.reports[-1].ratio(i):.1e} of its weights a step",
            "a mask does not freeze: use fl.freeze, which takes the rows out",
        )
    return None


def _still(seen: Evidence, i: int, part: PartFacts) -> PartVerdict | None:
    ratio, rules = seen.ratios[i], seen.rules
    if math.isnan(ratio) or ratio >= rules.still or not seen.enough:
        return None
    like = seen.alike(i)
    others = seen.others(i)
    left_behind = (bool(like) and ratio < rules.slow * max(like)) or (
        bool(others) and ratio < rules.apart * median(others)
    )
    if not left_behind and not seen.asleep:
        return None
    why, hint = cause_of(seen, i, part)
    return PartVerdict(STILL, f"a step moves it by {ratio:.1e} of its weights: {why}", hint)


def _exploding(seen: Evidence, i: int, part: PartFacts) -> PartVerdict | None:
    rules, first = seen.rules, seen.flow.reports[0]
    hint = "lower the learning rate, or clip at 1.0"
    steps = [r.ratio(i) for r in seen.reports if r.of("weight", i) > 0]
    ratio = median(steps) if steps else 0.0
    if ratio > rules.leap and len(steps) > 1 and first.of("weight", i) > 0:
        return PartVerdict(EXPLODING, f"a step moves it by {ratio:.1g} of its weights", hint)
    if _grew(seen.sizes[i], first.of("gradient", i), rules.growth):
        totals = list(seen.flow.norms().values())
        if _grew(min(totals[-rules.window :]), totals[0], rules.growth):
            return PartVerdict(
                EXPLODING,
                f"its gradient grew from {first.of('gradient', i):.1e} to {seen.sizes[i]:.1e}",
                hint,
            )
    return None


def _slow(seen: Evidence, i: int, part: PartFacts) -> PartVerdict | None:
    like = seen.alike(i)
    alone = len(like) < seen.rules.peers
    group = seen.others(i) if alone else like
    share = seen.rules.apart if alone else seen.rules.slow
    if not seen.enough or not group or not seen.ratios[i] < share * median(group):
        return None
    why, hint = cause_of(seen, i, part)
    return PartVerdict(
        SLOW,
        f"a step moves it by {seen.ratios[i]:.1e} of its weights, its peers by "
        f"{median(group):.1e}: {why}",
        hint,
    )


def _scaled(seen: Evidence, i: int, part: PartFacts) -> PartVerdict | None:
    """A steady factor on a whole layer's gradients that is not in its updates."""
    rules = seen.rules
    if seen.flow.optimizer not in rules.normalising or len(seen.reports) < rules.steady_reports:
        return None
    sides = [seen.layer_factors(part, side) for side in (-1, 1)]
    middles = [median(factors) if factors else 0.0 for factors in sides]
    steady = all(
        abs(f - m) <= rules.steady for fs, m in zip(sides, middles, strict=True) for f in fs
    )
    least = min(middles, key=abs)
    if not steady or middles[0] * middles[1] <= 0 or abs(least) < math.log(rules.scale):
        return None
    like = seen.alike(i)
    if not like or not 1 / rules.alike < seen.ratios[i] / median(like) < rules.alike:
        return None
    return PartVerdict(
        SCALED,
        f"gradients of its layer are steadily {math.exp(least):.3g} × those beside it, its updates "
        f"are not: {seen.flow.optimizer} divides a constant factor out",
        "give it a learning rate of its own instead",
    )


def _some(names: Iterable[str], part: PartFacts) -> str:
    listed = list(names)
    if len(listed) == len(part.learning):
        return "it is"
    return f"{listed[0]} is" if len(listed) == 1 else f"{listed[0]} and {len(listed) - 1} more are"


def _grew(now: float, first: float, factor: float) -> bool:
    return first > 0 and now > factor * first

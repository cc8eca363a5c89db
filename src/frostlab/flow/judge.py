"""Verdicts on the parts of a model, such as "not learning", and the rules that decide them.

Verdicts follow from a `Flow`: a series of reports, each of which measured one training step. A part
is all tensors of one role, such as query, in one layer or outside the layers; in an unknown
architecture, all tensors of one module.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from frostlab.flow.measurements import PartFacts, Report
from frostlab.recipe.settings import OPTIMIZERS

if TYPE_CHECKING:
    from frostlab.flow.measurements import Flow


LEARNING, SLOW, STILL = "learning", "slow", "not learning"
EXPLODING, FROZEN, SCALED = "exploding", "frozen on purpose", "scaled away by the optimizer"
UNDRIVEN, MOVED = "moved without a gradient", "frozen, yet moved"
UNKNOWN = "not measured yet"
VERDICTS = (LEARNING, SLOW, STILL, EXPLODING, FROZEN, SCALED, UNDRIVEN, MOVED, UNKNOWN)
_RAISE_RATE = "raise the learning rate of its parameter group"


@dataclass(frozen=True)
class Rules:
    """Thresholds of the verdicts.

    A ratio is |update| / |weight|, a quotient of norms, without the contribution of weight decay
    and scaled to the highest learning rate that the part has had. A part's ratio and gradient norm
    are medians over the last reports. Peers are the other parts with the same role or, in an
    unknown architecture, with the same module path except for numbers.
    """

    window: int = 5  # number of last reports that are judged
    fewest: int = 2  # reports needed for most verdicts: at first, weights of 0 may block gradients
    still: float = 1e-6  # a smaller ratio is "not learning", if other parts move much more
    asleep: float = 1e-9  # if every ratio is smaller, every part is "not learning"
    decayed: float = 2.0  # weight decay may explain ratios up to this multiple of lr · decay
    # with decay as L2: if |gradient| / (|gradient| + decay·|weight|) is less, decay moves the part
    drowned: float = 1e-4
    slow: float = 0.01  # a ratio below this multiple of the peers' median is "slow"
    apart: float = 1e-3  # like `slow`, but relative to all parts, for parts with too few peers
    vanishing: float = 1e-4  # a gradient below this multiple of the largest "vanishes"
    # A gradient of 0 is taken to be a tenth of the smallest gradient above 0. If that tenth is
    # below `underflow` × the largest gradient, the part's gradient "vanishes"; if not, something
    # such as a mask has set it to 0.
    underflow: float = 1e-12
    leap: float = 1.0  # a larger |update| / |weight|, weight decay included, is "exploding"
    # "exploding" if, since the first report, the gradients of part and model grew by this factor
    growth: float = 1e3
    # "scaled away": the gradients of a layer and of its neighbours differ by at least the factor
    # `scale`, the log of the measured factor stays within `steady` of its median, and the part's
    # ratio differs from its peers' by less than the factor `alike`.
    scale: float = 10.0
    steady: float = 0.5
    alike: float = 2.0
    saturated: float = 0.5  # a larger fraction of saturated activations is named as a cause
    steady_reports: int = 4  # fewest reports needed to call a factor steady
    peers: int = 2  # with fewer peers, a part is compared with all other parts
    normalising: tuple[str, ...] = tuple(  # optimizers whose updates do not scale with the gradient
        name for name, facts in OPTIMIZERS.items() if facts.normalises
    )


@dataclass(frozen=True)
class PartVerdict:
    """The verdict on a part: a word, the reason, and a hint on what to try."""

    word: str
    why: str
    hint: str = ""

    @property
    def accident(self) -> bool:
        """Whether the part is trainable but does not learn."""
        return self.word in (STILL, UNDRIVEN)

    @property
    def alarming(self) -> bool:
        """Whether the part needs attention."""
        return self.word not in (LEARNING, FROZEN, SCALED, UNKNOWN)


def judge(flow: "Flow", rules: Rules) -> dict[str, PartVerdict]:
    """Return a verdict on every part, by its name."""
    recent = RecentReports(flow, rules)
    return {part.name: _judge_part(recent, i, part) for i, part in enumerate(flow.parts)}


class RecentReports:
    """The last reports of a flow, with the quantities that the rules compare."""

    def __init__(self, flow: "Flow", rules: Rules) -> None:
        self.flow, self.rules = flow, rules
        self.reports = flow.reports[-rules.window :]
        self.highest = [  # highest learning rate by group; early reports lack groups added later
            max(_not_nan(r.rates[g] for r in flow.reports if g < len(r.rates)), default=0.0)
            for g in range(len(flow.groups))
        ]
        self.trainable = [i for i, part in enumerate(flow.parts) if part.state == "trainable"]
        # parts that start at zero have very large ratios, so others are not compared with them
        first = flow.reports[:1]
        self.comparable = {i for i in self.trainable if any(r.of("weight", i) > 0 for r in first)}
        self.ratios = {
            i: _median(self._learned_ratio(r, i) for r in self.reports) for i in self.trainable
        }
        # median gradient norms
        self.sizes = {i: _median(r.of("gradient", i) for r in self.reports) for i in self.trainable}

    @property
    def enough(self) -> bool:
        """Whether there are enough reports; see `Rules.fewest`."""
        return len(self.reports) >= self.rules.fewest

    @cached_property
    def asleep(self) -> bool:
        """Whether no part moves."""
        ratios = _not_nan(self.ratios.values())
        return bool(ratios) and max(ratios) < self.rules.asleep

    def _learned_ratio(self, report: Report, part: int) -> float:
        """Return |update| / |weight| at the highest learning rate, without weight decay.

        The result is NaN if the learning rate is 0. If decoupled decay alone can explain the
        update, the ratio is at most that of the largest update that the gradient can cause. If
        decay is added to the gradient (L2), the ratio is multiplied by the gradient's share of the
        sum, |gradient| / (|gradient| + |decay|), where |decay| is the weight decay × |weight|. The
        step of a normalising optimizer has about the same size whatever the gradient is, so under
        such an optimizer the ratio is multiplied only if the share is at most `Rules.drowned`.
        """
        facts, ratio = self.flow.parts[part], report.ratio(part)
        if report.of("weight", part) == report.of("update", part) == 0.0:
            ratio = 0.0
        groups = [g for g in facts.groups if g < len(report.rates) and report.rates[g] >= 0.0]
        if not groups:
            return ratio
        group = max(groups, key=lambda g: report.rates[g] * self.flow.groups[g].decay)
        rate, settings = report.rates[group], self.flow.groups[group]
        if rate <= 0.0:
            return math.nan
        size, weight = report.of("gradient", part), report.of("weight", part)
        normalises = self.flow.optimizer in self.rules.normalising
        if settings.coupled and settings.decay and weight > 0.0 and not math.isnan(size):
            share = size / (size + settings.decay * weight)
            ratio *= 1.0 if normalises and share > self.rules.drowned else share
        elif 0.0 < ratio <= self.rules.decayed * rate * settings.decay:
            # The largest |update| / rate: with momentum, equal gradients of many steps add up to
            # gradient / (1 - momentum); a normalising optimizer moves each element by about 1, or
            # by less if eps exceeds the element's gradient.
            largest = size / (1.0 - min(settings.momentum, 0.99))
            if normalises:
                spread = math.sqrt(facts.elements)
                largest = spread * (size / (size + settings.eps * spread) if size else 0.0)
            ratio = min(ratio, rate * largest / weight)
        return ratio * self.highest[group] / rate

    def peer_ratios(self, part: int) -> list[float]:
        """Return the ratios of the other comparable parts with the same role."""
        return self._without(part, self._sorted_ratios.get(self.flow.parts[part].peers, []))

    def other_ratios(self, part: int) -> list[float]:
        """Return the ratios of all other comparable parts."""
        return self._without(part, self._sorted_ratios[None])

    @cached_property
    def _sorted_ratios(self) -> dict[str | None, list[float]]:
        """Role, or None for all roles → ascending ratios of the comparable parts."""
        ratios: dict[str | None, list[float]] = {None: []}
        for i in sorted(self.comparable, key=lambda i: self.ratios[i]):
            if not math.isnan(self.ratios[i]):
                ratios[None].append(self.ratios[i])
                ratios.setdefault(self.flow.parts[i].peers, []).append(self.ratios[i])
        return ratios

    def _without(self, part: int, ratios: list[float]) -> list[float]:
        """Return sorted ratios without the part's own."""
        if part not in self.comparable or math.isnan(self.ratios[part]):
            return ratios
        place = bisect_left(ratios, self.ratios[part])
        return ratios[:place] + ratios[place + 1 :]

    def rate(self, part: PartFacts) -> float:
        """Return a part's largest learning rate in the last reports."""
        rates = (r.rates[g] for r in self.reports for g in part.groups if g < len(r.rates))
        return max(_not_nan(rates), default=math.nan)

    def vanishes(self, part: int) -> bool:
        """Return whether a part's gradient vanishes; see `vanishing` and `underflow` in `Rules`."""
        smallest, largest = self._extreme_sizes
        size = self.sizes[part] or smallest * 0.1
        limit = self.rules.vanishing if self.sizes[part] else self.rules.underflow
        return size < limit * largest

    @cached_property
    def _extreme_sizes(self) -> tuple[float, float]:
        """The smallest and the largest gradient norm above 0; zeros if there is none."""
        sizes = [x for x in _not_nan(self.sizes.values()) if x > 0]
        return min(sizes, default=0.0), max(sizes, default=0.0)

    def layer_factors(self, part: PartFacts, side: int) -> list[float]:
        """Return log(gradient of a part's layer / gradient of the neighbouring layer) by report.

        The neighbour is the layer before (`side` -1) or after (1). Each value is the median over
        the roles that both layers have; the list is empty if there is no neighbour.
        """
        if part.layer is None:
            return []
        layer = self._layers[part.stack, part.layer]
        neighbour = self._layers.get((part.stack, part.layer + side), {})
        pairs = [(i, neighbour[role]) for role, i in layer.items() if role in neighbour]
        medians = []
        for report in self.reports:
            sizes = [(report.of("gradient", i), report.of("gradient", j)) for i, j in pairs]
            factors = [math.log(a / b) for a, b in sizes if a > 0 and b > 0]
            medians += [median(factors)] if factors else []
        return medians

    @cached_property
    def _layers(self) -> dict[tuple[str, int | None], dict[str, int]]:
        """(stack, layer) → role → index of the part."""
        layers: dict[tuple[str, int | None], dict[str, int]] = {}
        for i, part in enumerate(self.flow.parts):
            layers.setdefault((part.stack, part.layer), {})[part.peers] = i
        return layers

    def unreached(self, part: PartFacts) -> list[str]:
        """Return the tensors of a part whose gradient was None in all of the last reports."""
        return [n for n in part.learning if all(n in r.unreached for r in self.reports)]


def _not_nan(numbers: Iterable[float]) -> list[float]:
    return [x for x in numbers if not math.isnan(x)]


def _median(numbers: Iterable[float]) -> float:
    present = _not_nan(numbers)
    return median(present) if present else math.nan


def _judge_part(recent: RecentReports, i: int, part: PartFacts) -> PartVerdict:
    if part.name in recent.flow.moved:
        return PartVerdict(
            MOVED,
            "the values of a frozen tensor in it changed",
            "look for writes through .data, or an optimizer that still holds this tensor",
        )
    if part.state != "trainable":
        unchanged = ", and its bits did not change" if recent.flow.verified else ""
        fixed = part.state == "fixed"
        return PartVerdict(
            FROZEN,
            f"{'the model never trains it' if fixed else 'it requires no gradient'}{unchanged}",
        )
    if not recent.reports:
        return PartVerdict(UNKNOWN, "no step has been measured yet")
    for rule in (_broken, _left_out, _undriven, _still, _exploding, _slow, _scaled):
        if (verdict := rule(recent, i, part)) is not None:
            return verdict
    if math.isnan(recent.ratios[i]):
        return PartVerdict(UNKNOWN, "no measured step has had a learning rate above 0 for it yet")
    return PartVerdict(LEARNING, f"a step moves it by {recent.ratios[i]:.1e} of its weights")


def _broken(recent: RecentReports, i: int, part: PartFacts) -> PartVerdict | None:
    step = next((r.step for r in recent.flow.reports if i in r.broken), None)
    if step is None:
        return None
    return PartVerdict(
        EXPLODING,
        f"NaN or infinity, first seen at step {step}",
        "lower the learning rate, clip at 1.0, or look at the loss of that batch",
    )


def _left_out(recent: RecentReports, i: int, part: PartFacts) -> PartVerdict | None:
    """Judge a part with learning rate 0, or with a tensor that has no optimizer or no gradient."""
    if part.missing:
        return PartVerdict(
            STILL,
            f"{_tensors_are(part.missing, part)} missing from the optimizer",
            "build the optimizer from model.parameters(), after freezing",
        )
    if detached := recent.unreached(part):
        return PartVerdict(
            STILL,
            f"no gradient arrives: {_tensors_are(detached, part)} detached from the loss",
            "look for detach(), no_grad(), or an output that the loss does not use",
        )
    # if all rates are 0 at the first report, a warm-up may still raise them
    some_learn = any(rate > 0 for r in recent.reports for rate in r.rates)
    none_ever = recent.enough and not any(recent.highest)
    if recent.rate(part) == 0.0 and (some_learn or none_ever):
        return PartVerdict(STILL, "its learning rate is 0", _RAISE_RATE)
    return None


def _undriven(recent: RecentReports, i: int, part: PartFacts) -> PartVerdict | None:
    masked = all(r.of("gradient", i) == 0.0 < r.of("update", i) for r in recent.reports)
    if masked and recent.enough and not recent.vanishes(i):
        return PartVerdict(
            UNDRIVEN,
            "its gradient is exactly zero, and the optimizer still moves it "
            f"by {recent.reports[-1].ratio(i):.1e} of its weights a step",
            "a gradient mask stops neither weight decay nor momentum: use fl.freeze instead",
        )
    return None


def _still(recent: RecentReports, i: int, part: PartFacts) -> PartVerdict | None:
    ratio, rules = recent.ratios[i], recent.rules
    if math.isnan(ratio) or ratio >= rules.still or not recent.enough:
        return None
    peers = recent.peer_ratios(i)
    others = recent.other_ratios(i)
    left_behind = (bool(peers) and ratio < rules.slow * max(peers)) or (
        bool(others) and ratio < rules.apart * median(others)
    )
    if not left_behind and not recent.asleep:
        return None
    why, hint = _cause_of(recent, i, part)
    return PartVerdict(STILL, f"a step moves it by {ratio:.1e} of its weights: {why}", hint)


def _exploding(recent: RecentReports, i: int, part: PartFacts) -> PartVerdict | None:
    rules, first = recent.rules, recent.flow.reports[0]
    hint = "lower the learning rate, or clip at 1.0"
    ratios = [r.ratio(i) for r in recent.reports if r.of("weight", i) > 0]
    ratio = median(ratios) if ratios else 0.0
    if ratio > rules.leap and len(ratios) > 1 and first.of("weight", i) > 0:
        moved = f"a step moves it by {ratio:.1g} × the norm of its weights"
        return PartVerdict(EXPLODING, moved, hint)
    if _grew(recent.sizes[i], first.of("gradient", i), rules.growth):
        totals = list(recent.flow.norms().values())
        if _grew(min(totals[-rules.window :]), totals[0], rules.growth):
            return PartVerdict(
                EXPLODING,
                f"its gradient grew from {first.of('gradient', i):.1e} to {recent.sizes[i]:.1e}",
                hint,
            )
    return None


def _slow(recent: RecentReports, i: int, part: PartFacts) -> PartVerdict | None:
    peers = recent.peer_ratios(i)
    alone = len(peers) < recent.rules.peers
    compared = recent.other_ratios(i) if alone else peers
    limit = recent.rules.apart if alone else recent.rules.slow
    if not recent.enough or not compared or not recent.ratios[i] < limit * median(compared):
        return None
    why, hint = _cause_of(recent, i, part)
    return PartVerdict(
        SLOW,
        f"a step moves it by {recent.ratios[i]:.1e} of its weights, "
        f"{'the other parts' if alone else 'parts like it'} by {median(compared):.1e}: {why}",
        hint,
    )


def _scaled(recent: RecentReports, i: int, part: PartFacts) -> PartVerdict | None:
    """Judge whether a constant factor scales the gradients of a layer, but not a part's updates.

    The gradients of the layer are steadily larger, or steadily smaller, than those of both
    neighbouring layers, but the part's updates are like those of the same role in other layers.
    """
    rules = recent.rules
    if recent.flow.optimizer not in rules.normalising or len(recent.reports) < rules.steady_reports:
        return None
    sides = [recent.layer_factors(part, side) for side in (-1, 1)]
    medians = [median(factors) if factors else 0.0 for factors in sides]
    steady = all(
        abs(f - m) <= rules.steady for fs, m in zip(sides, medians, strict=True) for f in fs
    )
    least = min(medians, key=abs)
    if not steady or medians[0] * medians[1] <= 0 or abs(least) < math.log(rules.scale):
        return None
    peers = recent.peer_ratios(i)
    if not peers or not 1 / rules.alike < recent.ratios[i] / median(peers) < rules.alike:
        return None
    return PartVerdict(
        SCALED,
        f"gradients of its layer are steadily {math.exp(least):.3g} × its neighbours', but "
        f"its updates are not: {recent.flow.optimizer} divides a constant factor out",
        "instead of scaling its gradient, give it a learning rate of its own",
    )


def _tensors_are(names: Iterable[str], part: PartFacts) -> str:
    listed = list(names)
    if len(listed) == len(part.learning):
        return "it is"
    return f"{listed[0]} is" if len(listed) == 1 else f"{listed[0]} and {len(listed) - 1} more are"


def _grew(now: float, first: float, factor: float) -> bool:
    return first > 0 and now > factor * first


def _cause_of(recent: RecentReports, i: int, part: PartFacts) -> tuple[str, str]:
    """Return the reason why a part hardly moves, and a hint on what to try."""
    size, rules = recent.sizes[i], recent.rules
    largest = max(_not_nan(recent.sizes.values()), default=math.nan)
    saturated = {n: s for n, s in recent.reports[-1].saturated.items() if s > rules.saturated}
    rates = _not_nan(recent.rate(p) for p in recent.flow.parts)
    if size == 0.0 and not recent.vanishes(i):
        why = "its gradient is exactly zero"
        hint = "look for dead units, a mask, or a closed gate"
    elif recent.rate(part) < rules.slow * max(rates, default=0.0):
        why = f"its learning rate is {recent.rate(part):.1e}; the largest is {max(rates):.1e}"
        return why, _RAISE_RATE
    elif recent.vanishes(i):
        amount = f"{size / largest:.1e} of the largest" if size else "down to zero"
        why = f"its gradient vanishes, {amount}"
        hint = "add a residual path or norms; a larger learning rate for this part helps a little"
        if recent.flow.optimizer in rules.normalising:
            hint += f"; a gradient scale does not, as {recent.flow.optimizer} undoes it"
        else:
            hint += "; or train with AdamW, which divides a gradient by its size"
    elif part.dtype in ("bfloat16", "float16"):
        return (
            f"updates are lost in rounding: its weights are {part.dtype}",
            "keep weights in float32 and compute under autocast",
        )
    else:
        return f"its gradient is {size:.1e}", "a larger learning rate for it"
    if saturated:
        name, fraction = max(saturated.items(), key=lambda item: item[1])
        why += f"; {fraction:.0%} of the output of `{name}` is saturated"
        hint = "use smaller initial weights, a norm before it, or another activation"
    return why, hint

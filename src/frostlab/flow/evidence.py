"""What the last reports of a flow say of a part, and why one might not move."""

import math
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from frostlab.flow.facts import PartFacts, Report
from frostlab.flow.rules import Rules

if TYPE_CHECKING:
    from frostlab.flow.flow import Flow


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

"""Judging a flow: every part gets one verdict, with a reason and what to try."""

import math
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from frostlab.flow.evidence import Evidence, cause_of
from frostlab.flow.facts import PartFacts
from frostlab.flow.rules import (
    DECAYING,
    EXPLODING,
    FROZEN,
    LEARNING,
    MOVED,
    SCALED,
    SLOW,
    STILL,
    UNKNOWN,
    Rules,
    Verdict,
)

if TYPE_CHECKING:
    from frostlab.flow.flow import Flow


def judge(flow: "Flow", rules: Rules) -> dict[str, Verdict]:
    """Give every part its verdict."""
    evidence = Evidence(flow, rules)
    return {part.name: _judge(evidence, i, part) for i, part in enumerate(flow.parts)}


def _judge(seen: Evidence, i: int, part: PartFacts) -> Verdict:
    if part.name in seen.flow.moved:
        return Verdict(
            MOVED,
            "a frozen tensor of it is no longer what it was",
            "look for writes through .data, or an optimizer that still holds it",
        )
    if part.state != "trainable":
        proof = ", and its bits did not change" if seen.flow.verified else ""
        fixed = part.state == "fixed"
        return Verdict(
            FROZEN, f"{'the architecture fixes it' if fixed else 'it requires no gradient'}{proof}"
        )
    if not seen.reports:
        return Verdict(UNKNOWN, "no step has been measured yet")
    for rule in (_broken, _left_out, _decaying, _still, _exploding, _slow, _scaled):
        if (found := rule(seen, i, part)) is not None:
            return found
    if math.isnan(seen.ratios[i]):
        return Verdict(
            UNKNOWN, "no step in which it has a learning rate above 0 has been measured yet"
        )
    return Verdict(LEARNING, f"a step moves it by {seen.ratios[i]:.1e} of its weights")


def _broken(seen: Evidence, i: int, part: PartFacts) -> Verdict | None:
    step = next((r.step for r in seen.flow.reports if i in r.broken), None)
    if step is None:
        return None
    return Verdict(
        EXPLODING,
        f"NaN or infinity, first seen at step {step}",
        "lower the learning rate, clip at 1.0, or look at the loss of that batch",
    )


def _left_out(seen: Evidence, i: int, part: PartFacts) -> Verdict | None:
    """What cannot learn, whatever its numbers are."""
    if part.missing:
        return Verdict(
            STILL,
            f"{_some(part.missing, part)} missing from the optimizer",
            "build the optimizer from model.parameters(), after freezing",
        )
    if cut := seen.unreached(part):
        return Verdict(
            STILL,
            f"no gradient arrives: {_some(cut, part)} detached from the loss",
            "look for detach(), no_grad(), or an output that the loss does not use",
        )
    some = any(rate > 0 for r in seen.reports for rate in r.rates)
    never = seen.enough and not any(seen.highest)
    if seen.rate(part) == 0.0 and (some or never):
        return Verdict(STILL, "its learning rate is 0", "look at its group in the optimizer")
    return None


def _decaying(seen: Evidence, i: int, part: PartFacts) -> Verdict | None:
    masked = all(r.of("gradient", i) == 0.0 < r.of("update", i) for r in seen.reports)
    if masked and seen.enough and not seen.vanishes(i):
        return Verdict(
            DECAYING,
            "its gradient is exactly zero, and the optimizer still moves it "
            f"by {seen.reports[-1].ratio(i):.1e} of its weights a step",
            "a mask does not freeze: use fl.freeze, which takes the rows out",
        )
    return None


def _still(seen: Evidence, i: int, part: PartFacts) -> Verdict | None:
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
    return Verdict(STILL, f"a step moves it by {ratio:.1e} of its weights: {why}", hint)


def _exploding(seen: Evidence, i: int, part: PartFacts) -> Verdict | None:
    rules, first = seen.rules, seen.flow.reports[0]
    hint = "lower the learning rate, or clip at 1.0"
    steps = [r.ratio(i) for r in seen.reports if r.of("weight", i) > 0]
    ratio = median(steps) if steps else 0.0
    if ratio > rules.leap and len(steps) > 1 and first.of("weight", i) > 0:
        return Verdict(EXPLODING, f"a step moves it by {ratio:.1g} of its weights", hint)
    if _grew(seen.sizes[i], first.of("gradient", i), rules.growth):
        totals = list(seen.flow.norms().values())
        if _grew(min(totals[-rules.window :]), totals[0], rules.growth):
            return Verdict(
                EXPLODING,
                f"its gradient grew from {first.of('gradient', i):.1e} to {seen.sizes[i]:.1e}",
                hint,
            )
    return None


def _slow(seen: Evidence, i: int, part: PartFacts) -> Verdict | None:
    like = seen.alike(i)
    alone = len(like) < seen.rules.peers
    group = seen.others(i) if alone else like
    share = seen.rules.apart if alone else seen.rules.slow
    if not seen.enough or not group or not seen.ratios[i] < share * median(group):
        return None
    why, hint = cause_of(seen, i, part)
    return Verdict(
        SLOW,
        f"a step moves it by {seen.ratios[i]:.1e} of its weights, its peers by "
        f"{median(group):.1e}: {why}",
        hint,
    )


def _scaled(seen: Evidence, i: int, part: PartFacts) -> Verdict | None:
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
    return Verdict(
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

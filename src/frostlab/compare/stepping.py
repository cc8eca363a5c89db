"""The arms of a plan timed step against step, with the ceiling beside each ratio."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from frostlab.compare.estimating import Ratio
from frostlab.compare.limits import Limits, flag, limits
from frostlab.compare.plan import Plan
from frostlab.compare.sides import CONTROL
from frostlab.compare.timing import Timing, time_arms
from frostlab.data import Material, prepare
from frostlab.errors import UnknownArchitecture
from frostlab.models.building import build_for
from frostlab.recipe import Recipe
from frostlab.training.devices import choose_device
from frostlab.training.treating import treat


def time_steps(plan: Plan, data_dir: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Time every arm against the baseline; plain values for the evidence."""
    assert plan.clock is not None
    seed = plan.seeds[0]
    recipes = {arm.name: plan.recipe_of(arm, seed) for arm in plan.arms}
    base = recipes[plan.baseline.name]
    prepared = prepare(base, data_dir)
    say(f"timing {len(recipes)} arms and a control, {plan.clock.seconds:.0f} s at most")
    timing = time_arms(
        recipes, prepared, baseline=plan.baseline.name, device=choose_device(base.train.device),
        seconds=plan.clock.seconds, width=plan.clock.width, say=say,
    )  # fmt: skip
    bounds = {name: limits_of(recipe, prepared) for name, recipe in recipes.items()}
    arms = {name: _arm_facts(name, timing, bounds.get(name)) for name in timing.arms}
    return timing.to_dict() | {"arms": arms, "control": arms[CONTROL]}


def limits_of(recipe: Recipe, prepared: Material) -> Limits | None:
    """The bound of a recipe's treatment at its batch; None for a model without an anatomy."""
    model = build_for(recipe, prepared)
    treat(model, recipe)
    length = float(prepared.splits["train"].lengths.mean())
    try:
        return limits(model, round(length), recipe.train.batch * length)
    except UnknownArchitecture:
        return None


def _arm_facts(name: str, timing: Timing, bound: Limits | None) -> dict[str, Any]:
    arm = timing.arms[name]
    ratio = arm.ratio
    word, sentence = (None, None) if ratio is None else judge_time(ratio, bound, timing)
    flagged = None
    if ratio is not None and bound is not None and name != CONTROL:
        flagged = flag(ratio, bound, timing.proven, timing.reasons)
    return {
        "ms": arm.ms_median,
        "ms_mean": arm.ms_mean,
        "ratio": None if ratio is None else ratio.estimate,
        "low": None if ratio is None else ratio.low,
        "high": None if ratio is None else ratio.high,
        "ceiling": None if bound is None else 1 / bound.speed_up,
        "limits": None if bound is None else bound.to_dict(),
        "flag": flagged,
        "word": word,
        "sentence": sentence,
        "step": arm.step,
        "peak_bytes": arm.peak_bytes,
        "optimizer_bytes": arm.optimizer_bytes,
        "checkpoint_bytes": arm.checkpoint_bytes,
        "trainable": arm.trainable,
        "blocks": list(arm.blocks),
    }


def judge_time(ratio: Ratio, bound: Limits | None, timing: Timing) -> tuple[str, str]:
    """A verdict on an arm's time, and a sentence with its numbers."""
    shown = f"{ratio.estimate:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] of the baseline's time"
    beside = "" if bound is None else f"; FLOPs allow {1 / bound.speed_up:.4f}"
    if not timing.proven:
        return (
            "unproven",
            f"unproven: a step took {shown}{beside}, but {'; '.join(timing.reasons)}.",
        )
    if ratio.holds(1.0):
        return "no difference found", f"no difference found: a step takes {shown}{beside}."
    word, said = ("better", "faster") if ratio.high < 1 else ("worse", "slower")
    return word, f"{said}: a step takes {shown}{beside}."

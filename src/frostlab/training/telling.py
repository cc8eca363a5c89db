"""Says what a run does now, to its record and to who watches."""

from typing import Any

from frostlab.training.progress import Progress
from frostlab.training.setting import Setting
from frostlab.training.stages import Stage, most_steps
from frostlab.training.step import EagerStep
from frostlab.training.treating import count_parameters


def say_stage(setting: Setting, progress: Progress) -> None:
    """Record and show what a stage trains, before its first step."""
    recipe, stage = setting.recipe, setting.stages[progress.stage]
    counts = count_parameters(setting.model)
    supervision = setting.objective.supervision
    best = progress.ended[-1]["best"] if progress.ended else None
    if setting.folder:
        setting.folder.event(
            "stage", progress.step, name=stage.name, steps=stage.steps, patience=stage.patience,
            train=None if stage.train is None else list(stage.train),
            freeze=list(recipe.surgery.frozen), changed=list(setting.entered.changed),
            added=list(setting.entered.new) if stage.add else [], trainable=counts["trainable"],
            total=counts["total"], lr=dict(stage.rates) or stage.optim(recipe.optim).lr,
            best_before=best, supervise=supervision and supervision.to_dict(),
        )  # fmt: skip
    if recipe.stages:
        line = _stage_line(setting, progress.stage, stage, counts)
        setting.display.stage(line, progress.step, most_steps(setting.stages, progress.lengths))


def _stage_line(setting: Setting, index: int, stage: Stage, counts: dict[str, int]) -> str:
    rates: Any = stage.rates or {"": stage.optim(setting.recipe.optim).lr}
    lr = ", ".join(f"{name} {rate:g}".strip() for name, rate in rates.items())
    added = f"{stage.add.layers} added, " if stage.add else ""
    return (
        f"stage {index + 1} of {len(setting.stages)}, {stage.name}: {added}"
        f"{counts['trainable']:,} of {counts['total']:,} parameters learn, lr {lr}"
    )


def say_how(setting: Setting, step: int, step_once: EagerStep, packed: bool) -> None:
    """Record and show which kind of step is taken, and why, when that changes."""
    setting.display.say(f"{step_once.kind} steps: {step_once.reason}")
    if setting.folder:
        setting.folder.event("stepping", step, how=step_once.kind, reason=step_once.reason,
                             packed=packed)  # fmt: skip

"""Gradient flow of a run: each stage is watched anew, and its reports go to the run's events."""

from pathlib import Path

from torch import nn

from frostlab.flow.beginning import watch
from frostlab.flow.probe import own_gradient
from frostlab.flow.recorded import parts_event
from frostlab.flow.shards import local
from frostlab.flow.watching import Watch
from frostlab.records.checkpoints import load_tensors, save_tensors
from frostlab.training.distributed import like, whole
from frostlab.training.progress import Progress
from frostlab.training.setting import Setting
from frostlab.training.step import EagerStep

START = "flow-start.safetensors"


def watch_stage(setting: Setting, progress: Progress, step: EagerStep) -> None:
    """Let a stage's step measure what the recipe asks for; steps are counted over the run."""
    asked = setting.recipe.watch
    if asked is None:
        return
    flow = watch(
        setting.model, step.optimizer, asked.every, change=asked.change,
        agreement=asked.agreement, units=asked.units, entropy=asked.entropy, verify=False,
        gradient=own_gradient if step.halves is None else step.halves.gradient,
    )  # fmt: skip
    flow.step, flow.first = progress.step, sum(progress.lengths)
    if asked.change:
        _begin_where_the_stage_began(setting, progress, flow)
    if setting.folder is not None:
        watched = flow.probe.watched
        front = [watched.names[i] for i in watched.front]
        name = setting.stages[progress.stage].name
        event = parts_event(flow, asked.every, front)
        setting.folder.event("flow_parts", progress.step, stage=name, **event)
    step.flow = flow.start(by_hand=True)


def _begin_where_the_stage_began(setting: Setting, progress: Progress, flow: Watch) -> None:
    """Keep the weights a stage begins with; one that goes on is measured from them."""
    path = Path(setting.path) / START
    names = {id(p): name for name, p in setting.model.named_parameters()}
    learning: dict[str, nn.Parameter] = {names[id(p)]: p for p in flow.probe.watched.parameters}
    if progress.place == 0:
        weights = {name: whole(p.detach()) for name, p in learning.items()}
        if setting.folder is not None:
            save_tensors(path, weights)
        setting.world.wait()
        return
    stored = load_tensors(path)
    flow.probe.start_at([local(like(stored[name], p)) for name, p in learning.items()])

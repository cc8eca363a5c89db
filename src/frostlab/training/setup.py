"""Where a run computes, with how many threads, and how precisely."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.data.eeg.recordings import Material
from frostlab.errors import BadInput, FrostlabError
from frostlab.models.build import build_for
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.settings import Train
from frostlab.records.checkpoint import Checkpoint, checkpoints_in
from frostlab.records.folder import RunRecord
from frostlab.surgery.audit import Audit
from frostlab.training.batches.batch import examples_of
from frostlab.training.distributed import World, gather_nothing, like, prepare_norms, same_buffers
from frostlab.training.stages import (
    Entered,
    Stage,
    enter,
    kept_state,
    stages_of,
    steps_per_epoch,
    survivors,
)
from frostlab.training.state import Best, Progress, Setting
from frostlab.training.step.compiled import uncompile
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.envelope_loss import objective_for
from frostlab.training.step.objective import resolve
from frostlab.training.step.optimizer import build_optimizer
from frostlab.training.treatment import (
    audit_frozen,
    count_parameters,
    state_digest,
    treat,
    wants_types,
)


def choose_device(wanted: str) -> torch.device:
    """`auto` is CUDA, then MPS, then the CPU; with several processes each takes its own GPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted in ("auto", "cuda"):
        if torch.cuda.is_available():
            device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(device)
            return device
        if wanted == "cuda":
            raise BadInput("train.device cuda: no CUDA device is available; `cpu` is")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise BadInput(f"train.device {wanted} is no device; auto, cpu, cuda, cuda:0 …") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise BadInput(f"train.device {wanted}: no CUDA device is available; `cpu` is")
        if (device.index or 0) >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise BadInput(f"train.device {wanted} does not exist; the last one is cuda:{last}")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise BadInput("train.device mps is not available; `cpu` is")
    elif device.type not in ("cpu", "mps"):
        raise BadInput(f"train.device {wanted} is not supported; auto, cpu, cuda, mps are")
    return device


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Within this, compute with as many threads; None: with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_precision(train: Train, device: torch.device) -> torch.dtype:
    """bf16 on CUDA unless told otherwise, float32 elsewhere."""
    if train.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if train.precision == "bf16" else torch.float32


def best_model(record: RunRecord, recipe: Recipe, prepared: Material) -> torch.nn.Module:
    """The model that was reported, down to its digest; its data must be what they were."""
    if prepared.digest != record.digests.data:
        raise BadInput(f"the data of {record.folder} cannot be made again: they changed")
    stages = stages_of(recipe, len(prepared.splits["train"]))
    model, _ = build_grown(recipe, prepared, stages)
    result = record.result
    assert result.checkpoint is not None, "the run is finished"
    assert result.best.step is not None
    load_weights(model, Checkpoint(record.folder / result.checkpoint, result.best.step))
    if state_digest(model) != result.weights_digest:
        raise BadInput(f"{record.folder}/{result.checkpoint} is not what was reported")
    return model


CPU = torch.device("cpu")


def any_unused(setting: Setting) -> bool:
    """Whether some trainable parameter gets no gradient, which DDP must be told beforehand."""
    if setting.world.size == 1 or setting.recipe.train.parallel == "fsdp":
        return False
    prepared, model = setting.prepared, setting.model
    examples = examples_of(prepared, prepared.splits["train"], CPU, wants_types(model))
    batch = examples.collate(examples.epoch(2, setting.recipe.seed, 0, bucket=False)[0])
    optimizer = build_optimizer(model, setting.recipe.optim, fused=False)
    step = EagerStep(setting.objective, optimizer, setting.precision, None, World())
    with same_buffers(model):
        step.gradients([batch.to(setting.device)], batch.scored)
    unused = any(p.grad is None for p in model.parameters() if p.requires_grad)
    optimizer.zero_grad(set_to_none=True)
    return unused


def cross(setting: Setting, progress: Progress, step: EagerStep) -> dict[str, Tensor]:
    """End a stage and enter the next; return the optimizer's state that goes on."""
    gather_nothing(setting.objective)
    kept = kept_state(setting.model, step.optimizer)
    if getattr(step, "compiles", False):
        uncompile(setting.objective)
    best = best_checkpoint(setting, progress)
    progress.ended.append(stage_facts(setting, progress))
    progress.best, progress.stopped_early = Best(setting.recipe.metric), False
    progress.epoch_seconds, progress.metrics = 0.0, {}
    progress.began = progress.seconds["total"]
    _build(setting, progress.stage - 1)  # on the CPU, where all processes draw the same
    load_weights(setting.model, best)
    stage = setting.stages[progress.stage]
    setting.entered = enter(setting.model, setting.recipe, stage, progress.stage, setting.entered)
    _place(setting, progress.stage)
    progress.frozen = {} if setting.frozen is None else setting.frozen.digests
    setting.world.wait()  # nobody reads the checkpoint any more
    return survivors(setting.model, setting.entered, kept) if stage.keep_state else {}


def go_to(setting: Setting, progress: Progress, checkpoint: Checkpoint) -> None:
    """Bring a model into a checkpoint's stage, and its weights into the model."""
    if progress.stage:
        _build(setting, progress.stage)
        _place(setting, progress.stage)
        if setting.frozen is not None:
            setting.frozen = Audit(setting.frozen.model, progress.frozen)
    load_weights(setting.model, checkpoint)


def _build(setting: Setting, last: int) -> None:
    """The recipe's model, treated and grown as in the given stage, its weights as at the start."""
    stages = setting.stages[: last + 1]
    setting.model, setting.entered = build_grown(setting.recipe, setting.prepared, stages)
    setting.objective = objective_for(setting.model, setting.recipe)


def build_grown(
    recipe: Recipe, prepared: Material, stages: Sequence[Stage]
) -> tuple[nn.Module, Entered]:
    """The recipe's model, treated, after entering these stages; its weights are the first ones."""
    model = build_for(recipe, prepared)
    treat(model, recipe)
    entered = Entered()
    for index, stage in enumerate(stages):
        entered = enter(model, recipe, stage, index, entered)
    return model, entered


def _place(setting: Setting, index: int) -> None:
    """Bring a stage's model to its device, give it its losses, take what is frozen's digests."""
    setting.objective.supervision = resolve(setting.stages[index].supervise, setting.model)
    setting.model.to(setting.device)
    prepare_norms(setting.model, setting.world.size, setting.device)
    setting.frozen = audit_frozen(setting.model, setting.recipe)


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights into a model, sharded or not; a tied one is stored once."""
    stored = checkpoint.model()
    state = model.state_dict()
    wanted = {name: like(stored[name], state[name]) for name in stored if name in state}
    missing, unexpected = model.load_state_dict(wanted, strict=False)
    tied = {n for n in missing if any(state[n].data_ptr() == state[k].data_ptr() for k in stored)}
    if unexpected or set(stored) - set(state) or set(missing) - tied:
        raise FrostlabError(f"{checkpoint.folder} does not fit the model")


def best_checkpoint(setting: Setting, progress: Progress) -> Checkpoint:
    """The weights that this stage hands on."""
    if progress.best.step is None:
        raise FrostlabError(f"no evaluation gave a number for {progress.best.metric}")
    place = (progress.best.step, progress.stage)
    return next(c for c in checkpoints_in(setting.path) if (c.step, c.stage) == place)


def stage_facts(setting: Setting, progress: Progress) -> dict[str, Any]:
    """What the stage came to, for the record; epochs are counted from its beginning."""
    best, counts = progress.best, count_parameters(setting.model)
    per_epoch = steps_per_epoch(len(setting.prepared.splits["train"]), setting.recipe.train.batch)
    began = sum(progress.lengths)
    return {
        "name": setting.stages[progress.stage].name,
        "steps": progress.place,
        "epochs": round(progress.place / per_epoch, 3),
        "stopped_early": progress.stopped_early,
        "best": {
            "metric": best.metric,
            "value": best.value,
            "step": best.step,
            "epoch": None if best.step is None else round((best.step - began) / per_epoch, 3),
        },
        "metrics": progress.metrics,
        "seconds": round(progress.seconds.get("total", 0.0) - progress.began, 4),
        "trainable": counts["trainable"],
        "total": counts["total"],
    }

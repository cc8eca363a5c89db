"""Models with the weights that a run has saved: at its next stage, on resume, and after the run.

The model is built as `frostlab.training.setup` builds it; then a checkpoint's weights are loaded.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from frostlab.data.prepare import PreparedData
from frostlab.errors import BadInput, FrostlabError, UnfinishedRun
from frostlab.records.checkpoint import PROGRESS, Checkpoint, checkpoint_name, checkpoints_in
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import build_stored
from frostlab.storage import file_digest
from frostlab.surgery.audit import Audit
from frostlab.training.distributed import place_like, reshard
from frostlab.training.setup import (
    BuiltModel,
    audited,
    build_model,
    default_modes,
    enter_stages,
    place_model,
)
from frostlab.training.stages import enter_stage, stages_of, state_by_slot, surviving_state
from frostlab.training.state import Best, Progress, RunContext, stage_facts
from frostlab.training.step.compiled import uncompile
from frostlab.training.step.eager import EagerStep
from frostlab.training.treatment import state_digest, treat


def next_stage(context: RunContext, progress: Progress, step: EagerStep) -> dict[str, Tensor]:
    """End the current stage and enter the next one, from the best weights of the current stage.

    Return the optimizer state that the next stage keeps.
    """
    reshard(context.objective)
    state = state_by_slot(context.model, step.optimizer)
    if getattr(step, "compiles", False):
        uncompile(context.objective)
    best = best_checkpoint(context.path, progress)
    progress.ended.append(stage_facts(context, progress))
    progress.best, progress.stopped_early = Best(context.recipe.metric), False
    progress.epoch_seconds, progress.metrics, progress.flow_start = 0.0, {}, None
    progress.began = progress.seconds["total"]
    index = progress.stage
    built = build_model(context.recipe, context.prepared, context.stages[:index])
    load_weights(built.model, best)
    stage = context.stages[index]
    # The model is still on the CPU, so all processes draw equal new layers.
    entered = enter_stage(built.model, context.recipe, stage, index, built.entered)
    _replace_model(context, replace(built, entered=entered), index)
    audit = context.current.audit
    progress.frozen = {} if audit is None else audit.digests
    context.world.wait()  # until every process has read the checkpoint
    return surviving_state(context.model, entered, state) if stage.keep_state else {}


def read_progress(context: RunContext, checkpoint: Checkpoint) -> Progress:
    """Return a checkpoint's progress; refuse one that does not fit checkpoint and recipe."""
    where = checkpoint.folder / "progress.json"
    progress = Progress.from_dict(checkpoint.progress(), where)
    stage_step, best = progress.stage_step, progress.best
    if (progress.step, progress.stage) != checkpoint.place:
        raise BadInput(f"{where}: `step` and `ended` belong to another checkpoint")
    if progress.stage >= len(context.stages) or min(progress.lengths, default=0) < 0:
        raise BadInput(f"{where}: `ended` does not fit the stages of the recipe")
    if not 0 <= stage_step <= context.stages[progress.stage].steps:
        raise BadInput(f"{where}: step {progress.step} is not a step of this stage")
    if best.metric != context.recipe.metric or (best.value is None) != (best.step is None):
        raise BadInput(
            f"{where}: `best` should be of {context.recipe.metric}, with both value and step, or "
            "with neither"
        )
    return progress


def restore(context: RunContext, progress: Progress, checkpoint: Checkpoint) -> None:
    """Rebuild the model, unless the run is in its first stage, and load the saved weights."""
    if progress.stage:
        stages = context.stages[: progress.stage + 1]
        built = build_model(context.recipe, context.prepared, stages)
        _replace_model(context, built, progress.stage)
        if (audit := context.current.audit) is not None:  # verify against the saved digests
            context.current = replace(context.current, audit=Audit(audit.model, progress.frozen))
    context.current = replace(context.current, frozen=checkpoint.frozen())
    load_weights(context.model, checkpoint)


def _replace_model(context: RunContext, built: BuiltModel, index: int) -> None:
    """Place a built model and make it the current stage's model."""
    placed = place_model(
        built, context.recipe, context.stages[index], index, context.task, context.compute
    )
    context.current = audited(placed, context.recipe)


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights into a model, sharded or not.

    A checkpoint stores tied weights once, so their other names may be missing from it.
    """
    stored = checkpoint.model()
    state = model.state_dict()
    for name, value in stored.items():
        own = state.get(name)
        if own is None or value.shape != own.shape or value.dtype != own.dtype:
            raise FrostlabError(f"{checkpoint.folder} does not fit the model ({name!a:.80})")
    for name in state.keys() - stored.keys():
        if not any(state[name].data_ptr() == state[tied].data_ptr() for tied in stored):
            raise FrostlabError(f"{checkpoint.folder} does not fit the model ({name})")
    weights = {name: place_like(value, state[name]) for name, value in stored.items()}
    model.load_state_dict(weights, strict=False)


def best_checkpoint(folder: Path, progress: Progress) -> Checkpoint:
    """Return the current stage's best checkpoint."""
    if progress.best.step is None:
        raise FrostlabError(f"no evaluation gave a finite {progress.best.metric}")
    place = (progress.best.step, progress.stage)
    for checkpoint in checkpoints_in(folder):
        if checkpoint.place == place:
            return checkpoint
    raise FrostlabError(f"{folder}/checkpoints/{checkpoint_name(*place)} is missing")


def best_model(record: RunRecord) -> nn.Module:
    """Load a run's best weights into its model, on the CPU and ready to evaluate.

    Only the run's folder is read, unless the model has Python code of its own. Changed files are
    refused. For a run that has not finished, a warning names the step of the weights: the best of
    the current stage so far, or the newest if the stage has not been evaluated yet.
    """
    recipe, _ = record.recipe, record.start  # `start` refuses a record of another schema
    checkpoint, is_best = _best_saved(record)
    stages = stages_of(recipe, record.data.splits["train"].examples)[: checkpoint.stage + 1]
    with default_modes(torch.device("cpu")), torch.random.fork_rng(devices=[]):
        model = build_stored(recipe, record.folder)
        treat(model, recipe, init=False)
        enter_stages(model, recipe, stages)
    load_weights(model, checkpoint)
    finished = record.ending == "finished"
    if finished and state_digest(model) != record.result.weights_digest:
        raise BadInput(f"{checkpoint.folder} does not hold the reported weights")
    if not finished:
        which = "best weights so far" if is_best else "newest weights"
        warnings.warn(
            f"{record.folder} has not finished; its {which} are used, those of "
            f"step {checkpoint.step}",
            UnfinishedRun,
            stacklevel=3,
        )
    return model.eval()


def _best_saved(record: RunRecord) -> tuple[Checkpoint, bool]:
    """Return the checkpoint whose weights to use, and whether they are the best.

    This is the checkpoint that `result.json` of a finished run names, or else the current stage's
    best one, or the newest one if the stage has not been evaluated yet.
    """
    saved = {checkpoint.place: checkpoint for checkpoint in checkpoints_in(record.folder)}
    if record.ending == "finished":
        name = record.result.checkpoint
        for checkpoint in saved.values():
            if f"checkpoints/{checkpoint.folder.name}" == name:
                return checkpoint, True
        raise BadInput(f"{record.folder} has no weights: {name} is missing")
    for checkpoint in reversed(saved.values()):
        if checkpoint.damaged_file(PROGRESS) is None:
            where = checkpoint.folder / PROGRESS
            step = Progress.from_dict(checkpoint.progress(), where).best.step
            best = None if step is None else saved.get((step, checkpoint.stage))
            return (checkpoint, False) if best is None else (best, True)
    ended = record.ending == "diverged"
    advice = "train it again" if ended else "continue it with --resume"
    raise BadInput(f"{record.folder} has no weights: the run has no undamaged checkpoint; {advice}")


def check_same_data(record: RunRecord, prepared: PreparedData) -> None:
    """Refuse data other than those of the run."""
    if prepared.digest != record.digests.data:
        changed = ", ".join(_changed_files(record)[:3])
        listed = f": {changed}" if changed else ""
        raise BadInput(f"the data of {record.folder} have changed since the run{listed}")


def _changed_files(record: RunRecord) -> list[str]:
    """Return the files of a run's data that are missing or have another content now."""
    recorded = {file.path: file for split in record.data.splits.values() for file in split.files}
    return [
        path
        for path, file in recorded.items()
        if not Path(path).is_file() or file_digest(Path(path)) != file.sha256
    ]

"""From one stage to the next: the best weights are handed on to a model that is built anew.

Built anew, as for a resumed run, nothing of the stage before is left in it: no wrapping for other
processes, no compiled layer, no captured step, no cached prefix.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from frostlab.data import Material
from frostlab.errors import FrostlabError
from frostlab.models.building import build_for
from frostlab.recipe import Recipe
from frostlab.records.checkpoints import Checkpoint, checkpoints_in
from frostlab.surgery import Audit
from frostlab.training.compiled import uncompile
from frostlab.training.distributed import gather_nothing, like
from frostlab.training.envelopes import objective_for
from frostlab.training.norms import prepare_norms
from frostlab.training.patience import Best
from frostlab.training.progress import Progress
from frostlab.training.setting import Setting
from frostlab.training.stages import Stage, steps_per_epoch
from frostlab.training.staging import Entered, enter, kept_state, survivors
from frostlab.training.step import EagerStep
from frostlab.training.supervision import resolve
from frostlab.training.treating import audit_frozen, count_parameters, treat


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

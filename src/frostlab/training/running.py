"""`fl.run`: a recipe in, a complete record out."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml

from frostlab.data import Material, Prepared, Signals, prepare, text_of
from frostlab.errors import BadInput
from frostlab.models.building import build_for
from frostlab.models.pretrained import first_line
from frostlab.recipe import Recipe
from frostlab.recipe.loading import load_recipe, recipe_from, recipe_name
from frostlab.recipe.settings import PretrainedModel
from frostlab.records.checkpoints import Checkpoint, resumable
from frostlab.records.environment import environment
from frostlab.records.folder import SCHEMA, RunFolder, read_events
from frostlab.records.places import (
    given_folder,
    new_folder,
    own_folder,
    supersede_result,
)
from frostlab.records.record import RunRecord
from frostlab.surgery import Audit
from frostlab.training.batching import collate, evaluation_order
from frostlab.training.devices import choose_device, choose_precision, with_threads
from frostlab.training.distributed import World, joined
from frostlab.training.envelopes import objective_for
from frostlab.training.interruptions import interruptions
from frostlab.training.norms import prepare_norms
from frostlab.training.objective import check_pieces, logits_of
from frostlab.training.progress import Display, Silent
from frostlab.training.recordings import baseline_scores
from frostlab.training.setting import Setting
from frostlab.training.stages import stages_of
from frostlab.training.staging import Entered, enter, rehearse
from frostlab.training.stopwatch import Meter
from frostlab.training.supervision import resolve
from frostlab.training.treating import audit_frozen, treat, wants_types, weight_digests
from frostlab.training.work import work


def run(
    recipe: Recipe | str | Path | dict[str, Any],
    *,
    name: str | None = None,
    out: str | Path | None = None,
    runs: str | Path = "runs",
    data_dir: str | Path | None = None,
    resume: bool = False,
    display: Display | None = None,
) -> RunRecord:
    """Train what a recipe says and return its record.

    Args:
        recipe: a shipped recipe's name, a YAML file, plain values, or a Recipe.
        out: the run's own folder; by default a new one under `runs`.
        resume: go on where the newest unfinished run of this very recipe stopped.
    """
    recipe, name = _resolve(recipe, name)
    device = choose_device(recipe.train.device)
    with ExitStack() as stack:
        world = stack.enter_context(joined(device, recipe.train))
        if recipe.train.batch % (world.size * recipe.train.accumulate):
            raise BadInput(
                f"train.batch {recipe.train.batch} cannot be shared by {world.size} processes × "
                f"{recipe.train.accumulate} accumulated parts"
            )
        path, resumes = world.agree(_choose_folder(recipe, name, out, Path(runs), resume))
        folder = stack.enter_context(RunFolder(path).open()) if world.writes and resumes else None
        stack.enter_context(with_threads(_threads(recipe, path if resumes else None)))
        meter = Meter(device)
        setting, digests = _set_up(recipe, data_dir, device, world, display or Silent(), path)
        if resumes:
            setting.folder = folder
            checkpoint = _go_on(setting, path, digests)
        else:
            checkpoint = None
            if world.writes:
                setting.folder = stack.enter_context(_begin(setting, name, path, digests, out))
            setting.path = world.agree(setting.folder.path if setting.folder else None)
        stack.callback(setting.display.close)
        setting.asked_to_stop = stack.enter_context(interruptions())
        work(setting, checkpoint, meter)
    return RunRecord(setting.path)


def _resolve(recipe: Recipe | str | Path | dict[str, Any], name: str | None) -> tuple[Recipe, str]:
    if isinstance(recipe, Recipe):
        return recipe, name or "run"
    if isinstance(recipe, dict):
        return recipe_from(recipe), name or "run"
    return load_recipe(str(recipe)), name or recipe_name(str(recipe))


def _choose_folder(
    recipe: Recipe, name: str, out: str | Path | None, runs: Path, resume: bool
) -> tuple[Path, bool]:
    if out is not None:
        return given_folder(Path(out).resolve(), resume, recipe.digest, recipe.to_dict())
    return own_folder(runs, f"{name}-{recipe.treatment_name}-s{recipe.seed}", resume, recipe.digest)


def _threads(recipe: Recipe, resumed: Path | None) -> int | None:
    """The threads that were asked for, or that a resumed run began with."""
    if recipe.train.threads is None and resumed is not None:
        return int(next(read_events(resumed / "events.jsonl"))["threads"])
    return recipe.train.threads


def _set_up(
    recipe: Recipe,
    data_dir: str | Path | None,
    device: torch.device,
    world: World,
    display: Display,
    path: Path,
) -> tuple[Setting, dict[str, Any]]:
    """Data, model and treatment: all that can be refused, before anything is written."""
    prepared = _prepare(recipe, data_dir, world)
    model = build_for(recipe, prepared)
    touched = treat(model, recipe)
    if isinstance(recipe.model, PretrainedModel):
        _try_out(model, text_of(prepared), recipe.model.name)
    digests = {
        "data": prepared.digest,
        "weights": weight_digests(model),
        "touched": sorted(touched),
    }
    precision = choose_precision(recipe.train, device)
    objective = objective_for(model, recipe)
    packs = recipe.train.batching == "packed" or recipe.train.cache_prefix is not None
    check_pieces(objective, prepared, wants_types(model), packs)
    stages = stages_of(recipe, len(prepared.splits["train"]))
    rehearse(model, recipe, stages, prepared, precision)
    entered = enter(model, recipe, stages[0], 0, Entered())
    objective.supervision = resolve(stages[0].supervise, model)
    model.to(device)
    prepare_norms(model, world.size, device)
    frozen = audit_frozen(model, recipe)
    digests["frozen"] = {} if frozen is None else frozen.digests
    setting = Setting(
        recipe=recipe,
        prepared=prepared,
        model=model,
        objective=objective,
        stages=stages,
        device=device,
        precision=precision,
        world=world,
        folder=None,
        frozen=frozen,
        display=display,
        asked_to_stop=lambda: False,
        path=path,
        entered=entered,
    )
    return setting, digests


def _try_out(model: torch.nn.Module, prepared: Prepared, name: str) -> None:
    """Show a strange model the longest example, so that what it cannot take is said at once."""
    tokens = prepared.splits["train"]
    rows = evaluation_order(tokens.lengths, 2)[0]
    batch = collate(tokens, rows, prepared.pad, types=wants_types(model))
    model.eval()
    try:
        with torch.no_grad():
            shape = tuple(logits_of(model, batch.inputs).shape)
    except Exception as error:  # models fail in ways of their own
        length = int(tokens.lengths.max())
        problem = f"model.name {name} cannot take an example of {length} tokens"
        raise BadInput(f"{problem} ({first_line(error)})") from None
    if len(shape) != (2 if prepared.classes else 3):
        raise BadInput(f"model.name {name} answers with shape {shape}, not with logits")


def _prepare(recipe: Recipe, data_dir: str | Path | None, world: World) -> Material:
    """The writing process prepares the data; the others then find it done."""
    where = None if data_dir is None else Path(data_dir)
    if not world.writes:
        world.wait()
    prepared = prepare(recipe, where)
    if isinstance(prepared, Signals):
        baseline_scores(prepared)
    if world.writes:
        world.wait()
    return prepared


def _begin(
    setting: Setting, name: str, path: Path, digests: dict[str, Any], out: str | Path | None
) -> RunFolder:
    """Make the run's folder, with all that it starts from; another run may have taken its name."""
    recipe, prepared = setting.recipe, setting.prepared
    files = {
        "recipe.yaml": yaml.safe_dump(recipe.to_dict(), sort_keys=False),
        "environment.json": json.dumps(environment(str(setting.device)), indent=1),
        "digests.json": json.dumps(digests, indent=1),
    }
    facts = dict(
        schema=SCHEMA, name=name, recipe_digest=recipe.digest, seed=recipe.seed,
        treatment=recipe.treatment_name, data=recipe.data.name, model=recipe.model.kind,
        origin=prepared.origin, caution=prepared.caution, known=prepared.known,
        **_shape(setting),
    )  # fmt: skip
    while True:
        try:
            return RunFolder.create(path, files, **facts)
        except FileExistsError:
            if out is not None:
                raise BadInput(f"--out {path}: another run has just begun there") from None
            path = new_folder(path.parent, path.name)


def _go_on(setting: Setting, path: Path, digests: dict[str, Any]) -> Checkpoint | None:
    """Check that data and frozen weights are what the run began with; find its last checkpoint."""
    known = RunRecord(path).digests
    for what in ("data", "weights"):
        if known[what] != digests[what]:
            raise BadInput(f"--resume: the {what} of {path} cannot be made again: they changed")
    if setting.frozen is not None:
        setting.frozen = Audit(setting.frozen.model, known["frozen"])
    checkpoint: Checkpoint | None = setting.world.agree(resumable(path))
    if setting.folder is not None:
        supersede_result(setting.folder)
        step = 0 if checkpoint is None else checkpoint.step
        number = 1 + len(list(path.glob("environment-*.json")))
        setting.folder.write(f"environment-{number}.json", environment(str(setting.device)))
        setting.folder.event("resume", step, **_shape(setting))
    return checkpoint


def _shape(setting: Setting) -> dict[str, Any]:
    """What decides the bits of a result beside the recipe."""
    return {
        "device": str(setting.device),
        "precision": str(setting.precision).removeprefix("torch."),
        "processes": setting.world.size,
        "threads": torch.get_num_threads(),
    }

"""`fl.run`: a recipe in, a complete record out."""

import errno
import json
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from frostlab.data.eeg.recordings import Material, Signals, text_of
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared
from frostlab.errors import BadInput, FrostlabError, first_line
from frostlab.models.build import build_for
from frostlab.recipe.load import load_recipe, recipe_from, recipe_name
from frostlab.recipe.model import PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.records.checkpoint import Checkpoint, checkpoint_name, resumable
from frostlab.records.environment import environment, gpu_state
from frostlab.records.folder import (
    RunFolder,
    RunRecord,
    given_folder,
    new_folder,
    own_folder,
    supersede_result,
)
from frostlab.records.schema import SCHEMA, Result, StartEvent, SteppingEvent, read
from frostlab.records.telemetry import Telemetry
from frostlab.storage import finite, write_whole
from frostlab.surgery.audit import Audit
from frostlab.timing.clock import Meter, Stopwatch
from frostlab.training.batches.batch import collate, evaluation_order
from frostlab.training.distributed import World, joined, prepare_norms
from frostlab.training.eeg_report import baseline_scores, measure_recordings
from frostlab.training.loop import Stopped, interruptions, measure, train
from frostlab.training.setup import (
    best_checkpoint,
    choose_device,
    choose_precision,
    go_to,
    load_weights,
    stage_facts,
    with_threads,
)
from frostlab.training.stages import Entered, enter, rehearse, stages_of
from frostlab.training.state import Best, Display, Progress, Setting, Silent
from frostlab.training.step.eager import Diverged
from frostlab.training.step.envelope_loss import objective_for
from frostlab.training.step.objective import check_pieces, logits_of, resolve
from frostlab.training.step_log import clocks
from frostlab.training.treatment import (
    audit_frozen,
    count_parameters,
    state_digest,
    treat,
    wants_types,
    weight_digests,
)


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
        return RunRecord(resumed).start.threads
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
        if getattr(known, what) != digests[what]:
            raise BadInput(f"--resume: the {what} of {path} cannot be made again: they changed")
    if setting.frozen is not None:
        setting.frozen = Audit(setting.frozen.model, known.frozen)
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


_ALLOCATOR = "DefaultCPUAllocator"  # the CPU's out of memory is a plain RuntimeError


class RunFailed(FrostlabError):
    """A run that did not finish; its record says how far it came."""


@dataclass(frozen=True)
class Failure:
    """A status for the record, and the error for the caller."""

    status: str
    error: BaseException


def failure_of(error: BaseException, recipe: Recipe) -> Failure:
    """What a user can act on, as one line; what nobody expected, as it is."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, Stopped | KeyboardInterrupt):
        return Failure("stopped", RunFailed("stopped; `--resume` goes on"))
    if isinstance(error, Diverged):
        return Failure("diverged", RunFailed(line))
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _ALLOCATOR in line:
        half = f"train.batch {recipe.train.batch} or data.length {recipe.data.length}"
        return Failure("failed", RunFailed(f"out of memory; a lower {half}, or train.accumulate"))
    if isinstance(error, OSError):
        full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
        where = f"{error.filename}: " if error.filename else ""
        return Failure("failed", RunFailed(f"{where}{error.strerror or line}{full}"))
    if isinstance(error, FrostlabError):
        return Failure("failed", RunFailed(line))
    return Failure("failed", error)


def work(setting: Setting, resumed: Checkpoint | None, meter: Meter) -> None:
    """Train, report, and write the result, whatever happens on the way.

    `meter` has measured the device's memory since before the model was built.
    """
    progress = Progress(Best(setting.recipe.metric))
    if resumed is not None:
        progress = Progress.from_dict(resumed.progress())
        go_to(setting, progress, resumed)
    where, before = str(setting.device), gpu_state(str(setting.device))
    watch = Stopwatch(setting.device, progress.seconds)
    report, scores, weights = None, None, None
    failure: Failure | None = None
    with Telemetry(where) as telemetry:
        try:
            train(setting, progress, watch, resumed)
            report, scores = _report(setting, progress)
            weights = state_digest(setting.model)
        except BaseException as error:
            failure = failure_of(error, setting.recipe)
            progress.seconds = watch.seconds
    if setting.folder is not None:
        extra = {
            "gpu_before": before,
            "gpu_after": gpu_state(where),
            "telemetry": telemetry.summary(),
            "device_memory_peak": meter.peak_bytes(),
            "weights_digest": weights,
            "order_digest": progress.order,
        }
        extra |= {} if scores is None else {"scores": scores}
        _conclude(setting, setting.folder, progress, report, failure, extra)
    if failure is not None:
        raise failure.error from None


def _conclude(
    setting: Setting,
    folder: RunFolder,
    progress: Progress,
    report: dict[str, float] | None,
    failure: Failure | None,
    extra: dict[str, Any],
) -> None:
    """Write the end; a disk that is full must not hide why the run ended."""
    status = "finished" if failure is None else failure.status
    error = None if failure is None else str(failure.error)
    try:
        folder.event("end", progress.step, status=status, error=error)
        folder.write("result.json", result(
            setting, folder, progress, status=status, error=error, report=report, extra=extra
        ))  # fmt: skip
    except OSError:
        if failure is None:
            raise


def _report(setting: Setting, progress: Progress) -> tuple[dict[str, float], dict[str, Any] | None]:
    """The reported result: the best weights on the split that nothing was chosen by.

    With published splits the best evaluation is the report, and is labelled so.
    """
    best = best_checkpoint(setting, progress)
    load_weights(setting.model, best)
    if setting.frozen is not None:
        setting.frozen.verify(setting.model)
    metrics, scores = _measure_report(setting, progress.step)
    verified = 0 if setting.frozen is None else len(setting.frozen.digests)
    if setting.folder:
        setting.folder.event("evaluation", progress.step, split="report", metrics=metrics,
                             checkpoint=best.step, frozen_verified=verified)  # fmt: skip
    return metrics, scores


def _measure_report(setting: Setting, step: int) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Every metric of the reporting split, and what is summed up beside them.

    What each example was taken for, or each recording decoded to, is kept in files.
    """
    prepared = setting.prepared
    if isinstance(prepared, Signals):
        return measure_recordings(setting, prepared, measure(setting, "report", step))
    if prepared.task != "classification":
        return measure(setting, "report", step), None
    labels = prepared.splits["report"].labels
    assert labels is not None
    guesses = torch.zeros(len(labels), dtype=torch.long, device=setting.device)
    metrics = measure(setting, "report", step, guesses)
    taken_for = (setting.world.total(guesses) - 1).tolist()
    if setting.folder:
        kept = {"split": "report", "labels": labels.tolist(), "classes": taken_for}
        write_whole(setting.folder.path / "predictions.json", json.dumps(kept))
    return metrics, None


def result(
    setting: Setting,
    folder: RunFolder,
    progress: Progress,
    *,
    status: str,
    error: str | None,
    report: dict[str, float] | None,
    extra: dict[str, Any],
) -> Result:
    """Return everything `result.json` says."""
    events, recipe = folder.events(), setting.recipe
    start = next(event for event in events if isinstance(event, StartEvent))
    best, name = progress.best, checkpoint_name(progress.best.step or 0, progress.stage)
    values = {
        "schema": SCHEMA,
        "status": status,
        "error": error,
        "name": start.name,
        "recipe_digest": recipe.digest,
        "seed": recipe.seed,
        "treatment": recipe.treatment_name,
        "started": _iso(start.at),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": progress.step,
        "stopped_early": progress.stopped_early,
        "best": {"metric": best.metric, "value": best.value, "step": best.step},
        "report": report,
        "caution": setting.prepared.caution,
        "last": progress.last or None,
        "target": progress.target,
        "stepping": [event for event in events if isinstance(event, SteppingEvent)],
        "clocks": clocks(events, progress.seconds),
        "parameters": count_parameters(setting.model),
        "stages": [*progress.ended, stage_facts(setting, progress)],
        "checkpoint": None if best.step is None else f"checkpoints/{name}",
        **extra,
    }
    return read(Result, finite(values), folder.path / "result.json")


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")

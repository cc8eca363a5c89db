"""`fl.run`: train a recipe and write the complete record of the run to a folder."""

import errno
import json
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from frostlab.data.prepare import PreparedData, as_token_data
from frostlab.devices import find_device, start_device, use_device
from frostlab.errors import BadInput, DamagedCheckpoint, FrostlabError
from frostlab.flow.probe import Gradient
from frostlab.integrations.tensorboard import LiveBoard, check_folder, marked_folder
from frostlab.launcher import runs_at_once
from frostlab.models.stand_in import suggesting_stand_in, with_stand_ins
from frostlab.recipe.load import load_recipe, recipe_from, recipe_name, with_paths
from frostlab.recipe.recipe import Recipe, Scale
from frostlab.records import SCHEMA
from frostlab.records.checkpoint import Checkpoint, checkpoint_name, keep_only, resumable
from frostlab.records.environment import environment, gpu_state
from frostlab.records.folder import (
    RunFolder,
    RunRecord,
    given_folder,
    new_folder,
    own_folder,
    supersede_result,
)
from frostlab.records.model_files import write_model_files
from frostlab.records.schema import (
    DataRecord,
    Result,
    ResumeEvent,
    StartEvent,
    StepEvent,
    SteppingEvent,
)
from frostlab.records.schema import WallClock as WallRecord
from frostlab.records.telemetry import Telemetry
from frostlab.storage import finite, write_whole
from frostlab.surgery.audit import Audit
from frostlab.timing.clock import Meter, Stopwatch, WallClock
from frostlab.training.distributed import Compute, process_group
from frostlab.training.loop import (
    Stopped,
    epochs_done,
    interruptions,
    measure,
    train,
    wait_for_checkpoints,
)
from frostlab.training.progress import Display, choose_screen
from frostlab.training.restore import best_checkpoint, load_weights, read_progress, restore
from frostlab.training.samples import write_samples
from frostlab.training.setup import (
    Assembly,
    assemble,
    build_first_stage,
    choose_precision,
    default_modes,
    prepare_data,
    with_threads,
)
from frostlab.training.state import (
    Best,
    Progress,
    Report,
    RunContext,
    StageModel,
    stage_facts,
)
from frostlab.training.step.compiled import forget_compiled_code
from frostlab.training.step.eager import Diverged
from frostlab.training.step_log import clocks, wall_record
from frostlab.training.tasks import TASKS
from frostlab.training.treatment import count_parameters, state_digest
from frostlab.typed import read


def run(
    recipe: Recipe | str | Path | dict[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    name: str | None = None,
    out: str | Path | None = None,
    runs: str | Path = "runs",
    data_dir: str | Path | None = None,
    resume: bool = False,
    tensorboard: str | Path | None = None,
    scale: Scale | None = None,
    stand_in: bool = False,
    progress: bool | Display | None = None,
    began: float | None = None,
) -> RunRecord:
    """Train a recipe and return the record of its run.

    Args:
        recipe: the name of a shipped recipe, a YAML file, a dict, or a Recipe.
        settings: changes to the recipe by dotted key, such as `{"optim.lr": 1e-4}`.
        seed: the seed of weights, data order and dropout; None: the recipe's.
        name: the first part of the folder's name; None: the recipe's name, or `run` if `recipe` is
            a dict or a Recipe.
        out: the folder of the run; None: a folder in `runs`.
        runs: the folder for runs without `out`.
        data_dir: the folder with the data sets.
        resume: continue the unfinished run in `out`, or the newest unfinished run of this recipe in
            `runs`. If there is no run yet, begin one; refuse a finished or diverged run.
        tensorboard: a folder to which TensorBoard event files are written during the run. A run
            that is scaled or has stand-ins (see below) writes to a subfolder whose name says so.
        scale: tiny or small: fewer examples, fewer steps and, unless the model is pretrained,
            narrower layers; full: the unscaled recipe; None: the scale that the recipe sets.
            `settings` win over the scale.
        stand_in: use built-in data, a learned tokenizer or random weights in place of a data set, a
            tokenizer or a pretrained model that is not available.
        progress: whether to show the progress; None: on a terminal or in a notebook. A
            `Display` shows it on its own screen.
        began: when the program started, as a reading of `time.perf_counter`; the record's wall
            clock counts from there. None: now.
    """
    wall = WallClock(began)
    changes = dict(settings or {}) | ({} if scale is None else {"scale": scale})
    recipe, name = _resolve(recipe, changes, seed, name)
    if stand_in:
        recipe = with_stand_ins(recipe, data_dir)
    if tensorboard is not None:
        tensorboard = marked_folder(tensorboard, recipe)
    display = progress if isinstance(progress, Display) else Display(choose_screen(progress))
    device = find_device(recipe.train.device)
    start_device(device)
    forget_compiled_code()
    with ExitStack() as stack:
        stack.enter_context(default_modes(device))
        world = stack.enter_context(process_group(device, recipe.train))
        if recipe.train.batch % (world.size * recipe.train.accumulate):
            raise BadInput(
                f"train.batch {recipe.train.batch} cannot be divided into {world.size} processes × "
                f"{recipe.train.accumulate} micro-batches"
            )
        chosen = _choose_folder(recipe, name, out, Path(runs), resume)
        if tensorboard is not None:
            check_folder(Path(tensorboard), chosen[0], resumes=chosen[1])
        path, resumes = world.agree(chosen)
        folder = stack.enter_context(RunFolder(path).open()) if world.writes and resumes else None
        stack.enter_context(with_threads(_threads(recipe, path if resumes else None)))
        compute = Compute(device, choose_precision(recipe.train, device), world)
        task = TASKS[recipe.data.task]
        with suggesting_stand_in():
            wall.end_part("building")
            prepared = prepare_data(recipe, data_dir, task, world)
            wall.end_part("data")
            first = build_first_stage(recipe, prepared, task, compute.precision)
        use_device(device)
        meter = Meter(device)
        assembly = assemble(first, recipe, prepared, task, compute)
        current, checkpoint = assembly.current, None
        if resumes:
            current, checkpoint = _continue(path, folder, assembly, compute)
        elif world.writes:
            folder = stack.enter_context(_create_folder(recipe, name, path, assembly, compute, out))
        path = world.agree(folder.path if folder else None)
        histograms = _write_nothing if world.agree(tensorboard is not None) else None
        if tensorboard is not None and folder is not None:
            board = LiveBoard(tensorboard, folder.events() if resumes else ())
            folder.listener = stack.enter_context(board).add
            histograms = board.histograms
        stack.callback(display.close)
        for line in prepared.notes if world.writes else ():
            display.say(f"note: {line}")
        context = RunContext(
            recipe=recipe,
            prepared=prepared,
            task=task,
            stages=assembly.stages,
            compute=compute,
            path=path,
            folder=folder,
            display=display,
            asked_to_stop=stack.enter_context(interruptions()),
            current=current,
            histograms=histograms,
        )
        _train_and_report(context, checkpoint, meter, wall)
    return RunRecord(path)


def _write_nothing(step: int, model: nn.Module, gradient: Gradient) -> None:
    """Write nothing: all ranks take part in computing histograms' gradients, and rank 0 writes."""


def _resolve(
    recipe: Recipe | str | Path | dict[str, Any],
    settings: Mapping[str, Any],
    seed: int | None,
    name: str | None,
) -> tuple[Recipe, str]:
    """Return the recipe with settings and seed applied, and the name of its runs."""
    if not isinstance(recipe, Recipe | dict):
        return load_recipe(str(recipe), settings, seed), name or recipe_name(str(recipe))
    changes = settings if seed is None else {**settings, "seed": seed}
    if isinstance(recipe, Recipe):
        values = recipe.to_dict()
        if not changes and with_paths(values) == values:
            return recipe, name or "run"
        recipe = values
    return recipe_from(recipe, settings=changes), name or "run"


def _choose_folder(
    recipe: Recipe, name: str, out: str | Path | None, runs: Path, resume: bool
) -> tuple[Path, bool]:
    """Return the run's folder, and whether it holds a run to resume."""
    if out is not None:
        return given_folder(Path(out).resolve(), resume, recipe.digest, recipe.to_dict())
    full_name = f"{name}{recipe.marks}-{recipe.treatment_name}-s{recipe.seed}"
    return own_folder(runs, full_name, resume, recipe.digest)


def _threads(recipe: Recipe, resumed: Path | None) -> int | None:
    """Return the recipe's number of threads, or else the number that a resumed run began with."""
    if recipe.train.threads is None and resumed is not None:
        return RunRecord(resumed).start.threads
    return recipe.train.threads


def _create_folder(
    recipe: Recipe,
    name: str,
    path: Path,
    assembly: Assembly,
    compute: Compute,
    out: str | Path | None,
) -> RunFolder:
    """Create the run's folder with its first files.

    If the folder is taken, use the next free name; refuse if the user chose the folder with `out`.
    """
    prepared = assembly.prepared
    files = {
        "recipe.yaml": yaml.safe_dump(recipe.to_dict(), sort_keys=False),
        "environment.json": json.dumps(environment(str(compute.device)), indent=1),
        "digests.json": json.dumps(assembly.digests, indent=1),
        "data.json": json.dumps(asdict(_data_record(prepared)), indent=1),
    }
    facts = dict(
        schema=SCHEMA, name=name, recipe_digest=recipe.digest, seed=recipe.seed,
        treatment=recipe.treatment_name, data=recipe.data.name, model=recipe.model.kind,
        origin=prepared.origin, caution=prepared.caution, known=prepared.known,
        **_conditions(compute),
    )  # fmt: skip

    def fill(folder: Path) -> None:
        write_model_files(folder, prepared, assembly.config)

    while True:
        try:
            folder = RunFolder.create(path, files, fill, **facts)
            for line in prepared.notes:
                folder.event("note", 0, text=line)
            return folder
        except FileExistsError:
            if out is not None:
                raise BadInput(
                    f"another run has just started in {path}; choose another folder with --out"
                ) from None
            path = new_folder(path.parent, path.name)


def _data_record(prepared: PreparedData) -> DataRecord:
    """Return the contents of data.json."""
    return DataRecord(
        task=prepared.task,
        digest=prepared.digest,
        labels=None if prepared.labels is None else list(prepared.labels),
        splits=prepared.described,
        notes=list(prepared.notes),
    )


def _continue(
    path: Path, folder: RunFolder | None, assembly: Assembly, compute: Compute
) -> tuple[StageModel, Checkpoint | None]:
    """Record the resume; return the first stage's model and the newest undamaged checkpoint.

    The checkpoint is None if the run has none. Data and initial weights must be unchanged. From now
    on, frozen weights are compared with the digests that the run recorded.
    """
    recorded, current = RunRecord(path).digests, assembly.current
    for name, shown in (("data", "data"), ("weights", "initial weights")):
        if getattr(recorded, name) != assembly.digests[name]:
            raise BadInput(f"--resume: the {shown} of {path} have changed since the run began")
    if current.audit is not None:
        current = replace(current, audit=Audit(current.audit.model, recorded.frozen))
    checkpoint, damaged = compute.world.agree(resumable(path))
    if folder is not None:
        supersede_result(folder)
        step = 0 if checkpoint is None else checkpoint.step
        for file in damaged:
            line = f"{file} was damaged; the run continues from step {step}"
            warnings.warn(line, DamagedCheckpoint, stacklevel=3)
            folder.event("note", step, text=line)
        number = 1 + len(list(path.glob("environment-*.json")))
        folder.write(f"environment-{number}.json", environment(str(compute.device)))
        folder.event("resume", step, **_conditions(compute))
    return current, checkpoint


def _conditions(compute: Compute) -> dict[str, Any]:
    """Return the conditions on which a result's exact bits, or its times, depend."""
    return {
        "device": str(compute.device),
        "precision": str(compute.precision).removeprefix("torch."),
        "processes": compute.world.size,
        "threads": torch.get_num_threads(),
        "runs_at_once": runs_at_once(),
    }


_ALLOCATOR = "DefaultCPUAllocator"  # named in torch's RuntimeError when CPU memory runs out


class RunFailed(FrostlabError):
    """Raised when a run stops, diverges or fails for a known reason; its record is kept.

    `errno` is the number of the system's error, such as that of a full disk, if there was one.
    """

    def __init__(self, text: str, errno: int | None = None) -> None:
        super().__init__(text)
        self.errno = errno


@dataclass(frozen=True)
class Failure:
    """The end of a failed run: the status for the record and the error for the caller."""

    status: str
    error: BaseException


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a GPU or this machine has too little memory."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and _ALLOCATOR in str(error))


def failure_of(error: BaseException, recipe: Recipe) -> Failure:
    """Turn an error of a known kind into a `RunFailed` of one line; keep any other error."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, Stopped | KeyboardInterrupt):
        return Failure("stopped", RunFailed("stopped; `--resume` continues the run"))
    if isinstance(error, Diverged):
        return Failure("diverged", RunFailed(line))
    if is_out_of_memory(error):
        sizes = f"train.batch {recipe.train.batch} or data.length {recipe.data.length}"
        return Failure(
            "failed", RunFailed(f"out of memory; lower {sizes}, or raise train.accumulate")
        )
    if isinstance(error, OSError):
        full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror or line}{full}"
        return Failure("failed", RunFailed(text, error.errno))
    if isinstance(error, FrostlabError):
        return Failure("failed", RunFailed(line))
    return Failure("failed", error)


def _train_and_report(
    context: RunContext, resumed: Checkpoint | None, meter: Meter, wall: WallClock
) -> None:
    """Train, then evaluate on the `report` (test) split; write `result.json` even after an error.

    `meter` has measured the device's memory since before the model was moved to the device.
    """
    progress = Progress(Best(context.recipe.metric))
    if resumed is not None:
        progress = read_progress(context, resumed)
        restore(context, progress, resumed)
        if context.folder is not None:  # a killed run may have left old checkpoints
            keep_only(context.path, progress.step, progress.best.step, progress.stage)
    device = str(context.compute.device)
    gpu_before = gpu_state(device)
    clock = Stopwatch(context.compute.device, progress.seconds)
    metrics, scores, weights_digest = None, None, None
    failure: Failure | None = None
    with Telemetry(device) as telemetry:
        wall.end_part("building")
        try:
            train(context, progress, clock, resumed)
            wall.end_part("training")
            metrics, scores = _report(context, progress)
            weights_digest = state_digest(context.model)
            wait_for_checkpoints(context)
            wall.end_part("report")
        except BaseException as error:
            failure = failure_of(error, context.recipe)
            # a result must not describe weights that perhaps could not be saved
            metrics, scores, weights_digest = None, None, None
            with suppress(BaseException):  # the first error is the one to report
                context.writer.wait()
            progress.seconds = clock.seconds
    if context.folder is not None:
        extra = {
            "gpu_before": gpu_before,
            "gpu_after": gpu_state(device),
            "telemetry": telemetry.summary(),
            "device_memory_peak": meter.peak_bytes(),
            "weights_digest": weights_digest,
            "order_digest": progress.order,
        }
        extra |= {} if scores is None else {"scores": scores}
        spent = partial(wall_record, wall, clock)
        _write_end(context, context.folder, progress, metrics, failure, extra, spent)
    if failure is not None:
        raise failure.error from None


def _write_end(
    context: RunContext,
    folder: RunFolder,
    progress: Progress,
    report: dict[str, float] | None,
    failure: Failure | None,
    extra: dict[str, Any],
    spent: Callable[[], WallRecord],
) -> None:
    """Write the end event and the result; a write error must not hide why the run failed."""
    status = "finished" if failure is None else failure.status
    error = None if failure is None else str(failure.error)
    try:
        folder.event("end", progress.step, status=status, error=error)
        folder.write_result(result(
            context, folder, progress, status=status, error=error, report=report, extra=extra,
            spent=spent,
        ))  # fmt: skip
    except OSError:
        if failure is None:
            raise


def _report(context: RunContext, progress: Progress) -> Report:
    """Evaluate the best weights on the `report` split.

    With the setting `data.splits: published`, this split has also selected the weights, and the
    record says so.
    """
    best_step, audit = progress.best.step, context.current.audit
    if best_step != progress.step:  # if equal, the model still has the best weights
        wait_for_checkpoints(context)
        load_weights(context.model, best_checkpoint(context.path, progress))
    if audit is not None:
        audit.verify(context.model)
    began = time.perf_counter()
    metrics, scores = _measure_report(context, progress.step)
    if context.folder:
        verified = 0 if audit is None else len(audit.digests)
        context.folder.event("evaluation", progress.step, split="report", metrics=metrics,
                             checkpoint=best_step, frozen_verified=verified,
                             epoch=epochs_done(context, progress),
                             seconds=round(time.perf_counter() - began, 4),
                             total_seconds=round(progress.seconds["total"], 4))  # fmt: skip
    write_samples(context, progress)
    return metrics, scores


def _measure_report(context: RunContext, step: int) -> Report:
    """Return the `report` split's metrics and, for EEG, scores; write predicted classes."""
    if not context.task.predicts_classes:
        return context.task.report(context, measure(context, "report", step))
    labels = as_token_data(context.prepared).splits["report"].labels
    assert labels is not None
    classes = torch.zeros(len(labels), dtype=torch.long, device=context.compute.device)
    metrics = measure(context, "report", step, classes)
    predicted = (context.world.total(classes) - 1).tolist()
    if context.folder:
        values = {"split": "report", "labels": labels.tolist(), "classes": predicted,
                  "caution": context.prepared.caution}  # fmt: skip
        write_whole(context.folder.path / "predictions.json", json.dumps(values))
    return context.task.report(context, metrics)


def result(
    context: RunContext,
    folder: RunFolder,
    progress: Progress,
    *,
    status: str,
    error: str | None,
    report: dict[str, float] | None,
    extra: dict[str, Any],
    spent: Callable[[], WallRecord],
) -> Result:
    """Return the contents of `result.json`."""
    events, recipe = folder.events(), context.recipe
    start = next(event for event in events if isinstance(event, StartEvent))
    best, name = progress.best, checkpoint_name(progress.best.step or 0, progress.stage)
    clipped = sum(event.clipped for event in events if isinstance(event, StepEvent))
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
        "clipped_steps": None if recipe.optim.clip is None else clipped,
        "stopped_early": progress.stopped_early,
        "best": {"metric": best.metric, "value": best.value, "step": best.step},
        "report": report,
        "caution": context.prepared.caution,
        "last": progress.last or None,
        "target": progress.target,
        "stepping": [event for event in events if isinstance(event, SteppingEvent)],
        "parameters": count_parameters(context.model),
        "stages": [*progress.ended, stage_facts(context, progress)],
        "checkpoint": None if best.step is None else f"checkpoints/{name}",
        **extra,
        "runs_at_once": max(
            event.runs_at_once for event in events if isinstance(event, StartEvent | ResumeEvent)
        ),
        "clocks": clocks(events, progress.seconds, spent()),
    }
    return read(Result, finite(values), folder.path / "result.json")


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")

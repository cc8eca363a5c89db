"""`--check`: find the data, build every model and take a few steps, without starting a run.

`--check` is an option of `frostlab matrix` and `frostlab run`. It shows how long the runs would
take, how much memory and disk they need, and which cannot run. The time is that of steps,
evaluations during training, the final evaluation (the best weights on the report split) and
checkpoints, extrapolated from a few steps, evaluation batches and copies. Not included are the time
to start a run, and the time in which a language model writes texts at the end of its run.
"""

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from frostlab.data.eeg.recordings import Signals
from frostlab.data.prepare import PreparedData, prepare
from frostlab.devices import choose_device, release_cached_memory, synchronize
from frostlab.errors import FrostlabError, first_line
from frostlab.models.build import recipe_blueprint
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.settings import Every
from frostlab.roles.read import anatomy
from frostlab.storage import plain_tensors
from frostlab.text import NONE, columns, counted, enumerated, fitted, hms, size_text
from frostlab.timing.clock import Meter
from frostlab.timing.memory import estimated_peak
from frostlab.training.batches.feed import Feed
from frostlab.training.distributed import Compute
from frostlab.training.evaluate import evaluate
from frostlab.training.run import is_out_of_memory
from frostlab.training.setup import (
    assemble,
    build_first_stage,
    choose_precision,
    default_modes,
    make_feed,
    make_step,
    with_threads,
)
from frostlab.training.stages import Stage, in_steps, steps_per_epoch
from frostlab.training.state import StageModel, Task, evaluation_batch
from frostlab.training.step.eager import seed_step
from frostlab.training.step.optimizer import optimizer_tensors
from frostlab.training.tasks import TASKS
from frostlab.training.treatment import treated_parts, wants_types

_TIMED_STEPS = 3
_TIMED_BATCHES = 2  # timed batches of an evaluation
_TIMED_SECONDS = 0.5  # short work is repeated and timed for about this long
_REPEATS = 50  # most repetitions of short work
_WARM_UP_STEPS = 3
_CHECKPOINTS_KEPT = 3  # checkpoints on the disk at once: the best one and the newest two
_RECORD_BYTES = 2_000_000  # smallest size of a run's files without checkpoints and events
_BYTES_PER_STEP = 60  # about what a step adds to events.jsonl
_HEAD = ("id", "runs", "parameters", "steps", "step", "evaluations", "time", "memory", "disk")
_LESS_IMPORTANT = ("parameters", "evaluations", "disk", "step", "runs", "steps")  # left out first
# A table that is too wide loses up to two columns, the first of `_LESS_IMPORTANT`, before its ids
# are shortened. So these are the tables that are tried before: with all columns, or 1 or 2 fewer.
_KEPT_WHOLE = 3


@dataclass(frozen=True)
class Checked:
    """What one recipe needs; None marks what is not known."""

    id: str
    runs: int  # how many runs train with it
    problem: str | None = None  # why it cannot run
    parameters: int | None = None
    trainable: int | None = None
    steps: int | None = None
    step_seconds: float | None = None
    kind: str | None = None  # kind of step: eager, compiled or captured
    seconds: float | None = None  # duration of one run, without its start (see the module)
    evaluations: int | None = None  # during training; early stopping may leave some out
    evaluation_seconds: float | None = None  # duration of one evaluation
    report_seconds: float | None = None  # duration of the final evaluation
    checkpoints: int | None = None  # largest possible number
    checkpoint_seconds: float | None = None  # to copy one checkpoint; a thread writes it later
    memory_estimated: int | None = None  # bytes at the peak of a run on a GPU, by formula
    memory_peak: int | None = None  # bytes at the peak of steps and evaluations; CUDA only
    disk_bytes: int | None = None  # for one run

    @property
    def memory(self) -> int | None:
        """The measured peak if there is one, else the estimate."""
        return self.memory_estimated if self.memory_peak is None else self.memory_peak

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def check_recipe(
    name: str, recipe: Recipe, runs: int = 1, data_dir: Path | None = None, device: str = "auto"
) -> Checked:
    """Build a recipe's model and take a few steps with a learning rate of 0."""
    try:
        return _check(name, recipe, runs, data_dir, device)
    except FrostlabError as error:
        return Checked(name, runs, str(error))
    except Exception as error:  # a model's own code can fail in many ways
        if is_out_of_memory(error):
            advice = f"lower train.batch (now {recipe.train.batch}), or choose a smaller model"
            return Checked(name, runs, f"out of memory; {advice}")
        return Checked(name, runs, f"{type(error).__name__}: {first_line(error)}")
    finally:
        gc.collect()
        release_cached_memory()


def _check(name: str, recipe: Recipe, runs: int, data_dir: Path | None, device: str) -> Checked:
    own = recipe.train.device
    place = choose_device(device if own in ("auto", "cuda") else own)
    compute, task = Compute(place, choose_precision(recipe.train, place)), TASKS[recipe.data.task]
    with default_modes(place), with_threads(recipe.train.threads):
        prepared = prepare(recipe, data_dir)
        task.check(prepared)
        meter = Meter(place)
        first = build_first_stage(recipe, prepared, task, compute.precision)
        assembly = assemble(first, recipe, prepared, task, compute)
        current = assembly.current
        feed = make_feed(current, recipe, prepared, task, compute)
        step = make_step(current, recipe, prepared, task, compute, feed)
        largest = _largest_batches(feed)

        def take(index: int) -> None:
            rows = largest[index % len(largest)]
            seed_step(recipe.seed, index, 0, place)
            step(feed(rows), feed.examples.scored(rows), 0.0)

        # A captured step records its CUDA graph when it gets a shape for the second time, so all
        # warm-up steps but the last have the same batch.
        for index in range(_WARM_UP_STEPS):
            take(0 if index < _WARM_UP_STEPS - 1 else index)

        def take_some() -> None:
            for index in range(_TIMED_STEPS):
                take(index)

        step_seconds = _timed(take_some, place) / _TIMED_STEPS
        parts = anatomy(current.model)
        tokens = max(batch.padded_tokens for batch in feed(largest[0]))
        language = recipe.data.task == "language"
        evaluated = evaluation_batch(recipe, current.model) * recipe.data.length
        memory = estimated_peak(
            parts, compute.precision.itemsize, language, tokens, evaluated, recipe.optim.facts
        )
        steps = sum(stage.steps for stage in assembly.stages)
        optimizer = optimizer_tensors(current.model, step.optimizer).values()
        weights = sum(p.nbytes for p in current.model.parameters())
        checkpoint = weights + sum(tensor.nbytes for tensor in optimizer)
        tensors = dict(current.model.state_dict()) | optimizer_tensors(
            current.model, step.optimizer
        )
        copying = _timed(lambda: plain_tensors(tensors, copy=True), place)
        evaluating, reporting = _evaluation_seconds(current, recipe, prepared, task, compute)
        peak = meter.peak_bytes()  # of steps and evaluations: logits can take more than a step
        evaluations, checkpoints = _counts(recipe, prepared, assembly.stages)
        seconds = steps * step_seconds + evaluations * evaluating + checkpoints * copying
        return Checked(
            name, runs, None, parts.count(), parts.count("trainable"), steps, step_seconds,
            step.kind, seconds + reporting, evaluations, evaluating, reporting, checkpoints,
            copying, round(memory), peak,
            _CHECKPOINTS_KEPT * checkpoint + _RECORD_BYTES + _BYTES_PER_STEP * steps,
        )  # fmt: skip


def _timed(work: Callable[[], object], place: torch.device) -> float:
    """Return the seconds of some work; short work is repeated, and the median is returned."""
    seconds: list[float] = []
    while not seconds or (sum(seconds) < _TIMED_SECONDS and len(seconds) < _REPEATS):
        synchronize(place)
        began = time.perf_counter()
        work()
        synchronize(place)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _evaluation_seconds(
    current: StageModel, recipe: Recipe, prepared: PreparedData, task: Task, compute: Compute
) -> tuple[float, float]:
    """Time a few batches; return the seconds of an evaluation in training, and of the final one."""
    batch = evaluation_batch(recipe, current.model)

    def tokens(name: str, most: int | None = None) -> int:
        split, types = prepared.splits[name], wants_types(current.model)
        examples = task.examples(prepared, split, compute.device, types)
        return sum(examples.tokens_read(rows) for rows in examples.evaluation_order(batch)[:most])

    def evaluate_some() -> None:
        evaluate(
            task, current.objective, prepared, prepared.splits[selecting], batch, compute,
            layers=current.objective.supervised, most=_TIMED_BATCHES,
        )  # fmt: skip

    selecting = "tune" if "tune" in prepared.splits else "report"
    evaluate_some()  # the first evaluation of a process is slower
    by_token = _timed(evaluate_some, compute.device) / max(1, tokens(selecting, _TIMED_BATCHES))
    report = tokens("report") + (_decoded(prepared) if isinstance(prepared, Signals) else 0)
    return by_token * tokens(selecting), by_token * report


def _decoded(signals: Signals) -> int:
    """Return how many samples of EEG the final evaluation decodes, in windows that overlap by half.

    It scores whole recordings in this way, in addition to the windows of the report split.
    """
    from frostlab.envelopes.correlation import window_starts  # imports scipy
    from frostlab.training.eeg_report import reported

    samples = 0
    for split in reported(signals):
        windows = signals.splits[split]
        half = max(1, windows.length // 2)
        for recording in windows.recordings:
            samples += windows.length * len(window_starts(len(recording), windows.length, half))
    return samples


def _counts(recipe: Recipe, prepared: PreparedData, stages: Sequence[Stage]) -> tuple[int, int]:
    """Return how many evaluations and, at most, how many checkpoints a run has."""
    per_epoch = steps_per_epoch(len(prepared.splits["train"]), recipe.train)

    def due(every: Every | None, steps: int) -> set[int]:
        return {steps, *(() if every is None else range(0, steps, in_steps(every, per_epoch)))} - {
            0
        }

    evaluations = checkpoints = 0
    for stage in stages:
        evaluates = due(recipe.evaluate.every, stage.steps)
        evaluations += len(evaluates)
        checkpoints += len(evaluates | due(recipe.train.checkpoint, stage.steps))
    return evaluations, checkpoints + len(stages) - 1  # one more between any two stages


def _largest_batches(feed: Feed) -> list[Any]:
    """Return the largest (by tokens) of the first epoch's first 64 batches, and the first two."""
    order = feed.order(0)
    some = order[:64]
    largest = max(some, key=feed.examples.tokens_read)
    return [largest, *some[: _TIMED_STEPS - 1]]


def estimate_memory(recipe: Recipe) -> int | None:
    """Estimate the peak GPU memory of a run from its recipe alone; None if that is not possible."""
    try:
        model, _ = recipe_blueprint(recipe)
        parts = treated_parts(model, recipe)
    except FrostlabError:
        return None
    value_bytes = 4 if recipe.train.precision == "float32" else 2
    language = recipe.data.task == "language"
    tokens = recipe.train.batch / recipe.train.accumulate * recipe.data.length
    evaluated = evaluation_batch(recipe, model) * recipe.data.length
    return round(
        estimated_peak(parts, value_bytes, language, tokens, evaluated, recipe.optim.facts)
    )


@dataclass(frozen=True)
class Verdict:
    """The checks of all recipes, and their totals."""

    checked: tuple[Checked, ...]
    seconds: float  # of all runs, if `at_once` of them train at the same time
    at_once: int
    disk_bytes: int
    disk_free: int

    @property
    def problems(self) -> list[str]:
        """Why something cannot run, one line each."""
        lines = [f"{entry.id}: {entry.problem}" for entry in self.checked if entry.problem]
        if self.disk_bytes > self.disk_free:
            lines.append(
                f"the disk has {size_text(self.disk_free)} free, and the runs need about "
                f"{size_text(self.disk_bytes)}"
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "problems": self.problems}


def check_recipes(
    recipes: Sequence[tuple[str, Recipe, int]],
    runs: Path,
    *,
    data_dir: Path | None = None,
    devices: Sequence[str] = ("auto",),
    say: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Check recipes, each with its name and number of runs, on the first of the devices.

    The total time assumes that one run trains on each of the devices at a time.
    """
    checked = []
    for number, (name, recipe, count) in enumerate(recipes, 1):
        say(f"checking {number} of {len(recipes)}: {name}")
        checked.append(check_recipe(name, recipe, count, data_dir, devices[0]))
    folder = next(path for path in (runs, *runs.resolve().parents) if path.exists())
    return Verdict(
        tuple(checked),
        sum(entry.runs * (entry.seconds or 0.0) for entry in checked) / len(devices),
        len(devices),
        sum(entry.runs * (entry.disk_bytes or 0) for entry in checked),
        shutil.disk_usage(folder).free,
    )


def check_table(verdict: Verdict, width: int | None) -> list[str]:
    """Return a table of all recipes, the totals, and the problems."""
    rows: list[tuple[str, ...]] = [_HEAD]
    rows += [_row(entry) for entry in verdict.checked if entry.problem is None]
    lines = _fitted(rows, width) if len(rows) > 1 else []
    total = sum(entry.runs for entry in verdict.checked if entry.problem is None)
    places = f" on {verdict.at_once} devices" if verdict.at_once > 1 else ""
    lines.append(
        f"{counted(total, 'runs')}{places}: {hms(verdict.seconds)}; "
        f"{size_text(verdict.disk_bytes)} of disk, {size_text(verdict.disk_free)} free"
    )
    if total:
        lines.append(f"the time is {_parts(verdict)}; starting the runs is not included")
    if any(entry.memory_peak is None and entry.problem is None for entry in verdict.checked):
        lines.append("memory is estimated; it is measured only on a CUDA GPU")
    return lines + [f"cannot run: {line}" for line in verdict.problems]


def _fitted(rows: Sequence[tuple[str, ...]], width: int | None) -> list[str]:
    """Return the lines of a table; columns that make it too wide are left out and named below."""
    shown = [
        [index for index, name in enumerate(_HEAD) if name not in _LESS_IMPORTANT[:count]]
        for count in range(len(_LESS_IMPORTANT) + 1)
    ]
    tables = [[[row[index] for index in indices] for row in rows] for indices in shown]
    table, lines = fitted(tables, width, keep=_KEPT_WHOLE)
    lines += columns(table, right=range(1, len(_HEAD)))
    hidden = [name for name in _HEAD if name not in table[0]]
    return lines + ([f"without {enumerated(hidden)}; --wide shows all columns"] if hidden else [])


def _parts(verdict: Verdict) -> str:
    """Return what the time of all runs consists of."""
    entries = [entry for entry in verdict.checked if entry.problem is None]
    parts = {
        "steps": [(e.steps or 0) * (e.step_seconds or 0.0) for e in entries],
        "evaluations": [(e.evaluations or 0) * (e.evaluation_seconds or 0.0) for e in entries],
        "final evaluations": [e.report_seconds or 0.0 for e in entries],
        "checkpoints": [(e.checkpoints or 0) * (e.checkpoint_seconds or 0.0) for e in entries],
    }
    counts = [entry.runs / verdict.at_once for entry in entries]
    return ", ".join(
        f"{_time(sum(n * spent for n, spent in zip(counts, seconds, strict=True)))} of {name}"
        for name, seconds in parts.items()
    )


def _row(entry: Checked) -> tuple[str, ...]:
    step = NONE if entry.step_seconds is None else _time(entry.step_seconds)
    times = "" if entry.evaluation_seconds is None else f" × {_time(entry.evaluation_seconds)}"
    memory = f"{'≈ ' if entry.memory_peak is None else ''}{size_text(entry.memory)}"
    return (
        entry.id, str(entry.runs), f"{entry.parameters or 0:,}", f"{entry.steps or 0:,}", step,
        f"{entry.evaluations or 0:,}{times}", hms(entry.seconds), memory,
        size_text(entry.disk_bytes),
    )  # fmt: skip


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else hms(seconds)

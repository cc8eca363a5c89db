"""`--check`: find the data, build every model and take a few steps, without starting a run.

It says how long the runs would take, how much memory and disk they need, and which cannot run.
"""

import gc
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from frostlab.data.prepare import prepare
from frostlab.devices import choose_device, release_cached_memory, synchronize
from frostlab.errors import FrostlabError, first_line
from frostlab.models.build import recipe_blueprint
from frostlab.recipe.recipe import Recipe
from frostlab.roles.read import anatomy
from frostlab.text import NONE, columns, counted, hms
from frostlab.timing.clock import Meter
from frostlab.timing.memory import estimated_memory
from frostlab.training.batches.feed import Feed
from frostlab.training.distributed import Compute
from frostlab.training.setup import (
    assemble,
    build_first_stage,
    choose_precision,
    default_modes,
    make_feed,
    make_step,
    with_threads,
)
from frostlab.training.step.eager import seed_step
from frostlab.training.step.optimizer import optimizer_tensors
from frostlab.training.tasks import TASKS

_TIMED_STEPS = 3
_WARM_UP_STEPS = 3  # a captured step is replayed from the third on
_KEPT = 3  # checkpoints on the disk at once: the best, the newest two
_RECORD_BYTES = 2_000_000  # of a run's other files, at least
_BYTES_PER_STEP = 60  # of events.jsonl


@dataclass(frozen=True)
class Checked:
    """What one recipe needs; None marks what is not known."""

    id: str
    runs: int  # seeds, or 1
    problem: str | None = None  # why it cannot run
    parameters: int | None = None
    trainable: int | None = None
    steps: int | None = None
    step_seconds: float | None = None
    kind: str | None = None  # of the step: eager, compiled or captured
    seconds: float | None = None  # of the steps of one run, without evaluations
    memory_estimated: int | None = None  # bytes at the peak of a step, by formula
    memory_peak: int | None = None  # bytes at the peak of the steps that were taken; CUDA only
    disk_bytes: int | None = None  # of one run

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
    except torch.OutOfMemoryError:
        return Checked(name, runs, f"out of memory; lower train.batch {recipe.train.batch}")
    except FrostlabError as error:
        return Checked(name, runs, str(error))
    except Exception as error:  # a model's own code can fail in many ways
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
        current.objective.train()
        feed = make_feed(current, recipe, prepared, task, compute)
        step = make_step(current, recipe, prepared, task, compute, feed)
        largest = _largest_batches(feed)

        def take(index: int) -> None:
            rows = largest[index % len(largest)]
            seed_step(recipe.seed, index, 0, place)
            step(feed(rows), feed.examples.scored(rows), 0.0)

        for index in range(_WARM_UP_STEPS):
            take(0 if index < _WARM_UP_STEPS - 1 else index)
        synchronize(place)
        began = time.perf_counter()
        for index in range(_TIMED_STEPS):
            take(index)
        synchronize(place)
        step_seconds = (time.perf_counter() - began) / _TIMED_STEPS
        peak = meter.peak_bytes()
        parts = anatomy(current.model)
        tokens = max(batch.padded_tokens for batch in feed(largest[0]))
        language = recipe.data.task == "language"
        memory = estimated_memory(parts, compute.precision.itemsize, language).of(tokens)
        steps = sum(stage.steps for stage in assembly.stages)
        optimizer = optimizer_tensors(current.model, step.optimizer).values()
        weights = sum(p.nbytes for p in current.model.parameters())
        checkpoint = weights + sum(tensor.nbytes for tensor in optimizer)
        return Checked(
            name, runs, None, parts.count(), parts.count("trainable"), steps, step_seconds,
            step.kind, steps * step_seconds, round(memory), peak,
            _KEPT * checkpoint + _RECORD_BYTES + _BYTES_PER_STEP * steps,
        )  # fmt: skip


def _largest_batches(feed: Feed) -> list[Any]:
    """Return batches of the first epoch: the one with the most tokens, and the first ones."""
    order = feed.order(0)
    some = order[:64]
    largest = max(some, key=feed.examples.tokens_read)
    return [largest, *some[: _TIMED_STEPS - 1]]


def estimate_memory(recipe: Recipe) -> int | None:
    """Estimate the peak GPU memory of a run from its recipe alone; None if that is not possible."""
    try:
        model, _ = recipe_blueprint(recipe)
        parts = anatomy(model)
    except FrostlabError:
        return None
    value_bytes = 4 if recipe.train.precision == "float32" else 2
    language = recipe.data.task == "language"
    tokens = recipe.train.batch / recipe.train.accumulate * recipe.data.length
    return round(estimated_memory(parts, value_bytes, language).of(tokens))


@dataclass(frozen=True)
class Verdict:
    """The sum of all checks."""

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
                f"the disk has {_size(self.disk_free)} free, and the runs need about "
                f"{_size(self.disk_bytes)}"
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
    """Check recipes, each with its name and number of runs, on the first of the devices."""
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
    rows: list[tuple[str, ...]] = [
        ("id", "runs", "parameters", "steps", "step", "time", "memory", "disk")
    ]
    rows += [_row(entry) for entry in verdict.checked if entry.problem is None]
    lines = columns(rows, right=range(1, 8), width=width) if len(rows) > 1 else []
    total = sum(entry.runs for entry in verdict.checked if entry.problem is None)
    places = f" on {verdict.at_once} devices" if verdict.at_once > 1 else ""
    lines.append(
        f"{counted(total, 'runs')}{places}: {hms(verdict.seconds)} of steps, without evaluations; "
        f"{_size(verdict.disk_bytes)} of disk, {_size(verdict.disk_free)} free"
    )
    if any(entry.memory_peak is None and entry.problem is None for entry in verdict.checked):
        lines.append("memory is estimated for this device; on a GPU, its peak is measured")
    return lines + [f"cannot run: {line}" for line in verdict.problems]


def _row(entry: Checked) -> tuple[str, ...]:
    step = NONE if entry.step_seconds is None else f"{1e3 * entry.step_seconds:.3g} ms"
    memory = f"{'≈ ' if entry.memory_peak is None else ''}{_size(entry.memory)}"
    return (
        entry.id, str(entry.runs), f"{entry.parameters or 0:,}", f"{entry.steps or 0:,}", step,
        hms(entry.seconds), memory, _size(entry.disk_bytes),
    )  # fmt: skip


def _size(size: int | None) -> str:
    if size is None:
        return NONE
    return f"{size / 1e9:.3g} GB" if size >= 10**9 else f"{size / 1e6:.3g} MB"

"""Runs that a plan asks for and that are not there yet, one after another."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from frostlab.compare.plan import Arm, Plan
from frostlab.errors import BadInput, FrostlabError
from frostlab.models.pretrained import first_line
from frostlab.recipe import Recipe
from frostlab.records.folder import write_whole
from frostlab.records.places import finished_status
from frostlab.records.record import RunRecord
from frostlab.records.words import number
from frostlab.training.failures import RunFailed
from frostlab.training.progress import Silent
from frostlab.training.running import run

Say = Callable[[str], None]
Tuned = dict[str, dict[str, float]]  # what was chosen, by arm and setting


@dataclass(frozen=True)
class Task:
    """One run: what it trains, where it lies, and what to call it."""

    arm: str
    seed: int
    recipe: Recipe
    path: Path
    about: str


class Stopped(RunFailed):
    """Somebody asked the comparison to stop; what is finished stays."""


class Runner:
    """Takes tasks in turn, and says where it is and how long the rest will take."""

    def __init__(self, data_dir: Path | None, say: Say, jobs: int = 1) -> None:
        self.data_dir, self._say, self.jobs = data_dir, say, jobs

    def run_all(
        self, tasks: Sequence[Task], *, alone: bool = False
    ) -> dict[tuple[str, int], RunRecord]:
        """Every task's record; a run that failed has one, too, and the others go on.

        `alone`: one at a time, for their times.
        """
        left = [task for task in tasks if not _is_done(task)]
        if len(left) < len(tasks):
            self._say(f"{len(tasks) - len(left)} of {len(tasks)} runs are there already")
        at_once, spent = 1 if alone else self.jobs, 0.0
        for count, (task, outcome, seconds) in enumerate(self._outcomes(left, at_once), 1):
            if outcome is None:
                raise Stopped("stopped; the same command goes on")
            spent += seconds
            remaining = spent / count * (len(left) - count) / at_once
            self._say(
                f"run {count} of {len(left)}  {task.about}  {outcome}  {seconds:.0f} s; "
                f"{_duration(remaining)} left"
            )
        return {(task.arm, task.seed): RunRecord(task.path) for task in tasks}

    def _outcomes(
        self, tasks: Sequence[Task], at_once: int
    ) -> Iterator[tuple[Task, str | None, float]]:
        if at_once == 1 or len(tasks) < 2:
            for task in tasks:
                yield (task, *take(task, self.data_dir))
            return
        fresh = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(at_once, fresh)
        try:
            going = {pool.submit(take, task, self.data_dir): task for task in tasks}
            for done in as_completed(going):
                yield (going[done], *done.result())
        except BrokenProcessPool:
            raise FrostlabError("a run's process was killed; the same command goes on") from None
        finally:
            pool.shutdown(cancel_futures=True)


def take(task: Task, data_dir: Path | None) -> tuple[str | None, float]:
    """Run a task: what came of it in words, None if it was asked to stop, and its seconds."""
    began = time.monotonic()
    try:
        record = run(
            task.recipe, name=task.arm, out=task.path, resume=task.path.exists(),
            data_dir=data_dir, display=Silent(),
        )  # fmt: skip
    except RunFailed as error:
        stopped = finished_status(task.path) == "stopped"
        return None if stopped else f"failed: {error}", time.monotonic() - began
    except Exception as error:  # a bug, perhaps in one arm alone: the others go on
        if isinstance(error, FrostlabError) or finished_status(task.path) != "failed":
            raise
        write_whole(task.path / "traceback.txt", traceback.format_exc())
        return f"failed: {type(error).__name__}: {first_line(error)}", time.monotonic() - began
    metric = task.recipe.metric
    return f"{metric} {number(record.metrics[metric])}", time.monotonic() - began


def _is_done(task: Task) -> bool:
    """Whether a task has its record; one of another recipe is refused."""
    if finished_status(task.path) not in ("finished", "diverged"):
        return False
    if RunRecord(task.path).result["recipe_digest"] != task.recipe.digest:
        raise BadInput(f"{task.path} holds a run of another recipe; choose another folder")
    return True


def result_tasks(plan: Plan, folder: Path, tuned: Tuned) -> list[Task]:
    """Every arm at every seed; arms alternate, forwards and backwards."""
    return [
        Task(arm.name, seed, plan.recipe_of(arm, seed, tuned.get(arm.name)),
             folder / "runs" / f"{arm.name}-s{seed}", f"{arm.name} seed {seed}")
        for number, seed in enumerate(plan.seeds)
        for arm in turns(plan.arms, number)
    ]  # fmt: skip


def round_tasks(plan: Plan, folder: Path, tuned: Tuned) -> list[Task]:
    """Whole runs at one seed that alternate, for their time alone."""
    return [
        Task(arm.name, number, plan.recipe_of(arm, plan.seeds[0], tuned.get(arm.name)),
             folder / "rounds" / f"{arm.name}-r{number + 1}", f"{arm.name} round {number + 1}")
        for number in range(plan.rounds)
        for arm in turns(plan.arms, number)
    ]  # fmt: skip


def turns(arms: Sequence[Arm], number: int) -> Sequence[Arm]:
    return arms if number % 2 == 0 else arms[::-1]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

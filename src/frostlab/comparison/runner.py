"""Runs that a plan asks for and that are not there yet, one after another."""

import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostlab.comparison.plan import SCHEMA, Arm, Plan
from frostlab.errors import BadInput, FrostlabError, first_line
from frostlab.recipe.recipe import Recipe
from frostlab.records.folder import RunRecord, differences, finished_status
from frostlab.storage import Lock, finite, write_whole
from frostlab.text import number
from frostlab.training.run import RunFailed, run
from frostlab.training.state import Silent

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
    if RunRecord(task.path).result.recipe_digest != task.recipe.digest:
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


_PLAN, _LOCK = "plan.json", "compare.lock"


class ComparisonFolder:
    """Where a comparison's plan, runs and answers lie."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def open(self, plan: Plan) -> Iterator[Plan]:
        """Take the folder and write the plan, or find the one it was begun with.

        The plan that comes back has every seed that was ever asked for.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"{self.path} is a file, not a folder")
        known = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        begun = {name for name in known if name == _LOCK or name.startswith(f".{_PLAN}")}
        if known - begun and _PLAN not in known:
            raise BadInput(f"{self.path} is not empty and holds no comparison; choose another")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.path / _LOCK)
            taken = lock.acquire(seconds=0)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be written ({error.strerror})") from None
        if not taken:
            raise BadInput(f"{self.path}: another process is comparing in it")
        try:
            yield self._agree(plan)
        finally:
            lock.release()

    def _agree(self, plan: Plan) -> Plan:
        stored = self.read(_PLAN)
        looks: list[dict[str, Any]] = []
        if stored is not None or (self.path / _PLAN).exists():
            known = self._known(stored)
            if known.digest != plan.digest:
                changed = differences(known.model_dump(mode="json"), plan.model_dump(mode="json"))
                named = ", ".join(key for key in changed if key != "seeds")
                raise BadInput(f"{self.path} was made by another plan ({named} differ)")
            seeds = (*known.seeds, *(seed for seed in plan.seeds if seed not in known.seeds))
            looks = stored["looks"]
            plan = plan.model_copy(update={"seeds": seeds})
        self._write_plan(plan, looks)
        return plan

    def _known(self, stored: Any) -> Plan:
        try:
            if stored["schema"] == SCHEMA and isinstance(stored["looks"], list):
                tune = stored["plan"]["tune"] or []  # a list since several can be tuned
                tune = [tune] if isinstance(tune, dict) else tune
                return Plan.model_validate_json(json.dumps(stored["plan"] | {"tune": tune}))
        except (KeyError, TypeError, ValueError):
            pass
        raise BadInput(f"{self.path / _PLAN} is damaged, or of another version")

    def _write_plan(self, plan: Plan, looks: list[dict[str, Any]]) -> None:
        self.write(
            _PLAN,
            {"schema": SCHEMA, "plan": plan.model_dump(mode="json"), "looks": looks},
        )

    def look(self, plan: Plan) -> int:
        """Which look at the results this is: each number of seeds that was judged is one."""
        stored = self.read(_PLAN)
        assert stored is not None, "the plan is written first"
        looks = stored["looks"]
        known = [look["seeds"] for look in looks]
        if len(plan.seeds) not in known:
            looks.append({"seeds": len(plan.seeds), "at": round(time.time(), 3)})
            self._write_plan(plan, looks)
            known.append(len(plan.seeds))
        return known.index(len(plan.seeds)) + 1

    def read(self, name: str) -> Any:
        """A JSON file of the folder, or None."""
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise BadInput(f"{path} is damaged ({error})") from None

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_whole(self.path / name, json.dumps(finite(value), indent=1) + "\n")

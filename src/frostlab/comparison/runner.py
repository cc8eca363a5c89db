"""The training runs of a comparison, and the folder that stores its plan and results.

A task is one training run of an arm; an arm is a variant of the recipe.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from frostlab.comparison.evidence import read_plan
from frostlab.comparison.judging.looks import Look, Looks, Results, take_look
from frostlab.comparison.plan import SCHEMA, Arm, Plan
from frostlab.errors import BadInput, FrostlabError
from frostlab.matrix.places import Opened, Places, executor_in
from frostlab.matrix.queue import Queue
from frostlab.matrix.task import Task, is_done
from frostlab.matrix.workers import InProcess, LocalWorkers, Slot
from frostlab.recipe.recipe import differences
from frostlab.records.folder import RunRecord, finished_status
from frostlab.records.manifest import MANIFEST, QUEUE, problems_in
from frostlab.storage import Lock, finite, read_json, write_whole
from frostlab.text import counted
from frostlab.training.loop import interruptions
from frostlab.training.progress import Nowhere, Screen
from frostlab.training.run import RunFailed
from frostlab.typed import check_schema, read

_MOST_JOBS = 256
_PLAN, _LOCK = "plan.json", "compare.lock"
# Files that a later call reads, besides the runs, to continue or judge the comparison.
_INPUTS = (_PLAN, "steps.json", "quick.json", "assay.json", "tuning.json")


@dataclass(frozen=True)
class ArmTask(Task):
    """One training run of an arm; `name` is the arm, with tuned values if any: oelm@lr=0.001."""

    number: int  # the seed or, in `round_tasks`, the index of the round

    @property
    def key(self) -> tuple[str, int]:
        """The name and the number."""
        return self.name, self.number


class Finished:
    """A stand-in for a `Runner`; it trains nothing, and returns the records of earlier runs."""

    data_dir: Path | None = None
    device: str | None = None
    jobs = 1
    on_cluster = False

    def say(self, line: str) -> None:
        """Ignore a line of progress."""

    def must_train(self, path: Path) -> None:
        """Refuse to go on without a file that only `frostlab compare` writes."""
        raise BadInput(f"{path} is missing; finish the comparison with frostlab compare")

    def run_all(
        self, tasks: Sequence[ArmTask], *, alone: bool = False
    ) -> dict[tuple[str, int], RunRecord]:
        """Return the records of all tasks; refuse a task without a readable result."""
        for task in tasks:
            if finished_status(task.path) is None:
                raise BadInput(
                    f"{task.path} has no readable result; finish the comparison with "
                    "frostlab compare"
                )
            is_done(task)  # refuses a run of another recipe
        return {task.key: RunRecord(task.path) for task in tasks}


class Stopped(RunFailed):
    """Raised when a run was stopped by the user; finished runs are kept."""


class Runner:
    """A runner of tasks that reports progress and the time left.

    Tasks run one at a time in this process, with a progress bar on a live screen; or `jobs` at a
    time in worker processes on this device; or in the `places` that the user has chosen.
    """

    def __init__(
        self,
        data_dir: Path | None,
        screen: Screen | None = None,
        jobs: int = 1,
        places: Places | None = None,
    ) -> None:
        if type(jobs) is not int or not 1 <= jobs <= _MOST_JOBS:
            raise BadInput(f"jobs {jobs!r:.40} should be a whole number from 1 to {_MOST_JOBS}")
        self.data_dir, self.screen, self.jobs = data_dir, screen or Nowhere(), jobs
        self.say, self._places = self.screen.line, places

    @property
    def device(self) -> str | None:
        """The device of steps that are timed in this process; None: the recipe's."""
        return None if self._places is None else self._places.first_device()

    @property
    def on_cluster(self) -> bool:
        """Whether runs train on a Ray cluster or through Slurm."""
        return self._places is not None and (self._places.ray or self._places.slurm) is not None

    def must_train(self, path: Path) -> None:
        """Accept that a file is missing, because this runner can make its content."""

    def run_all(
        self, tasks: Sequence[ArmTask], *, alone: bool = False
    ) -> dict[tuple[str, int], RunRecord]:
        """Run the tasks that are not done, and return the records of all tasks by `ArmTask.key`.

        A run that fails in training also has a record, and does not stop the other runs. With
        `alone`, tasks run one at a time, so that no task slows another down.
        """
        for path in {path for task in tasks for path in (task.path, task.path.parent)}:
            if path.is_symlink():
                raise BadInput(f"{path} is a link; runs are written only inside their folder")
        left = [task for task in tasks if not is_done(task)]
        if len(left) < len(tasks):
            self.say(f"{len(tasks) - len(left)} of {len(tasks)} runs are done already")
        if left:
            self._run(left, alone)
        return {task.key: RunRecord(task.path) for task in tasks}

    def _run(self, left: Sequence[ArmTask], alone: bool) -> None:
        """Run tasks through the queue; at the end, raise an error if one crashed or was stopped."""
        total, crashed, stopped, in_workers = 0.0, [], False, not self._stays_here(left, alone)
        with self._executor(left, in_workers, alone) as opened, ExitStack() as stack:
            # In this process, the run itself catches signals.
            asked = stack.enter_context(interruptions()) if in_workers else _never
            # A run that was stopped stops the others too, which then write their checkpoints.
            queue = Queue(opened.executor, asked_to_stop=lambda: asked() or stopped, say=self.say)
            outcomes = stack.enter_context(queue.session(left))
            for count, (task, outcome) in enumerate(outcomes, 1):
                stopped |= outcome.kind == "stopped"
                if stopped:
                    continue
                if outcome.kind == "refused":
                    raise BadInput(outcome.text)
                if outcome.kind in ("crashed", "blocked"):
                    crashed.append(f"{task.about} ({outcome.text})")
                total += outcome.seconds
                remaining = total / count * (len(left) - count) / opened.at_once
                failed = "" if outcome.kind == "finished" else "failed: "
                self.say(
                    f"run {count} of {len(left)}  {task.about}  {failed}{outcome.text}  "
                    f"{outcome.seconds:.0f} s; {_duration(remaining)} left"
                )
        if stopped:
            raise Stopped("stopped; the same command continues the comparison")
        if crashed:
            raise FrostlabError(
                f"{counted(len(crashed), 'runs')} ended without a result: {'; '.join(crashed[:3])};"
                " the same command tries again"
            )

    def _stays_here(self, left: Sequence[ArmTask], alone: bool) -> bool:
        """Return whether tasks run in this process."""
        return self._places is None and (alone or self.jobs == 1 or len(left) < 2)

    @contextmanager
    def _executor(self, left: Sequence[ArmTask], in_workers: bool, alone: bool) -> Iterator[Opened]:
        if not in_workers:
            yield Opened(InProcess(self.data_dir, self.screen), "this process", 1)
        elif self._places is None:
            workers = LocalWorkers([Slot("this device", self.jobs)], self.data_dir)
            yield Opened(workers, "this device", self.jobs)
        else:
            places = self._places.for_one_run() if alone else self._places
            logs = _logs_of(left[0].path.parent)
            with executor_in(places, self.data_dir, logs, say=self.say) as opened:
                self.jobs = max(self.jobs, min(opened.at_once, len(left)))
                yield opened


def _logs_of(runs: Path) -> Path:
    """Make and return the folder for the logs of a comparison's folder of runs, such as `runs`."""
    logs = runs.parent / QUEUE / runs.name / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def _never() -> bool:
    return False


def round_tasks(
    plan: Plan, folder: Path, tuned: Mapping[str, Mapping[str, float]]
) -> list[ArmTask]:
    """Return the tasks of the plan's rounds; in a round, every arm trains once, to be timed.

    All rounds have the first seed. `tuned` holds the values of tuned settings by arm. Every second
    round takes the arms in reverse order, so that a drift of the machine's speed affects all arms
    alike.
    """
    return [
        ArmTask(arm.name, plan.recipe_of(arm, plan.seeds[0], tuned.get(arm.name)),
                folder / "rounds" / f"{arm.name}-r{index + 1}", f"{arm.name} round {index + 1}",
                index)
        for index in range(plan.rounds)
        for arm in alternated(plan.arms, index)
    ]  # fmt: skip


def alternated(arms: Sequence[Arm], index: int) -> Sequence[Arm]:
    """Return the arms in the given order for an even index, and reversed for an odd index."""
    return arms if index % 2 == 0 else arms[::-1]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class StoredPlan:
    """The content of plan.json."""

    schema: int  # version of the file's format: `SCHEMA` of frostlab.comparison.plan
    plan: dict[str, Any]  # the keys of `Plan`
    planned: float  # when the plan was written first, in seconds since 1970
    looks: list[Look]  # the looks (analyses of the results) so far, oldest first


def stored_plan(path: Path) -> StoredPlan | None:
    """Return the content of a plan.json; None if it does not exist."""
    values = _read_value(path)
    if values is None:
        return None
    return read(StoredPlan, check_schema(values, SCHEMA, path), path)


def plan_in(stored: StoredPlan, path: Path) -> Plan:
    """Return the plan of the plan.json at `path`."""
    plan = read_plan(stored.plan, path)
    plan.check_seeds()
    return plan


def _read_value(path: Path) -> Any:
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    if value is None:
        raise BadInput(f"{path} is damaged: it holds only null")
    return value


class ComparisonFolder:
    """The folder with a comparison's plan, runs and evidence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def open(self, plan: Plan, looks: Sequence[Look] = ()) -> Iterator[Plan]:
        """Lock the folder, write the plan, and yield it with the seeds of earlier calls.

        A stored plan with another digest is an error; seeds do not change the digest. The lock
        keeps other comparisons from writing to the folder. If the comparison reproduces another
        one, `looks` are the looks of the original; they are stored with the new plan.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"{self.path} is a file; choose another folder with --out")
        try:
            names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read ({error.strerror})") from None
        # An interrupted first call leaves only the lock and a temporary file of the plan.
        leftovers = {name for name in names if name == _LOCK or name.startswith(f".{_PLAN}")}
        if names - leftovers and _PLAN not in names:
            raise BadInput(
                f"{self.path} is not empty and holds no comparison; "
                "choose another folder with --out"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.path / _LOCK)
            locked = lock.acquire(seconds=0)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be written ({error.strerror})") from None
        if not locked:
            raise BadInput(f"{self.path}: another process is running a comparison in this folder")
        try:
            self.check_inputs()
            yield self._with_stored_seeds(plan, looks)
        finally:
            lock.release()

    def _with_stored_seeds(self, plan: Plan, known: Sequence[Look]) -> Plan:
        """Store and return the plan, with the stored plan's seeds before its own new seeds."""
        stored, planned, looks = self._stored(), round(time.time(), 3), list(known)
        if stored is not None:
            before = read_plan(stored.plan, self.path / _PLAN)
            before.check_seeds()
            if before.digest != plan.digest:
                changed = differences(before.model_dump(mode="json"), plan.model_dump(mode="json"))
                keys = ", ".join(key for key in changed if key != "seeds")
                raise BadInput(
                    f"{self.path} was made by another plan ({keys} differ); "
                    "choose another folder with --out"
                )
            seeds = (*before.seeds, *(seed for seed in plan.seeds if seed not in before.seeds))
            planned, looks = stored.planned, stored.looks
            plan = plan.model_copy(update={"seeds": seeds})
        new = StoredPlan(SCHEMA, plan.model_dump(mode="json"), planned, looks)
        if new != stored:
            self._write(new)
        return plan

    def check_inputs(self) -> None:
        """Refuse files that every call reads (steps.json, …) if they changed since the last call.

        A file that was deleted is not refused.
        """
        if (self.path / MANIFEST).exists():
            inputs = {str(path) for name in _INPUTS if (path := self.path / name).exists()}
            for problem in problems_in(self.path, deep=False):
                if problem.path in inputs and not problem.added:
                    raise BadInput(f"{problem}; restore it, or choose another folder with --out")

    def look(self, plan: Plan, results: Results) -> Looks:
        """Count a look at these results, and store it and the earlier looks in plan.json."""
        stored = self._stored()
        assert stored is not None, "the plan is written first"
        looks = take_look(plan, self.path, results, stored.looks)
        # Store looks at results in other folders, too, for when this folder is on another machine.
        known = [*looks.earlier, looks.current]
        new = [look for look in known if look not in stored.looks]
        if new:
            self._write(replace(stored, looks=[*stored.looks, *new]))
        return looks

    def _write(self, stored: StoredPlan) -> None:
        self.write(_PLAN, asdict(stored))

    def plan(self) -> Plan:
        """Return the stored plan."""
        stored = self._stored()
        if stored is None:
            raise BadInput(f"{self.path} holds no comparison: it has no {_PLAN}")
        return plan_in(stored, self.path / _PLAN)

    def _stored(self) -> "StoredPlan | None":
        return stored_plan(self.path / _PLAN)

    def read(self, name: str) -> Any:
        """Read a JSON file of the folder; return None if it does not exist."""
        return _read_value(self.path / name)

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file atomically, with null for numbers that are not finite.

        The manifest of an earlier call, which has the checksums of the folder's files, is removed,
        because it is no longer right.
        """
        (self.path / MANIFEST).unlink(missing_ok=True)
        write_whole(self.path / name, json.dumps(finite(value), indent=1) + "\n")

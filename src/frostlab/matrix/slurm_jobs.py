"""An executor on Slurm, through submitit: every run is one job of a job array.

Shortly before its time limit, a job's run stops with a checkpoint, and the job is requeued and goes
on from there. The folder of runs must be on a file system that the nodes share. States are read
with squeue, because sacct needs a database that many clusters do not have.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from frostlab.errors import BadInput, first_line, nearest, require
from frostlab.matrix.queue import Ended, Reason
from frostlab.matrix.task import Kind, Outcome, Task, run_task
from frostlab.matrix.workers import output_to
from frostlab.storage import read_json, write_whole
from frostlab.text import counted
from frostlab.training.progress import Display, Lines
from frostlab.typed import read

_MOST_JOBS = 1000  # most jobs that may be pending or running at the same time
_LOOK_SECONDS = 2.0  # time between two calls of squeue
_RETRY_SECONDS = 30.0  # wait before jobs that sbatch refused are submitted again
_TIMEOUTS = 1000  # how often a job may reach its time limit and be requeued
_WARNING_SECONDS = (10, 90)  # least and most time between Slurm's signal and the time limit
_LOST_SECONDS = 10.0  # wait for the file with a job's outcome after squeue reports its end
_LIVE = (
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED",
    "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "REQUEUE_FED", "SPECIAL_EXIT",
)  # fmt: skip
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
# Options that submitit knows by these names; others are passed to sbatch as they are.
_KNOWN_OPTIONS = (
    "partition", "nodes", "cpus_per_task", "gpus_per_node", "qos", "mem", "mem_per_cpu",
    "constraint", "exclude", "account", "gres", "nodelist", "comment", "array_parallelism",
    "signal_delay_s",
)  # fmt: skip


@dataclass(frozen=True)
class _Job:
    """A line of squeue."""

    id: str
    state: str
    node: str


def parse_options(text: str) -> dict[str, Any]:
    """Return the options in `partition=gpu,time=4:00:00` by the names that submitit uses."""
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        if not equals or not name.isidentifier() or not value.strip():
            raise BadInput(
                f"--slurm {part!r:.60} should be KEY=VALUE, such as partition=gpu,time=4:00:00"
            )
        options[name] = value.strip()
    if "time" in options:
        options["time"] = _minutes(options["time"])
    delay = options.get("signal_delay_s", "90")
    if not delay.isdecimal():
        raise BadInput(f"--slurm signal_delay_s={delay!r:.40} should be seconds, such as 90")
    return options


def _minutes(text: str) -> int:
    """Return a time of sbatch, such as 30, 4:00:00 or 1-12:00:00, in minutes."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise BadInput(f"--slurm time={text!r:.40} should be a time, such as 4:00:00")
    days, first, second, third = (int(group) if group else 0 for group in match.groups())
    if match[1] is not None:  # days-hours:minutes:seconds
        seconds = 86400 * days + 3600 * first + 60 * second + third
    elif match[4] is not None:  # hours:minutes:seconds
        seconds = 3600 * first + 60 * second + third
    else:  # minutes:seconds
        seconds = 60 * first + second
    return max(1, math.ceil(seconds / 60))


def check_options(text: str) -> None:
    """Refuse wrong options, a machine without Slurm, and a partition that does not exist."""
    require("submitit", "slurm", "--slurm")
    options = parse_options(text)
    if "time" not in options:
        raise BadInput(
            f"--slurm {text:.60}: add the time limit of a job, such as time=4:00:00; a run that "
            "needs longer is requeued, and goes on"
        )
    partition = options.get("partition")
    for program in ("sbatch", "squeue", "scancel", "sinfo", "srun"):
        if shutil.which(program) is None:
            raise BadInput(
                f"--slurm: {program} is not installed here; run frostlab on a Slurm login node"
            )
    partitions = _ask("sinfo", "--noheader", "--format=%R").split()
    if partition is not None and partition not in partitions:
        hint = nearest(partition, partitions) or f"; there are {', '.join(partitions)}"
        raise BadInput(f"--slurm partition={partition:.60} does not exist{hint}")


def _ask(*command: str) -> str:
    """Return the output of one of Slurm's programs; an error is one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise BadInput(f"--slurm: {command[0]}: {first_line(error)}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BadInput(f"--slurm: {lines[0]:.200}")
    return done.stdout


def warning_seconds(minutes: int) -> int:
    """Return how long before the time limit Slurm should send its signal, by default.

    It is a sixth of the limit, but at least 10 s and at most 90 s. Short jobs get a late signal,
    because Slurm checks time limits only twice a minute: the signal may come half a minute too
    early, and it kills a Python process that is still importing modules.
    """
    least, most = _WARNING_SECONDS
    return max(least, min(most, 60 * minutes // 6))


class SlurmRun:
    """The function of a job: it trains a run, or resumes it, and leaves its outcome in a file.

    Args:
        grace: seconds for a step and a checkpoint after Slurm's signal.
    """

    def __init__(
        self, task: Task, data_dir: Path | None, logs: Path, outcome: Path, grace: float
    ) -> None:
        self.task, self.data_dir, self.logs = task, data_dir, logs
        self.outcome, self.grace = outcome, grace

    def __call__(self) -> None:
        """Train the run and write its outcome; if the time limit stopped it, requeue the job."""
        requeue, announced = signal.getsignal(signal.SIGUSR2), threading.Event()
        if callable(requeue):  # the handler of submitit
            signal.signal(signal.SIGUSR2, self._stop_first(requeue, announced))
        signal.signal(signal.SIGTERM, _interrupt)  # until training sets its own handler
        try:
            with output_to(self.logs, self.task):
                outcome = run_task(self.task, self.data_dir, Display(Lines()))
        except KeyboardInterrupt:
            outcome = Outcome("stopped", "stopped")
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # there is nothing left to stop
        if announced.is_set() and outcome.kind == "stopped" and callable(requeue):
            requeue(signal.SIGUSR2, None)  # ends this process
        write_whole(self.outcome, json.dumps(asdict(outcome)) + "\n")

    def _stop_first(
        self, requeue: Callable[[int, FrameType | None], Any], announced: threading.Event
    ) -> Callable[[int, FrameType | None], None]:
        """Return a handler that lets the run write a checkpoint before the job is requeued.

        The checkpoint must come first, because a requeued job is killed at once. If it takes longer
        than `grace`, the job is requeued without it.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            announced.set()
            signal.signal(signal.SIGALRM, requeue)
            signal.setitimer(signal.ITIMER_REAL, self.grace)
            os.kill(os.getpid(), signal.SIGTERM)  # the run stops after a step

        return handle

    def checkpoint(self) -> Any:
        """Return what submitit runs in the requeued job: this function again.

        The run then continues from its last checkpoint.
        """
        submitit = require("submitit", "slurm", "--slurm")
        return submitit.helpers.DelayedSubmission(self)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class SlurmJobs:
    """An executor whose tasks are jobs of Slurm.

    A job that an earlier command has submitted is found again by its number, which is kept in a
    folder next to the logs.
    """

    def __init__(
        self,
        options: str,
        data_dir: Path | None,
        logs: Path,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        check_options(options)
        self._say = say
        self._submitit = require("submitit", "slurm", "--slurm")
        self._data_dir = None if data_dir is None else data_dir.resolve()
        self._logs = logs.resolve()
        folder = (logs.parent / "slurm").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._numbers = folder, folder / "jobs.json"
        self._executor = self._submitit.SlurmExecutor(folder / "%j", max_num_timeout=_TIMEOUTS)
        given = parse_options(options)
        given.setdefault("signal_delay_s", warning_seconds(given["time"]))
        self._grace = int(_number(given["signal_delay_s"])) / 2
        known = {key: given.pop(key) for key in ("time", *_KNOWN_OPTIONS) if key in given}
        self._executor.update_parameters(
            job_name="frostlab", **{k: _number(v) for k, v in known.items()},
            additional_parameters=given,
        )  # fmt: skip
        self._jobs: dict[Path, str] = {}  # a run's folder → its job
        self._tasks: dict[Path, Task] = {}
        self._undecided: list[Task] = []  # tasks that may have a job of an earlier command
        self._new: list[Task] = []  # tasks without a job
        self._accepted = False  # whether Slurm has accepted a job with these options
        self._states: dict[str, _Job] = {}
        self._looked = -_LOOK_SECONDS
        self._problem: str | None = None  # why squeue does not answer now
        self._refusal: str | None = None  # why sbatch refused the last job array
        self._next_try = 0.0  # no job is submitted before this time of the monotonic clock
        self._gone: dict[str, float] = {}  # job → when squeue first called it ended
        self._known = self._stored()  # a run's name → its job, also of an earlier command

    def _stored(self) -> dict[str, str]:
        try:
            values = read_json(self._numbers)
        except (OSError, BadInput):
            return {}
        return {str(k): str(v) for k, v in values.items()} if isinstance(values, dict) else {}

    def free(self) -> int:
        """Return how many more jobs may be submitted; Slurm decides when they run."""
        return _MOST_JOBS - len(self._tasks)

    def start(self, task: Task) -> None:
        """Keep a task for the next job array, unless an earlier job still trains the same run."""
        task = replace(task, path=task.path.resolve())
        self._tasks[task.path] = task
        self._undecided.append(task)

    def _find_earlier(self) -> None:
        """Find out which tasks have an earlier job; keep the others for the next job array.

        While Slurm does not answer, an earlier job may be alive, and there must be no second one.
        """
        if self._undecided:
            self._look()
        waiting, self._undecided = self._undecided, []
        for task in waiting:
            earlier = self._known.get(task.path.name)
            if earlier is not None and self._problem is not None:
                self._undecided.append(task)
            elif earlier in self._states and self._states[earlier].state in _LIVE:
                self._jobs[task.path], self._accepted = earlier, True
            else:
                self._outcome(task).unlink(missing_ok=True)
                self._new.append(task)

    def _submit(self) -> None:
        """Submit the tasks that wait and have no job yet, as one job array.

        If Slurm refuses the first of all jobs, the options are wrong: BadInput is raised. A later
        refusal, for example by a busy server, must not end the driver, so it is only shown, and the
        tasks are submitted again after `_RETRY_SECONDS`.
        """
        self._find_earlier()
        if not self._new or time.monotonic() < self._next_try:
            return
        functions = [
            SlurmRun(task, self._data_dir, self._logs, self._outcome(task), self._grace)
            for task in self._new
        ]
        try:
            with self._executor.batch():
                jobs = [self._executor.submit(function) for function in functions]
        except Exception as error:  # submitit passes on what sbatch has written
            if not self._accepted:
                raise BadInput(f"--slurm: {first_line(error)}") from None
            self._next_try = time.monotonic() + _RETRY_SECONDS
            if self._refusal != (refusal := first_line(error)):
                runs = counted(len(self._new), "runs")
                self._say(f"--slurm: {refusal}; submits {runs} again in {_RETRY_SECONDS:.0f} s")
            self._refusal = refusal
            return
        for task, job in zip(self._new, jobs, strict=True):
            self._jobs[task.path] = self._known[task.path.name] = job.job_id
        self._new.clear()
        self._refusal, self._accepted = None, True
        self._looked = -_LOOK_SECONDS
        write_whole(self._numbers, json.dumps(self._known, indent=1) + "\n")

    def _outcome(self, task: Task) -> Path:
        return self._folder / f"{task.path.name}.outcome.json"

    def _look(self) -> None:
        """Ask squeue for the states of all jobs, at most every `_LOOK_SECONDS`."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            output = _ask("squeue", "--me", "--states=all", "--array", "--noheader",
                          "--format=%i|%T|%N")  # fmt: skip
        except BadInput as error:
            self._has_problem(str(error))
            return
        if self._problem is not None:
            self._problem = None
            self._say("Slurm answers again")
        self._states = {
            job.id: job
            for line in output.splitlines()
            if len(parts := line.strip().split("|")) == 3
            for job in [_Job(*parts)]
        }

    def _has_problem(self, problem: str) -> None:
        """Say once that Slurm does not answer; jobs go on, and their outcomes are still found."""
        if self._problem is None:
            self._say(f"{problem}; the jobs go on, and Slurm is asked again")
        self._problem = problem

    def wait(self, seconds: float) -> list[Ended]:
        """Return the runs whose job has left an outcome, or has ended without one."""
        self._submit()
        time.sleep(seconds)
        self._look()
        ended = []
        for path, task in list(self._tasks.items()):
            outcome = self._ended(task)
            if outcome is not None:
                del self._tasks[path]
                self._jobs.pop(path, None)
                # The job may live on for a moment; another attempt at the run must not take it for
                # its own.
                self._known.pop(path.name, None)
                ended.append((task, outcome))
        return ended

    def _ended(self, task: Task) -> Outcome | None:
        """Return how a task's job ended; None if it has not ended."""
        path, number = self._outcome(task), self._jobs.get(task.path)
        if number is None:  # not submitted, so that an outcome would be an earlier job's
            return None
        if path.exists():
            return read(Outcome, read_json(path), path)
        if self._problem is not None:  # the job's state is not known
            return None
        job = self._states.get(number)
        state = "UNKNOWN" if job is None else job.state
        if state in _LIVE:
            self._gone.pop(number, None)
            return None
        since = self._gone.setdefault(number, time.monotonic())
        if time.monotonic() - since < _LOST_SECONDS:
            return None
        del self._gone[number]
        if state in ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL"):
            return Outcome("lost", f"job {number} ended with {state}")
        kind: Kind = "stopped" if state == "CANCELLED" else "crashed"
        return Outcome(kind, f"job {number} ended with {state}")

    def running(self) -> dict[Path, str]:
        """Return the job of every task, with the node on which it runs, or that it is pending."""
        self._submit()
        places = {}
        for path in self._tasks:
            number = self._jobs.get(path)
            if number is None:
                places[path] = "Slurm, pending"
                continue
            job = self._states.get(number)
            state = "pending" if job is None else (job.node or job.state.lower())
            places[path] = f"job {number}, {state}"
        return places

    def stop(self, paths: Iterable[Path]) -> None:
        """Cancel pending jobs; send SIGTERM to running ones, which write a checkpoint."""
        self._submit()
        self._looked = -_LOOK_SECONDS
        self._look()
        for task in self._undecided:  # their earlier jobs may be alive
            self._jobs[task.path] = self._known[task.path.name]
        self._undecided.clear()
        for path in paths:
            number = self._jobs.get(path.resolve())
            if number is None:
                self._tasks.pop(path.resolve(), None)
                self._new = [task for task in self._new if task.path != path.resolve()]
                continue
            job = self._states.get(number)
            waits = job is None or job.state == "PENDING"
            self._cancel(number, *([] if waits else ["--signal=TERM"]))

    def _cancel(self, number: str, *options: str) -> None:
        try:
            _ask("scancel", *options, number)
        except BadInput as error:
            self._say(f"job {number} could not be stopped ({error}); `scancel {number}` stops it")

    def close(self, reason: Reason = "done") -> None:
        """Cancel all jobs if the user wants that; after an error, they go on."""
        if reason == "killed":
            for number in self._jobs.values():
                self._cancel(number)


def _number(value: Any) -> Any:
    """Return a text of digits as a number, which submitit expects."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value

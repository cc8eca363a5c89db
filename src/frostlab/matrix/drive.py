"""The driver of a matrix: the one process that works through the queue of a folder of runs.

It first writes the plan (matrix.json), which lists the runs. Then it trains the runs that are not
done, answers requests that other programs leave in the matrix's folder (to stop or to add runs),
and keeps state.json up to date, which `frostlab status` shows. If it is killed, the command that
started it continues the matrix: finished runs are not repeated, and unfinished ones continue from
their last checkpoint.
"""

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from frostlab.errors import BadInput, FrostlabError
from frostlab.matrix.places import Opened, Places, executor_in
from frostlab.matrix.plan import merged, tasks_of
from frostlab.matrix.queue import Queue
from frostlab.matrix.store import (
    EVERYTHING,
    LEFT_OUT,
    SCHEMA,
    DriverState,
    MatrixFolder,
    MatrixPlan,
    PlannedRun,
    RunState,
    driving,
    holder_of,
)
from frostlab.matrix.task import Outcome, Task, check_begun, is_done
from frostlab.records.folder import RunRecord, finished_status
from frostlab.text import counted, hms, plain
from frostlab.training.loop import interruptions
from frostlab.typed import read

_STATE_SECONDS = 0.5  # the least time between two writings of state.json
_LONGEST_SECONDS = 5.0  # the most time between two writings, even if the state has not changed
_PLAN_SECONDS = 2.0  # time between two checks whether the plan's file has changed
_NOTIFY_SECONDS = 60.0  # the most time that the command of --notify may take
_ERROR_BYTES = 1 << 16  # bytes that are read of the errors of that command
_FAILED = ("failed", "crashed", "refused", "blocked")


@dataclass(frozen=True)
class Ends:
    """How the runs of a matrix ended, in this call and before."""

    # finished, diverged, failed, stopped, missing, left out or waiting → number of runs
    counts: dict[str, int]
    stopped: bool  # whether the matrix was asked to stop
    seconds: float

    @property
    def failed(self) -> int:
        """The number of runs that failed in any way, diverged, or lack something, such as data."""
        return sum(self.counts.get(word, 0) for word in ("failed", "diverged", "missing"))

    @property
    def status(self) -> str:
        """How the matrix ended: stopped, failed (if `failed` is not 0) or finished."""
        return "stopped" if self.stopped else "failed" if self.failed else "finished"


def check_notify(command: str | None) -> None:
    """Refuse a command of --notify that cannot be split into words, or whose program is missing.

    The command may contain {name} and {status}, but no other braces.
    """
    if command is not None:
        try:
            parts = [part.format(name="", status="") for part in shlex.split(command)]
        except (ValueError, LookupError, AttributeError):
            parts = []
        if not parts:
            raise BadInput(
                f"--notify {command!r:.80} should be a command; in braces, it may have only "
                "{name} and {status}"
            )
        if shutil.which(parts[0]) is None:
            raise BadInput(f"--notify: the program {parts[0]!r:.80} is not found")


@dataclass(frozen=True)
class Prepared:
    """A plan that is merged with the stored one, and the runs of it that are to be trained."""

    plan: MatrixPlan
    left: list[Task]  # not done yet
    left_out: list[str]  # names of runs that are not done either, which the command leaves out


def prepare_matrix(plan: MatrixPlan, folder: MatrixFolder) -> Prepared:
    """Merge a plan with the stored one, if there is one, and find the runs that are not done.

    An earlier command may have planned more runs from the same file or group than this command,
    which may have --only or fewer --seeds. The runs that this command leaves out stay in the plan
    but are not trained. BadInput is raised if the folder of a planned run holds a run of another
    recipe.
    """
    wanted, phases = {run.name for run in plan.runs}, {run.phase for run in plan.runs}
    if folder.has_plan():
        plan, _ = merged(folder.plan(), plan)
    chosen = {run.name for run in plan.runs if run.name in wanted or run.phase not in phases}
    left, left_out = list[Task](), list[str]()
    for task in tasks_of(plan, folder.runs):
        if task.path.is_symlink():
            raise BadInput(
                f"{task.path} is a link; runs are written only inside the folder of runs"
            )
        if not is_done(task):
            check_begun(task)
            if task.path.name in chosen:
                left.append(task)
            else:
                left_out.append(task.path.name)
    return Prepared(plan, left, left_out)


def drive(
    plan: MatrixPlan,
    folder: MatrixFolder,
    places: Places,
    *,
    notify: str | None = None,
    memory: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Ends:
    """Carry out a plan, or continue it; return how its runs ended.

    Args:
        notify: a command that is started when a run fails or diverges and when the matrix ends;
            {name} and {status} in it are replaced by those of the run or the matrix.
        memory: bytes of GPU memory that the largest run needs, if that is known.
    """
    # An absolute path is needed where runs train on other machines.
    folder = MatrixFolder(folder.runs.resolve(), folder.name)
    with driving(folder) as release:
        folder.forget_stops()  # at once, because from now on a request to stop is for this driver
        prepared = prepare_matrix(plan, folder)
        plan, is_new = prepared.plan, not folder.has_plan()
        try:
            folder.write_plan(plan)
        except OSError as error:
            raise BadInput(f"{folder.path} cannot be written ({error.strerror})") from None
        data_dir = None if plan.data_dir is None else Path(plan.data_dir)
        opening = executor_in(places, data_dir, folder.logs, say=say, memory=memory)
        with Notices(notify, say) as notices, interruptions() as asked, ExitStack() as stack:
            try:
                opened = stack.enter_context(opening)
            except BaseException:
                if is_new:
                    folder.plan_path.unlink(missing_ok=True)
                raise
            ends = _Driver(plan, folder, opened, asked, notices, say).work(prepared)
            stack.close()
            if folder.is_asked_to_add():
                say("more runs were asked for too late; the same command trains them")
            release()  # another command may use the folder of runs while notices are sent
    return ends


class _Driver:
    """A driver at work: it runs the queue, answers requests and writes the state."""

    def __init__(
        self,
        plan: MatrixPlan,
        folder: MatrixFolder,
        opened: Opened,
        asked: Callable[[], bool],
        notices: "Notices",
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._folder, self._say = plan, folder, say
        self._opened, self._asked, self._notices = opened, asked, notices
        self._queue = Queue(
            opened.executor, asked_to_stop=self._asked_to_stop, each_turn=self._turn, say=say
        )
        self._stop_requests = 0
        self._began = time.time()
        self._states = {
            run.name: RunState("missing", error=f"missing: {run.missing}")
            for run in plan.runs if run.missing is not None
        }  # fmt: skip
        self._attempts: Counter[str] = Counter()
        self._since: dict[Path, float] = {}  # folder of a running run → when it began
        self._written = self._looked = 0.0  # when state.json was written, and matrix.json checked
        self._last: DriverState | None = None  # the last state that was written
        self._plan_time = self._modified()

    def _asked_to_stop(self) -> bool:
        """Return whether a signal or a request has asked the matrix to stop."""
        return self._stop_requests > 0 or self._asked()

    def work(self, prepared: Prepared) -> Ends:
        """Run the tasks that are left, and return how all runs ended."""
        left, left_out = prepared.left, prepared.left_out
        runnable = sum(run.missing is None for run in self._plan.runs)
        for name, state in self._states.items():
            self._say(f"{name} cannot run ({state.error}); the others go on")
        self._states |= {name: RunState(LEFT_OUT, attempts=0) for name in left_out}
        if done := runnable - len(left) - len(left_out):
            self._say(f"{done} of {runnable} runs are done already")
            self._say_diverged()
        if left_out:
            runs = counted(len(left_out), "runs")
            self._say(f"{runs} of earlier commands are left out by this one")
        self._say(f"{counted(len(left), 'runs')} on {self._opened.about}")
        stopped = True
        try:
            with self._queue.session(left) as outcomes:
                for count, (task, outcome) in enumerate(outcomes, 1):
                    self._ended(task, outcome, count)
            stopped = self._asked_to_stop()
        finally:
            self._write_state("stopped" if stopped else "finished", last=True)
        ends = self._ends(stopped)
        self._say(_summary(self._plan.name, ends))
        self._notices.send(self._plan.name, ends.status)
        return ends

    def _say_diverged(self) -> None:
        """Show which runs diverged in an earlier call; with the same seed, they would again."""
        for run in self._plan.runs:
            path = self._folder.runs / run.name
            if run.missing is None and _status(path) == "diverged":
                error = RunRecord(path).result.error
                self._say(
                    f"{run.name} has diverged, and would again, so it is not repeated: {error}"
                )

    def _ended(self, task: Task, outcome: Outcome, count: int) -> None:
        name = task.path.name
        self._since.pop(task.path, None)
        if outcome.kind in _FAILED:
            kind = "failed" if outcome.kind == "blocked" else outcome.kind
            attempts = self._attempts[name]
            self._states[name] = RunState(kind, attempts=attempts, error=outcome.text)
            self._notices.send(name, "failed")
        elif outcome.kind == "stopped":
            if all(waiting.path != task.path for waiting in self._queue.waiting):
                self._states[name] = RunState("stopped", attempts=self._attempts[name])
        else:
            self._states.pop(name, None)
            if outcome.kind == "diverged":
                self._notices.send(name, "diverged")
        rest = len(self._queue.waiting) + len(self._queue.executor.running())
        passed = time.time() - self._began
        text = outcome.text if outcome.kind == "finished" else f"{outcome.kind}: {outcome.text}"
        # The text of a stopped run mentions `--resume`, but here the matrix's command continues it.
        text = "stopped" if outcome.kind == "stopped" else text
        self._say(
            f"run {count} of {count + rest}  {task.about}  {text}  "
            f"{outcome.seconds:.0f} s; {hms(passed / count * rest)} left"
        )

    def _turn(self) -> None:
        """Answer requests, check the plan's file, and write the state."""
        running = self._queue.executor.running()
        for path in running:
            if path not in self._since:
                self._since[path] = time.time()
                self._attempts[path.name] += 1
        self._since = {path: since for path, since in self._since.items() if path in running}
        for request in self._folder.requests():
            self._answer(request)
        self._keep_plan()
        status = "stopping" if self._asked_to_stop() else "running"
        if self._queue.disk is not None:
            status = "waiting"
        self._write_state(status)

    def _answer(self, request: dict[str, Any]) -> None:
        """Stop a run or the matrix, or add runs."""
        name = request.get("stop")
        if name == EVERYTHING:
            self._stop_requests += 1
            if self._stop_requests > 1:
                raise KeyboardInterrupt  # the queue then ends the running tasks
        elif isinstance(name, str) and self._plan.run(name) is not None:
            if self._queue.drop(self._folder.runs / name):
                self._say(f"{name} is stopped")
                self._states[name] = RunState("stopped", attempts=self._attempts[name])
        elif "add" in request:
            try:
                self._add(read(MatrixPlan, request["add"], "a request"))
            except (FrostlabError, OSError) as error:  # for instance because the disk is full
                self._say(f"no runs were added: {error}")

    def _add(self, other: MatrixPlan) -> None:
        """Add another plan's runs to the queue if they are new or can start; store the plan."""
        plan, added = merged(self._plan, other)
        plan = replace(plan, data_dir=self._plan.data_dir)  # the executor keeps its folder
        again = {run.name for run in other.runs if _can_start(run, self._states.get(run.name))}
        names = {run.name for run in added} | again
        # a run that was asked to stop is known as stopped while it still trains
        busy = {task.path for task in self._queue.waiting} | self._queue.executor.running().keys()
        tasks = [
            task for task in tasks_of(plan, self._folder.runs)
            if task.path.name in names and task.path not in busy
        ]  # fmt: skip
        again -= {path.name for path in busy}
        left = [task for task in tasks if not is_done(task)]
        for task in left:
            check_begun(task)
        self._folder.write_plan(plan)
        self._plan, self._plan_time = plan, self._modified()
        self._states = {name: known for name, known in self._states.items() if name not in again}
        self._states |= {
            run.name: RunState("missing", error=f"missing: {run.missing}")
            for run in added if run.missing is not None
        }  # fmt: skip
        self._queue.add(left)
        order = {run.name: place for place, run in enumerate(plan.runs)}
        self._queue.waiting.sort(key=lambda task: order[task.path.name])
        self._say(f"added: {counted(len(left), 'runs')}")

    def _keep_plan(self) -> None:
        """Write the plan again if another program has removed or changed its file.

        A changed file is kept under another name.
        """
        if time.monotonic() - self._looked < _PLAN_SECONDS:
            return
        self._looked = time.monotonic()
        if self._modified() == self._plan_time:
            return
        with suppress(OSError):
            if not self._folder.has_plan():
                self._folder.write_plan(self._plan)
                self._plan_time = self._modified()
                self._say("matrix.json was removed while the matrix runs; it is written again")
                return
            kept = self._folder.keep_changed_plan()
            self._folder.write_plan(self._plan)
            self._plan_time = self._modified()
            self._say(
                f"matrix.json was changed while the matrix runs; the matrix goes on with its own "
                f"plan, and the changed one is kept as {kept.name}; add runs with `frostlab matrix "
                "FILE --add`"
            )

    def _modified(self) -> int | None:
        with suppress(OSError):
            return self._folder.plan_path.stat().st_mtime_ns
        return None

    def _write_state(self, status: str, last: bool = False) -> None:
        """Write state.json if the state has changed or the last writing was long ago.

        It is not written more often than every `_STATE_SECONDS`, except with `last`. If it cannot
        be written, for instance because the disk is full, the driver goes on.
        """
        now = time.monotonic()
        if not last and now - self._written < _STATE_SECONDS:
            return
        running = {
            path.name: RunState(
                "pending" if place.endswith(", pending") else "running",
                place, self._since.get(path), self._attempts[path.name],
            )
            for path, place in ({} if last else self._queue.executor.running()).items()
        }  # fmt: skip
        state = DriverState(
            schema=SCHEMA, status=status, pid=os.getpid(), host=socket.gethostname(),
            began=self._began, updated=round(time.time(), 3), places=self._opened.about,
            at_once=self._opened.at_once, runs={**self._states, **running}, note=self._queue.disk,
        )  # fmt: skip
        same = self._last is not None and replace(state, updated=self._last.updated) == self._last
        if same and not last and now - self._written < _LONGEST_SECONDS:
            return
        with suppress(OSError):
            self._folder.write_state(state)
            self._last = state
        self._written = now

    def _ends(self, stopped: bool) -> Ends:
        counts: Counter[str] = Counter()
        for run in self._plan.runs:
            state = self._states.get(run.name)
            if state is None:
                with suppress(FrostlabError, OSError):
                    counts[_status(self._folder.runs / run.name)] += 1
            elif state.state in _FAILED:
                counts["failed"] += 1
            else:
                counts[state.state] += 1
        return Ends(dict(counts), stopped, time.time() - self._began)


class Notices:
    """The command of --notify, which is started for one event after another.

    Args:
        command: the command, with {name} and {status}; None: nothing is started.
    """

    def __init__(self, command: str | None, say: Callable[[str], None]) -> None:
        self._command, self._say = command, say
        self._threads = ThreadPoolExecutor(1)
        self._sent: list[Future[None]] = []

    def send(self, name: str, status: str) -> None:
        """Start the command once its earlier calls have ended; runs go on meanwhile."""
        if self._command is not None:
            parts = [part.format(name=name, status=status) for part in shlex.split(self._command)]
            self._sent.append(self._threads.submit(self._call, parts))

    def __enter__(self) -> "Notices":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the calls; leave out those that have not begun in time, except the last one.

        After an error, only the call that has begun is waited for.
        """
        earlier = self._sent[:-1] if kind is None else self._sent
        wait_for(earlier, _NOTIFY_SECONDS if kind is None else 0.0)
        if late := sum(call.cancel() for call in earlier):
            self._say(f"--notify was too slow: {counted(late, 'calls')} left out")
        self._threads.shutdown()

    def _call(self, parts: Sequence[str]) -> None:
        """Run a program; if it fails, show the last line of its errors."""
        with ExitStack() as stack:
            errors: IO[bytes] | None = None
            with suppress(OSError):
                # a pipe would stay open while a program that was started in the background runs
                errors = stack.enter_context(tempfile.TemporaryFile())
            try:
                subprocess.run(
                    parts, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=errors or subprocess.DEVNULL, timeout=_NOTIFY_SECONDS, check=True,
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError) as error:
                self._say(f"--notify failed: {plain(str(error))}{_last_line(errors)}")


def _last_line(errors: IO[bytes] | None) -> str:
    if errors is None:
        return ""
    errors.seek(0)
    lines = errors.read(_ERROR_BYTES).decode(errors="replace").strip().splitlines()
    return f": {plain(lines[-1])}" if lines else ""


def _can_start(run: PlannedRun, known: RunState | None) -> bool:
    """Return whether a run that a live matrix does not train now can begin, or go on."""
    if known is None or run.missing is not None:
        return False
    return known.state in (LEFT_OUT, "stopped", "missing", *_FAILED)


def _status(path: Path) -> str:
    return finished_status(path) or "waiting"


def _summary(name: str, ends: Ends) -> str:
    parts = [f"{count} {word}" for word, count in sorted(ends.counts.items())]
    how = "stopped; the same command continues it" if ends.stopped else "ended"
    return f"{name} {how}: {', '.join(parts)}, {hms(ends.seconds)}"


def add_to_live(plan: MatrixPlan, folder: MatrixFolder) -> int:
    """Ask the live driver of a matrix to add the runs of a plan.

    What the driver would refuse is refused here, too.

    Returns:
        the number of runs that will be added: those that are new, and those that have stopped,
        failed or were left out.
    """
    old = folder.plan()
    if _resolved(plan.data_dir) != _resolved(old.data_dir):
        used = "no --data-dir" if old.data_dir is None else f"--data-dir {old.data_dir}"
        raise BadInput(f"{folder.name}, which is running, was started with {used}; use the same")
    both, added = merged(old, plan)
    state = folder.state()
    known = {} if state is None else state.runs
    again = {run.name for run in plan.runs if _can_start(run, known.get(run.name))}
    names = {run.name for run in added} | again
    done = 0
    for task in tasks_of(both, folder.runs):
        if task.path.name in names:
            if is_done(task):
                done += 1
            else:
                check_begun(task)
    folder.request(add=asdict(plan))
    holder = holder_of(folder.runs)
    if holder is None or holder.name != folder.name:
        raise BadInput(f"{folder.name} has just ended; give the command again")
    return len(names) - done


def _resolved(data_dir: str | None) -> Path | None:
    return None if data_dir is None else Path(data_dir).resolve()

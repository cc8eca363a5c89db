"""The driver of a matrix: crashes, kill -9, requests, two at once, a plan that changed."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml
from typer.testing import CliRunner

import frostlab as fl
from frostlab.cli.main import app
from frostlab.cli.matrix import _detach
from frostlab.matrix.drive import (
    Ends,
    Notices,
    Prepared,
    add_to_live,
    check_notify,
    drive,
    prepare_matrix,
)
from frostlab.matrix.places import Opened, Places
from frostlab.matrix.plan import matrix_plan, merged
from frostlab.matrix.show import terminal_table
from frostlab.matrix.status import read_status
from frostlab.matrix.store import EVERYTHING, MatrixFolder, MatrixPlan, driving, holder_of
from frostlab.matrix.task import Outcome, Task, run_task
from frostlab.matrix.workers import InProcess
from frostlab.records.folder import RunRecord, finished_status
from tiny import tiny

CPU = Places("cpu", "2")


def plan_of(folder: Path, seeds: int, name: str = "mine", **recipe: Any) -> MatrixPlan:
    (folder / f"{name}-recipe.yaml").write_text(yaml.safe_dump(tiny(**recipe)))
    values = {"recipes": [f"{name}-recipe.yaml"], "seeds": seeds}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    return matrix_plan(str(folder / f"{name}.yaml"))


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command in a Python of its own: the server of `forked` has no workers."""
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", "frostlab", *arguments]
    return subprocess.Popen(words, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def wait_until(condition: Any, seconds: float = 250) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited too long"
        time.sleep(0.02)


def digests(folder: Path) -> dict[str, str | None]:
    return {p.name: RunRecord(p).result.weights_digest for p in folder.glob("*-s*")}


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_and_the_rest_goes_on(tmp_path: Path) -> None:
    """One worker is killed while it trains; runs are added; one run is stopped; then all ends."""
    folder = MatrixFolder(tmp_path / "runs", "mine")
    train = {"batch": 32, "steps": 300, "threads": 1, "checkpoint": 50}
    long = {"train": train, "evaluate": {"every": 300, "batch": 256}}
    plan = plan_of(tmp_path, 3, **long)
    said: list[str] = []
    ended: list[Ends] = []
    thread = threading.Thread(
        target=lambda: ended.append(drive(plan, folder, CPU, say=said.append)), daemon=True
    )
    thread.start()
    first = folder.runs / "mine-recipe-none-s0"
    wait_until(lambda: any(first.glob("checkpoints/step-*")))
    worker = _worker_of(first)
    worker.kill()
    add_to_live(plan_of(tmp_path, 4, **long), folder)
    folder.request(stop="mine-recipe-none-s1")
    wait_until(lambda: any(line.startswith("added: ") for line in said))
    with pytest.raises(fl.BadInput, match="the matrix mine runs in .* already"):
        drive(plan_of(tmp_path, 1, "other"), MatrixFolder(folder.runs, "other"), CPU)
    state = folder.state()
    assert state is not None
    assert state.status == "running"
    assert state.at_once == 2
    folder.plan_path.write_text("{}")
    wait_until(lambda: list(folder.path.glob("changed-*.json")))
    thread.join(200)
    (ends,) = ended
    assert ends.counts == {"finished": 3, "stopped": 1}, said
    assert any("killed by SIGKILL; the run is tried once more" in line for line in said)
    assert any(line.startswith("matrix.json was changed") for line in said)
    assert len(folder.plan().runs) == 4
    resumes = [line for line in (first / "events.jsonl").read_text().splitlines()
               if line.startswith('{"kind": "resume"')]  # fmt: skip
    assert len(resumes) == 1, "it went on from its checkpoint"
    assert json.loads(resumes[0])["step"] > 0
    assert RunRecord(first).result.runs_at_once == 2
    environment = json.loads((first / "environment.json").read_text())
    assert environment["command"] == shlex.join(sys.orig_argv), "the queue's, not the worker's"
    assert finished_status(folder.runs / "mine-recipe-none-s1") == "stopped"
    assert "step" in (folder.logs / "mine-recipe-none-s0.log").read_text()
    alone = fl.run(str(tmp_path / "mine-recipe.yaml"), seed=0, out=tmp_path / "alone")
    assert RunRecord(first).result.weights_digest == alone.result.weights_digest
    again = drive(plan_of(tmp_path, 4, **long), folder, CPU, say=said.append)
    assert said[-4] == "3 of 4 runs are done already"
    assert again.counts == {"finished": 4}
    final = folder.state()
    assert final is not None
    assert final.status == "finished"


def _worker_of(run: Path) -> psutil.Process:
    """The process that has a run's lock open."""
    for child in psutil.Process().children():
        if any(Path(file.path) == run / "events.jsonl" for file in child.open_files()):
            return child
    raise AssertionError("no process has it open")


class Refusing(InProcess):
    """Runs tasks in this process, and reports bad input as an outcome, as workers do."""

    def wait(self, seconds: float) -> list[tuple[Task, Outcome]]:
        task, self._task = self._task, None
        return [] if task is None else [(task, run_task(task, None))]


def test_a_run_that_is_refused_is_reported_and_the_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    folder = MatrixFolder(tmp_path / "runs", "mine")
    plan = plan_of(tmp_path, 2, train={"batch": 32, "epochs": 1, "threads": 1, "processes": 2})
    told = tmp_path / "told.txt"
    ends = drive(plan, folder, CPU, notify=f"sh -c 'echo {{name}} {{status}} >> {told}'")
    assert ends.counts == {"failed": 2}
    assert ends.status == "failed"
    state = folder.state()
    assert state is not None
    assert {run.state for run in state.runs.values()} == {"refused"}
    assert told.read_text().splitlines() == [
        "mine-recipe-none-s0 failed", "mine-recipe-none-s1 failed", "mine failed",
    ]  # fmt: skip


def test_a_request_to_stop_ends_with_the_driver_that_it_was_meant_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second request to stop may be left when the driver ends; the next one must not obey it."""
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    folder = MatrixFolder(tmp_path / "runs", "mine")
    plan, more = plan_of(tmp_path, 1), plan_of(tmp_path, 1, "more")
    for request in ({"stop": EVERYTHING}, {"stop": "mine-recipe-none-s0"}, {"stop": EVERYTHING}):
        folder.request(**request)
    folder.request(add=asdict(more))
    ends = drive(plan, folder, CPU)
    assert (ends.counts, ends.stopped) == ({"finished": 2}, False), "runs are still added"


def test_a_request_is_removed_before_it_is_answered(tmp_path: Path) -> None:
    folder = MatrixFolder(tmp_path, "mine")
    folder.request(stop=EVERYTHING)
    assert next(folder.requests()) == {"stop": EVERYTHING}  # the answer may end the driver here
    assert list(folder.requests()) == []


def test_runs_that_a_command_leaves_out_are_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    folder, said = MatrixFolder(tmp_path / "runs", "mine"), list[str]()
    three, one, more = plan_of(tmp_path, 3), plan_of(tmp_path, 1), plan_of(tmp_path, 1, "more")
    folder.write_plan(merged(three, more)[0])  # as an earlier command, which was stopped, left it
    ends = drive(one, folder, CPU, say=said.append)
    assert ends.counts == {"finished": 2, "left out": 2}, "runs of another file are not left out"
    status = read_status(folder.runs)
    assert status.counts == {"finished": 2, "left out": 2}
    assert "4 runs: 2 left out, 2 finished" in terminal_table(status).plain
    assert "2 runs of earlier commands are left out by this one" in said
    assert drive(three, folder, CPU).counts == {"finished": 4}


def test_runs_that_were_left_out_can_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    folder, said = MatrixFolder(tmp_path / "runs", "mine"), list[str]()
    three, one = plan_of(tmp_path, 3), plan_of(tmp_path, 1)
    folder.write_plan(three)

    start = Refusing.start

    def adding(self: Refusing, task: Task) -> None:
        if task.path.name.endswith("-s0"):
            assert [add_to_live(three, folder) for _ in range(2)] == [2, 2]
        start(self, task)

    monkeypatch.setattr(Refusing, "start", adding)
    assert drive(one, folder, CPU, say=said.append).counts == {"finished": 3}
    assert [line for line in said if line.startswith("added")] == ["added: 2 runs", "added: 0 runs"]
    with driving(folder):
        assert add_to_live(three, folder) == 0


def test_a_stop_is_not_lost_while_the_driver_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is held, so that `frostlab stop` says that the matrix stops."""
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    folder = MatrixFolder(tmp_path / "runs", "mine")

    def stopped(plan: MatrixPlan, folder: MatrixFolder) -> Prepared:
        folder.request(stop=EVERYTHING)
        return prepare_matrix(plan, folder)

    monkeypatch.setattr("frostlab.matrix.drive.prepare_matrix", stopped)
    ends = drive(plan_of(tmp_path, 1), folder, CPU)
    assert (ends.counts, ends.stopped) == ({"waiting": 1}, True)


def test_requests_to_add_outlive_a_crash_while_stops_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = MatrixFolder(tmp_path, "mine")
    folder.request(add={"name": "a"})
    folder.request(stop=EVERYTHING)
    folder.request(add={"name": "b"})

    def crash(self: MatrixFolder, **values: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MatrixFolder, "request", crash)
    with suppress(KeyboardInterrupt):
        folder.forget_stops()
    assert list(folder.requests()) == [{"add": {"name": "a"}}, {"add": {"name": "b"}}]


def test_runs_that_cannot_be_stored_are_not_added_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    folder, said = MatrixFolder(tmp_path / "runs", "mine"), list[str]()
    one, three, write = plan_of(tmp_path, 1), plan_of(tmp_path, 3), MatrixFolder.write_plan

    def full(self: MatrixFolder, plan: MatrixPlan) -> None:
        if len(plan.runs) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, plan)

    def adding(line: str) -> None:
        said.append(line)
        if "on here" in line:
            add_to_live(three, folder)

    monkeypatch.setattr(MatrixFolder, "write_plan", full)
    assert drive(one, folder, CPU, say=adding).counts == {"finished": 1}
    assert "no runs were added: [Errno 28] No space left on device" in said


def test_a_slow_notice_does_not_hold_up_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command about the first run ends only when the second run has begun."""
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    folder = MatrixFolder(tmp_path / "runs", "mine")
    plan = plan_of(tmp_path, 2, train={"batch": 32, "epochs": 1, "threads": 1, "processes": 2})
    second, told = folder.logs / "second", tmp_path / "told.txt"
    start = Refusing.start

    def noted(self: Refusing, task: Task) -> None:
        if task.path.name.endswith("-s1"):
            second.touch()
        start(self, task)

    monkeypatch.setattr(Refusing, "start", noted)
    waits = f"until [ -e {second} ]; do sleep 0.02; done; echo {{name}} >> {told}"
    said: list[str] = []
    drive(plan, folder, CPU, notify=f"sh -c '{waits}'", say=said.append)
    assert len(told.read_text().splitlines()) == 3
    assert not [line for line in said if "--notify" in line]


def test_a_run_that_was_stopped_goes_on_while_the_matrix_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does one that failed; the same command adds both."""
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    folder, said = MatrixFolder(tmp_path / "runs", "mine"), list[str]()
    plan, wait = plan_of(tmp_path, 3), Refusing.wait

    def ending(self: Refusing, seconds: float) -> list[tuple[Task, Outcome]]:
        if self._task is not None and self._task.path.name.endswith("-s0") and not said[1:]:
            task, self._task = self._task, None
            return [(task, Outcome("failed", "for once"))]
        return wait(self, seconds)

    def adding(line: str) -> None:
        said.append(line)
        if "for once" in line:
            folder.request(stop="mine-recipe-none-s2")
        if line == "mine-recipe-none-s2 is stopped":
            monkeypatch.setattr(Refusing, "start", added)

    def added(self: Refusing, task: Task) -> None:
        if task.path.name.endswith("-s1"):
            driver_has_written(folder, "mine-recipe-none-s2", "stopped")
            assert add_to_live(plan, folder) == 2
        start(self, task)

    start = Refusing.start
    monkeypatch.setattr(Refusing, "wait", ending)
    monkeypatch.setattr("frostlab.matrix.drive._STATE_SECONDS", 0.0)
    assert drive(plan, folder, CPU, say=adding).counts == {"finished": 3}, said
    assert "added: 2 runs" in said


def driver_has_written(folder: MatrixFolder, name: str, state: str) -> None:
    known = folder.state()
    assert known is not None
    assert known.runs[name].state == state


def test_runs_that_the_driver_would_refuse_are_refused_at_once(tmp_path: Path) -> None:
    folder = MatrixFolder(tmp_path / "runs", "mine")
    folder.write_plan(plan_of(tmp_path, 1))
    fl.run(tiny(train__epochs=1), out=folder.runs / "more-recipe-none-s0")
    with pytest.raises(fl.BadInput, match=r"holds a run of another recipe \(train.epochs differ\)"):
        add_to_live(plan_of(tmp_path, 1, "more"), folder)
    other = replace(plan_of(tmp_path, 2), data_dir=str(tmp_path))
    with pytest.raises(fl.BadInput, match="mine, which is running, was started with no --data-dir"):
        add_to_live(other, folder)
    assert list(folder.requests()) == []
    with pytest.raises(fl.BadInput, match="mine has just ended; give the command again"):
        add_to_live(plan_of(tmp_path, 2), folder)


def test_a_data_folder_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    plan_of(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    folder = MatrixFolder(tmp_path / "runs", "mine")
    folder.write_plan(matrix_plan("mine.yaml", data_dir=Path("data")))
    assert folder.plan().data_dir == str(tmp_path / "data")
    older = replace(folder.plan(), data_dir="data")
    with driving(folder):
        assert add_to_live(older, folder) == 0


def test_added_runs_find_the_data_of_the_matrix_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = MatrixFolder(tmp_path / "runs", "mine")
    plan_of(tmp_path, 1)
    source = str(tmp_path / "mine.yaml")
    folder.write_plan(matrix_plan(source, data_dir=tmp_path))
    asked: list[MatrixPlan] = []
    monkeypatch.setattr(
        "frostlab.matrix.drive.add_to_live", lambda plan, folder: asked.append(plan) or 0
    )
    with driving(folder):
        done = CliRunner().invoke(app, ["matrix", source, "--add", "--runs", str(folder.runs)])
    assert done.exit_code == 0, done.exception
    assert [plan.data_dir for plan in asked] == [str(tmp_path)]


def test_a_slow_notice_does_not_keep_the_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last notice is sent although the ones before it are too slow."""
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    monkeypatch.setattr("frostlab.matrix.drive.wait_for", lambda calls, seconds: None)
    folder, said, told = MatrixFolder(tmp_path / "runs", "mine"), list[str](), tmp_path / "told"
    plan = plan_of(tmp_path, 4, train={"batch": 32, "epochs": 1, "threads": 1, "processes": 2})
    leaving, left = Notices.__exit__, []

    def leave(self: Notices, *error: Any) -> None:
        # a program that is about to start has the lock, too, for a moment
        wait_until(lambda: holder_of(folder.runs) is None, 20)
        left.append(True)
        leaving(self, *error)

    def saying(line: str) -> None:
        said.append(line)
        if "too slow" in line:
            (tmp_path / "go").touch()

    monkeypatch.setattr(Notices, "__exit__", leave)
    waits = f"until [ -e {tmp_path / 'go'} ]; do sleep 0.02; done"
    slow = f"sh -c 'case {{name}} in mine) echo {{status}} >> {told};; *) {waits};; esac'"
    drive(plan, folder, CPU, notify=slow, say=saying)
    assert left
    assert told.read_text() == "failed\n"
    assert any(re.fullmatch("--notify was too slow: . calls? left out", line) for line in said)


def test_a_notice_may_leave_a_program_in_the_background(tmp_path: Path) -> None:
    said: list[str] = []
    began = time.monotonic()
    with Notices("sh -c 'sleep 60 & echo {name} >&2; exit 3'", said.append) as notices:
        notices.send("a-run", "failed")
    assert time.monotonic() - began < 50, "it does not wait for the sleep"
    assert said[0].startswith("--notify failed: ")
    assert said[0].endswith(": a-run")


def test_a_notice_is_sent_even_if_its_errors_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("frostlab.matrix.drive.tempfile.TemporaryFile", full)
    with Notices(f"sh -c 'echo {{name}} > {tmp_path / 'told'}; exit 3'", print) as notices:
        notices.send("a-run", "failed")
    assert (tmp_path / "told").read_text() == "a-run\n"


def test_after_an_interruption_no_further_notice_is_sent(tmp_path: Path) -> None:
    told, go = tmp_path / "told", tmp_path / "go"

    def saying(line: str) -> None:
        go.touch()

    waits = f"echo {{name}} >> {told}; until [ -e {go} ]; do sleep 0.02; done"
    with suppress(KeyboardInterrupt), Notices(f"sh -c '{waits}'", saying) as notices:
        for name in ("a", "b", "c"):
            notices.send(name, "failed")
        wait_until(told.exists)
        raise KeyboardInterrupt
    assert told.read_text() == "a\n"


def test_a_run_that_still_stops_is_not_queued_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was asked to stop is called stopped while it still trains."""
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    monkeypatch.setattr("frostlab.matrix.drive._STATE_SECONDS", 0.0)
    folder, said = MatrixFolder(tmp_path / "runs", "mine"), list[str]()
    plan, wait, start, started = plan_of(tmp_path, 2), Refusing.wait, Refusing.start, []

    def slow(self: Refusing, seconds: float) -> list[tuple[Task, Outcome]]:
        if "added: 0 runs" not in said and len(started) == 1:
            if not said[-1].startswith("mine-recipe-none-s0 is stopped"):
                folder.request(stop="mine-recipe-none-s0")
            else:
                add_to_live(plan, folder)
            return []
        return wait(self, seconds)

    def starting(self: Refusing, task: Task) -> None:
        started.append(task.path.name)
        start(self, task)

    monkeypatch.setattr(Refusing, "wait", slow)
    monkeypatch.setattr(Refusing, "start", starting)
    monkeypatch.setattr(Refusing, "stop", lambda self, paths: None)  # it trains a little longer
    drive(plan, folder, CPU, say=said.append)
    assert "added: 0 runs" in said
    assert started == ["mine-recipe-none-s0", "mine-recipe-none-s1"]


def test_what_cannot_be_opened_leaves_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def executor_in(*_: Any, **__: Any) -> Iterator[Opened]:
        raise fl.BadInput("--ray auto: no cluster")
        yield

    monkeypatch.setattr("frostlab.matrix.drive.executor_in", executor_in)
    folder = MatrixFolder(tmp_path / "runs", "mine")
    with pytest.raises(fl.BadInput, match="--ray auto: no cluster"):
        drive(plan_of(tmp_path, 1), folder, CPU)
    assert not folder.has_plan()


def test_a_plan_that_is_removed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = nullcontext(Opened(Refusing(None), "here", 1))
    monkeypatch.setattr("frostlab.matrix.drive.executor_in", lambda *_, **__: opened)
    monkeypatch.setattr("frostlab.matrix.drive._PLAN_SECONDS", 0.0)
    folder, said = MatrixFolder(tmp_path / "runs", "mine"), list[str]()

    def removing(line: str) -> None:
        said.append(line)
        if "on here" in line:
            folder.plan_path.unlink()

    plan = plan_of(tmp_path, 1)
    drive(plan, folder, CPU, say=removing)
    assert folder.plan().runs == plan.runs
    assert "matrix.json was removed while the matrix runs; it is written again" in said


def test_a_run_that_diverges_is_reported_once_and_the_others_go_on(tmp_path: Path) -> None:
    """The loss of one of three runs becomes NaN: the same seed would do so again."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(tiny()))
    values = {"recipes": ["small.yaml"], "settings": {"optim.lr": [1e-3, 1e30, 3e-3]}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    plan, folder = matrix_plan(str(tmp_path / "mine.yaml")), MatrixFolder(tmp_path / "runs", "mine")
    told, said = tmp_path / "told.txt", []
    notify = f"sh -c 'echo {{name}} {{status}} >> {told}'"
    ends = drive(plan, folder, Places("cpu"), notify=notify, say=said.append)
    assert (ends.counts, ends.status) == ({"diverged": 1, "finished": 2}, "failed")
    (broken,) = [path for path in folder.runs.glob("*-s0") if finished_status(path) == "diverged"]
    assert "lr=1e+30" in broken.name
    (line,) = [line for line in said if "diverged: step " in line]
    assert "is not finite" in line
    kinds = [event.kind for event in RunRecord(broken).events()]
    assert (kinds.count("start"), kinds.count("resume")) == (1, 0), "it is not tried again"
    task = Task(broken.name, RunRecord(broken).recipe, broken, broken.name)
    assert run_task(task, None).kind == "diverged", "a worker may have outlived its driver"
    assert told.read_text().splitlines() == [f"{broken.name} diverged", "mine failed"]
    status = read_status(folder.runs)
    assert status.counts == {"diverged": 1, "finished": 2}
    shown = CliRunner().invoke(app, ["status", "--runs", str(folder.runs)]).output
    assert re.search(rf"{re.escape(broken.name)}: step \d+: .* is not finite", shown)
    modified = (broken / "result.json").stat().st_mtime_ns
    again = drive(plan, folder, Places("cpu"), say=said.append)
    assert (again.counts, again.status) == (ends.counts, "failed")
    assert (broken / "result.json").stat().st_mtime_ns == modified
    assert any(line.startswith(f"{broken.name} has diverged, and would again") for line in said)


def test_a_command_to_notify_is_checked_first() -> None:
    check_notify("echo {name} {status}")
    with pytest.raises(fl.BadInput, match="--notify: the program 'no-such-program' is not found"):
        check_notify("no-such-program {name}")
    for wrong in ("echo {nam}", "echo '", "echo {0}", ""):
        with pytest.raises(fl.BadInput, match="should be a command; in braces"):
            check_notify(wrong)


def test_a_folder_of_another_recipe_is_refused_before_anything_runs(tmp_path: Path) -> None:
    folder = MatrixFolder(tmp_path / "runs", "mine")
    fl.run(tiny(train__epochs=1), out=folder.runs / "mine-recipe-none-s0")
    with pytest.raises(fl.BadInput, match=r"holds a run of another recipe \(train.epochs differ\)"):
        drive(plan_of(tmp_path, 2), folder, CPU)
    assert not (folder.runs / "mine-recipe-none-s1").exists()


def test_the_holder_of_a_lock_is_known_only_while_it_lives(tmp_path: Path) -> None:
    folder = MatrixFolder(tmp_path, "mine")
    assert holder_of(tmp_path) is None
    with driving(folder):
        holder = holder_of(tmp_path)
        assert holder is not None
        assert (holder.name, holder.pid) == ("mine", os.getpid())
    assert holder_of(tmp_path) is None


def test_a_driver_that_cannot_write_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("frostlab.matrix.store.write_whole", full)
    folder = MatrixFolder(tmp_path / "runs", "mine")
    with pytest.raises(fl.BadInput, match=r"matrices cannot be written \(No space left"):
        drive(plan_of(tmp_path, 1), folder, CPU)
    assert holder_of(folder.runs) is None


def test_on_a_terminal_a_full_disk_is_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver whose log cannot be written could not say why it has ended."""
    monkeypatch.setattr("frostlab.matrix.task.disk_problem", lambda folder: "No space left")
    monkeypatch.setattr(
        "frostlab.cli.matrix.subprocess.Popen", lambda *_, **__: pytest.fail("started")
    )
    folder = MatrixFolder(tmp_path / "runs", "mine")
    with pytest.raises(fl.BadInput, match=r"mine cannot be written \(No space left\)"):
        _detach(plan_of(tmp_path, 1), folder)


@pytest.mark.parametrize(
    ("words", "place"),
    [(["matrix", "mine.yaml", "--runs", "r"], 4), (["matrix", "--runs", "r", "--", "mine"], 3)],
)
@pytest.mark.parametrize("code", [1, 2])
def test_on_a_terminal_the_driver_gets_the_same_options_and_its_end_is_shown(
    code: int, words: list[str], place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked: list[list[str]] = []

    class Ended:
        pid, returncode = 4321, code

        def __init__(self, command: list[str], stdout: Any, **_: Any) -> None:
            asked.append(command)
            stdout.write(b"s0 has diverged\nfrostlab: no room\nmine ended: 1 diverged\n")
            stdout.flush()

        def poll(self) -> int:
            return code

    monkeypatch.setattr("frostlab.cli.matrix.subprocess.Popen", Ended)
    monkeypatch.setattr(sys, "argv", ["frostlab", *words])
    folder = MatrixFolder(tmp_path / "runs", "mine")
    error = typer.Exit if code == 1 else fl.BadInput
    with pytest.raises(error) as caught:
        _detach(plan_of(tmp_path, 1), folder)
    assert asked[0][3:] == [*words[:place], "--wait", *words[place:]]
    if code == 1:
        assert capsys.readouterr().out == "s0 has diverged\nfrostlab: no room\n" + (
            "mine ended: 1 diverged\n"
        )
    else:
        assert str(caught.value) == "no room"


def test_on_a_terminal_a_driver_that_does_not_begin_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hanging:
        pid, returncode = 4321, None

        def poll(self) -> None:
            return None

    monkeypatch.setattr("frostlab.cli.matrix.subprocess.Popen", lambda *_, **__: Hanging())
    monkeypatch.setattr("frostlab.cli.matrix._START_SECONDS", 0.2)
    folder = MatrixFolder(tmp_path / "runs", "mine")
    with pytest.raises(fl.FrostlabError, match=r"^mine has not begun .* process 4321 ") as caught:
        _detach(plan_of(tmp_path, 1), folder)
    assert not isinstance(caught.value, fl.BadInput), "the exit code is 1"
    assert str(folder.log) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_kill_everything_then_the_same_command_repeats_nothing(tmp_path: Path) -> None:
    long = {"train": {"batch": 32, "epochs": 60, "threads": 1, "checkpoint": 20}}
    plan_of(tmp_path, 4, **long)
    words = ("matrix", "mine.yaml", "--devices", "cpu", "--per-device", "2")
    runs = tmp_path / "runs"
    program = command(tmp_path, *words)
    wait_until(lambda: any(runs.glob("*/result.json")))
    holder = holder_of(runs)
    assert holder is not None
    victims = [psutil.Process(holder.pid), *psutil.Process(holder.pid).children(recursive=True)]
    finished = {p.parent.name: p.stat().st_mtime_ns for p in runs.glob("*/result.json")}
    for victim in victims:
        victim.kill()
    program.communicate(timeout=200)
    again = command(tmp_path, *words)
    _, stderr = again.communicate(timeout=250)
    assert again.returncode == 0, stderr
    assert len(digests(runs)) == 4
    for name, modified in finished.items():
        assert (runs / name / "result.json").stat().st_mtime_ns == modified
    alone = fl.run(str(tmp_path / "mine-recipe.yaml"), seed=3, out=tmp_path / "alone")
    assert digests(runs)["mine-recipe-none-s3"] == alone.result.weights_digest


@pytest.mark.slow
def test_a_signal_stops_it_with_checkpoints_and_a_second_at_once(tmp_path: Path) -> None:
    endless = {"train": {"batch": 8, "epochs": 4000, "threads": 1}, "evaluate": {"every": 200000}}
    plan_of(tmp_path, 2, **endless)
    words = ("matrix", "mine.yaml", "--devices", "cpu", "--per-device", "2")
    program = command(tmp_path, *words)
    runs = tmp_path / "runs"
    events = [runs / f"mine-recipe-none-s{seed}" / "events.jsonl" for seed in (0, 1)]
    wait_until(lambda: all(p.exists() and '"step"' in p.read_text() for p in events))
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(timeout=200)
    assert program.returncode == 1
    assert "mine stopped; the same command continues it: 2 stopped" in stderr
    for path in events:
        assert finished_status(path.parent) == "stopped"
        assert any(path.parent.glob("checkpoints/*"))
    program = command(tmp_path, *words)
    wait_until(lambda: all('"resume"' in p.read_text() for p in events))
    MatrixFolder(runs, "mine").request(stop=EVERYTHING)
    MatrixFolder(runs, "mine").request(stop=EVERYTHING)
    program.communicate(timeout=200)
    assert program.returncode != 0
    assert holder_of(runs) is None
    resumes = [path.read_text().count('"resume"') for path in events]
    program = command(tmp_path, *words)  # goes on again
    wait_until(lambda: all(p.read_text().count('"resume"') > n
                           for p, n in zip(events, resumes, strict=True)))  # fmt: skip
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=200)


@pytest.mark.slow
def test_a_comparison_goes_through_the_same_queue(tmp_path: Path) -> None:
    """Two devices are two workers here; the comparison is the one that a single process makes."""
    values = {"recipe": tiny(), "arms": ["baseline", "oelm"], "seeds": 2, "clock": False}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    options = ("--devices", "cpu", "--per-device", "2", "--json")
    shared = command(tmp_path, "compare", "c.yaml", *options)
    stdout, stderr = shared.communicate(timeout=250)
    assert shared.returncode == 0, stderr
    alone = command(tmp_path, "compare", "c.yaml", "--out", "x", "--json")
    one, two = json.loads(stdout), json.loads(alone.communicate(timeout=250)[0])
    assert (one["jobs"], two["jobs"]) == (2, 1)
    for name, arm in one["arms"].items():
        for run, other in zip(arm["runs"], two["arms"][name]["runs"], strict=True):
            assert run["weights_digest"] == other["weights_digest"]


def test_options_of_a_comparison_that_exclude_each_other() -> None:
    for option in ("--jobs", "2"), ("--device", "cpu"):
        refused = CliRunner().invoke(
            app, ["compare", "docstrings-gpt", "--devices", "cpu", *option]
        )
        assert isinstance(refused.exception, fl.BadInput)
        assert f"{option[0]} has no meaning with --devices" in str(refused.exception)

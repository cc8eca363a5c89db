"""`status`, `stop` and `logs`: what they show, what they refuse, and that they import no torch."""

import errno
import fcntl
import json
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import frostlab as fl
from forked import frostlab_command
from frostlab.cli.main import app
from frostlab.matrix.plan import matrix_plan
from frostlab.matrix.show import overview_rows, overview_table, terminal_table
from frostlab.matrix.status import MatrixStatus, RunStatus, _progress, _seconds_left, read_status
from frostlab.matrix.store import DriverState, MatrixFolder, RunState, driving
from run_made import SHAPE, stage_event, step_event, write_events
from tiny import tiny


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a matrix of two treatments and two seeds, of which three runs have ended."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "small.yaml").write_text(yaml.safe_dump(tiny(train__epochs=1)))
    values = {"recipes": ["small.yaml"], "treatments": ["none", "oelm"], "seeds": 2}
    (folder / "mine.yaml").write_text(yaml.safe_dump(values))
    plan = matrix_plan(str(folder / "mine.yaml"))
    runs = folder / "runs"
    MatrixFolder(runs, "mine").write_plan(plan)
    for treatment, seed in (("none", 0), ("none", 1), ("oelm", 0)):
        settings = {"treatment": treatment}
        name = f"small-{treatment}-s{seed}"
        fl.run(str(folder / "small.yaml"), settings, seed=seed, out=runs / name)
    return folder


def set_state(store: Path, status: str = "running", **runs: RunState) -> None:
    state = DriverState(1, status, os.getpid(), "elsewhere", time.time(), time.time(), "cpu", 1,
                        {name.replace("_", "-"): run for name, run in runs.items()})  # fmt: skip
    MatrixFolder(store / "runs", "mine").write_state(state)


def test_the_record_and_the_driver_say_where_runs_stand(store: Path) -> None:
    runs = store / "runs"
    (runs / "matrices" / "mine" / "state.json").unlink(missing_ok=True)
    found = read_status(runs)
    assert found.counts == {"finished": 3, "waiting": 1}
    assert (found.name, found.status, found.seconds_left) == ("mine", "not started", None)
    broken = RunState("failed", error="out of memory", attempts=2)
    set_state(store, small_oelm_s1=broken)
    assert read_status(runs).status == "stopped", "its driver does not hold the lock"
    with driving(MatrixFolder(runs, "mine")):
        found = read_status(runs)
        assert found.status == "running"
        (failed,) = [row for row in found.runs if row.state == "failed"]
        assert (failed.name, failed.error) == ("small-oelm-s1", "out of memory")
        set_state(store)
        found = read_status(runs)
        assert found.counts == {"finished": 3, "waiting": 1}
        assert found.seconds_left is not None
        assert found.seconds_left == pytest.approx(
            sum(row.total_seconds or 0 for row in found.runs) / 3
        )
    set_state(store, "finished")


def test_jobs_that_are_pending_have_no_room_yet(store: Path) -> None:
    rows = [replace(row, state="finished", total_seconds=60.0) for row in
            read_status(store / "runs").runs[:1]]  # fmt: skip
    rows += [replace(rows[0], state="running", steps=600, steps_per_second=10.0, seconds_left=30.0)]
    rows += [replace(rows[0], state="pending", total_seconds=None)] * 3
    assert _seconds_left(rows, 1000) == pytest.approx(30 + 3 * 60)


def test_a_running_run_shows_its_step_speed_and_time_left(store: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    folder = MatrixFolder(runs, "mine")
    folder.write_plan(MatrixFolder(store / "runs", "mine").plan())
    source = store / "runs" / "small-none-s0" / "events.jsonl"
    lines = source.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if line.startswith('{"kind": "step"'))
    (runs / "small-none-s0").mkdir(parents=True)
    (runs / "small-none-s0" / "events.jsonl").write_text("".join(lines[: last + 1]))
    values = json.loads(lines[last])
    state = DriverState(1, "running", os.getpid(), "here", 0.0, 0.0, "cuda:0", 1,
                        {"small-none-s0": RunState("running", "cuda:0")})  # fmt: skip
    folder.write_state(state)
    with driving(folder):
        (row,) = [row for row in read_status(runs).runs if row.state == "running"]
    assert (row.step, row.steps, row.place) == (values["step"], 8, "cuda:0")
    assert row.loss == values["loss"][-1]
    assert row.steps_per_second is not None
    assert row.seconds_left == pytest.approx((8 - values["step"]) / row.steps_per_second)


def test_the_steps_are_those_of_the_stage_that_runs(tmp_path: Path) -> None:
    """Also if the stage has written many events."""
    events = [stage_event(0, steps=100), stage_event(100, steps=99_000)]
    events += [
        step_event(step, loss=[1.0] * 9 + [step / 2], ms=[5.0] * 10)
        for step in range(110, 90_110, 10)
    ]
    write_events(tmp_path, *events)
    path = tmp_path / "events.jsonl"
    assert path.stat().st_size > 1 << 20
    assert _progress(path) == (90_100, 99_100, 45_050.0, 200.0)
    write_events(tmp_path, *events, {"kind": "resume", "at": 1.0, "step": 50_000, **SHAPE})
    assert _progress(path) == (50_000, 99_100, 25_000.0, 200.0), "the run takes the rest again"


def test_the_overview_has_the_columns_of_the_mission_and_the_gap(store: Path) -> None:
    found = read_status(store / "runs")
    rows = {row.name: row for row in found.runs}
    table = overview_table(overview_rows(found)).splitlines()
    assert table[0] == ("| phase | id | data | method | total | step | gap to baseline | status |")
    base, treated = rows["small-none-s0"].value, rows["small-oelm-s0"].value
    assert base is not None
    assert treated is not None
    assert "| mine | small-none | majority | none |" in table[2]
    assert table[2].endswith("| baseline | finished, 2 seeds |")
    share = f"accuracy {treated - base:+.4g} ({100 * (treated - base) / base:+.1f} %)"
    assert f"| {share} | 1 waiting, 1 finished |" in table[3]
    treated_only = [replace(row, baseline=None) for row in found.runs if row.method == "oelm"]
    (alone,) = overview_rows(replace(found, runs=treated_only))
    assert alone.gap is None, "a treated run without a baseline is not one"
    pair = [replace(row, method="random") for row in found.runs if row.method == "none"]
    gaps = [row.gap for row in overview_rows(replace(found, runs=[*pair, rows["small-oelm-s0"]]))]
    assert gaps == ["baseline", share], "another treatment can be the baseline"


def test_times_of_runs_that_shared_a_device_are_left_out(store: Path) -> None:
    found = read_status(store / "runs")
    shared = replace(found, runs=[replace(row, runs_at_once=2) for row in found.runs])
    alone, apart = (overview_rows(status)[0] for status in (found, shared))
    assert alone.total_seconds is not None
    assert (apart.total_seconds, apart.step_seconds) == (None, None)
    assert apart.status == "finished, 2 seeds; shared a device, so not timed"
    first, second = (row for row in found.runs if row.id == apart.id)
    mixed = replace(found, runs=[first, replace(second, runs_at_once=2)])
    (one,) = overview_rows(mixed)
    assert (one.total_seconds, one.status) == (first.total_seconds, "finished, 2 seeds")


def test_a_crash_is_shown_with_the_end_of_the_log(store: Path) -> None:
    killed = "its process was killed by SIGSEGV"
    set_state(store, "finished", small_oelm_s1=RunState("crashed", error=killed))
    log = MatrixFolder(store / "runs", "mine").logs / "small-oelm-s1.log"
    for text, error in (
        ("", killed),
        ("\n \n", killed),
        ("step 12\nterminate called\n\n", f"{killed}; its log ends in: terminate called"),
    ):
        log.write_text(text)
        (row,) = [row for row in read_status(store / "runs").runs if row.state == "crashed"]
        assert row.error == error
    log.unlink()
    set_state(store, "finished")


def night(names: list[str]) -> MatrixStatus:
    """A matrix of which a third of the runs are running, the others crashed, wait or finished."""
    rows = []
    for index, name in enumerate(names):
        row = RunStatus(name, name, "m", "d", "oelm", 0, "waiting", metric="perplexity")
        if index % 3 == 0:
            row = replace(
                row, state="running", place="cuda:0", step=1000 + index, steps=120_000,
                loss=2.5, steps_per_second=12.25, seconds_left=9714.0,
            )  # fmt: skip
        elif index % 7 == 1:
            row = replace(row, state="crashed", error="its process was killed by SIGSEGV")
        elif index % 3 == 1:
            row = replace(row, state="finished", step=120_000, steps=120_000, value=47.24)
        rows.append(row)
    counts = {state: sum(row.state == state for row in rows) for state in
              ("running", "crashed", "waiting", "finished")}  # fmt: skip
    return MatrixStatus("m", "running", "cuda:0", "a full disk", rows, counts, [], 9e4, 1.7e9)


_GRID = [f"docstrings-gpt@lr={rate}-{treatment}-s{seed}" for rate in ("0.0001", "0.001", "0.01")
         for treatment in ("baseline", "oelm") for seed in range(5)]  # fmt: skip
_GROUP = [f"{name}-tiny-{treatment}-s{seed}" for name in ("gpt-01", "openwebtext-random")
          for treatment in ("baseline", "oelm-random") for seed in range(5)]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("names", [_GRID, _GROUP])
def test_a_table_fits_the_terminal_and_cuts_neither_states_nor_numbers(
    names: list[str], width: int
) -> None:
    status = night(names)
    lines = terminal_table(status, width).plain.split("\n")
    assert max(map(len, lines)) <= width
    head = next(index for index, line in enumerate(lines) if line.startswith("run "))
    table = [line.split("  ") for line in lines[head + 1 : head + 1 + len(names)]]
    assert len({row[0] for row in table}) == len(names), "names can be told apart"
    for row, run, line in zip(table, status.runs, lines[head + 1 :], strict=False):
        assert row[0][-3:] == run.name[-3:]
        assert f"  {run.state}" in line
        if run.state == "running":
            assert f"{run.step:,} of 120,000  " in line
            assert "loss 2.5000" in line
        assert (run.state == "running" and width >= 80) == ("2:41:54" in line)
        assert ("47.24" in line) == (run.state == "finished")
    assert ("steps/s" in lines[head]) == (width >= (120 if names is _GROUP else 100))
    assert terminal_table(status).plain.count("12.2") == sum(
        r.state == "running" for r in status.runs
    )


@pytest.mark.parametrize("height", [8, 12, 23, 60])
def test_a_table_fits_the_height_with_the_running_runs_and_the_end(height: int) -> None:
    status = night(_GRID)
    text = terminal_table(status, 80, height=height).plain
    lines = text.split("\n")
    assert len(lines) <= height
    assert "m (running): 30 runs: 10 running, 4 crashed, 8 waiting, 8 finished" in text
    assert re.search(r"25:00:00\s+left, until \w{3} \d\d:\d\d", text)
    running, crashed, waiting = (
        sum(bool(re.search(rf"  {state}\b", line)) for line in lines[2:])
        for state in ("running", "crashed", "waiting")
    )
    assert (running, crashed, waiting) == {
        8: (3, 0, 0), 12: (5, 0, 0), 23: (10, 3, 0), 60: (10, 4, 8),
    }[height]  # fmt: skip
    hidden = {
        8: "… 7 running, 4 crashed, 8 waiting, 8 finished\n",
        12: "… 5 running, 4 crashed, 8 waiting, 8 finished\n",
        23: "… 1 crashed, 8 waiting, 8 finished\n",
        60: "mine",
    }[height]
    assert (hidden in text) == (height < 60)


def test_the_commands_print_it(store: Path) -> None:
    set_state(store, "finished")
    one = replace(read_status(store / "runs"), runs=read_status(store / "runs").runs[:1])
    assert "): 1 run: " in terminal_table(one).plain
    call = CliRunner().invoke
    runs = ["--runs", str(store / "runs")]
    shown = call(app, ["status", *runs]).output
    assert "small-oelm-s0" in shown
    assert "mine (finished): 4 runs: 1 waiting, 3 finished" in shown
    values = json.loads(call(app, ["status", "--json", *runs]).output)
    assert (values["done"], values["total"]) == (3, 4)
    assert call(app, ["status", "--markdown", *runs]).output.startswith("| phase | id |")
    assert "no runs yet" in call(app, ["status", "--runs", str(store / "nowhere")]).output
    logs = MatrixFolder(store / "runs", "mine").logs
    (logs / "small-none-s0.log").write_text("step 1\nstep 2\n")
    assert call(app, ["logs", "small-none-s0", *runs]).output == "step 1\nstep 2\n"
    assert call(app, ["logs", "small-none", "-f", *runs]).output == "step 1\nstep 2\n"
    never = call(app, ["logs", "small-oelm-s1", "-f", *runs])
    assert isinstance(never.exception, fl.FrostlabError), "nothing is running"
    assert not isinstance(never.exception, fl.BadInput), "it ends with 1"
    assert str(never.exception) == (
        "small-oelm-s1 has not begun, and mine does not run now (finished); repeat the "
        "`frostlab matrix` command that started it to continue"
    )
    set_state(store, "finished", small_oelm_s1=RunState("missing", error="missing: data x"))
    never = call(app, ["logs", "small-oelm-s1", "-f", *runs])
    reason = "small-oelm-s1 has written no log: it is missing (missing: data x)"
    assert str(never.exception) == reason
    set_state(store, "finished")


def test_the_log_of_a_run_that_waits_is_waited_for(store: Path) -> None:
    runs = ["--runs", str(store / "runs")]
    folder = MatrixFolder(store / "runs", "mine")
    set_state(store)
    with driving(folder):
        early = CliRunner().invoke(app, ["logs", "small-oelm-s1", *runs]).exception
        assert "small-oelm-s1 has written nothing yet; see `frostlab status`" in str(early)
        shown: list[str] = []
        follow = ["logs", "small-oelm-s1", "-f", *runs]
        thread = threading.Thread(
            target=lambda: shown.append(CliRunner().invoke(app, follow).output), daemon=True
        )
        thread.start()
        time.sleep(0.5)
        (folder.logs / "small-oelm-s1.log").write_text("it begins\n")
        time.sleep(0.5)
        set_state(store, "finished")
        thread.join(20)
    assert shown == ["it begins\n"]
    (folder.logs / "small-oelm-s1.log").unlink()


def test_stop_leaves_a_request_for_the_driver(store: Path) -> None:
    call, runs = CliRunner().invoke, store / "runs"
    folder = MatrixFolder(runs, "mine")
    with driving(folder):
        set_state(store)
        stopped = call(app, ["stop", "small-oelm-s1", "--runs", str(runs)])
        assert stopped.output == "small-oelm-s1 will not be started\n"
        stopped = call(app, ["stop", "mine", "--runs", str(runs)])
        assert stopped.output == "mine stops; its runs write a checkpoint first\n"
        set_state(store, "stopping")
        assert call(app, ["stop", "mine", "--runs", str(runs)]).output == "mine ends at once\n"
        for name, reason in (
            ("small-none-s0", "is finished; only a run that trains or waits can be stopped"),
            ("small-oelm", "could be small-oelm-s0, small-oelm-s1"),
            ("small-olm-s2", "is no run of mine; did you mean `small-oelm-s"),
        ):
            refused = call(app, ["stop", name, "--runs", str(runs)]).exception
            assert isinstance(refused, fl.BadInput)
            assert reason in str(refused)
    assert list(folder.requests()) == [{"stop": "small-oelm-s1"}, {"stop": "*"}, {"stop": "*"}]
    assert list(folder.requests()) == []


def test_a_driver_that_writes_no_more_is_noticed(store: Path) -> None:
    """Its disk may be full, so that what it last wrote stays."""
    runs = store / "runs"
    folder = MatrixFolder(runs, "mine")
    with driving(folder):
        for seconds, noticed in ((5.0, False), (33.0, True)):
            now = time.time()
            folder.write_state(DriverState(
                1, "running", os.getpid(), socket.gethostname(), now, now - seconds, "cpu", 1,
                {"small-oelm-s1": RunState("running", "cpu", now)},
            ))  # fmt: skip
            status = read_status(runs)
            shown = terminal_table(status).plain
            note = rf"what is shown is 3\d s old: process {os.getpid()} cannot write "
            assert bool(re.search(note, " ".join(shown.split()))) == noticed
            assert (status.seconds_left is None) == noticed
    assert read_status(runs).note is None


def test_a_matrix_on_a_full_disk_can_be_stopped(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    call, runs = CliRunner().invoke, store / "runs"
    asked: list[int] = []
    named = ["frostlab"]

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def cmdline(self) -> list[str]:
            return ["python", "-m", *named]

        def terminate(self) -> None:
            asked.append(self.pid)

    with driving(MatrixFolder(runs, "mine")):
        set_state(store)
        monkeypatch.setattr("frostlab.matrix.store.write_whole", full)
        monkeypatch.setattr("psutil.Process", Process)
        stopped = call(app, ["stop", "mine", "--runs", str(runs)])
        assert stopped.output == "mine stops; its runs write a checkpoint first\n"
        one = call(app, ["stop", "small-oelm-s1", "--runs", str(runs)]).exception
        named[:] = ["another"]
        other = call(app, ["stop", "mine", "--runs", str(runs)]).exception
    assert isinstance(one, fl.BadInput)
    assert "requests cannot be written (No space left on device), so the request cannot" in str(one)
    assert isinstance(other, fl.BadInput)
    assert asked == [os.getpid()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stop", "mine"], "no matrix runs in"),
        (["matrix", "phase3", "--only", " , "], "--only ' , ' names no experiment"),
        (["status", "mien"], "no matrix 'mien' in .*did you mean `mine`"),
        (["logs", "small-none-s7"], "has a log of 'small-none-s7'; did you mean `small-none-s.`"),
        (["status", "--live", "--json"], "--live draws a table on a terminal"),
        (["matrix", "phase33"], "no group is called 'phase33'; did you mean `phase3`"),
        (["matrix", "phase3", "--devices", "cuda:77"], "'cuda:77' is not a device of this machine"),
        (["matrix", "phase3", "--add"], "--add: no matrix runs in"),
        (
            ["matrix", "phase3", "--notify", "x {y}"],
            "in braces, it may have only",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, store: Path) -> None:
    done = CliRunner().invoke(app, [*arguments, "--runs", str(store / "runs")])
    assert isinstance(done.exception, fl.BadInput)
    assert re.search(message, str(done.exception))
    assert "\n" not in str(done.exception)


def test_status_imports_neither_torch_nor_pydantic_models(store: Path) -> None:
    program = (
        "import sys; sys.argv = ['frostlab', 'status', '--runs', sys.argv[1]]\n"
        "from frostlab.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'frostlab.recipe.recipe', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(store / "runs")], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_a_terminal_has_its_width_and_a_pipe_has_whole_names(store: Path, tmp_path: Path) -> None:
    name = "a-run-with-a-long-name" * 5
    shutil.copytree(store / "runs" / "small-none-s0", tmp_path / name)
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    size = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "frostlab", "status", "--runs", str(tmp_path)]
    for options in ([], ["--wide"]):
        subprocess.run([*command, *options], stdout=other, env=size, check=True)
    os.close(other)
    narrow, wide = re.findall(r"(?m)^.*finished .*$", re.sub(r"\x1b\[\d*m|\r", "", read_all(main)))
    assert len(narrow) == 80
    assert re.match(r"a-run-with-.*….*-long-name  finished ", narrow)
    assert re.search(r"  finished  8 of 8  +[01][.\d]*$", narrow), "no column is empty"
    assert wide.startswith(f"{name}  finished  8 of 8  accuracy ")
    assert name in frostlab_command("status", "--runs", str(tmp_path)).stdout


def read_all(terminal: int) -> str:
    """The output of a terminal whose programs have ended."""
    text = b""
    with suppress(OSError):
        while block := os.read(terminal, 10000):
            text += block
    os.close(terminal)
    return text.decode()


@pytest.mark.slow
def test_on_a_terminal_it_goes_on_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(tiny()))
    values: dict[str, Any] = {"recipes": ["small.yaml"], "seeds": 2}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    main, other = pty.openpty()
    command = [sys.executable, "-m", "frostlab", "matrix", "mine.yaml", "--devices", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, stdout=other, stderr=other, check=False)
    os.close(other)
    text = os.read(main, 10000).decode()
    os.close(main)
    assert done.returncode == 0, text
    assert "2 runs to train in the background" in text
    ends = time.monotonic() + 200
    while "mine (finished): 2 runs: 2 finished" not in (
        shown := frostlab_command("status", cwd=tmp_path).stdout
    ):
        assert time.monotonic() < ends, shown
        time.sleep(0.5)
    assert "mine ended: 2 finished" in (tmp_path / "runs/matrices/mine/driver.log").read_text()

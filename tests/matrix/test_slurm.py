"""A matrix through a real Slurm on this machine; skipped where it is not installed."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

import frostlab as fl
import slurm_here
from compared import compared_in
from frostlab.matrix.check import check_recipe
from frostlab.matrix.places import Places
from frostlab.matrix.slurm_jobs import SlurmJobs, check_options, parse_options, warning_seconds
from frostlab.matrix.task import Outcome, Task
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunRecord
from tiny import tiny


def test_options_are_those_of_sbatch() -> None:
    assert parse_options("partition=gpu,time=4:00:00,mem=8G,cpus-per-task=2") == {
        "partition": "gpu", "time": 240, "mem": "8G", "cpus_per_task": "2",
    }  # fmt: skip
    times = {"30": 30, "90:30": 91, "1-12": 2160, "0:00:10": 1, "1-00:30:00": 1470}
    for text, minutes in times.items():
        assert parse_options(f"time={text}")["time"] == minutes


@pytest.mark.parametrize(
    "text", ["partition", "=x", "time=soon", "a b=1", "partition=", "signal_delay_s=x"]
)
def test_wrong_options_are_refused(text: str) -> None:
    with pytest.raises(fl.BadInput, match="--slurm"):
        parse_options(text)


def test_the_time_limit_must_be_given() -> None:
    pytest.importorskip("submitit", reason="submitit is not installed: frostlab[slurm]")
    with pytest.raises(fl.BadInput, match="--slurm partition=x: add the time limit of a job"):
        check_options("partition=x")


def test_the_signal_before_the_limit_leaves_a_short_job_time_to_start() -> None:
    """Slurm may send it half a minute early."""
    assert [warning_seconds(minutes) for minutes in (1, 3, 9, 240)] == [10, 30, 90, 90]


def test_places_exclude_each_other() -> None:
    with pytest.raises(fl.BadInput, match="--ray and --slurm exclude each other"):
        Places(ray="a:1", slurm="time=1").check()
    with pytest.raises(fl.BadInput, match="--slurm chooses the devices itself"):
        Places(per_device="2", slurm="time=1").check()


PROGRAMS = {  # instead of Slurm's; they fail while the file `down` exists
    "sbatch": "test -e $HERE/down && { echo 'sbatch: error: busy' >&2; exit 1; }; "
    "echo Submitted batch job 77",
    "squeue": "test -e $HERE/down && { echo 'Socket timed out' >&2; exit 1; }; cat $HERE/jobs",
    "scancel": 'test -e $HERE/down && exit 1; echo "$@" >> $HERE/cancelled',
    "sinfo": "echo cpu",
    "srun": "true",
}


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs of Slurm that do as the files in it say."""
    pytest.importorskip("submitit", reason="submitit is not installed: frostlab[slurm]")
    here = tmp_path / "programs"
    here.mkdir()
    for name, text in PROGRAMS.items():
        (here / name).write_text(f"#!/bin/sh\nHERE={here}\n{text}\n")
        (here / name).chmod(0o755)
    (here / "jobs").touch()
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    for seconds in ("_LOOK_SECONDS", "_LOST_SECONDS", "_RETRY_SECONDS"):
        monkeypatch.setattr(f"frostlab.matrix.slurm_jobs.{seconds}", 0.0)
    return here


def tasks(folder: Path, *names: str) -> list[Task]:
    recipe = recipe_from(tiny())
    return [Task(name, recipe, (folder / "runs" / name).resolve(), name) for name in names]


def test_jobs_go_on_while_slurm_does_not_answer(pretended: Path, tmp_path: Path) -> None:
    said: list[str] = []
    jobs = SlurmJobs("time=1", None, tmp_path / "logs", said.append)
    first, second = tasks(tmp_path, "a", "b")
    (pretended / "jobs").write_text("77|PENDING|\n")
    jobs.start(first)
    assert jobs.wait(0) == []
    assert jobs.running() == {first.path: "job 77, pending"}
    (pretended / "jobs").write_text("77|RUNNING|node1\n")
    assert jobs.wait(0) == []
    assert jobs.running() == {first.path: "job 77, node1"}
    (pretended / "down").touch()
    (pretended / "jobs").write_text("")
    jobs.start(second)
    for _ in range(3):
        assert jobs.wait(0) == [], "a job is not lost because its state is not known"
    assert jobs.running() == {first.path: "job 77, node1", second.path: "Slurm, pending"}
    assert [line.partition(";")[0] for line in said] == [
        "--slurm: Socket timed out", "--slurm: sbatch: error: busy",
    ]  # fmt: skip
    write_outcome(tmp_path, "a", Outcome("finished", "accuracy 0.5"))
    assert [(task.name, outcome.kind) for task, outcome in jobs.wait(0)] == [("a", "finished")]
    (pretended / "down").unlink()
    (pretended / "jobs").write_text("77|PENDING|\n")
    assert jobs.wait(0) == []
    assert jobs.running() == {second.path: "job 77, pending"}
    jobs.close("failed")
    assert not (pretended / "cancelled").exists(), "the next driver finds the jobs again"
    jobs.close("killed")
    assert (pretended / "cancelled").read_text() == "77\n"


def test_a_refusal_between_two_jobs_is_not_the_end(pretended: Path, tmp_path: Path) -> None:
    """No job lives when the only one that is left has ended and is to be submitted again."""
    said: list[str] = []
    jobs = SlurmJobs("time=1", None, tmp_path / "logs", said.append)
    first, second = tasks(tmp_path, "a", "b")
    (pretended / "jobs").write_text("77|PENDING|\n")
    jobs.start(first)
    jobs.wait(0)
    write_outcome(tmp_path, "a", Outcome("crashed", "killed"))
    assert [outcome.kind for _, outcome in jobs.wait(0)] == ["crashed"]
    (pretended / "down").touch()
    jobs.start(second)
    assert jobs.wait(0) == []
    assert jobs.running() == {second.path: "Slurm, pending"}
    assert said[-1] == "--slurm: sbatch: error: busy; submits 1 run again in 0 s"


def test_the_outcome_of_a_job_that_is_tried_again_is_read_once(
    pretended: Path, tmp_path: Path
) -> None:
    """squeue still calls the first job running when its outcome arrives."""
    (task,) = tasks(tmp_path, "a")
    jobs = SlurmJobs("time=1", None, tmp_path / "logs")
    (pretended / "jobs").write_text("77|RUNNING|node1\n")
    jobs.start(task)
    jobs.wait(0)
    write_outcome(tmp_path, "a", Outcome("blocked", "No space left on device"))
    assert [outcome.kind for _, outcome in jobs.wait(0)] == ["blocked"]
    (pretended / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 78\n")
    (pretended / "jobs").write_text("77|RUNNING|node1\n78|PENDING|\n")
    jobs.start(task)
    assert jobs.wait(0) == []
    assert jobs.running() == {task.path: "job 78, pending"}


def test_a_run_is_not_submitted_twice_if_squeue_does_not_answer_at_first(
    pretended: Path, tmp_path: Path
) -> None:
    (task,) = tasks(tmp_path, "a")
    earlier = SlurmJobs("time=1", None, tmp_path / "logs")
    (pretended / "jobs").write_text("77|RUNNING|node1\n")
    earlier.start(task)
    earlier.wait(0)
    earlier.close("failed")
    (pretended / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 78\n")
    (pretended / "squeue").rename(pretended / "answers")
    (pretended / "squeue").write_text("#!/bin/sh\necho 'Socket timed out' >&2\nexit 1\n")
    (pretended / "squeue").chmod(0o755)
    jobs = SlurmJobs("time=1", None, tmp_path / "logs")
    jobs.start(task)
    assert jobs.wait(0) == []
    assert jobs.running() == {task.path: "Slurm, pending"}
    (pretended / "answers").rename(pretended / "squeue")
    assert jobs.wait(0) == []
    assert jobs.wait(0) == []
    assert jobs.running() == {task.path: "job 77, node1"}


def write_outcome(folder: Path, name: str, outcome: Outcome) -> None:
    (folder / "slurm" / f"{name}.outcome.json").write_text(json.dumps(asdict(outcome)))


def test_a_job_that_slurm_does_not_know_has_crashed(pretended: Path, tmp_path: Path) -> None:
    jobs = SlurmJobs("time=1", None, tmp_path / "logs")
    (task,) = tasks(tmp_path, "a")
    jobs.start(task)
    (ended,) = jobs.wait(0)
    assert ended == (task, Outcome("crashed", "job 77 ended with UNKNOWN"))


def test_options_that_sbatch_refuses_are_one_line(pretended: Path, tmp_path: Path) -> None:
    jobs = SlurmJobs("time=1", None, tmp_path / "logs")
    (pretended / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such qos' >&2\nexit 1\n")
    jobs.start(*tasks(tmp_path, "a"))
    with pytest.raises(fl.BadInput, match="^--slurm: .*no such qos"):
        jobs.wait(0)


def test_a_missing_program_of_slurm_is_named(pretended: Path) -> None:
    (pretended / "srun").unlink()
    if shutil.which("srun") is not None:
        pytest.skip("this machine has Slurm's own srun")
    with pytest.raises(fl.BadInput, match="--slurm: srun is not installed here"):
        check_options("time=1")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    pytest.importorskip("submitit", reason="submitit is not installed: frostlab[slurm]")
    if (reason := slurm_here.missing()) is not None:
        pytest.skip(reason)
    with slurm_here.slurm(tmp_path_factory.mktemp("slurm") / "s") as environment:
        yield environment


def command(
    folder: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "frostlab", *arguments]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=290
    )


def write(folder: Path, seeds: int, **changes: object) -> None:
    (folder / "small.yaml").write_text(yaml.safe_dump(tiny(**changes)))
    values = {"recipes": ["small.yaml"], "seeds": seeds}
    (folder / "mine.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.slow
def test_runs_are_jobs_of_an_array(environment: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, 3)
    options = ("--slurm", "partition=test,time=9")
    wrong = command(tmp_path, environment, "matrix", "mine.yaml", *options)
    assert wrong.returncode == 2
    assert "partition=test does not exist; did you mean `tests`" in wrong.stderr
    assert not (tmp_path / "runs").exists()
    done = command(
        tmp_path, environment, "matrix", "mine.yaml", "--slurm", "partition=tests,time=10"
    )
    assert done.returncode == 0, done.stderr
    jobs = json.loads((tmp_path / "runs/matrices/mine/slurm/jobs.json").read_text())
    assert len({number.partition("_")[0] for number in jobs.values()}) == 1, "one array job"
    assert len(set(jobs.values())) == 3
    for seed in range(3):
        alone = fl.run(str(tmp_path / "small.yaml"), seed=seed, out=tmp_path / f"alone-{seed}")
        there = RunRecord(tmp_path / "runs" / f"small-none-s{seed}")
        assert there.result.weights_digest == alone.result.weights_digest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_at_its_time_limit_is_requeued_and_goes_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The run takes longer than the limit of one minute; status shows the job while it waits."""
    train = {"batch": 8, "steps": 1000, "threads": 1, "checkpoint": 10**6}
    # the least of several times, because other programs on the machine may slow some of them
    times = [check_recipe("a", recipe_from(tiny(train=train))).step_seconds for _ in range(8)]
    train["steps"] = round(65 / min(time for time in times if time is not None))
    write(tmp_path, 1, train=train, evaluate={"every": train["steps"], "batch": 256})
    words = [sys.executable, "-m", "frostlab", "matrix", "mine.yaml", "--slurm", "time=0:01:00"]
    pipe = subprocess.PIPE
    driver = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True
    )
    events = tmp_path / "runs" / "small-none-s0" / "events.jsonl"
    states: list[str] = []
    while driver.poll() is None:
        shown = json.loads(command(tmp_path, environment, "status", "--json").stdout)
        states += [row["state"] for row in shown["runs"] if states[-1:] != [row["state"]]]
        time.sleep(0.5)
    _, stderr = driver.communicate()
    assert driver.returncode == 0, stderr
    assert "tried once more" not in stderr, "a time limit is no crash"
    assert "pending" in states[states.index("running") :], states
    found = [json.loads(line) for line in events.read_text().splitlines()]
    stops = [event["step"] for event in found if event["kind"] == "end"]
    resumes = [event["step"] for event in found if event["kind"] == "resume"]
    assert resumes, "it took longer than the limit"
    assert resumes == stops[:-1], "no step was taken twice"
    assert stops[-1] == train["steps"]


@pytest.mark.slow
def test_a_comparison_through_slurm_is_the_local_one(
    environment: dict[str, str], tmp_path: Path
) -> None:
    there = compared_in(tmp_path, "--slurm", "time=10", environment=environment)
    jobs = json.loads((there / "queue" / "runs" / "slurm" / "jobs.json").read_text())
    assert sorted(jobs) == ["baseline-s0", "baseline-s1", "oelm-s0", "oelm-s1"]
    log = there / "queue" / "runs" / "logs" / "oelm-s1.log"
    assert log.read_text().startswith("step 0 of 16")

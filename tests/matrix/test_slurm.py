"""A matrix through a real Slurm on this machine; skipped where it is not installed."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import frostlab as fl
import slurm_here
from frostlab.matrix.places import Places
from frostlab.matrix.slurm_jobs import parse_options
from frostlab.records.folder import RunRecord
from tiny import tiny


def test_options_are_those_of_sbatch() -> None:
    assert parse_options("partition=gpu,time=4:00:00,mem=8G,cpus-per-task=2") == {
        "partition": "gpu", "time": 240, "mem": "8G", "cpus_per_task": "2",
    }  # fmt: skip
    times = {"30": 30, "90:30": 91, "1-12": 2160, "0:00:10": 1, "1-00:30:00": 1470}
    for text, minutes in times.items():
        assert parse_options(f"time={text}")["time"] == minutes


@pytest.mark.parametrize("text", ["partition", "=x", "time=soon", "a b=1", "partition="])
def test_wrong_options_are_refused(text: str) -> None:
    with pytest.raises(fl.BadInput, match="--slurm"):
        parse_options(text)


def test_places_exclude_each_other() -> None:
    with pytest.raises(fl.BadInput, match="--ray and --slurm exclude each other"):
        Places(ray="a:1", slurm="time=1").check()
    with pytest.raises(fl.BadInput, match="--slurm chooses the devices itself"):
        Places(per_device="2", slurm="time=1").check()


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
    wrong = command(tmp_path, environment, "matrix", "mine.yaml", "--slurm", "partition=test")
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
def test_a_requeued_job_goes_on_from_its_checkpoint(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The signal that Slurm sends before the time limit requeues the job; status shows it."""
    train = {"batch": 8, "steps": 4000, "threads": 1, "checkpoint": 200}
    write(tmp_path, 1, train=train, evaluate={"every": 2000, "batch": 256})
    words = [sys.executable, "-m", "frostlab", "matrix", "mine.yaml", "--slurm", "time=30"]
    pipe = subprocess.PIPE
    driver = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True
    )
    run = tmp_path / "runs" / "small-none-s0"
    deadline = time.monotonic() + 100
    while not list(run.glob("checkpoints/step-*")):
        assert time.monotonic() < deadline
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.1)
    jobs = json.loads((tmp_path / "runs/matrices/mine/slurm/jobs.json").read_text())
    (number,) = jobs.values()
    subprocess.run(["scancel", "--signal=USR2", number], env=environment, check=True)
    seen = set()
    deadline = time.monotonic() + 60
    while "pending" not in seen and time.monotonic() < deadline:
        shown = command(tmp_path, environment, "status", "--json")
        seen |= {row["state"] for row in json.loads(shown.stdout)["runs"]}
    _, stderr = driver.communicate(timeout=290)
    assert driver.returncode == 0, stderr
    assert "pending" in seen, "Slurm lets a requeued job wait for two minutes"
    resumes = [
        json.loads(line)["step"] for line in (run / "events.jsonl").read_text().splitlines()
        if line.startswith('{"kind": "resume"')
    ]  # fmt: skip
    assert len(resumes) == 1
    assert resumes[0] > 0
    alone = fl.run(str(tmp_path / "small.yaml"), out=tmp_path / "alone")
    assert RunRecord(run).result.weights_digest == alone.result.weights_digest

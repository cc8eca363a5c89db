"""`frostlab check`: what the machine has, and what would stop a run."""

import importlib.metadata
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import typer

from frostlab.cli import machine
from frostlab.matrix import mps, slots, task
from frostlab.matrix.mps import Mps
from frostlab.matrix.slots import GpuUse
from frostlab.records import environment as environments


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    monkeypatch.setattr(machine, "_steps", lambda problems: "eager, float32")
    found = machine.look(tmp_path / "not" / "yet")
    assert found.problems == []
    assert found.memory_total == psutil.virtual_memory().total
    assert {package.name for package in found.packages} >= {"torch", "transformers", "typer"}
    assert all(package.fits for package in found.packages)
    (runs, cache) = found.folders
    assert runs.path == str(tmp_path / "not" / "yet")
    assert runs.free == 10**12
    assert cache.purpose == "cache"
    assert not (tmp_path / "not").exists(), "it only looks"
    assert json.loads(json.dumps(found.to_dict()))["extras"][0]["installed"] in (True, False)


def test_every_extra_is_explained() -> None:
    extras = importlib.metadata.metadata("frostlab").get_all("Provides-Extra") or []
    assert set(machine.EXTRAS) == set(extras) - {"dev"}
    found: list[str] = []
    _, shown = machine._packages(found)
    assert {p.name for p in next(e for e in shown if e.name == "slurm").packages} == {"submitit"}
    assert {p.name for p in next(e for e in shown if e.name == "eeg").packages} == {"mne"}


def test_old_and_missing_packages_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "mne":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"torch": "2.10.0", "ray": "2.1"}.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    problems: list[str] = []
    packages, extras = machine._packages(problems)
    assert problems == ["torch 2.10.0 is installed, but frostlab needs torch>=2.11"]
    assert [package.name for package in packages if not package.fits] == ["torch"]
    assert [extra.name for extra in extras if not extra.installed] == ["eeg", "ray"]


def test_a_disk_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "disk_problem", lambda folder: "Read-only file system")
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path / "cache"))
    problems: list[str] = []
    list(machine._folders(tmp_path / "runs", problems))
    assert problems == [
        f"{name}: nothing can be written in {tmp_path}: Read-only file system"
        for name in ("runs", "cache")
    ]


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch can use this machine's GPU")
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda p: str(p) == "/dev/nvidiactl" or exists(p))
    problems: list[str] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine._steps(problems) == "eager, float32"
    (problem,) = problems
    assert problem.startswith(f"torch {torch.__version__} cannot use this machine's GPU: ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine._steps(hidden := []) == "eager, float32"
    assert hidden == [], "the user has hidden it"


def test_a_missing_package_is_named_and_nothing_is_imported_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "psutil":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(machine, "_steps", lambda problems: pytest.fail("looked further"))
    with pytest.raises(typer.Exit):
        machine.check(runs=Path("runs"))
    assert "problem: psutil is not installed: pip install frostlab" in capsys.readouterr().out


def test_gpus_are_shown_with_their_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"name": "NVIDIA H200", "memory_total_bytes": 150 * 10**9, "driver": "580.1"}
    real = environments.environment

    def environment(device: str) -> dict[str, Any]:
        return real("cpu") | ({"gpu": facts} if device != "cpu" else {})

    use = GpuUse(30 * 10**9, 150 * 10**9, 5.0, False, (77,))
    monkeypatch.setattr(environments, "environment", environment)
    monkeypatch.setattr(slots, "count_gpus", lambda: 1)
    monkeypatch.setattr(slots, "gpu_use", lambda device: use)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    monkeypatch.setattr(machine, "_steps", lambda problems: "eager, float32")
    refusing = nullcontext(Mps(refusal="no daemon for a test"))
    monkeypatch.setattr(mps, "multi_process_service", lambda: refusing)
    machine.check(runs=Path("runs"))
    shown = " ".join(capsys.readouterr().out.split())
    assert "cuda:0 NVIDIA H200, 150 GB, 120 GB free, driver 580.1, in use (by process 77" in shown
    assert "CUDA MPS no daemon for a test" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo cpu*", "available"),
        ("echo 'sinfo: error: no server' >&2; exit 1", "it does not answer: sinfo: error: no serv"),
        (None, "sinfo is not installed"),
    ],
)
def test_slurm_is_asked(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "squeue", *(["sinfo"] if text else [])):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine._slurm().startswith(said)


def test_problems_end_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["torch>=99", "none-such>=1; extra == 'eeg'"]
    )
    with pytest.raises(typer.Exit) as ended:
        machine.check(runs=Path("runs"))
    assert ended.value.exit_code == 1
    shown = capsys.readouterr().out
    assert "but frostlab needs torch>=99" in " ".join(shown.split())
    assert "no: none-such>=1" in shown
    assert "pip install 'frostlab[eeg]'" in shown


def test_without_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    problems: list[str] = []
    assert machine._packages(problems) == ([], [])
    assert problems == ["frostlab is not installed as a package, so its needs are not known"]


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    problems: list[str] = []
    assert machine._steps(problems) == "none"
    assert problems[0].startswith("torch cannot be imported: ")

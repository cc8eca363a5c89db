"""The environment is told whole where it can be, and nothing that is missing stops a run."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import frostlab as fl
from frostlab.records import environment as module
from frostlab.records.environment import (
    code_state,
    comparable_facts,
    environment,
    gpu_state,
    one_line,
)
from tiny import tiny


class FakeNvml(ModuleType):
    """pynvml on a machine with three GPUs: handles are their numbers."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.UUIDS):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "MIG-dddd":
            raise self.NVMLError("Not Found")
        return 7

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.UUIDS[handle]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"Fake {handle}"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.1"

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 40 + handle

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return {1: 2000, 2: 2700}[kind]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 123_400

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=1000, used=250)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        ours, theirs = os.getpid(), 4_000_000
        return [SimpleNamespace(pid=pid, usedGpuMemory=50) for pid in (theirs, ours)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=4_000_001, usedGpuMemory=None)]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid == 4_000_001:
            raise self.NVMLError("Not Found")
        return "python"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_a_gpu_is_described_with_who_else_is_on_it(nvml: FakeNvml) -> None:
    found = environment("cuda:1")
    state = {
        "temperature_c": 41.0,
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 2619.0,
        "power_watts": 123.4,
        "utilisation_percent": None,  # this one does not say
        "memory_used_bytes": 250,
    }
    assert found["gpu_reason"] is None
    assert found["gpu"] == {
        "name": "Fake 1",
        "uuid": "GPU-aabb-2",
        "driver": "550.1",
        "memory_total_bytes": 1000,
        "power_limit_watts": 700.0,
        "max_sm_clock_mhz": 2000.0,
        "max_memory_clock_mhz": 2700.0,
        **state,
        "other_processes": [
            {"pid": 4_000_000, "name": "python", "memory_bytes": 50},
            {"pid": 4_000_001, "name": None, "memory_bytes": None},
        ],
    }
    assert gpu_state("cuda:1") == state


@pytest.mark.parametrize(
    ("visible", "device", "name"),
    [
        (None, "cuda", "Fake 0"),
        (None, "cuda:2", "Fake 2"),
        ("2,0", "cuda", "Fake 2"),
        ("2, 0", "cuda:1", "Fake 0"),
        ("GPU-cccc-3,1", "cuda:0", "Fake 2"),
        ("GPU-aab,GPU-c", "cuda:1", "Fake 2"),  # the beginning of a UUID, as CUDA allows
        ("MIG-dddd", "cuda", "Fake 7"),
    ],
)
def test_cuda_numbers_follow_the_visible_devices(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    device: str,
    name: str,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment(device)["gpu"]["name"] == name


@pytest.mark.parametrize(
    ("visible", "device", "reason"),
    [
        (None, "cpu", "no CUDA device: the run is on cpu"),
        (None, "mps", "no CUDA device: the run is on mps"),
        (None, "cuda:x", "no CUDA device: 'cuda:x' is not a device name"),
        (None, "cuda:3", "NVML knows no GPU 3"),
        ("", "cuda", "no CUDA device 0 in CUDA_VISIBLE_DEVICES="),
        ("1,-1,2", "cuda:1", "no CUDA device 1 in CUDA_VISIBLE_DEVICES=1,-1,2"),
        ("GPU-aa", "cuda", "NVML knows no GPU GPU-aa"),  # two begin so
        ("MIG-eeee", "cuda", "NVML knows no GPU MIG-eeee"),
    ],
)
def test_without_a_gpu_the_reason_is_said(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    device: str,
    reason: str,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = environment(device)
    assert (found["gpu"], found["gpu_reason"]) == (None, reason)
    assert gpu_state(device) is None


def test_once_cuda_runs_torch_says_which_gpu_it_is(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 1,
        get_device_properties=lambda index: SimpleNamespace(uuid=("aaaa-1", "cccc-3")[index]),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # CUDA may order them otherwise
    assert environment("cuda")["gpu"]["name"] == "Fake 2"
    assert environment("cuda:0")["gpu"]["name"] == "Fake 0"


def test_nvml_may_be_missing_broken_or_hang(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise nvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    assert environment("cuda")["gpu_reason"] == "NVML does not answer: Driver Not Loaded"
    monkeypatch.setattr(module, "_TIMEOUT", 0.1)
    monkeypatch.setattr(nvml, "nvmlInit", lambda: time.sleep(5))
    began = time.monotonic()
    assert environment("cuda")["gpu_reason"] == "the driver gave no answer within 0.1 s"
    assert gpu_state("cuda") is None
    assert time.monotonic() - began < 2
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert environment("cuda")["gpu_reason"] == "nvidia-ml-py is not installed"


def test_the_host_and_the_libraries_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("RANK", raising=False)
    found = environment("cpu")
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["cuda"] == torch.version.cuda
    assert found["device_name"] == found["host"]["cpu"]
    assert found["versions"]["scipy"] == importlib.metadata.version("scipy")
    assert found["packages"]["pytest"] == pytest.__version__
    assert len(found["packages"]) > 30
    assert found["numerics"] == {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": False,
        "cudnn_deterministic": False,
        "cudnn_benchmark": False,
        "cuda_matmul": "float32",
        "cudnn_convolution": "tf32",
        "cpu_matmul": "float32",
    }
    assert found["host"]["torch_threads"] == torch.get_num_threads()
    assert found["host"]["logical_cores"] == os.cpu_count()
    assert found["host"]["memory_bytes"] > found["host"]["memory_available_bytes"] > 0
    assert len(found["host"]["load_average"]) == 3
    assert (found["variables"]["OMP_NUM_THREADS"], found["variables"]["RANK"]) == ("3", None)
    made = datetime.fromisoformat(found["time"])
    assert abs((datetime.now(UTC) - made).total_seconds()) < 60
    assert all(word in found["command"] for word in sys.orig_argv[:1])
    assert {key for key, value in found["host"].items() if value is None} <= {"usable_cores"}


def test_settings_that_change_digits_are_comparable_facts() -> None:
    import torch

    before = comparable_facts(environment("cpu"))
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    try:
        after = comparable_facts(environment("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    changed = {key: value for key, value in after.items() if before[key] != value}
    assert changed == {"deterministic": "True", "cuda matmul": "tf32", "cpu matmul": "tf32"}
    assert comparable_facts(environment("cpu")) == before
    assert comparable_facts({"gpu": 3, "versions": None})["frostlab's code"] == "none"


def test_torch_is_not_imported_for_it() -> None:
    code = "import sys; from frostlab.records.environment import environment as e\n"
    code += "print(e('cuda:0')['host']['torch_threads'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None False\n"


HOSTILE = """
[core]
fsmonitor = touch {marker}
hooksPath = {hooks}
pager = touch {marker}
sshCommand = touch {marker}
[filter "evil"]
clean = touch {marker}; cat
smudge = touch {marker}; cat
process = touch {marker}
required = true
[diff "evil"]
textconv = touch {marker}
[gpg]
program = {hooks}/post-index-change
[alias]
status = !touch {marker}
rev-parse = !touch {marker}
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the current folder a repository whose config runs programs; they write this file."""
    marker, folder, hooks = tmp_path / "marker", tmp_path / "repository", tmp_path / "hooks"
    folder.mkdir()
    hooks.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q")
    Path("code.py").write_text("1")
    Path(".gitattributes").write_text("* filter=evil diff=evil")
    git("-c", "core.hooksPath=/", "add", "code.py")
    git("commit", "-qm", "Begin")
    with Path(".git/config").open("a") as config:
        config.write(HOSTILE.format(marker=marker, hooks=hooks))
    for name in ("post-index-change", "pre-commit", "post-checkout", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (hooks / name).chmod(0o755)
    os.utime("code.py", (1, 1))  # git must look at the content
    programs = folder / "bin"  # a folder of programs in the repository, such as PATH=./bin
    programs.mkdir()
    for name in ("git", "uname"):
        (programs / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (programs / name).chmod(0o755)
    return marker


def git(*words: str, cwd: Path | None = None) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def test_a_repository_in_the_current_folder_runs_nothing(
    marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment("cpu")
    assert not marker.exists()
    subprocess.run(["git", "status"], capture_output=True, check=False)
    assert marker.exists(), "the repository is harmless, so the test shows nothing"
    marker.unlink()
    monkeypatch.setenv("PATH", f"./bin:{os.environ['PATH']}")
    monkeypatch.setattr(platform, "_uname_cache", None, raising=False)
    monkeypatch.setattr(platform, "_platform_cache", {}, raising=False)
    environment("cpu")
    assert not marker.exists(), "a program was looked up in PATH"


def test_a_run_in_somebody_elses_repository_runs_nothing_of_it(marker: Path) -> None:
    record = fl.run(tiny(), runs=Path("runs"))
    assert record.status == "finished"
    assert set(record.environment["code"]) == {"commit", "digest"}
    assert not marker.exists()


def test_no_process_is_started(tmp_path: Path) -> None:
    code = """
import sys
bad = ("subprocess", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty")
sys.addaudithook(lambda event, _: print(event) if event.startswith(bad) else None)
from frostlab.records.environment import environment
environment("cpu")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == ""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of frostlab with one commit."""
    package = tmp_path / "checkout" / "src" / "frostlab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("1")
    root = tmp_path / "checkout"
    git("init", "-q", "-b", "main", cwd=root)
    git("add", ".", cwd=root)
    git("commit", "-qm", "Begin", cwd=root)
    return root


def commit_of(root: Path) -> str | None:
    return code_state(root / "src" / "frostlab")["commit"]


def test_the_commit_of_a_checkout(checkout: Path, tmp_path: Path) -> None:
    commit = git("rev-parse", "HEAD", cwd=checkout).strip()
    assert commit_of(checkout) == commit
    git("worktree", "add", "-q", "-b", "feature/x", str(tmp_path / "worktree"), cwd=checkout)
    assert commit_of(tmp_path / "worktree") == commit
    git("pack-refs", "--all", cwd=checkout)
    assert commit_of(checkout) == commit_of(tmp_path / "worktree") == commit
    git("commit", "-qm", "Next", "--allow-empty", cwd=tmp_path / "worktree")
    git("checkout", "-q", "--detach", "feature/x", cwd=checkout)
    assert commit_of(checkout) == commit_of(tmp_path / "worktree") != commit


def test_an_installed_package_has_no_commit(checkout: Path) -> None:
    installed = checkout / ".venv" / "site-packages" / "frostlab"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("1")
    state = code_state(installed)
    assert state == {"commit": None, "digest": code_state(checkout / "src" / "frostlab")["digest"]}


def test_the_digest_shows_changed_and_renamed_files(checkout: Path) -> None:
    package = checkout / "src" / "frostlab"
    digests = [code_state(package)["digest"]]
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_text("x")
    assert code_state(package)["digest"] == digests[0]
    (package / "__init__.py").write_text("2")
    digests.append(code_state(package)["digest"])
    (package / "__init__.py").rename(package / "other.py")
    digests.append(code_state(package)["digest"])
    assert len(set(digests)) == 3
    assert None not in digests


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("HEAD", "ref: refs/../../secret\n"),
        ("HEAD", "ref: /etc/hostname\n"),
        ("HEAD", "ref: refs/heads/gone\n"),
        ("HEAD", "x" * 40),
        ("HEAD", ""),
        ("HEAD", "\0"),
        ("HEAD", "ref: refs/heads/\0"),
        ("refs/heads/main", "ref: refs/heads/main\n"),
        ("refs/heads/main", "é" * 40),
    ],
)
def test_a_damaged_repository_has_no_commit(checkout: Path, name: str, content: str) -> None:
    (checkout / ".git" / name).write_text(content)
    assert commit_of(checkout) is None


def test_a_pipe_instead_of_a_repository_does_not_block(checkout: Path) -> None:
    (checkout / ".git" / "HEAD").unlink()
    os.mkfifo(checkout / ".git" / "HEAD")
    assert commit_of(checkout) is None


def test_the_machine_on_one_line_has_only_known_facts() -> None:
    host = {"cpu": "Xeon", "logical_cores": 8, "usable_cores": 2, "os": "Linux"}
    assert module.machine_line({"host": host}) == "Xeon, 2 of 8 cores, Linux"
    assert module.machine_line({"host": {**host, "usable_cores": None}}) == "Xeon, 8 cores, Linux"
    assert module.machine_line({}) == ""


def test_an_environment_on_one_line() -> None:
    whole = {
        "gpu": {"name": "Fake 1", "driver": "550.1"},
        "host": {"name": "here", "cpu": "Old"},
        "versions": {"torch": "2.13", "python": "3.11"},
        "code": {"commit": "0123456789abcdef", "digest": "fedcba98765432100"},
    }
    line = "Fake 1, driver 550.1, torch 2.13, python 3.11, on here, commit 0123456789ab, "
    line += "digest fedcba987654"
    assert one_line(whole) == line
    assert one_line({**whole, "gpu": None, "versions": 3, "code": {}}) == "Old, on here"
    assert one_line({}) == ""

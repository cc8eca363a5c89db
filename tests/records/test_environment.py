"""The environment is told whole where it can be, and nothing that is missing stops a run."""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from frostlab.records import environment as module
from frostlab.records.environment import environment, gpu_state, one_line


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
    assert environment("cuda")["gpu_reason"] == "no answer within 0.1 s"
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
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["cuda"] == torch.version.cuda
    assert found["host"]["torch_threads"] == torch.get_num_threads()
    assert found["host"]["logical_cores"] == os.cpu_count()
    assert found["host"]["memory_bytes"] > found["host"]["memory_available_bytes"] > 0
    assert len(found["host"]["load_average"]) == 3
    assert (found["variables"]["OMP_NUM_THREADS"], found["variables"]["RANK"]) == ("3", None)
    made = datetime.fromisoformat(found["time"])
    assert abs((datetime.now(UTC) - made).total_seconds()) < 60
    assert all(word in found["command"] for word in sys.orig_argv[:1])
    assert {key for key, value in found["host"].items() if value is None} <= {"usable_cores"}


def test_torch_is_not_imported_for_it() -> None:
    code = "import sys; from frostlab.records.environment import environment as e\n"
    code += "print(e('cuda:0')['host']['torch_threads'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None False\n"


def test_the_commit_of_the_folder_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment("cpu")["git"] == {"commit": None, "dirty": None}

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *who, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    Path("code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-qm", "Begin")
    Path("runs").mkdir()
    Path("runs/events.jsonl").touch()  # a run's own output makes nothing dirty
    commit = git("rev-parse", "HEAD")
    assert environment("cpu")["git"] == {"commit": commit, "dirty": False}
    Path("code.py").write_text("2")
    assert environment("cpu")["git"] == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment("cpu")["git"] == {"commit": None, "dirty": None}


def test_an_environment_on_one_line() -> None:
    whole = {
        "gpu": {"name": "Fake 1", "driver": "550.1"},
        "host": {"name": "here", "cpu": "Old"},
        "versions": {"torch": "2.13", "python": "3.11"},
        "git": {"commit": "0123456789abcdef", "dirty": True},
    }
    line = "Fake 1, driver 550.1, torch 2.13, python 3.11, on here, commit 0123456789ab (dirty)"
    assert one_line(whole) == line
    assert one_line({**whole, "gpu": None, "versions": 3, "git": {}}) == "Old, on here"
    assert one_line({}) == ""

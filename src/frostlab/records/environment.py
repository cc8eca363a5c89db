"""The environment of a run: GPU, host, libraries, commit and command."""

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Thread
from typing import Any

import psutil  # type: ignore[import-untyped]

import frostlab
from frostlab.records.telemetry import Gpu, wanted_gpu

VARIABLES = (  # environment variables to record, because they affect speed or results
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "ONEDNN_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
)
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "peft")
_TIMEOUT = 1.5  # seconds to wait for the driver and for git


def gpu_state(device: str) -> dict[str, Any] | None:
    """Return the GPU's current state (temperature, clocks, power, …), or None without a GPU."""
    return _try(lambda: _ask_gpu(device, _state).answer(time.monotonic() + _TIMEOUT))


def _state(gpu: Gpu) -> dict[str, Any]:
    """Return the values of `schema.GpuState`; a value is None if its query fails."""
    return {
        "temperature_c": _try(gpu.temperature),
        "sm_clock_mhz": _try(gpu.clock, "SM"),
        "memory_clock_mhz": _try(gpu.clock, "MEM"),
        "power_watts": _try(gpu.power),
        "utilisation_percent": _try(gpu.utilisation),
        "memory_used_bytes": _try(lambda: int(gpu.ask("nvmlDeviceGetMemoryInfo").used)),
    }


def _facts(gpu: Gpu) -> dict[str, Any]:
    """Return the GPU's name, limits and state, and the other processes on it."""
    return {
        "name": _try(gpu.ask, "nvmlDeviceGetName"),
        "uuid": _try(gpu.ask, "nvmlDeviceGetUUID"),
        "driver": _try(gpu.nvml.nvmlSystemGetDriverVersion),
        "memory_total_bytes": _try(lambda: int(gpu.ask("nvmlDeviceGetMemoryInfo").total)),
        "power_limit_watts": _try(lambda: gpu.ask("nvmlDeviceGetEnforcedPowerLimit") / 1000),
        "max_sm_clock_mhz": _try(gpu.clock, "SM", "nvmlDeviceGetMaxClockInfo"),
        "max_memory_clock_mhz": _try(gpu.clock, "MEM", "nvmlDeviceGetMaxClockInfo"),
        **_state(gpu),
        "other_processes": _other_processes(gpu),
    }


def _other_processes(gpu: Gpu) -> list[dict[str, Any]] | None:
    """Return all other processes on the GPU, or None if NVML does not answer."""
    kinds = ("Compute", "Graphics")
    answers = [_try(gpu.ask, f"nvmlDeviceGet{kind}RunningProcesses") for kind in kinds]
    if all(answer is None for answer in answers):
        return None
    memory = {p.pid: p.usedGpuMemory for answer in answers for p in answer or ()}
    memory.pop(os.getpid(), None)
    return [
        {
            "pid": pid,
            "name": _try(gpu.nvml.nvmlSystemGetProcessName, pid),
            "memory_bytes": used,
        }
        for pid, used in sorted(memory.items())
    ]


def environment(device: str) -> dict[str, Any]:
    """Describe the machine, libraries and command; unknown values are None, never an error."""
    until = time.monotonic() + _TIMEOUT
    git = _Question(_git)
    gpu, reason = None, None
    try:
        gpu = _ask_gpu(device, _facts).answer(until)
    except Exception as error:
        reason = str(error) or type(error).__name__
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "device": device,
        "gpu": gpu,
        "gpu_reason": reason,
        "versions": _versions(),
        "host": _host(),
        "git": _try(lambda: git.answer(until)) or {"commit": None, "dirty": None},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def one_line(values: dict[str, Any]) -> str:
    """Return the main facts of an environment on one line; omit missing facts."""
    objects = ((key, values.get(key)) for key in ("gpu", "host", "versions", "git"))
    parts = {key: value if isinstance(value, dict) else {} for key, value in objects}
    fields = [
        ("", parts["gpu"].get("name") or parts["host"].get("cpu")),
        ("driver ", parts["gpu"].get("driver")),
        *((f"{name} ", parts["versions"].get(name)) for name in ("torch", "cuda", "transformers")),
        *((f"{name} ", parts["versions"].get(name)) for name in ("python", "frostlab")),
        ("on ", parts["host"].get("name")),
        ("commit ", str(parts["git"].get("commit") or "")[:12]),
    ]
    line = ", ".join(f"{label}{value}" for label, value in fields if value)
    return f"{line} (dirty)" if parts["git"].get("dirty") is True else line


def _versions() -> dict[str, str | None]:
    torch: Any = sys.modules.get("torch")  # not imported only for this, which takes seconds
    cudnn = _try(lambda: torch.backends.cudnn.version())
    return {
        "python": platform.python_version(),
        "frostlab": frostlab.__version__,
        **{name: _try(importlib.metadata.version, name) for name in LIBRARIES},
        "cuda": _try(lambda: torch.version.cuda),
        "cudnn": None if cudnn is None else str(cudnn),
    }


def _host() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    return {
        "name": _try(socket.gethostname),
        "os": _try(platform.platform),
        "cpu": _try(_cpu_model),
        "logical_cores": _try(psutil.cpu_count),
        "physical_cores": _try(lambda: psutil.cpu_count(logical=False)),
        "usable_cores": _try(lambda: len(os.sched_getaffinity(0))),
        "memory_bytes": _try(lambda: psutil.virtual_memory().total),
        "memory_available_bytes": _try(lambda: psutil.virtual_memory().available),
        "load_average": _try(lambda: list(os.getloadavg())),
        "torch_threads": _try(lambda: torch.get_num_threads()),
    }


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or None


def _git() -> dict[str, Any]:
    """Return the commit of the current folder, and whether tracked files differ from it."""

    def ask(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        completed = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT / 2, check=True,
        )  # fmt: skip
        return completed.stdout.strip()

    status = ("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _try(lambda: ask("rev-parse", "--verify", "HEAD")),
        "dirty": _try(lambda: bool(ask(*status))),
    }


def _ask_gpu(device: str, ask: Callable[[Gpu], dict[str, Any]]) -> "_Question":
    wanted = wanted_gpu(device)
    return _Question(lambda: ask(Gpu(wanted)))


class _Question(Thread):
    """A query on its own thread, so that a driver that hangs does not block the run."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self._answer: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:
            self._error = error

    def answer(self, until: float) -> Any:
        """Return the answer, or raise TimeoutError at `until`, a time of `time.monotonic()`."""
        self.join(max(0.0, until - time.monotonic()))
        if self.is_alive():
            raise TimeoutError(f"no answer within {_TIMEOUT} s")
        if self._error is not None:
            raise self._error
        return self._answer


def _try(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; return None if it raises an error."""
    try:
        return ask(*arguments)
    except Exception:
        return None

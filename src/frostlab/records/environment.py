"""The environment of a run: GPU, host, libraries, frostlab's own code, and command.

No other program is started to record it, not even git, because the settings of a repository can
make git run further programs.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.message import Message
from email.parser import HeaderParser
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import psutil  # type: ignore[import-untyped]

import frostlab
from frostlab import storage
from frostlab.errors import BadInput
from frostlab.launcher import command
from frostlab.records.telemetry import Gpu, wanted_gpu
from frostlab.storage import read_bytes
from frostlab.typed import check_numbers, parse

VARIABLES = (  # environment variables to record, because they affect speed or results
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "FROSTLAB_TRUST_REMOTE_CODE",
)
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "safetensors", "peft")
_CHANGE_RESULTS = (  # the variables that can change the digits of a result
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)
_TIMEOUT = 1.5  # seconds to wait for the driver
_MOST_REFS = 64 << 20  # the largest file in .git that is read, in bytes


def gpu_state(device: str) -> dict[str, Any] | None:
    """Return the GPU's current state (temperature, clocks, power, …), or None if no GPU answers."""
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
    """Return the other processes on the GPU, or None if NVML does not answer.

    In a container, this process may be among them, because NVML reports another id for it.
    """
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
    gpu, reason = None, None
    try:
        gpu = _ask_gpu(device, _facts).answer(time.monotonic() + _TIMEOUT)
    except Exception as error:
        reason = str(error) or type(error).__name__
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "device": device,
        "device_name": _try(_device_name, device),
        "gpu": gpu,
        "gpu_reason": reason,
        "versions": _versions(),
        "packages": dict(_packages()),
        "numerics": _numerics(),
        "host": _host(),
        "code": _own_code(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def read_environment(folder: Path, name: str = "environment.json") -> dict[str, Any]:
    """Return the contents of an environment file: the machine, the libraries and the command."""
    path = folder / name
    try:
        values = parse(read_bytes(path))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist (yet)") from None
    if values is None:
        raise BadInput(f"{path} is not a JSON object")
    check_numbers(values, path)
    return values


def _device_name(device: str) -> str | None:
    """Return the GPU's name as torch knows it, or the CPU's; NVML may be missing or busy."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_model()


def one_line(values: dict[str, Any]) -> str:
    """Return the main facts of an environment on one line; omit missing facts."""
    objects = ((key, values.get(key)) for key in ("gpu", "host", "versions", "code"))
    parts = {key: value if isinstance(value, dict) else {} for key, value in objects}
    fields = [
        ("", parts["gpu"].get("name") or parts["host"].get("cpu")),
        ("driver ", parts["gpu"].get("driver")),
        *((f"{name} ", parts["versions"].get(name)) for name in ("torch", "cuda", "transformers")),
        *((f"{name} ", parts["versions"].get(name)) for name in ("python", "frostlab")),
        ("on ", parts["host"].get("name")),
        *((f"{key} ", str(parts["code"].get(key) or "")[:12]) for key in ("commit", "digest")),
    ]
    return ", ".join(f"{label}{value}" for label, value in fields if value)


def _versions() -> dict[str, str | None]:
    torch: Any = sys.modules.get("torch")  # not imported here: that takes seconds
    cudnn = _try(lambda: torch.backends.cudnn.version())
    return {
        "python": platform.python_version(),
        "frostlab": frostlab.__version__,
        **{name: _version(name) for name in LIBRARIES},
        "cuda": _try(lambda: torch.version.cuda),
        "cudnn": None if cudnn is None else str(cudnn),
    }


@cache
def _version(library: str) -> str | None:
    """Return the version of an installed library, read once; None if it is not installed."""
    headers = _try(lambda: _headers(importlib.metadata.distribution(library)))
    return headers and headers["Version"]


@cache
def _packages() -> dict[str, str]:
    """Return the version of every installed package, read once."""
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        headers = _try(_headers, package) or {}
        name, version = (headers.get(key) for key in ("Name", "Version"))
        if name and version:  # else the package's files are damaged
            versions[str(name)] = str(version)
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _headers(package: importlib.metadata.Distribution) -> Message:
    """Return the headers of a package's metadata, without parsing its long description."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or package.read_text("")
    return HeaderParser().parsestr((text or "").partition("\n\n")[0])


def _numerics() -> dict[str, Any]:
    """Return torch's settings that change the digits of a result; None where torch lacks one.

    `float32` is full precision; other values name the shorter format that matmuls or convolutions
    of float32 tensors may use.
    """
    torch: Any = sys.modules.get("torch")
    return {
        "cpu_capability": _try(lambda: torch.backends.cpu.get_cpu_capability()),
        "deterministic": _try(lambda: torch.are_deterministic_algorithms_enabled()),
        "cudnn_deterministic": _try(lambda: torch.backends.cudnn.deterministic),
        "cudnn_benchmark": _try(lambda: torch.backends.cudnn.benchmark),
        "cuda_matmul": _try(lambda: _precision(torch.backends.cuda.matmul)),
        "cudnn_convolution": _try(lambda: _precision(torch.backends.cudnn.conv)),
        "cpu_matmul": _try(lambda: _precision(torch.backends.mkldnn.matmul)),
    }


def _precision(backend: Any) -> str:
    """Return the format in which a backend multiplies float32 tensors."""
    value = str(backend.fp32_precision)
    return "float32" if value in ("none", "ieee") else value


def comparable_facts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of an environment that must be equal for two runs to be comparable.

    They are frostlab's code, versions, the device, and settings that change digits of a result.
    """
    objects = ((key, values.get(key)) for key in ("versions", "numerics", "code", "variables"))
    parts = {key: value if isinstance(value, dict) else {} for key, value in objects}
    facts = {
        "frostlab's code": _short(parts["code"].get("digest")),
        **parts["versions"],
        "the device's name": values.get("device_name"),
        **{name.replace("_", " "): value for name, value in parts["numerics"].items()},
        **{name: parts["variables"].get(name) for name in _CHANGE_RESULTS},
    }
    return {name: "none" if value is None else str(value) for name, value in facts.items()}


def machine_line(values: Mapping[str, Any]) -> str:
    """Return an environment's GPU, CPU and system on one line, without the name of the host."""
    gpu, host = (
        value if isinstance(value := values.get(key), dict) else {} for key in ("gpu", "host")
    )
    usable, logical = host.get("usable_cores"), host.get("logical_cores")
    counts = f"{usable} of {logical}" if usable and logical else usable or logical
    cores = f"{counts} cores" if counts else None
    driver = f"driver {gpu.get('driver')}" if gpu.get("driver") else None
    facts = (gpu.get("name"), driver, host.get("cpu"), cores, host.get("os"))
    return ", ".join(str(fact) for fact in facts if fact)


def _short(digest: object) -> str | None:
    return None if digest is None else str(digest)[:16]


def _host() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    return {
        "name": _try(socket.gethostname),
        "os": _try(_system),
        "cpu": _try(_cpu_model),
        "logical_cores": _try(psutil.cpu_count),
        "physical_cores": _try(lambda: psutil.cpu_count(logical=False)),
        "usable_cores": _try(lambda: len(os.sched_getaffinity(0))),
        "memory_bytes": _try(lambda: psutil.virtual_memory().total),
        "memory_available_bytes": _try(lambda: psutil.virtual_memory().available),
        "load_average": _try(lambda: list(os.getloadavg())),
        "torch_threads": _try(lambda: torch.get_num_threads()),
    }


def _system() -> str:
    """Return the system's name; `platform.platform` would run `uname` to return the same."""
    system = os.uname()
    libc = "".join(platform.libc_ver())
    parts = (system.sysname, system.release, system.machine, *(["with", libc] if libc else []))
    return "-".join(parts)


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine() or None  # `platform.processor` would run `uname`


@cache
def _own_code() -> dict[str, str | None]:
    """Return the state of frostlab's code, read once: a process runs the code that it imported."""
    return code_state(Path(frostlab.__file__).parent)


def code_state(package: Path) -> dict[str, str | None]:
    """Return a digest of a package's files and, in a checkout, the commit; None if unknown.

    Equal code has equal digests, so the digest shows changes that were not committed.
    """
    is_checkout = package.parent.name == "src"  # else a folder above may be another repository
    return {
        "commit": _try(_commit, package.parents[1] / ".git") if is_checkout else None,
        "digest": _try(_code_digest, package),
    }


def _code_digest(package: Path) -> str:
    """Return the sha256 of the names and contents of a package's files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = storage.read_bytes(path)
            digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _commit(git: Path) -> str | None:
    """Return the commit of a repository's HEAD, read from its files; git is not run."""
    if git.is_file():  # a worktree: the file names the folder
        git = git.parent / _line(git).removeprefix("gitdir: ")
    common = git  # the folder with the branches, which worktrees share
    if (git / "commondir").is_file():
        common = git / _line(git / "commondir")
    value = _line(git / "HEAD")
    if value.startswith("ref: "):
        value = _branch(git, common, value.removeprefix("ref: "))
    return value if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value) else None


def _branch(git: Path, common: Path, name: str) -> str:
    """Return the commit of a branch, or "" if it has none."""
    if not name.startswith("refs/") or ".." in name:
        return ""
    for folder in (git, common):
        if (folder / name).is_file():
            return _line(folder / name)
    lines = storage.read_text(common / "packed-refs", _MOST_REFS).splitlines()
    return next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), "")


def _line(path: Path) -> str:
    return storage.read_text(path, _MOST_REFS).rstrip("\n")


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
            raise TimeoutError(f"the driver gave no answer within {_TIMEOUT} s")
        if self._error is not None:
            raise self._error
        return self._answer


def _try(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; return None if it raises an error."""
    try:
        return ask(*arguments)
    except Exception:
        return None

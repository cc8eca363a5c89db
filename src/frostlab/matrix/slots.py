"""This machine's devices: which exist, which other programs use, and how many runs share one."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from frostlab.errors import BadInput, nearest
from frostlab.matrix.workers import Slot
from frostlab.records.telemetry import Gpu, NoGpu, wanted_gpu
from frostlab.text import counted

_MOST_AT_ONCE = 256
# `--per-device auto`: how many runs take steps at the same time without and with CUDA MPS, and how
# many more start or end meanwhile. Only the 5 was measured (docs/measurements.md).
_TRAINING, _TRAINING_WITH_MPS, _STARTING = 1, 5, 2
_MEMORY_SHARE = 0.9  # share of the free memory that the runs of a device may use together
_USED_BYTES = 1 << 30  # a GPU with more memory in use than this counts as used by another program
_IDLE_SECONDS = 10.0  # time between two checks whether a GPU is idle
_MPS_SERVER = "nvidia-cuda-mps"  # MPS's server process, which does not count as a user


@dataclass(frozen=True)
class GpuUse:
    """How a GPU is used, according to NVML, the interface of NVIDIA's driver."""

    memory_used: int  # bytes, by all processes
    memory_total: int
    utilisation: float  # percent
    ours: bool  # whether some of the memory may be used by this program or by MPS's server
    others: tuple[int, ...]  # ids of all other processes that use the GPU


def gpu_use(device: str) -> GpuUse | None:
    """Return how a GPU is used now; None if the driver cannot be asked."""
    try:
        gpu = Gpu(wanted_gpu(device))
        memory = gpu.ask("nvmlDeviceGetMemoryInfo")
        pids: list[int] = []
        with suppress(Exception):  # some drivers do not list processes
            pids = [process.pid for process in gpu.ask("nvmlDeviceGetComputeRunningProcesses")]
        others = tuple(pid for pid in pids if not _is_ours(pid))
        ours = len(others) < len(pids) or _has_children()
        return GpuUse(int(memory.used), int(memory.total), gpu.utilisation(), ours, others)
    except Exception:  # NVML's errors have their own class, which needs the extra `gpu`
        return None


def _is_ours(pid: int) -> bool:
    """Return whether a process belongs to this program, or is the server of MPS."""
    import psutil  # type: ignore[import-untyped]

    if not psutil.pid_exists(pid):
        # In a container, NVML may report the id that a worker has outside of it.
        return _has_children()
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        parents = {parent.pid for parent in process.parents()}
        return os.getpid() in parents | {pid} or process.name().startswith(_MPS_SERVER)
    return False


def _has_children() -> bool:
    """Return whether this program has worker processes, which may be what uses a GPU."""
    import multiprocessing

    return bool(multiprocessing.active_children())


def count_gpus() -> int:
    """Return the number of CUDA devices that this process can use."""
    try:
        first = Gpu(wanted_gpu("cuda:0"))
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            return int(first.nvml.nvmlDeviceGetCount())
        number = 1
        with suppress(NoGpu):  # the end of the list, or an entry that is not a GPU
            while True:
                Gpu(wanted_gpu(f"cuda:{number}"))
                number += 1
        return number
    except NoGpu:
        if not os.path.exists("/dev/nvidiactl"):
            return 0
    except Exception:  # an error of NVML
        pass
    import torch  # slow, and only needed if the driver cannot be asked through NVML

    return torch.cuda.device_count()


def parse_devices(text: str | None) -> list[str]:
    """Return the devices in `cuda:0,cuda:1`; None: every GPU, or else the CPU."""
    gpus = [f"cuda:{index}" for index in range(count_gpus())]
    if text is None:
        return gpus or ["cpu"]
    names = [part.strip() for part in text.split(",")]
    names = ["cuda:0" if name == "cuda" else name for name in names]
    for name in names:
        if name not in ("cpu", *gpus):
            there = ", ".join([*gpus, "cpu"])
            hint = nearest(name, [*gpus, "cpu"]) or f"; there are {there}"
            raise BadInput(f"--devices {name!r:.40} is not a device of this machine{hint}")
    if len(set(names)) < len(names):
        raise BadInput(f"--devices {text:.80} names a device twice; use --per-device instead")
    return names


def free_devices(names: Sequence[str], chosen: bool, when_idle: bool) -> list[str]:
    """Return the devices that no other program uses.

    BadInput is raised if all are in use or, if the user has `chosen` the devices, if one is. With
    `when_idle`, all are returned, because the queue waits for them.
    """
    if when_idle:
        return list(names)
    free = []
    for name in names:
        user = taken_by(name)
        if user is None:
            free.append(name)
        elif chosen:
            raise BadInput(f"--devices {name} is in use ({user}); wait for it with --when-idle")
    if not free:
        raise BadInput(f"every GPU is in use ({', '.join(names)}); wait with --when-idle")
    return free


def taken_by(device: str) -> str | None:
    """Describe which other programs use a GPU; return None if there are none."""
    if device == "cpu" or (use := gpu_use(device)) is None:
        return None
    used = f"{use.memory_used / 1e9:.1f} GB"
    if use.others:
        return f"by process {', '.join(map(str, use.others[:3]))}, {used}"
    # Inside a container, NVIDIA's driver does not list processes that run outside it.
    return None if use.ours or use.memory_used <= _USED_BYTES else f"{used} of its memory"


class IdleDevices:
    """A function that returns whether no other program uses a device.

    It asks NVIDIA's driver at most every `_IDLE_SECONDS`, and otherwise returns the last answer.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, bool]] = {}

    def __call__(self, device: str) -> bool:
        """Return whether runs may start on a device now."""
        at, idle = self._known.get(device, (-_IDLE_SECONDS, False))
        if time.monotonic() - at >= _IDLE_SECONDS:
            idle = taken_by(device) is None
            self._known[device] = (time.monotonic(), idle)
        return idle


def parse_per_device(text: str) -> int | None:
    """Return the number of runs per device; None for `auto`."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_AT_ONCE):
        raise BadInput(
            f"--per-device {text!r:.40} should be auto or a whole number from 1 to {_MOST_AT_ONCE}"
        )
    return int(text)


def make_slots(
    names: Iterable[str],
    per_device: int | None,
    *,
    memory: int | None = None,
    mps: Mapping[str, str] | None = None,
) -> list[Slot]:
    """Return a slot for each device: the device, and how many runs may train on it at once.

    Args:
        per_device: runs at the same time on each; None: as many as `advised` returns.
        memory: bytes that the largest run needs, if that is known; `advised` uses it.
        mps: the variables by which workers find CUDA MPS; None: it is not used.
    """
    slots = []
    for name in names:
        variables = _visible(name) | (dict(mps) if mps and name != "cpu" else {})
        at_once, training = per_device, None
        if at_once is None:
            at_once, training = advised(name, memory, with_mps=bool(mps))
        slots.append(Slot(name, at_once, training, variables))
    on_gpus = sum(slot.at_once for slot in slots if slot.device != "cpu")
    if on_gpus < 2 or "OMP_NUM_THREADS" in os.environ:
        return slots
    # Runs on the CPU keep their threads, because the number of threads changes the last digits of
    # results there.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // on_gpus))}
    return [
        slot if slot.device == "cpu" else replace(slot, variables={**slot.variables, **threads})
        for slot in slots
    ]


def advised(device: str, memory: int | None, with_mps: bool) -> tuple[int, int | None]:
    """Return, for `--per-device auto`, how many runs share a device, and how many may take steps.

    The second number is None if all of them may take steps at the same time.
    """
    if device == "cpu":
        return 1, None
    training = _TRAINING_WITH_MPS if with_mps else _TRAINING
    most = min(training + _STARTING, os.cpu_count() or 1)
    use = gpu_use(device)
    if memory and use is not None:
        free = _MEMORY_SHARE * (use.memory_total - use.memory_used)
        most = min(most, int(free // memory))
    at_once = max(1, most)
    return at_once, training if training < at_once else None


def _visible(device: str) -> dict[str, str]:
    """Return the variables by which a worker sees only this device."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": str(wanted_gpu(device)[0])}


def described(slots: Sequence[Slot]) -> str:
    """Describe slots: "cuda:0 (7 runs at once, 5 of them training), cuda:1"."""
    return ", ".join(slot.device + _sharing(slot) for slot in slots)


def _sharing(slot: Slot) -> str:
    if slot.at_once == 1:
        return ""
    training = "" if slot.training is None else f", {slot.training} of them training"
    return f" ({counted(slot.at_once, 'runs')} at once{training})"

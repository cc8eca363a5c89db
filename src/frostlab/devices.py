"""Capabilities of devices, so that other modules need not ask for CUDA, MPS or CPU by name."""

import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from frostlab.errors import BadInput
from frostlab.launcher import local_rank

HAS_TRITON = importlib.util.find_spec("triton") is not None
_READ_SECONDS = 1.0  # minimum time between two readings that wait for the device


def choose_device(wanted: str) -> torch.device:
    """Return the device that a recipe asks for, and make it torch's current device.

    `auto` tries CUDA, then MPS, then the CPU. `auto` and `cuda` spread the processes of a run over
    the GPUs; `cuda:1` is one GPU for all of them.
    """
    device = find_device(wanted)
    use_device(device)
    return device


def find_device(wanted: str) -> torch.device:
    """Return the device that `choose_device` returns, but do not start or select it."""
    if wanted in ("auto", "cuda"):
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank() % torch.cuda.device_count())
        if wanted == "cuda":
            raise BadInput("train.device cuda: no CUDA device is available; set train.device: cpu")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except (RuntimeError, ValueError, TypeError):
        raise BadInput(
            f"train.device {wanted!r:.40} is not a device; choose from auto, cpu, mps, cuda, "
            "cuda:0 …"
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise BadInput(
                f"train.device {wanted}: no CUDA device is available; set train.device: cpu"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise BadInput(f"train.device {wanted} does not exist; the last one is cuda:{last}")
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise BadInput("train.device mps is not available; set train.device: cpu")
    if device.type not in ("cpu", "mps"):
        raise BadInput(f"train.device {wanted} is not supported; choose from auto, cpu, cuda, mps")
    return device


def start_device(device: torch.device) -> None:
    """Start a CUDA device in a thread, while the program goes on.

    Starting takes about a second, in which data can be read and a model built on the CPU. The first
    use of the device waits for its start.
    """
    if device.type == "cuda" and not torch.cuda.is_initialized():
        threading.Thread(target=_start, args=(device,)).start()


def _start(device: torch.device) -> None:
    with suppress(RuntimeError):  # the first use of the device raises the same error
        torch.zeros(1, device=device)


def use_device(device: torch.device) -> None:
    """Make a CUDA device torch's current device; start it, or wait for its start."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's GPU torch's current device in a context; do nothing for other tensors."""
    return torch.cuda.device_of(tensor)


def first_gpu() -> torch.device:
    """Return the first CUDA device, or the CPU if there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def default_precision(device: torch.device) -> torch.dtype:
    """Return bf16 on CUDA, else float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def runs_ahead(device: torch.device) -> bool:
    """Return whether the device runs kernels while the host continues."""
    return device.type != "cpu"


def has_events(device: torch.device) -> bool:
    """Return whether the device can be timed with events."""
    return device.type == "cuda"


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a CUDA device."""
    return tensor.is_cuda


def runs_triton(device: torch.device) -> bool:
    """Return whether the device runs kernels that are written in Triton."""
    return HAS_TRITON and device.type == "cuda"


def captures_graphs(device: torch.device) -> bool:
    """Return whether the device can capture a training step as a graph and replay it."""
    return device.type == "cuda"


def prepares_kernels(device: torch.device) -> bool:
    """Return whether the first use of a kernel, or of a tensor shape, is slow."""
    return device.type == "cuda"


def updates_conditionally(device: torch.device) -> bool:
    """Return whether fused optimizers clip, and skip NaN steps, without waiting for the device."""
    return device.type == "cuda"


def uses_nccl(device: torch.device) -> bool:
    """Return whether processes that each have such a device communicate through NCCL."""
    return device.type == "cuda"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for the copy."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Readback:
    """Reads a number that a device computes, usually without waiting; the value may be old."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._value: float | None = None
        self._read_at = -_READ_SECONDS
        self._copy: Tensor | None = None  # pinned memory that a CUDA device writes to
        self._copied: Any = None  # CUDA event after the copy that is under way

    def latest(self, newest: Tensor) -> float | None:
        """Return the newest value that has arrived, and request `newest`, a tensor of one element.

        On the CPU, this is `newest` itself. A CUDA device copies the value when it has computed it,
        and a later call returns it; until the first value has arrived, the result is None. Other
        devices are waited for, at most once a second.
        """
        if not runs_ahead(self._device):
            return float(newest)
        if not has_events(self._device):
            if time.monotonic() - self._read_at >= _READ_SECONDS:
                self._value, self._read_at = float(newest), time.monotonic()
            return self._value
        if self._copy is None:
            self._copy = torch.empty((), dtype=newest.dtype, pin_memory=True)
        if self._copied is not None and self._copied.query():
            self._value, self._copied = float(self._copy), None
        if self._copied is None:
            self._copy.copy_(newest.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._value


@contextmanager
def attention_without_plans(device: torch.device) -> Iterator[None]:
    """Compute attention without cuDNN in this context, for batches whose shapes keep changing.

    cuDNN takes about 11 ms to plan each new shape, which is longer than the attention itself.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the CPU's and the device's generator faster than torch.manual_seed, which takes 1 ms."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def forked_devices(device: torch.device) -> list[torch.device]:
    """Return the CUDA devices whose generators `torch.random.fork_rng` saves besides the CPU's."""
    return [device] if device.type == "cuda" else []


def release_cached_memory() -> None:
    """Free the GPU memory that torch keeps cached, so that other processes can use it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def memory_bytes(device: torch.device) -> int | None:
    """Return the size of a CUDA device's memory; None elsewhere."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def allocated_bytes(device: torch.device) -> int:
    """Return the currently allocated bytes; 0 if torch does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a CUDA device can still give to this process; None elsewhere."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Reset the peak of allocated memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak of allocated bytes since the last reset; None if torch does not count it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """Return the GPU's name; empty for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""

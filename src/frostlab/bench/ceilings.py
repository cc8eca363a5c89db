"""What the device can do at most, and the least time that a training step can take on it.

A step needs its matmuls and its optimizer's traffic: it cannot be faster than the longer of
FLOPs / measured matmul rate and bytes / measured copy bandwidth. AdamW in float32 moves 28 bytes a
trainable parameter: weight and both moments read and written, the gradient read.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from frostlab.anatomy import anatomy
from frostlab.anatomy.savings import savings
from frostlab.models.stack import is_causal
from frostlab.training.stopwatch import synchronize

ADAM_BYTES = 28  # a trainable parameter
FORMULA = (
    "max(matmul FLOPs of forward and backward / measured matmul rate, "
    "28 bytes × trainable parameters / measured copy bandwidth)"
)
_SPEC = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, as the vendor says


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of a device, and what its maker promises."""

    matmul_flops: float  # a second
    copy_bytes: float  # a second, read and written
    how: str
    spec_flops: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """What one training step has to do."""

    flops: float
    parameters: int  # trainable

    def least(self, ceilings: Ceilings) -> dict[str, float]:
        """The least milliseconds: of either part, of both at once, of one after the other."""
        compute = 1e3 * self.flops / ceilings.matmul_flops
        traffic = 1e3 * ADAM_BYTES * self.parameters / ceilings.copy_bytes
        return {
            "compute_ms": compute,
            "traffic_ms": traffic,
            "ceiling_ms": max(compute, traffic),
            "serial_ms": compute + traffic,
        }


def measure_ceilings(device: torch.device, small: bool = False) -> Ceilings:
    """Time a large matmul and a large copy; the best of several."""
    cuda = device.type == "cuda"
    size = 512 if small else 8192 if cuda else 2048
    words = 1 << (22 if small else 29 if cuda else 26)
    kind = torch.bfloat16 if cuda else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _best(lambda: torch.mm(left, right, out=out), device)
    source = torch.ones(words, device=device)
    target = torch.empty_like(source)
    copied = _best(lambda: target.copy_(source), device)
    name = torch.cuda.get_device_name(device) if cuda else ""
    spec = next((rate for key, rate in _SPEC.items() if key in name), None)
    how = f"{size}³ {str(kind).removeprefix('torch.')} matmul; copy of {4 * words >> 20} MiB"
    return Ceilings(2 * size**3 / seconds, 8 * words / copied, how, spec)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the best of five groups; long enough for the clock."""
    times = 10 if device.type == "cuda" else 2
    found = []
    for _ in range(6):  # the first warms up
        synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        synchronize(device)
        found.append((time.perf_counter() - began) / times)
    return min(found[1:])


def step_work(model: nn.Module, length: int, tokens: float) -> Work:
    """The work of a step over `tokens` in sequences of a length, as the model is frozen now."""
    flops = savings(anatomy(model), length, causal=is_causal(model)).flops
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Work(flops * tokens, trainable)

"""What freezing can save at most: matmul arithmetic, and memory for gradients and Adam.

A trained matrix costs three matmuls: forward, input gradient, weight gradient. Freezing it
removes the third. The second disappears too where nothing below learns. Attention's own two
products (scores, mixing) cost as much again per token as the sequence is long, and their
backward is needed as long as anything below or in the attention learns. Causal attention, in a
kernel that skips what is masked, needs half of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from frostlab.devices import default_precision, device_name, runs_ahead, synchronize
from frostlab.models.stack import is_causal
from frostlab.roles.parts import ATTENTION_INPUTS, Part
from frostlab.roles.read import anatomy
from frostlab.roles.snapshot import Anatomy, Layer
from frostlab.timing.interleave import Ratio

_BYTES = 4


@dataclass(frozen=True)
class Savings:
    """Floating-point operations a token and bytes, with everything trained and as frozen."""

    length: int
    flops_all: float
    flops: float
    bytes_all: int
    bytes: int

    @property
    def flop_share(self) -> float:
        """The share of all matmul operations that freezing removes."""
        return 1 - self.flops / self.flops_all if self.flops_all else 0.0

    @property
    def speed_up(self) -> float:
        """The ceiling on the speed-up of a step bound by matmuls."""
        return self.flops_all / self.flops if self.flops else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "length": self.length,
            "matmul_flop_share": self.flop_share,
            "speed_up_at_most": self.speed_up,
            "gradient_and_adam_bytes_all": self.bytes_all,
            "gradient_and_adam_bytes": self.bytes,
        }


def savings(anatomy: Anatomy, length: int, *, causal: bool = False) -> Savings:
    """Compute what the frozen parts of an anatomy can save on sequences of a length.

    `causal`: attention only looks back, in a kernel that skips the other half of its products.
    """
    trainable, possible = anatomy.count("trainable"), anatomy.count("trainable", "frozen")
    return Savings(
        length,
        _flops(anatomy.with_frozen(), length, causal),
        _flops(anatomy, length, causal),
        3 * _BYTES * possible,
        3 * _BYTES * trainable,
    )


def _flops(anatomy: Anatomy, length: int, causal: bool) -> float:
    """Matmul operations a token of one training step: forward and backward."""
    encoder_learns = any(_learns(p) for p in anatomy.parts if p.stack == "encoder")
    below = {stack: _input_learns(anatomy, stack) for stack in {p.stack for p in anatomy.parts}}
    total = 0.0
    for layer in anatomy.layers:
        total += _layer_flops(layer, below[layer.stack], encoder_learns, length, causal)
        below[layer.stack] |= any(map(_learns, layer.parts))
    sizes = (p.shape[0] for p in anatomy.parts if p.role == "embedding" and p.shape)
    vocabulary = max(sizes, default=0)  # types of tokens have embeddings, too
    for part in anatomy.parts:
        if not part.layers and part.matmul and part.kind == "weight":
            cost = 2 * part.parameters * (1 + any(below.values()) + _learns(part))
            # a head as wide as the vocabulary works on every token, another on one of them
            every_token = part.role != "head" or part.shape[part.axis] == vocabulary
            total += cost if every_token else cost / length
    return total


def forward_flops(
    anatomy: Anatomy, length: int, *, causal: bool = False
) -> tuple[list[float], float]:
    """Matmul operations a token of a forward pass: of each layer, and of what is outside them."""
    frozen = anatomy.with_frozen("all")
    layers = [_layer_flops(layer, False, False, length, causal) for layer in frozen.layers]
    return layers, _flops(frozen, length, causal) - sum(layers)


def _input_learns(anatomy: Anatomy, stack: str) -> bool:
    """Whether anything below a stack's first layer learns.

    Norms outside the layers are left out: whether they come before or after is not known, and
    what is computed here is a ceiling.
    """
    return any(
        _learns(part) and part.role not in ("head", "norm")
        for part in anatomy.parts
        if not part.layers and part.stack in (stack, "")
    )


def _layer_flops(
    layer: Layer, below: bool, encoder_learns: bool, length: int, causal: bool
) -> float:
    total = 0.0
    heads: dict[bool, int] = {}
    learning: dict[bool, bool] = {}
    inside = any(_learns(p) for p in layer.parts)
    for part in layer.parts:
        if part.kind != "weight" or not part.matmul:
            continue
        cross, role = part.place.cross, part.role
        if role in ATTENTION_INPUTS:
            upstream = encoder_learns if cross and role != "query" else below or (cross and inside)
            learning[cross] = learning.get(cross, False) or upstream or _learns(part)
            if role == "query":
                heads[cross] = part.shape[part.axis]
        else:
            upstream = below or inside
        total += 2 * part.parameters * (1 + upstream + _learns(part))
    for cross, width in heads.items():
        seen = length / 2 if causal and not cross else length
        total += 2 * 2 * seen * width * (3 if learning[cross] else 1)
    return total


def _learns(part: Part) -> bool:
    return part.state == "trainable"


def describe_savings(anatomy: Anatomy, length: int) -> Sequence[str]:
    """Say in plain lines what freezing can save at most."""
    found = savings(anatomy, length)
    mib = 2**20
    return [
        f"matmul work     −{found.flop_share:.2%} at length {length}: "
        f"a step bound by it gets at most {found.speed_up:.3f}× as fast",
        f"gradients, Adam −{(found.bytes_all - found.bytes) / mib:,.0f} of "
        f"{found.bytes_all / mib:,.0f} MiB in float32; activations are not counted",
    ]


_BALANCE = 300.0  # FLOPs a byte moved: an H100 in bf16, more than other devices
_FEW = 2048  # tokens a step, below which launching kernels may take longer than computing


@dataclass(frozen=True)
class Limits(Savings):
    """The work of one step, not of a token, with everything trained and as it is frozen now."""

    tokens: float  # a step
    traffic_all: int  # bytes the optimizer moves
    traffic: int

    @property
    def speed_up_with_traffic(self) -> float:
        """The same where the optimizer's traffic counts as much as it ever may."""
        now = self.flops / _BALANCE + self.traffic
        return (self.flops_all / _BALANCE + self.traffic_all) / now if now else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return super().to_dict() | {
            "flops_all": self.flops_all,
            "flops": self.flops,
            "tokens": self.tokens,
            "traffic_bytes_all": self.traffic_all,
            "traffic_bytes": self.traffic,
            "speed_up_with_traffic": self.speed_up_with_traffic,
        }


def limits(model: nn.Module, length: int, tokens: float, *, causal: bool | None = None) -> Limits:
    """What the model, treated as it is now, can save in a step over `tokens` of a length.

    Args:
        causal: attention only looks back, in a kernel that leaves out the other half of its
            products; by default true of frostlab's own language models.
    """
    found = anatomy(model)
    free = found.with_frozen()
    saved = savings(found, length, causal=is_causal(model) if causal is None else causal)
    return Limits(
        length=length,
        flops_all=saved.flops_all * tokens,
        flops=saved.flops * tokens,
        bytes_all=saved.bytes_all,
        bytes=saved.bytes,
        tokens=tokens,
        traffic_all=ADAM_BYTES * free.count("trainable"),
        traffic=ADAM_BYTES * found.count("trainable"),
    )


def flag(ratio: Ratio, found: Limits, proven: bool, reasons: tuple[str, ...] = ()) -> str | None:
    """Say what is likely behind a gain that the saved work does not explain; None: it does.

    Args:
        ratio: an arm's time over that of the baseline, in which everything learns.
        reasons: why the timing is not proven.
    """
    gain = 1 / ratio.high  # the least that the interval allows
    if gain <= found.speed_up:
        return None
    beyond = f"{gain:.3f}× as fast at least, and matmuls explain {found.speed_up:.3f}×"
    if not proven:
        return f"{beyond}: the timing is not proven ({'; '.join(reasons) or 'no reason given'})"
    if gain <= found.speed_up_with_traffic:
        saved = (found.traffic_all - found.traffic) / 2**20
        return f"{beyond}: likely optimizer traffic, {saved:,.1f} MiB a step less"
    if found.tokens < _FEW:
        return f"{beyond}: likely launch-bound, with {found.tokens:,.0f} tokens a step"
    return f"{beyond}: nothing counted here explains it; look for a second difference"


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
    large = runs_ahead(device)
    size = 512 if small else 8192 if large else 2048
    words = 1 << (22 if small else 29 if large else 26)
    kind = default_precision(device)
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _best(lambda: torch.mm(left, right, out=out), device)
    source = torch.ones(words, device=device)
    target = torch.empty_like(source)
    copied = _best(lambda: target.copy_(source), device)
    name = device_name(device)
    spec = next((rate for key, rate in _SPEC.items() if key in name), None)
    how = f"{size}³ {str(kind).removeprefix('torch.')} matmul; copy of {4 * words >> 20} MiB"
    return Ceilings(2 * size**3 / seconds, 8 * words / copied, how, spec)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the best of five groups; long enough for the clock."""
    times = 10 if runs_ahead(device) else 2
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

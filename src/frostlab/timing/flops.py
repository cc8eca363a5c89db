"""The FLOPs of a training step, the FLOPs that freezing saves, and the limits of a device.

A trained matrix costs up to three matmuls per step: forward, weight gradient and, if anything below
it is trained, input gradient. Freezing removes the weight gradient. The two products inside
attention (scores and mixing) cost more per token in longer sequences, and they need a backward pass
if anything below or inside the attention is trained. A kernel for causal attention that skips the
masked half needs half of these FLOPs. A learned table of relative positions costs one more product:
every query with the row of every distance. The functions read a model's `Anatomy`: the list of its
parts (weights, or the rows of one role in a fused weight), each frozen or trainable.

The results are bounds, because only matmuls and the optimizer's memory traffic are counted. If a
step were only matmuls, freezing would make it at most `speed_up` times as fast. At the measured
rates of a device, no step with Adam takes less than `ceiling_ms` (the ceiling on its speed).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from frostlab.devices import default_precision, device_name, runs_ahead, synchronize
from frostlab.models.stack import is_causal
from frostlab.recipe.settings import OPTIMIZERS, OptimizerFacts
from frostlab.roles.parts import ATTENTION_INPUTS, Part
from frostlab.roles.read import anatomy
from frostlab.roles.snapshot import Anatomy, Layer
from frostlab.timing.interleave import Ratio

_ADAMW = OPTIMIZERS["AdamW"]  # the optimizer of benchmarks, and of models without a recipe
_GRADIENT_BYTES = 4  # of a float32 gradient, per trainable parameter
_MOST_FLOPS_PER_BYTE = 300.0  # about the bf16 FLOP/s of an H100 over its memory bandwidth
_LAUNCH_BOUND_TOKENS = 2048  # with fewer tokens per step, kernel launches may dominate
_SPEC_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # the vendor's dense bf16 figures
CEILING_FORMULA = (
    "max(matmul FLOPs of forward and backward / measured matmul rate, "
    f"{_ADAMW.traffic_bytes} bytes × trainable parameters / measured copy bandwidth)"
)


# The work of a step


@dataclass(frozen=True)
class StepWork:
    """The work of one training step."""

    flops: float  # of matmuls, forward and backward
    parameters: int  # number of trainable parameters


def step_work(model: nn.Module, length: int, tokens: float) -> StepWork:
    """Return the work of a step over `tokens` tokens, in sequences of `length` tokens.

    Parts that are frozen in the model count as frozen.
    """
    flops = savings(anatomy(model), length, causal=is_causal(model)).flops
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return StepWork(flops * tokens, trainable)


def forward_flops(
    anatomy: Anatomy, length: int, *, causal: bool = False
) -> tuple[list[float], float]:
    """Return the FLOPs per token of a forward pass: in each layer, and outside the layers."""
    frozen = anatomy.with_frozen("all")
    layers = [_layer_flops(layer, False, False, length, causal) for layer in frozen.layers]
    return layers, _step_flops(frozen, length, causal) - sum(layers)


def _step_flops(anatomy: Anatomy, length: int, causal: bool) -> float:
    """Return the matmul FLOPs per token of one training step, forward and backward."""
    encoder_learns = any(_learns(part) for part in anatomy.parts if part.stack == "encoder")
    stacks = {part.stack for part in anatomy.parts}
    learns_below = {stack: _input_learns(anatomy, stack) for stack in stacks}
    total = 0.0
    for layer in anatomy.layers:
        total += _layer_flops(layer, learns_below[layer.stack], encoder_learns, length, causal)
        learns_below[layer.stack] |= any(map(_learns, layer.parts))
    sizes = (part.shape[0] for part in anatomy.parts if part.role == "embedding" and part.shape)
    vocabulary = max(sizes, default=0)  # the largest, because token types also have an embedding
    for part in anatomy.parts:
        if not part.layers and part.matmul and part.kind == "weight":
            flops = 2 * part.parameters * (1 + any(learns_below.values()) + _learns(part))
            # A head as wide as the vocabulary counts for every token, other heads once per
            # sequence. So does the head of an EEG model, which reads every time step but is small.
            every_token = part.role != "head" or part.shape[part.axis] == vocabulary
            total += flops if every_token else flops / length
    return total


def _layer_flops(
    layer: Layer, learns_below: bool, encoder_learns: bool, length: int, causal: bool
) -> float:
    total = 0.0
    query_widths: dict[bool, int] = {}  # whether attention is cross-attention → query width
    needs_backward: dict[bool, bool] = {}  # the same key → whether there is a backward pass
    learns_inside = any(_learns(part) for part in layer.parts)
    tables = [part for part in layer.parts if _is_distance_table(part, layer, length)]
    query_learns = learns_below  # whether queries need a gradient
    experts: dict[str, set[int]] = {}  # role → indices of the experts that have it
    for part in layer.parts:
        if part.place.expert is not None:
            experts.setdefault(part.role, set()).add(part.place.expert)
    # `below` says whether a matrix needs an input gradient
    for part in layer.parts:
        if part.kind != "weight" or not part.matmul:
            continue
        cross, role = part.place.cross, part.role
        # a latent part is a low-rank projection that queries, keys or values are computed from
        if role in ATTENTION_INPUTS or role == "latent":
            reads_encoder = cross and role != "query"
            below = encoder_learns if reads_encoder else learns_below or (cross and learns_inside)
            needs_backward[cross] = needs_backward.get(cross, False) or below or _learns(part)
            if role == "query":
                query_widths[cross] = part.shape[part.axis]
                query_learns |= _learns(part) and not cross
        else:
            below = learns_below or learns_inside
        # every token uses one expert at least; how many more is not known
        used = part.parameters / (1 if part.place.expert is None else len(experts[role]))
        total += 2 * used * (1 + below + _learns(part))
    inside_attention = (*tables, *(part for part in layer.parts if _is_head_norm(part, layer)))
    if any(map(_learns, inside_attention)):
        needs_backward[False] = True
    for table in tables:
        product = 2 * (2 * length - 1) * query_widths.get(False, 0)
        total += product * (1 + query_learns + _learns(table))
    # two products of 2 FLOPs per multiply-add; the backward pass costs twice the forward pass
    for cross, width in query_widths.items():
        attended = length / 2 if causal and not cross else length
        total += 2 * 2 * attended * width * (3 if needs_backward[cross] else 1)
    return total


def _head_size(layer: Layer) -> int:
    """Return the size of a layer's query heads; 0 if it has none or only one."""
    heads = (part.heads for part in layer.parts if part.role == "query")
    return next((h.size for h in heads if h is not None and h.count > 1), 0)


def _is_distance_table(part: Part, layer: Layer, length: int) -> bool:
    """Return whether a part has a row for each distance between two tokens of a sequence."""
    is_table = part.role == "position" and len(part.shape) == 2 and not part.matmul
    return is_table and part.shape[0] >= 2 * length - 1 and part.shape[1] == _head_size(layer)


def _is_head_norm(part: Part, layer: Layer) -> bool:
    """Return whether a part is a norm of queries or keys, which has a gain per unit of a head."""
    return part.role == "norm" and part.shape == (_head_size(layer),)


def _input_learns(anatomy: Anatomy, stack: str) -> bool:
    """Return whether anything below the first layer of a stack (encoder or decoder) is trained.

    Norms outside the layers may come before or after the layers, so they are ignored. At worst,
    too few FLOPs are counted, and the least possible time stays a lower bound.
    """
    return any(
        _learns(part) and part.role not in ("head", "norm")
        for part in anatomy.parts
        if not part.layers and part.stack in (stack, "")
    )


def _learns(part: Part) -> bool:
    return part.state == "trainable"


# The savings of freezing


@dataclass(frozen=True)
class Savings:
    """FLOPs per token and bytes of gradients and moments, with and without freezing.

    Fields that end in `_all` assume that nothing is frozen. The other fields count frozen parts as
    frozen.
    """

    length: int  # tokens per sequence
    flops_all: float
    flops: float
    bytes_all: int
    bytes: int

    @property
    def flop_share(self) -> float:
        """The fraction of matmul FLOPs that freezing removes."""
        return 1 - self.flops / self.flops_all if self.flops_all else 0.0

    @property
    def speed_up(self) -> float:
        """The largest possible speed-up of a step that is bound by matmuls."""
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


def savings(
    anatomy: Anatomy,
    length: int,
    *,
    causal: bool = False,
    optimizer: OptimizerFacts = _ADAMW,
) -> Savings:
    """Compute how much a model's frozen parts can save on sequences of a given length.

    `anatomy` describes the parts of the model, and whether each is frozen.
    `causal` assumes causal attention, in a kernel that skips the masked half.
    """
    trainable, possible = anatomy.count("trainable"), anatomy.count("trainable", "frozen")
    kept = _GRADIENT_BYTES + optimizer.state_bytes
    return Savings(
        length,
        _step_flops(anatomy.with_frozen(), length, causal),
        _step_flops(anatomy, length, causal),
        kept * possible,
        kept * trainable,
    )


def describe_savings(anatomy: Anatomy, length: int) -> Sequence[str]:
    """Describe the savings from freezing as lines of text; attention is counted as not causal."""
    saved = savings(anatomy, length)
    mib = 2**20
    return [
        f"matmul work     −{saved.flop_share:.2%} at length {length}: "
        f"a step of only matmuls would be at most {saved.speed_up:.3f}× as fast",
        f"gradients, Adam −{(saved.bytes_all - saved.bytes) / mib:,.0f} of "
        f"{saved.bytes_all / mib:,.0f} MiB in float32; activations are not counted",
    ]


@dataclass(frozen=True)
class StepSavings(Savings):
    """The savings of a whole step, with the optimizer's memory traffic; FLOPs are per step."""

    tokens: float  # tokens per step
    traffic_all: int  # bytes that the optimizer moves in a step
    traffic: int

    def relative_to(self, baseline: "StepSavings") -> "StepSavings":
        """Return the savings against a baseline, whose values become the `_all` fields."""
        return replace(
            self,
            flops_all=baseline.flops,
            bytes_all=baseline.bytes,
            traffic_all=baseline.traffic,
        )

    @property
    def speed_up_with_traffic(self) -> float:
        """The largest possible speed-up of a step of matmuls and the optimizer's memory traffic.

        Moving a byte counts as much as `_MOST_FLOPS_PER_BYTE` FLOPs.
        """
        frozen = self.flops / _MOST_FLOPS_PER_BYTE + self.traffic
        everything = self.flops_all / _MOST_FLOPS_PER_BYTE + self.traffic_all
        return everything / frozen if frozen else 1.0

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


def step_savings(
    model: nn.Module, length: int, tokens: float, optimizer: OptimizerFacts = _ADAMW
) -> StepSavings:
    """Compute how much a model's frozen parts can save in a step over `tokens` tokens."""
    parts = anatomy(model)
    per_token = savings(parts, length, causal=is_causal(model), optimizer=optimizer)
    return StepSavings(
        length=length,
        flops_all=per_token.flops_all * tokens,
        flops=per_token.flops * tokens,
        bytes_all=per_token.bytes_all,
        bytes=per_token.bytes,
        tokens=tokens,
        traffic_all=optimizer.traffic_bytes * parts.with_frozen().count("trainable"),
        traffic=optimizer.traffic_bytes * parts.count("trainable"),
    )


def unexplained_gain(
    ratio: Ratio, saved: StepSavings, proven: bool, reasons: tuple[str, ...] = ()
) -> str | None:
    """Name the likely cause of a gain that the saved matmuls do not explain; None if they do.

    The gain is the speed-up of an arm (a variant of a recipe) over the baseline.

    Args:
        ratio: the arm's time over the baseline's time.
        saved: the savings against the baseline.
        proven: whether the timing passed its own checks, e.g. that copies of the baseline are as
            fast as the baseline.
        reasons: the checks that failed.
    """
    gain = 1 / ratio.high  # the smallest gain in the interval
    if gain <= saved.speed_up:
        return None
    beyond = f"at least {gain:.3f}× as fast, but saved matmuls explain only {saved.speed_up:.3f}×"
    if not proven:
        return f"{beyond}: the timing is not proven ({'; '.join(reasons) or 'no reason given'})"
    if gain <= saved.speed_up_with_traffic:
        mib = (saved.traffic_all - saved.traffic) / 2**20
        return f"{beyond}: likely optimizer traffic, {mib:,.1f} MiB less per step"
    if saved.tokens < _LAUNCH_BOUND_TOKENS:
        return f"{beyond}: likely launch-bound, with {saved.tokens:,.0f} tokens a step"
    return f"{beyond}: nothing counted explains this; look for another difference between the arms"


# The limits of the device


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of a device, and the vendor's figure for its matmuls."""

    matmul_flops: float  # FLOPs per second
    copy_bytes: float  # bytes per second that a copy reads and writes
    how: str  # the matmul and the copy that were timed
    spec_flops: float | None  # FLOPs per second; None if the device is not in `_SPEC_FLOPS`

    def lower_bounds(self, work: StepWork) -> dict[str, float]:
        """Return lower bounds on the milliseconds of a step's matmuls and of Adam.

        `ceiling_ms` assumes that the two overlap completely, `serial_ms` that they do not overlap.
        """
        compute = 1e3 * work.flops / self.matmul_flops
        traffic = 1e3 * _ADAMW.traffic_bytes * work.parameters / self.copy_bytes
        return {
            "compute_ms": compute,
            "traffic_ms": traffic,
            "ceiling_ms": max(compute, traffic),
            "serial_ms": compute + traffic,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def measure_ceilings(device: torch.device, small: bool = False) -> Ceilings:
    """Time a large (or small) matmul and copy; of several groups of calls, the fastest counts."""
    large = runs_ahead(device)
    size = 512 if small else 8192 if large else 2048
    floats = 1 << (22 if small else 29 if large else 26)
    dtype = default_precision(device)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    matmul_seconds = _best_seconds(lambda: torch.mm(left, right, out=out), device)
    source = torch.ones(floats, device=device)
    target = torch.empty_like(source)
    copy_seconds = _best_seconds(lambda: target.copy_(source), device)
    name = device_name(device)
    spec = next((rate for key, rate in _SPEC_FLOPS.items() if key in name), None)
    how = f"{size}³ {str(dtype).removeprefix('torch.')} matmul; copy of {4 * floats >> 20} MiB"
    return Ceilings(2 * size**3 / matmul_seconds, 8 * floats / copy_seconds, how, spec)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds per call in the best of five groups of calls, after a warm-up group."""
    calls = 10 if runs_ahead(device) else 2  # enough for the clock to measure them accurately
    groups = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        groups.append((time.perf_counter() - began) / calls)
    return min(groups[1:])

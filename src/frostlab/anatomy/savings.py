"""What freezing can save at most: matmul arithmetic, and memory for gradients and Adam.

A trained matrix costs three matmuls: forward, input gradient, weight gradient. Freezing it
removes the third. The second disappears too where nothing below learns. Attention's own two
products (scores, mixing) cost as much again per token as the sequence is long, and their
backward is needed as long as anything below or in the attention learns. Causal attention, in a
kernel that skips what is masked, needs half of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frostlab.anatomy.parts import ATTENTION_INPUTS, Part
from frostlab.anatomy.snapshot import Anatomy, Layer

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

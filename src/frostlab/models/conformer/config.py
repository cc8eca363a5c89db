"""The shape of a Conformer, and what can be switched in it."""

from dataclasses import dataclass
from typing import Literal

Residual = Literal["none", "plain", "gated"]
Head = Literal["linear", "mlp"]
Norm = Literal["batch", "layer", "group"]
Attending = Literal["plain", "relative"]
Unseen = Literal["mean", "none"]


@dataclass(frozen=True)
class ConformerConfig:
    """The shape of a Conformer; the defaults are the published v2's.

    v1 is `residual="none"`, `head="linear"`, `gradient_scale=1.0`.
    """

    channels: int = 64  # of the EEG
    subjects: int = 71  # that are trained on, each with a row of its own
    width: int = 256
    layers: int = 8
    heads: int = 4
    hidden: int = 1024  # of each feed-forward network
    kernel: int = 31  # of the depthwise convolution, in samples
    dropout: float = 0.3
    residual: Residual = "gated"  # from the stack's input to its output
    gate_bias: float = 0.0  # where the gate's bias starts: 0 is half open, 4 nearly all stack
    gradient_scale: float = 2.0  # of what flows back into the stack, not of the residual
    head: Head = "mlp"
    norm: Norm = "batch"  # in the convolution module
    attention: Attending = "plain"  # sinusoids are added once, or enter every attention
    unseen: Unseen = "mean"  # an unseen subject's row: the mean of all rows, or zeros

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd; sines and cosines come in pairs")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel} is even; odd ones have a middle")

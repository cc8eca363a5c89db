"""The most that a treatment can speed a step up, and what to think of a timing that shows more.

A step spends its time on matmuls and on the optimizer's traffic: 28 bytes a trainable parameter.
Launching kernels, norms and activations come on top, and freezing saves little of those.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from frostlab.anatomy import anatomy
from frostlab.anatomy.savings import Savings, savings
from frostlab.bench.ceilings import ADAM_BYTES
from frostlab.compare.estimating import Ratio
from frostlab.models.stack import is_causal

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

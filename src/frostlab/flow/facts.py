"""What a flow is made of: facts about parts that do not change, and one report a measured step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class PartFacts:
    """A part of a model: everything of one role in one layer."""

    name: str
    peers: str  # parts with the same word here are alike
    stack: str
    layer: int | None
    state: str  # trainable, frozen or fixed
    tensors: tuple[str, ...]
    learning: tuple[str, ...]  # those that require a gradient
    missing: tuple[str, ...]  # those of them that no optimizer holds
    groups: tuple[int, ...]  # the optimizer's groups that hold the others
    dtype: str
    elements: int  # how many numbers of it learn

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PartFacts":
        """Read what `to_dict` wrote."""
        read: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**read)


# Those of torch's optimizers whose groups do not say it themselves
_COUPLED = ("SGD", "ASGD", "RMSprop", "Adagrad", "Adadelta", "Adamax")


@dataclass(frozen=True)
class GroupFacts:
    """What an optimizer was told about a group of parameters."""

    decay: float
    momentum: float
    eps: float
    coupled: bool = False  # decay is added to the gradient, and goes the way it goes

    @classmethod
    def of(cls, group: dict[str, Any], optimizer: str) -> "GroupFacts":
        """Read them from one of `optimizer.param_groups`."""
        momentum, eps = group.get("momentum", 0.0), group.get("eps", 0.0)
        return cls(
            float(group.get("weight_decay", 0.0)),
            float(momentum) if isinstance(momentum, float | int) else 0.0,
            float(eps) if isinstance(eps, float | int) else 0.0,
            not group.get("decoupled_weight_decay", optimizer not in _COUPLED),
        )


QUANTITIES = {
    "gradient": "norm of the gradient the optimizer got: unscaled, after clipping",
    "before_clip": "norm of the gradient before clipping, where it is known",
    "weight": "norm of the weights before the step",
    "update": "norm of what the step changed",
    "change": "distance from the weights at the start, relative to their norm",
    "cosine": "cosine between the weights and those at the start",
    "agreement": "cosine between this gradient and the one of the report before",
}


@dataclass(frozen=True)
class Report:
    """One measured step: for each quantity a number a part, NaN where there is none."""

    step: int
    values: dict[str, tuple[float, ...]]
    rates: tuple[float, ...]  # the learning rate of every group, NaN for one that has none
    unreached: tuple[str, ...] = ()  # tensors that learn and got no gradient at all
    largest: dict[str, float] = field(default_factory=dict)  # front, back, output: mean of max |g|
    ranges: dict[str, float] = field(default_factory=dict)  # max - min of each front tensor
    broken: tuple[int, ...] = ()  # parts with a NaN or an infinity
    dead: dict[str, float] = field(default_factory=dict)  # module -> share of units
    saturated: dict[str, float] = field(default_factory=dict)
    entropy: dict[str, tuple[float, ...]] = field(default_factory=dict)  # attention -> heads

    def of(self, quantity: str, part: int) -> float:
        """One number of one part."""
        return self.values[quantity][part]

    def at(self, places: Sequence[int | None]) -> "Report":
        """The same of other parts: where each stood here, None for what was not there."""
        values = {
            quantity: tuple(math.nan if place is None else own[place] for place in places)
            for quantity, own in self.values.items()
        }
        broken = tuple(i for i, place in enumerate(places) if place in self.broken)
        return replace(self, values=values, broken=broken)

    def ratio(self, part: int) -> float:
        """How far the step moved a part, relative to its weights."""
        weight, update = self.of("weight", part), self.of("update", part)
        if weight == 0.0:
            return float("inf") if update > 0.0 else float("nan")
        return update / weight

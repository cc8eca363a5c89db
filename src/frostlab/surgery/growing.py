"""Growing: more layers for a model, at the moment they start to learn."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from frostlab.errors import BadInput
from frostlab.models.decoder import Decoder
from frostlab.models.gpt import GPT


@dataclass(frozen=True)
class Growth:
    """What growing did: the prefixes of the new layers, and the old tensors it changed."""

    names: tuple[str, ...]
    changed: tuple[str, ...] = ()


def grow(
    model: nn.Module,
    layers: int = 1,
    at: Literal["top", "bottom"] | int = "top",
    init: Literal["identity", "random", "copy"] = "identity",
) -> Growth:
    """Add layers to a model in place."""
    if not isinstance(model, Decoder | GPT):
        raise BadInput(f"grow: the layers of {type(model).__name__} cannot be found")
    if init != "random":
        raise BadInput(f"grow: init {init} is not there yet; use random")
    count = len(model.blocks)
    first = {"top": count, "bottom": 0}.get(at) if isinstance(at, str) else at
    assert first is not None
    model.config = replace(model.config, layers=count + layers)
    donor = type(model)(replace(model.config, vocabulary=2))  # type: ignore[arg-type]
    for index in range(first, first + layers):
        model.blocks.insert(index, donor.blocks[index])
    return Growth(tuple(f"blocks.{index}" for index in range(first, first + layers)))

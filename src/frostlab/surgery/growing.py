"""Growing: more layers for a model that is there, at the top, the bottom or in between."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from frostlab.anatomy import survey
from frostlab.errors import BadInput, UnknownArchitecture, nearest
from frostlab.surgery.checks import refuse_untouchable, refuse_wrapped
from frostlab.surgery.identity import (
    last_norm,
    move_affine,
    norm_below,
    refuse_impossible,
    zero_additions,
)
from frostlab.surgery.origin import move_origins
from frostlab.surgery.stale import expect
from frostlab.surgery.trunk import (
    Trunk,
    build_layer,
    find_trunk,
    insert_layers,
    keep_scales,
    kinds_of_layers,
    set_count,
    unknown,
)

Init = Literal["identity", "random", "copy"]
_INITS = ("identity", "random", "copy")
_ENDS = ("top", "bottom")


@dataclass(frozen=True)
class Growth:
    """What growing did to a model."""

    at: int
    layers: tuple[int, ...]  # the indices of the new layers
    names: tuple[str, ...]  # their prefixes in the state dict, without the dot
    changed: tuple[str, ...]  # parts that were there before and have other values now
    note: str  # what else is no longer as it was, or nothing

    def renamed(self, name: str) -> str:
        """What a tensor of the model before is called now."""
        path = self.names[0].rpartition(".")[0]
        index, dot, rest = name.removeprefix(f"{path}.").partition(".")
        if not name.startswith(f"{path}.") or int(index) < self.at:
            return name
        return f"{path}.{int(index) + len(self.layers)}{dot}{rest}"


def grow(
    model: nn.Module, layers: int = 1, at: int | Literal["top", "bottom"] = "top",
    init: Init = "identity",
) -> Growth:  # fmt: skip
    """Add layers to a model, in place, and say what that changed.

    New layers are whole and trainable, with the dtypes, device and mode of their neighbour. The
    parameters that were there stay the same objects, frozen or not: optimizers still hold them,
    and lack the new ones.

    Args:
        layers: how many new layers, one above the other.
        at: the index the first of them gets, "top" or "bottom" (0).
        init: "identity" leaves what the model computes unchanged within 1e-6 (where layers end in
            a norm, as in BERT, the norm below gives its gain to the last new one: `changed`);
            "random" draws them as the model draws its own, from torch's default generator;
            "copy" copies the layer below, at the bottom the layer above.
    """
    refuse_wrapped(model, "grow")
    try:
        found, slots = survey(model)
    except UnknownArchitecture:
        raise BadInput(unknown(model)) from None
    refuse_untouchable(model, slots.values(), "grow")
    if any(slot.adapts is not None for slot in slots.values()):
        raise BadInput("grow: the model has adapters; grow it first, then add them")
    if init not in _INITS:
        listed = ", ".join(f'"{choice}"' for choice in _INITS)
        raise BadInput(f"grow: init={init!r} is not one of {listed}{nearest(str(init), _INITS)}")
    trunk = find_trunk(model, found)
    count = _count(layers)
    first = _index(at, len(trunk.layers))
    below = norm_below(found, first) if trunk.norm_after else None
    if init == "identity" and trunk.norm_after:
        refuse_impossible(model, trunk, first, below)

    _insert(model, trunk, first, count, init)
    new = tuple(range(first, first + count))
    names = tuple(f"{trunk.path}.{index}" for index in new)
    changed, notes = _keep_scales(model, trunk, new, init), list[str]()
    if changed:
        notes.append("queries of layers that moved were multiplied, as the config divides by place")
    if init == "identity":
        found, slots = survey(model)
        zero_additions(found, slots, new)
        if below is not None:
            last = last_norm(found, new[-1])
            changed += move_affine(model, below, last)
            notes.append(
                f"{below} is plain now and {last} has its gain, so what the model would say right "
                "after that norm (an early exit) is not what it was"
            )
    growth = Growth(first, new, names, tuple(changed), "; ".join(notes))
    move_origins(model, growth.renamed)
    for name in names:
        for local, parameter in model.get_submodule(name).named_parameters():
            expect(parameter, f"{name}.{local}")
    return growth


def _count(layers: int) -> int:
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise BadInput(f"grow: layers={layers!r} is not a whole number from 1")
    return layers


def _index(at: int | str, there: int) -> int:
    if at == "top":
        return there
    if at == "bottom":
        return 0
    if isinstance(at, int) and not isinstance(at, bool) and 0 <= at <= there:
        return at
    close = nearest(at, _ENDS) if isinstance(at, str) else ""
    raise BadInput(
        f'grow: at={at!r} is not "top", "bottom" or an index from 0 to {there}, '
        f"for a model of {there} layers{close}"
    )


def _insert(model: nn.Module, trunk: Trunk, at: int, count: int, init: Init) -> None:
    """Build the layers, then put them in; nothing is changed if one cannot be built."""
    before, kinds = len(trunk.layers), kinds_of_layers(model, trunk)
    source = max(at - 1, 0)
    beside = trunk.layers[source]
    more = {name: [*v[:at], *[v[source]] * count, *v[at:]] for name, v in kinds.items()}
    set_count(model, trunk, before + count, more)
    try:
        with torch.random.fork_rng([], enabled=init == "copy"):  # a copy draws nothing
            new = [build_layer(trunk, at + i, beside) for i in range(count)]
        if init == "copy":
            values = beside.state_dict()
            for layer in new:
                layer.load_state_dict(values)
    except BaseException:
        set_count(model, trunk, before, kinds)
        raise
    insert_layers(trunk, at, new)


def _keep_scales(model: nn.Module, trunk: Trunk, new: tuple[int, ...], init: Init) -> list[str]:
    """Let layers that moved, and copies, attend as they did where they came from."""
    moved = {index: index - len(new) for index in range(new[-1] + 1, len(trunk.layers))}
    changed = keep_scales(model, trunk, moved)
    if init == "copy":
        source = max(new[0] - 1, 0)
        keep_scales(model, trunk, dict.fromkeys(new, source))
    return changed

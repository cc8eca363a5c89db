"""Roles that a weight gets from the same weight in other layers, and layers that contradict it.

The layers of a stack have the same weights, but a pass may show a weight's role in only some of
them: it may use one expert of several, and the last layer is not followed by an attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from frostlab.roles.parts import ATTENTION_INPUTS, Heads, Place, Rows, Slot
from frostlab.roles.tracing.claims import Contradiction
from frostlab.roles.tracing.layers import Layers
from frostlab.roles.tracing.passes.deciding import Deciding

_OF_EXPERTS = {"up", "gate", "down", "norm", "conv"}


@dataclass(frozen=True)
class Measured:
    """What the evidence says about one parameter: the rows of each role, and their heads."""

    rows: Mapping[str, Rows] | None  # None: one role for all rows
    heads: Mapping[str, Heads] = field(default_factory=dict)
    axis: int | None = None
    layout: str = "separate"
    bias: bool = False
    matmul: bool = False


Placements = dict[str, tuple[Measured, Place]]  # name of a parameter → its rows, and its place


def compare_layers(
    placements: Placements,
    unreached: list[str],
    slots: Mapping[str, Slot],
    layers: Layers,
    model: nn.Module,
) -> None:
    """Complete `placements` from other layers; raise Contradiction if two layers disagree.

    `unreached` lists the parameters without a role. Those that get one are removed.
    """
    _copy_from_siblings(placements, unreached, slots, layers, model)
    _keep_experts(placements, layers)
    _agree(placements, unreached, slots, layers)
    _leave_the_last(placements, slots)
    _name_first_norms(placements, layers, slots)


def _keep_experts(placements: Placements, layers: Layers) -> None:
    """Remove the expert's index from the places of layers without a router."""
    chosen = {layers.path(n) for n, (_, place) in placements.items() if place.role == "router"}
    for name, (measured, place) in placements.items():
        if place.expert is not None and layers.path(name) not in chosen:
            placements[name] = (measured, replace(place, expert=None))


def _copy_from_siblings(
    placements: Placements,
    unreached: list[str],
    slots: Mapping[str, Slot],
    layers: Layers,
    model: nn.Module,
) -> None:
    """Give parameters that no token reached, such as experts', the roles of siblings.

    A sibling is the same parameter in another layer, or else in another expert. The modules that
    hold both must have the same classes and settings.
    """
    if not unreached:
        return
    modules, deciding = dict(model.named_modules(remove_duplicate=False)), Deciding(model)
    kinds = {
        path: (type_before_parametrizations(module), *deciding.of(module))
        for path, module in modules.items()
    }

    def forms(name: str) -> list[tuple[object, ...]]:
        """Return what siblings of a parameter in other layers share with it, then experts."""
        segments, path = name.split(".")[:-1], layers.path(name)
        held = [kinds.get(".".join(segments[: i + 1])) for i in range(len(segments))]
        depth = len(path.split(".")) if path else 0  # the layer, then what is in it
        of_layers = (layers.in_any_layer(name), slots[name].shape, *held[max(depth - 1, 0) :])
        return [of_layers, (_without_numbers(name), slots[name].shape, *held[depth:])]

    reached: dict[tuple[object, ...], str] = {}
    roles: dict[tuple[object, ...], set[str]] = {}
    for name, (_, place) in placements.items():
        if name not in unreached:
            for form in forms(name):
                reached.setdefault(form, name)
                roles.setdefault(form, set()).add(place.role)
    for name in list(unreached):
        of_layers, of_experts = forms(name)
        sibling = reached.get(of_layers)
        if sibling is None and roles.get(of_experts, set()) <= _OF_EXPERTS:
            sibling = reached.get(of_experts)
        if sibling is None:
            continue
        measured, place = placements[sibling]
        own = placements[name][1]
        expert = None if place.expert is None else layers.expert(name)
        placements[name] = (
            measured, Place(place.role, own.stack, own.layers, place.cross, expert),
        )  # fmt: skip
        unreached.remove(name)


def _agree(
    placements: Placements,
    unreached: Sequence[str],
    slots: Mapping[str, Slot],
    layers: Layers,
) -> None:
    """Raise Contradiction if a weight is, say, a value in one layer but not in another layer."""
    first: dict[tuple[object, ...], tuple[str, set[str]]] = {}
    for name, (measured, place) in placements.items():
        roles = {place.role} if measured.rows is None else set(measured.rows)
        if name in unreached or not place.layers or "recurrent" in roles:
            continue
        key = (place.stack, layers.in_any_layer(name), slots[name].shape)
        other, before = first.setdefault(key, (name, roles))
        if before & set(ATTENTION_INPUTS) != roles & set(ATTENTION_INPUTS):
            raise Contradiction(
                f"{other} is {' and '.join(sorted(before))}, but {name} is "
                f"{' and '.join(sorted(roles))}"
            )


def _leave_the_last(placements: Placements, slots: Mapping[str, Slot]) -> None:
    """Replace the role `head` with the role of the same weight in other blocks.

    No attention follows the last block, so weights of that block look like a head. If the same
    weight of the other blocks comes before all attentions, the blocks are no layers but, for
    example, a stem and a head. The same weight has the same shape or, if it is a convolution, as
    many axes, because blocks of images often have different widths.
    """
    keys = {
        name: (_of_any_block(name), slot.shape if len(slot.shape) < 3 else len(slot.shape))
        for name, slot in slots.items()
    }
    roles: dict[object, set[str]] = {}
    for name, (_, place) in placements.items():
        roles.setdefault(keys[name], set()).add(place.role)
    for name, (measured, place) in placements.items():
        others = roles[keys[name]] - {"head"}
        if place.role == "head" and others and others != {"embedding"}:
            role = "other" if len(others) > 1 else next(iter(others))
            placements[name] = (measured, replace(place, role=role))


def _name_first_norms(placements: Placements, layers: Layers, slots: Mapping[str, Slot]) -> None:
    """Call a weight a norm if it is one in another layer.

    The norm of the first layer may be applied to parameters alone, such as learned queries.
    """
    norms = {
        (layers.in_any_layer(n), slots[n].shape)
        for n, (_, p) in placements.items()
        if p.role == "norm"
    }
    for name, (measured, place) in placements.items():
        key = (layers.in_any_layer(name), slots[name].shape)
        if place.role == "other" and place.layers and key in norms:
            placements[name] = (measured, replace(place, role="norm"))


def _of_any_block(name: str) -> str:
    """Return a name with `*` for its first number, unless that is in the last two segments."""
    segments = name.split(".")
    first = next((i for i, segment in enumerate(segments[:-2]) if segment.isdecimal()), None)
    return name if first is None else ".".join([*segments[:first], "*", *segments[first + 1 :]])


def _without_numbers(name: str) -> str:
    return ".".join("*" if segment.isdecimal() else segment for segment in name.split("."))

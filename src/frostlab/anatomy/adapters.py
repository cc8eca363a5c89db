"""Adapters that PEFT put around modules: what they adapt keeps its name, they get a role."""

import sys
from collections.abc import Iterable, Mapping

from torch import nn

from frostlab.anatomy.parts import Place, Slot
from frostlab.anatomy.placing import Placed

_BASE = "base_layer"  # what PEFT calls the module it wraps


def adapted(model: nn.Module) -> set[str]:
    """The paths of the modules that PEFT wrapped."""
    source = sys.modules.get("peft.tuners.tuners_utils")
    if source is None:  # then nothing can be wrapped
        return set()
    modules = model.named_modules(remove_duplicate=False)
    return {path for path, module in modules if isinstance(module, source.BaseTunerLayer)}


def without_wrapping(path: str, wrapped: set[str]) -> tuple[str, str | None]:
    """The path a module has without PEFT, and the path of what it adapts if it is an adapter's."""
    if not path or not wrapped:
        return path, None
    here, plain = "", ""
    for segment in path.split("."):
        if here in wrapped:
            if segment != _BASE:
                return path, plain
        else:
            plain = f"{plain}.{segment}" if plain else segment
        here = f"{here}.{segment}" if here else segment
    return plain, None


def place_adapters(slots: Iterable[Slot], placed: Mapping[str, Placed]) -> dict[str, Placed]:
    """Adapters stand where the module stands that they adapt."""
    places = {name.rpartition(".")[0]: place for name, (_, place, _) in placed.items()}
    found: dict[str, Placed] = {}
    for slot in slots:
        if slot.adapts is not None:
            place = places[slot.adapts]
            found[slot.name] = ("adapter", Place("adapter", place.stack, place.layers), None)
    return found

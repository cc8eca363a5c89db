"""Names of the parameters of modules that PEFT, Hugging Face's library of adapters, wrapped.

The unmodified model is the model before PEFT wrapped its modules. PEFT wraps a module in one of
three ways. An adapter's layer keeps the module as `base_layer` and also holds the weights of its
adapters; only active adapters are in use. A module that is to be trained whole (`modules_to_save`,
such as the head of a classifier) is copied: while an adapter is active, the model uses the
adapter's copy, and `original_module` is out of use. An embedding of which only some tokens are
trained (`trainable_token_indices`) is in a wrapper that uses `token_adapter`, an adapter's layer
around the embedding.
"""

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

_BASE = "base_layer"
_ORIGINAL = "original_module"


@dataclass(frozen=True)
class ParameterName:
    """The name of a parameter, and its relation to the unmodified model."""

    # as in the unmodified model; adapters and weights that are out of use keep their present name
    name: str
    adapts: str | None = None  # for an adapter: the path of the adapted module
    replaced: str | None = None  # for a weight out of use: the name of the weight that is used
    unused: bool = False  # whether the model does not compute with it


class PeftNames:
    """The wrapped modules of a model; finds the unmodified names of their parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.tuners: dict[str, Any] = {}  # path → an adapter's layer
        # path of a wrapper with copies or with trained tokens → path in it of the module in use
        self.copied: dict[str, list[str]] = {}
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        if tuners is None:  # PEFT is not loaded, so nothing is wrapped
            return
        other = sys.modules["peft.utils.other"]
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, tuners.BaseTunerLayer):
                self.tuners[path] = module
            elif isinstance(module, other.ModulesToSaveWrapper):
                active = [] if module.disable_adapters else module.active_adapters
                self.copied[path] = ["modules_to_save", active[0]] if active else [_ORIGINAL]
            elif isinstance(module, other.TrainableTokensWrapper):
                self.copied[path] = ["token_adapter"]

    def find(self, present: str) -> ParameterName:
        """Find what the parameter with this present name is called in the unmodified model."""
        if not self.tuners and not self.copied:
            return ParameterName(present)
        segments, plain, unused = present.split("."), list[str](), False
        i = 0
        while i < len(segments):
            here = ".".join(segments[:i])
            if here in self.tuners:
                if segments[i] != _BASE:
                    adapter = segments[i + 1] if i + 1 < len(segments) else ""
                    unused |= _is_inactive(self.tuners[here], adapter)
                    return ParameterName(present, ".".join(plain), None, unused)
                i += 1
            elif here in self.copied:
                used = self.copied[here]
                width = 2 if segments[i] == "modules_to_save" else 1
                unused |= segments[i : i + width] != used
                i += width
            else:
                plain.append(segments[i])
                i += 1
        name = ".".join(plain)
        return ParameterName(present, None, name, True) if unused else ParameterName(name)


def is_adapted(module: nn.Module | None) -> bool:
    """Return whether a module is an adapter's layer, around the module that it adapts."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def _is_inactive(layer: Any, adapter: str) -> bool:
    """Return whether a layer has this adapter but does not compute with it."""
    known = adapter in layer._all_available_adapter_names()
    return known and (layer.disable_adapters or adapter not in layer.active_adapters)

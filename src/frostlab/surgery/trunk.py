"""The layers between a model's embedding and its head: where they are, and how one is added."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from frostlab.anatomy import Anatomy, survey
from frostlab.anatomy.description import model_type
from frostlab.errors import BadInput
from frostlab.models import GPT, Decoder

_GROWABLE = ("bert", "gpt2", "llama")  # Hugging Face model types
_KNOWN = "frostlab's GPT and Decoder, Hugging Face's bert, gpt2 and llama"
_INDICES = ("layer_idx", "layer_index")
_SCALED = "scale_attn_by_inverse_layer_idx"  # GPT-2 can divide scores by the layer's number


@dataclass(frozen=True)
class Trunk:
    """A model's one list of layers, and the module whose config counts them."""

    path: str
    layers: nn.ModuleList
    body: Any

    @property
    def norm_after(self) -> bool:
        """Whether a layer ends in a norm, rather than in a sum."""
        if isinstance(self.body, Decoder):
            return self.body.config.norm == "after"
        return model_type(self.body) == "bert"


def find_trunk(model: nn.Module, found: Anatomy) -> Trunk:
    """Find the list that holds the layers the anatomy sees, or say what is known."""
    name = type(model).__name__
    if len({layer.stack for layer in found.layers}) > 1:
        raise BadInput(f"grow: {name} has several stacks of layers; known: {_KNOWN}")
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and _holds(path, module, found):
            body = _body(model, path)
            if isinstance(body, GPT | Decoder) or model_type(body) in _GROWABLE:
                return Trunk(path, module, body)
    raise BadInput(unknown(model))


def unknown(model: nn.Module) -> str:
    """What to say of a model that layers cannot be added to."""
    return f"grow: {type(model).__name__} cannot be grown; known: {_KNOWN}"


def _holds(path: str, layers: nn.ModuleList, found: Anatomy) -> bool:
    """Whether a list has exactly the layers of the anatomy, each where its parts say."""
    inside = [layer.index for layer in found.layers] == list(range(len(layers)))
    return bool(found.layers) and inside and all(
        part.name.startswith(f"{path}.{layer.index}.")
        for layer in found.layers
        for part in layer.parts
    )  # fmt: skip


def _body(model: nn.Module, path: str) -> nn.Module:
    """The innermost model around a path."""
    body, here = model, model
    for segment in path.split("."):
        if isinstance(here, GPT | Decoder) or model_type(here) is not None:
            body = here
        here = getattr(here, segment)
    return body


def set_count(model: nn.Module, trunk: Trunk, count: int, kinds: dict[str, list[str]]) -> None:
    """Make every config of the model say how many layers there are, and of which kinds."""
    if isinstance(trunk.body, GPT | Decoder):
        trunk.body.config = replace(trunk.body.config, layers=count)
        return
    for config in _configs(model, trunk):
        config.num_hidden_layers = count
        for name, values in kinds.items():
            setattr(config, name, list(values))


def kinds_of_layers(model: nn.Module, trunk: Trunk) -> dict[str, list[str]]:
    """The lists in a Hugging Face config that have one word for each layer."""
    if isinstance(trunk.body, GPT | Decoder):
        return {}
    return {
        name: list(value)
        for name, value in vars(trunk.body.config).items()
        if name.endswith("layer_types") and value is not None and len(value) == len(trunk.layers)
    }


def _configs(model: nn.Module, trunk: Trunk) -> Iterable[Any]:
    """The configs of this kind that modules hold: some heads give their body a copy."""
    kind = model_type(trunk.body)
    held = (module.__dict__.get("config") for module in model.modules())
    return {id(c): c for c in held if getattr(c, "model_type", None) == kind}.values()


def build_layer(trunk: Trunk, index: int, beside: nn.Module) -> nn.Module:
    """Draw a layer as the model draws its own, with the dtypes, device and mode of its neighbour.

    Drawn on the CPU from torch's default generator, so that a seed gives the same anywhere.
    """
    with torch.device("cpu"):
        if isinstance(trunk.body, GPT | Decoder):
            layer: Any = trunk.body.new_block()
        else:
            layer = type(beside)(trunk.body.config, layer_idx=index)
            layer.apply(trunk.body._initialize_weights)
    there = dict(beside.named_buffers()) | beside.state_dict()  # whole where the layer is split
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        tensor.data = tensor.data.to(there[name])
    if getattr(beside, "gradient_checkpointing", False):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = beside._gradient_checkpointing_func
    _record_alike(layer, beside)
    return layer.train(beside.training)


def _record_alike(layer: nn.Module, beside: nn.Module) -> None:
    """Hang on a layer what transformers has hung on its neighbour to record hidden states."""
    for name, module in beside.named_modules():
        for hook in module._forward_hooks.values():
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                layer.get_submodule(name).register_forward_hook(hook)


def insert_layers(trunk: Trunk, at: int, new: list[nn.Module]) -> None:
    """Put layers into the list, and tell every layer its index."""
    for offset, layer in enumerate(new):
        trunk.layers.insert(at + offset, layer)
    for index, layer in enumerate(trunk.layers):
        for module in layer.modules():
            held: Any = module
            if module.__dict__.get(_SCALED):
                held.scaling *= (held.layer_idx + 1) / (index + 1)
            for name in _INDICES:
                if isinstance(module.__dict__.get(name), int):
                    setattr(module, name, index)


def keep_scales(model: nn.Module, trunk: Trunk, moved: dict[int, int]) -> list[str]:
    """Undo, in the queries, what another index does to a layer's scores; name what was changed.

    Args:
        moved: the index of each layer that came from another place, and the index it had there.
    """
    if not getattr(trunk.body.config, _SCALED, False):
        return []
    found, slots = survey(model)
    changed = []
    for part in found.parts:
        was = moved.get(-1 if part.layer is None else part.layer)
        if part.role == "query" and was is not None and part.layer is not None:
            slot = slots[part.name]
            slot.write(slot.read(part.rows) * ((part.layer + 1) / (was + 1)), part.rows)
            changed.append(part.key)
    return changed

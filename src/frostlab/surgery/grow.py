"""Growing: more layers for a model that is there, at the top, the bottom or in between."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frostlab.errors import BadInput, UnknownArchitecture, nearest
from frostlab.models.decoder import Decoder
from frostlab.models.gpt import GPT
from frostlab.roles.description import model_type
from frostlab.roles.parts import Slot
from frostlab.roles.read import survey
from frostlab.roles.snapshot import Anatomy
from frostlab.surgery.freeze import refuse_untouchable, refuse_wrapped
from frostlab.surgery.origin import move_origins
from frostlab.surgery.stale import expect, record_change

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
    record_change(model)
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


_ADDED = ("output", "down")  # the roles whose products are added to what a layer was given
_ALLOWED = 8e-7  # of the promised 1e-6; the rest is for float32's rounding
_NEGLIGIBLE = 1e-9  # an eps that no variance of a working model makes visible
_PROBE = (4, 32)  # sequences and tokens
_INSTEAD = 'use init="copy" or init="random"'


def zero_additions(found: Anatomy, slots: dict[str, Slot], layers: tuple[int, ...]) -> None:
    """Make new layers add nothing to what they are given."""
    for part in found.parts:
        if part.layer in layers and part.role in _ADDED:
            slots[part.name].write(torch.zeros_like(slots[part.name].read()))


def norm_below(found: Anatomy, at: int) -> str | None:
    """The path of the norm whose output the layer at an index is given, if there is one."""
    first = next(i for i, part in enumerate(found.parts) if part.layers)
    below = [p for p in found.parts if p.layer == at - 1] if at else found.parts[:first]
    norms = [part.name.rpartition(".")[0] for part in below if part.role == "norm"]
    return norms[-1] if norms else None


def last_norm(found: Anatomy, layer: int) -> str:
    """The path of the norm that a layer ends in."""
    path = norm_below(found, layer + 1)
    assert path is not None
    return path


@torch.no_grad()
def move_affine(model: nn.Module, source: str, target: str) -> list[str]:
    """Give a norm another's gain and bias and leave that one plain; name what was changed."""
    old, new = model.get_submodule(source), model.get_submodule(target)
    for name, parameter in old.named_parameters():
        new.get_parameter(name).copy_(parameter)
        parameter.fill_(1.0 if name == "weight" else 0.0)
    return [f"{source}.{name}" for name, _ in old.named_parameters()]


def refuse_impossible(model: nn.Module, trunk: Trunk, at: int, below: str | None) -> None:
    """Refuse an identity that would not hold within 1e-6, for layers that end in a norm."""
    where = f'grow: init="identity" at {at}'
    if below is None:
        raise BadInput(
            f"{where} is impossible: layers of {type(model).__name__} end in a norm, and there is "
            f"none below whose gain they could keep; grow above layer 0, or {_INSTEAD}"
        )
    norm: Any = model.get_submodule(below)
    if norm.weight.dtype not in (torch.float32, torch.float64):
        raise BadInput(
            f"{where} would round: {below} is {norm.weight.dtype}; grow in float32 and convert "
            f"afterwards, or {_INSTEAD}"
        )
    change, variance = _change_by_eps(trunk, norm)
    if change > _ALLOWED:
        raise BadInput(
            f"{where} would change outputs by {change:.1e}: the eps of {below}, {norm.eps:g}, is "
            f"not small beside what it normalises (variance {variance:.2g}); {_INSTEAD}"
        )


def _change_by_eps(trunk: Trunk, norm: Any) -> tuple[float, float]:
    """The largest relative change by normalising again, and the variance it happens at.

    A norm leaves variance v as v / (v + eps), norms after it as 1 - eps: the output, which should
    stay what it was, is multiplied by 1 + (eps / (v + eps) - eps) / 2.
    """
    if norm.eps <= _NEGLIGIBLE:
        return 0.0, 1.0
    given = _inputs_of(norm, trunk).double()
    centre = given.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else 0.0
    variance = (given - centre).square().mean(-1).flatten()
    change = (norm.eps / (variance + norm.eps) - norm.eps).abs() / 2
    worst = int(change.argmax())
    return float(change[worst]), float(variance[worst])


def _inputs_of(norm: nn.Module, trunk: Trunk) -> Tensor:
    """What a norm is given when the model reads random tokens."""
    seen: list[Tensor] = []
    body, (rows, length) = trunk.body, _PROBE
    size = getattr(body.config, "vocabulary", None) or body.config.vocab_size
    length = min(length, getattr(body.config, "max_position_embeddings", length))
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(size, (rows, length), generator=generator)
    handle = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        with _evaluating(body), torch.no_grad():
            body(ids.to(next(norm.parameters()).device))
    finally:
        handle.remove()
    return seen[0]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within this nothing is dropped; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

"""Growing of a model: new layers at the top, at the bottom or in between.

The new layers can leave the model's outputs unchanged up to rounding (init="identity"), use the
model's own initialisation (init="random"), or copy a neighbouring layer (init="copy").
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frostlab.errors import BadInput, UnknownArchitecture, first_line, nearest
from frostlab.models.decoder import Decoder
from frostlab.models.gpt import GPT
from frostlab.roles.description import model_type
from frostlab.roles.parts import Slot
from frostlab.roles.read import survey
from frostlab.roles.snapshot import Anatomy
from frostlab.roles.tracing.passes.inputs import candidate_inputs
from frostlab.surgery.freeze import refuse_untouchable, refuse_wrapped
from frostlab.surgery.origin import move_origins
from frostlab.surgery.stale import expect, record_change

_GROWABLE = ("bert", "gpt2", "llama")  # Hugging Face model types
_SUPPORTED = (
    "frostlab's GPT and Decoder, Hugging Face's bert, gpt2 and llama, and models that "
    "no table describes, if a layer can be built from their config and the layer's number"
)
_SAME = 1e-5  # largest relative change of outputs by init="identity", if no table describes a model
_INDICES = ("layer_idx", "layer_index")  # attributes that hold a layer's number
_SCALED = "scale_attn_by_inverse_layer_idx"  # GPT-2's option to divide scores by layer_idx + 1

Init = Literal["identity", "random", "copy"]
_INITS = ("identity", "random", "copy")
_ENDS = ("top", "bottom")
_ADDED = ("output", "down")  # roles whose outputs are added to the residual stream
# Largest relative change of the outputs that a norm's eps may cause. `grow` promises at most 1e-6;
# the rest is for float32 rounding.
_ALLOWED = 8e-7
_NEGLIGIBLE = 1e-9  # a norm's eps up to this value has no measurable effect
_PROBE = (4, 32)  # sequences, and tokens per sequence, for measuring variances
_INSTEAD = 'use init="copy" or init="random"'


@dataclass(frozen=True)
class Trunk:
    """The list of a model's layers, and the model whose config counts them."""

    path: str  # path of the list within the model
    layers: nn.ModuleList
    body: Any  # the innermost frostlab or Hugging Face model around the list
    # whether no table describes the model: then a growth that does not work is undone
    probed: bool = False

    @property
    def norm_after(self) -> bool:
        """Whether a layer ends with a norm rather than with a residual sum."""
        if isinstance(self.body, Decoder):
            return self.body.config.norm == "after"
        return model_type(self.body) == "bert"


@dataclass(frozen=True, repr=False)
class Growth:
    """The result of growing a model."""

    at: int  # the index of the first new layer
    layers: tuple[int, ...]  # the indices of the new layers
    names: tuple[str, ...]  # prefixes of the new layers in the state dict, without the final dot
    changed: tuple[str, ...]  # existing parameters, or rows of one role, whose values changed
    note: str  # an explanation of the changes, or ""

    def __repr__(self) -> str:
        indices = ", ".join(map(str, self.layers))
        changed = f"; {len(self.changed)} existing parts changed" if self.changed else ""
        return f"Growth(layers {indices} are new{changed})"

    def renamed(self, name: str) -> str:
        """Return the new name of a tensor that the model had before growing."""
        path = self.names[0].rpartition(".")[0]
        index, dot, rest = name.removeprefix(f"{path}.").partition(".")
        if not name.startswith(f"{path}.") or int(index) < self.at:
            return name
        return f"{path}.{int(index) + len(self.layers)}{dot}{rest}"


def grow(
    model: nn.Module, layers: int = 1, at: int | Literal["top", "bottom"] = "top",
    init: Init = "identity",
) -> Growth:  # fmt: skip
    """Add layers to a model, in place, and return their indices, their names and other changes.

    New layers are trainable, have unsplit projections even if `freeze` split their neighbour's, and
    take the dtypes, device and training mode of their neighbour. Existing parameters stay the same
    objects, and stay frozen or trainable as they were, so existing optimizers remain valid; the new
    parameters are in no optimizer yet.

    Args:
        layers: the number of new layers, which are inserted next to each other.
        at: the index of the first new layer, "top" or "bottom" (0).
        init: "identity" changes the model's outputs by at most 1e-6, relatively (1e-5 in a model
            that no table describes). "random" uses the model's own initialisation and torch's
            default generator. "copy" copies the layer below or, at the bottom, the layer above.

    If layers end with a norm, as in BERT, "identity" moves the gain and bias of the norm below the
    new layers to the last norm of the new layers. BadInput is raised if there is no norm below, if
    that norm is in half precision, or if the eps of the norms would change the outputs for random
    tokens by more than 8e-7.
    """
    refuse_wrapped(model, "grow")
    try:
        anatomy, slots = survey(model)
    except UnknownArchitecture:
        raise BadInput(_refusal(model)) from None
    refuse_untouchable(model, slots.values(), "grow")
    if any(slot.adapts is not None for slot in slots.values()):
        raise BadInput("grow: the model has adapters; grow it first, then add them")
    if init not in _INITS:
        listed = ", ".join(f'"{choice}"' for choice in _INITS)
        raise BadInput(f"grow: init={init!r} is not one of {listed}{nearest(str(init), _INITS)}")
    trunk = find_trunk(model, anatomy)
    count = _checked_count(layers)
    first = _insertion_index(at, len(trunk.layers))
    below = _norm_below(anatomy, first) if trunk.norm_after else None
    if init == "identity" and trunk.norm_after:
        _refuse_impossible_identity(model, trunk, first, below)

    trial = _Trial(model, trunk) if trunk.probed else None
    _insert(model, trunk, first, count, init)
    new = tuple(range(first, first + count))
    names = tuple(f"{trunk.path}.{index}" for index in new)
    changed, notes = _keep_scales(model, trunk, new, init), list[str]()
    if changed:
        notes.append(
            "queries of moved layers were rescaled, because the config divides attention scores "
            "by the layer's number"
        )
    if init == "identity":
        anatomy, slots = survey(model)
        _zero_outputs(anatomy, slots, new)
        if below is not None:
            last = _last_norm(anatomy, new[-1])
            changed += _move_affine(model, below, last)
            notes.append(
                f"the gain and bias of {below} moved to {last}, so the output of {below} "
                "(for example as an early exit) has changed"
            )
    if trial is not None:
        trial.check(new, same=init == "identity")
    growth = Growth(first, new, names, tuple(changed), "; ".join(notes))
    move_origins(model, growth.renamed)
    added = ((name, model.get_submodule(name).named_parameters()) for name in names)
    expect(model, [(f"{name}.{local}", p) for name, items in added for local, p in items])
    record_change(model)
    return growth


class _Trial:
    """The outputs of a model before it grows, to compare with its outputs afterwards."""

    def __init__(self, model: nn.Module, trunk: Trunk) -> None:
        self.model, self.trunk, self.kinds = model, trunk, _kinds_of_layers(model, trunk)
        self.count = len(trunk.layers)
        for self.call in candidate_inputs(model):
            with suppress(Exception):  # the model does not take these inputs
                self.before = self._outputs()
                return
        raise BadInput(f"grow: {type(model).__name__} runs with none of the inputs that were tried")

    def _outputs(self) -> list[Tensor]:
        with _eval_mode(self.model), torch.no_grad():
            output = self.model(*self.call.args, **self.call.kwargs)
        values = list(output.values()) if isinstance(output, Mapping) else [output]
        return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]

    def check(self, new: tuple[int, ...], same: bool) -> None:
        """Undo the growth if the model does not run or, with `same`, if its outputs changed.

        Raise an error in these cases.
        """
        problem, name = "", type(self.model).__name__
        try:
            after = self._outputs()
            change = max(
                (float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
                 for a, b in zip(after, self.before, strict=True)), default=0.0,
            )  # fmt: skip
            if same and not change <= _SAME:
                problem = (
                    f'init="identity" would change the outputs of {name} by {change:.1e}; '
                    f"perhaps its layers end with a norm; {_INSTEAD}"
                )
        except Exception as error:  # a model's own code can fail in many ways
            problem = f"{name} does not run with another number of layers ({first_line(error)})"
        if problem:
            for index in reversed(new):
                del self.trunk.layers[index]
            _insert_layers(self.trunk, 0, [])  # number the remaining layers as before
            _set_count(self.model, self.trunk, self.count, self.kinds)
            raise BadInput(f"grow: {problem}")


def _checked_count(layers: int) -> int:
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise BadInput(f"grow: layers={layers!r} is not a positive integer")
    return layers


def _insertion_index(at: int | str, layers: int) -> int:
    """Return the index of the first new layer in a model that has `layers` layers."""
    if at == "top":
        return layers
    if at == "bottom":
        return 0
    if isinstance(at, int) and not isinstance(at, bool) and 0 <= at <= layers:
        return at
    close = nearest(at, _ENDS) if isinstance(at, str) else ""
    raise BadInput(
        f'grow: at={at!r} is not "top", "bottom" or an index from 0 to {layers}, '
        f"for a model of {layers} layers{close}"
    )


def find_trunk(model: nn.Module, anatomy: Anatomy) -> Trunk:
    """Find the list of a model's layers, or raise an error if the model cannot grow."""
    name = type(model).__name__
    if len({layer.stack for layer in anatomy.layers}) > 1:
        raise BadInput(f"grow: {name} has several stacks of layers; supported: {_SUPPORTED}")
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and _holds(path, module, anatomy):
            body = _body(model, path)
            if isinstance(body, GPT | Decoder) or model_type(body) in _GROWABLE:
                return Trunk(path, module, body)
            count = getattr(getattr(body, "config", None), "num_hidden_layers", None)
            if anatomy.evidence.method == "probe" and count == len(module):
                return Trunk(path, module, body, probed=True)
    raise BadInput(_refusal(model))


def _refusal(model: nn.Module) -> str:
    """Return the error message for a model that cannot grow."""
    return f"grow: {type(model).__name__} cannot be grown; supported: {_SUPPORTED}"


def _holds(path: str, layers: nn.ModuleList, anatomy: Anatomy) -> bool:
    """Return whether a ModuleList at this path holds exactly the layers of the anatomy."""
    complete = [layer.index for layer in anatomy.layers] == list(range(len(layers)))
    return bool(anatomy.layers) and complete and all(
        part.name.startswith(f"{path}.{layer.index}.")
        for layer in anatomy.layers
        for part in layer.parts
    )  # fmt: skip


def _body(model: nn.Module, path: str) -> nn.Module:
    """Return the innermost frostlab or Hugging Face model that contains a path."""
    body, module = model, model
    for segment in path.split("."):
        if isinstance(module, GPT | Decoder) or model_type(module) is not None:
            body = module
        module = getattr(module, segment)
    return body


def _set_count(model: nn.Module, trunk: Trunk, count: int, kinds: dict[str, list[str]]) -> None:
    """Set the number of layers and the layer types in every config of the model."""
    if isinstance(trunk.body, GPT | Decoder):
        trunk.body.config = replace(trunk.body.config, layers=count)
        return
    for config in _configs(model, trunk):
        config.num_hidden_layers = count
        for name, values in kinds.items():
            setattr(config, name, list(values))


def _kinds_of_layers(model: nn.Module, trunk: Trunk) -> dict[str, list[str]]:
    """Return the lists of layer types in a Hugging Face config, with one entry per layer."""
    if isinstance(trunk.body, GPT | Decoder):
        return {}
    return {
        name: list(value)
        for name, value in vars(trunk.body.config).items()
        if name.endswith("layer_types") and value is not None and len(value) == len(trunk.layers)
    }


def _configs(model: nn.Module, trunk: Trunk) -> Iterable[Any]:
    """Return the distinct configs of the body's model type; a model's head may hold a copy."""
    kind = model_type(trunk.body)
    configs = (module.__dict__.get("config") for module in model.modules())
    return {id(c): c for c in configs if getattr(c, "model_type", None) == kind}.values()


def _build_layer(trunk: Trunk, index: int, neighbour: nn.Module) -> nn.Module:
    """Build a layer with the model's initialisation and the neighbour's dtypes, device and mode.

    The weights are drawn on the CPU from torch's default generator, so that a seed gives the
    same weights on every device.
    """
    with torch.device("cpu"):
        if isinstance(trunk.body, GPT | Decoder):
            layer: Any = trunk.body.new_block()
        else:
            layer = _from_config(trunk, index, neighbour)
            layer.apply(trunk.body._initialize_weights)
    # a state dict has the original names and shapes even if the neighbour's projections are split
    tensors = dict(neighbour.named_buffers()) | neighbour.state_dict()
    if trunk.probed and layer.state_dict().keys() != neighbour.state_dict().keys():
        raise BadInput(
            f'grow: layer {index} would be of another kind than the layer next to it; try at="top"'
        )
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        tensor.data = tensor.data.to(tensors[name])
    if getattr(neighbour, "gradient_checkpointing", False):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = neighbour._gradient_checkpointing_func
    _copy_capturing_hooks(layer, neighbour)
    return layer.train(neighbour.training)


def _from_config(trunk: Trunk, index: int, neighbour: nn.Module) -> Any:
    """Build a Hugging Face layer from the config and the layer's number."""
    if not trunk.probed:
        return type(neighbour)(trunk.body.config, layer_idx=index)
    names = inspect.signature(type(neighbour)).parameters
    number = {name: index for name in _INDICES if name in names}
    try:
        return type(neighbour)(trunk.body.config, **number)
    except Exception as error:
        raise BadInput(
            f"grow: a {type(neighbour).__name__} cannot be built from the config and the "
            f"layer's number ({first_line(error)})"
        ) from None


def _copy_capturing_hooks(layer: nn.Module, neighbour: nn.Module) -> None:
    """Copy the hooks with which the library transformers records hidden states to a new layer."""
    for name, module in neighbour.named_modules():
        for hook in module._forward_hooks.values():
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                layer.get_submodule(name).register_forward_hook(hook)


def _insert_layers(trunk: Trunk, at: int, new: list[nn.Module]) -> None:
    """Insert layers into the list, and update the layer number in every layer's modules."""
    for offset, layer in enumerate(new):
        trunk.layers.insert(at + offset, layer)
    for index, layer in enumerate(trunk.layers):
        for module in layer.modules():
            attention: Any = module
            if module.__dict__.get(_SCALED):  # the scale contains 1 / (layer number + 1)
                attention.scaling *= (attention.layer_idx + 1) / (index + 1)
            for name in _INDICES:
                if isinstance(module.__dict__.get(name), int):
                    setattr(module, name, index)


def _rescale_queries(model: nn.Module, trunk: Trunk, moved: dict[int, int]) -> list[str]:
    """Rescale queries so that moved layers keep their attention scores; return the changed parts.

    Only GPT-2 needs this, and only if its config divides the scores by the layer's number.

    Args:
        moved: a map from the new index of a layer to its former index or, for a copied layer, to
            the index of its source.
    """
    if not getattr(trunk.body.config, _SCALED, False):
        return []
    anatomy, slots = survey(model)
    changed = []
    for part in anatomy.parts:
        former = moved.get(-1 if part.layer is None else part.layer)
        if part.role == "query" and former is not None and part.layer is not None:
            slot = slots[part.name]
            slot.write(slot.read(part.rows) * ((part.layer + 1) / (former + 1)), part.rows)
            changed.append(part.key)
    return changed


def _insert(model: nn.Module, trunk: Trunk, at: int, count: int, init: Init) -> None:
    """Build the layers, then insert them; if building fails, the model is unchanged."""
    before, kinds = len(trunk.layers), _kinds_of_layers(model, trunk)
    source = max(at - 1, 0)  # the layer below the new ones or, at the bottom, above
    neighbour = trunk.layers[source]
    grown = {name: [*v[:at], *[v[source]] * count, *v[at:]] for name, v in kinds.items()}
    _set_count(model, trunk, before + count, grown)
    try:
        # building draws weights, but a copy must leave torch's generator unchanged
        with torch.random.fork_rng([], enabled=init == "copy"):
            new = [_build_layer(trunk, at + i, neighbour) for i in range(count)]
        if init == "copy":
            values = neighbour.state_dict()
            for layer in new:
                layer.load_state_dict(values)
    except BaseException:
        _set_count(model, trunk, before, kinds)
        raise
    _insert_layers(trunk, at, new)


def _keep_scales(model: nn.Module, trunk: Trunk, new: tuple[int, ...], init: Init) -> list[str]:
    """Keep the attention scores of moved and copied layers; return the changed existing parts."""
    moved = {index: index - len(new) for index in range(new[-1] + 1, len(trunk.layers))}
    changed = _rescale_queries(model, trunk, moved)
    if init == "copy":
        source = max(new[0] - 1, 0)
        _rescale_queries(model, trunk, dict.fromkeys(new, source))
    return changed


def _zero_outputs(anatomy: Anatomy, slots: dict[str, Slot], layers: tuple[int, ...]) -> None:
    """Zero the output projections of new layers, so that they add nothing to their input."""
    for part in anatomy.parts:
        if part.layer in layers and part.role in _ADDED:
            slots[part.name].write(torch.zeros_like(slots[part.name].read()))


def _norm_below(anatomy: Anatomy, at: int) -> str | None:
    """Return the path of the norm whose output is the input of layer `at`, or None."""
    first = next(i for i, part in enumerate(anatomy.parts) if part.layers)
    below = [p for p in anatomy.parts if p.layer == at - 1] if at else anatomy.parts[:first]
    norms = [part.name.rpartition(".")[0] for part in below if part.role == "norm"]
    return norms[-1] if norms else None


def _last_norm(anatomy: Anatomy, layer: int) -> str:
    """Return the path of the norm at the end of a layer."""
    path = _norm_below(anatomy, layer + 1)
    assert path is not None
    return path


@torch.no_grad()
def _move_affine(model: nn.Module, source: str, target: str) -> list[str]:
    """Move gain and bias from one norm to another; return the names of the source's tensors."""
    old, new = model.get_submodule(source), model.get_submodule(target)
    for name, parameter in old.named_parameters():
        new.get_parameter(name).copy_(parameter)
        parameter.fill_(1.0 if name == "weight" else 0.0)
    return [f"{source}.{name}" for name, _ in old.named_parameters()]


def _refuse_impossible_identity(model: nn.Module, trunk: Trunk, at: int, below: str | None) -> None:
    """Raise an error if new layers that end with a norm cannot keep the outputs within 1e-6."""
    where = f'grow: init="identity" at {at}'
    if below is None:
        raise BadInput(
            f"{where} is impossible: layers of {type(model).__name__} end in a norm, and there is "
            f"no norm below whose gain they could take; grow above layer 0, or {_INSTEAD}"
        )
    norm: Any = model.get_submodule(below)
    if norm.weight.dtype not in (torch.float32, torch.float64):
        raise BadInput(
            f"{where} would round the outputs: {below} is {norm.weight.dtype}; grow in float32 and "
            f"convert afterwards, or {_INSTEAD}"
        )
    change, variance = _change_by_eps(trunk, norm)
    if change > _ALLOWED:
        raise BadInput(
            f"{where} would change outputs by {change:.1e}: the eps of {below}, {norm.eps:g}, is "
            f"not small compared with the variance of its input, {variance:.2g}; {_INSTEAD}"
        )


def _change_by_eps(trunk: Trunk, norm: Any) -> tuple[float, float]:
    """Return the largest relative change that eps causes, and the input variance where it occurs.

    A norm turns the variance v of its input into w = v / (v + eps). The new layers apply a second
    norm. It should change nothing, but it multiplies its input by 1 / √(w + eps), which is about
    1 + (eps / (v + eps) - eps) / 2.
    """
    if norm.eps <= _NEGLIGIBLE:
        return 0.0, 1.0
    inputs = _inputs_of(norm, trunk).double()
    centre = inputs.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else 0.0
    variance = (inputs - centre).square().mean(-1).flatten()
    change = (norm.eps / (variance + norm.eps) - norm.eps).abs() / 2
    worst = int(change.argmax())
    return float(change[worst]), float(variance[worst])


def _inputs_of(norm: nn.Module, trunk: Trunk) -> Tensor:
    """Return the inputs of a norm in a forward pass over random tokens."""
    inputs: list[Tensor] = []
    body, (rows, length) = trunk.body, _PROBE
    vocabulary = getattr(body.config, "vocabulary", None) or body.config.vocab_size
    length = min(length, getattr(body.config, "max_position_embeddings", length))
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (rows, length), generator=generator)
    handle = norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        with _eval_mode(body), torch.no_grad():
            body(ids.to(next(norm.parameters()).device))
    finally:
        handle.remove()
    return inputs[0]


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

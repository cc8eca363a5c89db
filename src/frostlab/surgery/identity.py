"""New layers that change nothing at first: what they add is zero, and a norm keeps its affine.

A layer that ends in a sum passes its input on once its output projections are zero. One that ends
in a norm (BERT) normalises its input twice, so what lies below must come unscaled: the affine of
the norm below moves to the last new norm. Normalising what is normalised changes it only by eps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.anatomy import Anatomy, Slot
from frostlab.errors import BadInput
from frostlab.surgery.trunk import Trunk

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

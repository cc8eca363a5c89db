"""Where frozen weights came from, so that they can be made again instead of stored."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frostlab.roles.parts import Part, Slot

_ATTRIBUTE = "_frostlab_origins"
_PROJECTIONS = 4


@dataclass(frozen=True)
class Origin:
    """The operation that made a weight."""

    method: Literal["orthogonalize", "randomize"]
    scope: Literal["head", "matrix"] | None = None
    source: Literal["weights", "gaussian"] | None = None
    std: float | str | None = None
    seed: int | None = None

    @property
    def reads_weights(self) -> bool:
        """Whether what comes out depends on what was there."""
        return self.seed is None or self.std == "match"

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def digest(tensor: Tensor) -> str:
    """The sha256 of a tensor's dtype, shape and bytes."""
    plain = tensor.detach().contiguous().cpu()
    made = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    if plain.numel():
        made.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def record_origin(model: nn.Module, part: Part, slot: Slot, origin: Origin) -> None:
    """Remember on the model how a part was made, with the digest of what came out."""
    known = model.__dict__.setdefault(_ATTRIBUTE, {})
    known[part.key] = (origin, digest(slot.read(part.rows)))


def origin_of(model: nn.Module, part: Part, slot: Slot) -> Origin | None:
    """How a part was made, if it still is what came out then."""
    found = model.__dict__.get(_ATTRIBUTE, {}).get(part.key)
    if found is None or found[1] != digest(slot.read(part.rows)):
        return None
    origin: Origin = found[0]
    return origin


def move_origins(model: nn.Module, renamed: Callable[[str], str]) -> None:
    """Keep what is known of parts whose names have changed.

    A draw from a seed depends on the name, so that under another it could not be made again.
    """
    known = model.__dict__.get(_ATTRIBUTE, {})
    kept = {
        renamed(key): (origin, made)
        for key, (origin, made) in known.items()
        if origin.seed is None or renamed(key) == key
    }
    if known:
        model.__dict__[_ATTRIBUTE] = kept


def fingerprint(tensor: Tensor) -> list[float]:
    """A few numbers that tell tensors apart and survive rounding.

    The norm, and the unit tensor projected on random signs: rounding each weight by 6e-8 moves
    a projection by about as much, another tensor moves it by about 1.
    """
    flat = tensor.detach().cpu().double().flatten()
    norm = flat.norm()
    generator = torch.Generator().manual_seed(flat.numel())
    bits = torch.randint(0, 2**_PROJECTIONS, flat.shape, generator=generator, dtype=torch.uint8)
    unit = flat / norm.clamp(min=1e-300)
    signs = ((bits >> i & 1).double() * 2 - 1 for i in range(_PROJECTIONS))
    return [float(norm), *(float(unit @ sign) for sign in signs)]


def same_fingerprint(one: list[float], other: list[float], tolerance: float = 1e-6) -> bool:
    """Whether two fingerprints are of the same tensor, up to rounding."""
    if len(one) != len(other):
        return False
    norms = abs(one[0] - other[0]) <= tolerance * max(one[0], other[0], 1e-300)
    return norms and all(abs(a - b) <= tolerance for a, b in zip(one[1:], other[1:], strict=True))

"""Records of how weights were made, to regenerate frozen weights instead of storing them.

The records are kept by part: a parameter, or the rows of a parameter that have one role, such as
query.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frostlab.roles.parts import Part, Slot

_ATTRIBUTE = "_frostlab_origins"  # attribute of a model: part key → (origin, digest of the values)
_PROJECTIONS = 4  # random projections in a fingerprint
FINGERPRINT = 1 + _PROJECTIONS  # numbers in a fingerprint
_TOLERANCE = 1e-6  # largest difference by rounding between two fingerprints of a tensor


@dataclass(frozen=True)
class Origin:
    """The call of `orthogonalize` or `randomize` that made a weight."""

    method: Literal["orthogonalize", "randomize"]  # name of the function
    scope: Literal["head", "matrix"] | None = None  # argument of `orthogonalize`; None: randomized
    # the matrix that was orthogonalized; None: randomized
    source: Literal["weights", "gaussian", "identity"] | None = None
    # argument of `randomize`; None: orthogonalized
    std: float | Literal["match", "orthonormal"] | None = None
    seed: int | None = None  # None: nothing was drawn

    @property
    def reads_weights(self) -> bool:
        """Whether the new values depend on the values that they replace."""
        return self.source == "weights" or self.std == "match"

    @property
    def is_valid(self) -> bool:
        """Whether `orthogonalize` or `randomize` can have been called with these values."""
        if self.method == "orthogonalize":
            drawn = self.source == "gaussian"
            known = self.scope is not None and self.source is not None and self.std is None
            return known and drawn == (self.seed is not None)
        named = self.std in ("match", "orthonormal")
        scaled = named or (self.std is not None and float(self.std) > 0)
        return scaled and self.seed is not None and self.scope is None and self.source is None

    def to_dict(self) -> dict[str, Any]:
        """Return the values that are not None, for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def digest(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's dtype, shape and bytes."""
    plain = tensor.detach().contiguous().cpu()
    sha = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    if plain.numel():
        sha.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def record_origin(model: nn.Module, part: Part, slot: Slot, origin: Origin) -> None:
    """Store the origin of a part and the digest of its values on the model."""
    origins = model.__dict__.setdefault(_ATTRIBUTE, {})
    origins[part.key] = (origin, digest(slot.read(part.rows)))


def origin_of(model: nn.Module, part: Part, slot: Slot) -> Origin | None:
    """Return a part's origin, or None if it is unknown or its values have changed since."""
    origin: Origin
    origin, stored = model.__dict__.get(_ATTRIBUTE, {}).get(part.key, (None, None))
    return origin if stored is not None and stored == digest(slot.read(part.rows)) else None


def move_origins(model: nn.Module, renamed: Callable[[str], str]) -> None:
    """Store the origins of parts under the new names of the parts.

    A draw depends on the seed and on the part's name. If the name of a drawn part has changed, its
    origin is dropped, because the draw cannot be reproduced under the new name.
    """
    origins = model.__dict__.get(_ATTRIBUTE, {})
    if origins:
        model.__dict__[_ATTRIBUTE] = {
            renamed(key): (origin, stored)
            for key, (origin, stored) in origins.items()
            if origin.seed is None or renamed(key) == key
        }


def fingerprint(tensor: Tensor) -> list[float]:
    """Return a few numbers that identify a tensor and hardly change with rounding.

    They are the norm, and projections of the normalised tensor onto vectors of random signs. A
    relative rounding error of 6e-8 (float32) in each weight changes a projection by about 6e-8;
    projections of different tensors differ by about 1.
    """
    flat = tensor.detach().cpu().double().flatten()
    norm = flat.norm()
    generator = torch.Generator().manual_seed(flat.numel())
    bits = torch.randint(0, 2**_PROJECTIONS, flat.shape, generator=generator, dtype=torch.uint8)
    unit = flat / norm.clamp(min=1e-300)
    signs = ((bits >> i & 1).double() * 2 - 1 for i in range(_PROJECTIONS))
    return [float(norm), *(float(unit @ sign) for sign in signs)]


def same_fingerprint(a: list[float], b: list[float]) -> bool:
    """Return whether two fingerprints belong to the same tensor, up to rounding."""
    if len(a) != len(b):
        return False
    norms_agree = abs(a[0] - b[0]) <= _TOLERANCE * max(a[0], b[0], 1e-300)
    return norms_agree and all(abs(x - y) <= _TOLERANCE for x, y in zip(a[1:], b[1:], strict=True))

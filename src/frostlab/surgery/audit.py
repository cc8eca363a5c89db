"""Digests of frozen tensors, to prove later that the tensors did not change."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from frostlab.errors import BadInput, FrozenWeightsMoved
from frostlab.roles.read import survey, unwrapped
from frostlab.surgery.freeze import frozen_statistics
from frostlab.surgery.grow import Growth
from frostlab.surgery.origin import digest


@dataclass(frozen=True)
class Audit:
    """The digests of a model's frozen tensors at one moment."""

    model: str
    digests: dict[str, str] = field(repr=False)

    def verify(self, model: nn.Module) -> None:
        """Raise FrozenWeightsMoved with the names of all frozen tensors that changed."""
        now = _digests(model, only=self.digests)
        moved = [name for name, value in self.digests.items() if now.get(name) != value]
        if moved:
            raise FrozenWeightsMoved(moved)

    def renewed(self, model: nn.Module, growth: Growth) -> "Audit":
        """Return this audit updated for a model that has just grown.

        Renamed tensors keep their digests under the new names; tensors that `grow` changed get
        new digests. Raises FrozenWeightsMoved if any other tensor changed.
        """
        before = {growth.renamed(name): value for name, value in self.digests.items()}
        now = _digests(model, only=before)
        moved = [n for n, v in before.items() if n not in growth.changed and now.get(n) != v]
        if moved:
            raise FrozenWeightsMoved(moved)
        return Audit(self.model, now)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"model": self.model, "digests": dict(self.digests)}


def audit(model: nn.Module) -> Audit:
    """Compute the sha256 of every frozen tensor, including frozen rows of split projections."""
    digests = _digests(model, only=None)
    if not digests:
        raise BadInput("audit: nothing is frozen; call fl.freeze first")
    return Audit(type(unwrapped(model)).__name__, digests)


def _digests(model: nn.Module, only: dict[str, str] | None) -> dict[str, str]:
    """Return the digests of the parts and buffers named in `only`; None: of all frozen ones."""
    anatomy, slots = survey(model)
    inner = unwrapped(model)
    chosen = {
        part.key: (slots[part.name], part.rows)
        for part in anatomy.parts
        if (part.state != "trainable" if only is None else part.key in only)
    }
    digests = {key: digest(slot.read(rows)) for key, (slot, rows) in chosen.items()}
    statistics = frozen_statistics(inner) if only is None else dict(inner.named_buffers())
    digests |= {
        name: digest(buffer) for name, buffer in statistics.items() if only is None or name in only
    }
    return digests

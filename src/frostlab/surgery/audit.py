"""Digests of a model's tensors, to prove later which changed and which did not.

The tensors are the model's parts: parameters, or the rows of a parameter that have one role, such
as query (`frostlab.roles.parts`).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from frostlab.errors import BadInput, FrozenWeightsMoved, TrainableWeightsStayed
from frostlab.roles.read import survey, unwrapped
from frostlab.surgery.freeze import frozen_statistics
from frostlab.surgery.grow import Growth
from frostlab.surgery.origin import digest


@dataclass(frozen=True, repr=False)
class Audit:
    """The digests of a model's tensors at one moment: 64 characters for each tensor."""

    model: str
    # name → digest: frozen parts, fixed parts (which are never trained), and the running
    # statistics of frozen BatchNorms
    digests: dict[str, str]
    trainable: dict[str, str] | None = None  # digests of trainable parts; None: not recorded

    def __repr__(self) -> str:
        counts = f"{len(self.digests)} frozen"
        if self.trainable is not None:
            counts += f" and {len(self.trainable)} trainable"
        return f"Audit({self.model}: {counts} tensors)"

    def verify(self, model: nn.Module, *, moved: bool = False) -> None:
        """Raise FrozenWeightsMoved with the names of all frozen tensors that changed or are gone.

        With `moved`, also raise TrainableWeightsStayed with the names of all tensors that were
        trainable and of which no bit has changed.
        """
        now = _digests(model, self.digests)
        changed = [name for name, value in self.digests.items() if now.get(name) != value]
        if changed:
            raise FrozenWeightsMoved(changed)
        if moved:
            self._verify_moved(model)

    def _verify_moved(self, model: nn.Module) -> None:
        if self.trainable is None:
            raise BadInput("verify: this audit has no trainable tensors; make it with fl.audit")
        now = _digests(model, self.trainable)
        if lost := [name for name in self.trainable if name not in now]:
            raise BadInput(f"verify: the model no longer has {lost[0]}; audit it again")
        stayed = [name for name, value in self.trainable.items() if now[name] == value]
        if stayed:
            raise TrainableWeightsStayed(stayed)

    def renewed(self, model: nn.Module, growth: Growth) -> "Audit":
        """Return this audit updated for a model that has just grown.

        Renamed tensors keep their digests under the new names; tensors that `grow` changed get
        new digests, and so do trainable tensors that it added. Raises FrozenWeightsMoved if any
        other frozen tensor changed.
        """
        before = {growth.renamed(name): value for name, value in self.digests.items()}
        now = _digests(model, before)
        moved = [n for n, v in before.items() if n not in growth.changed and now.get(n) != v]
        if moved:
            raise FrozenWeightsMoved(moved)
        if self.trainable is None:
            return Audit(self.model, now)
        kept = {growth.renamed(name): value for name, value in self.trainable.items()}
        kept = {name: value for name, value in kept.items() if name not in growth.changed}
        return Audit(self.model, now, _trainable_digests(model) | kept)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"model": self.model, "digests": dict(self.digests), "trainable": self.trainable}


def audit(model: nn.Module) -> Audit:
    """Compute the sha256 of every part, and of the running statistics of frozen BatchNorms.

    No copy of the weights is kept. Hashing takes a second or two per GB. If nothing is frozen, an
    error is raised.
    """
    return replace(frozen_audit(model), trainable=_trainable_digests(model))


def frozen_audit(model: nn.Module) -> Audit:
    """Compute the sha256 of frozen tensors only; `verify(moved=True)` needs `audit` instead."""
    anatomy, _ = survey(model)
    names = {part.key for part in anatomy.parts if part.state != "trainable"}
    digests = _digests(model, names | frozen_statistics(unwrapped(model)).keys())
    if not digests:
        raise BadInput("audit: nothing is frozen; call fl.freeze first")
    return Audit(type(unwrapped(model)).__name__, digests)


def _trainable_digests(model: nn.Module) -> dict[str, str]:
    """Return the digests of all trainable tensors that are not empty."""
    anatomy, _ = survey(model)
    trainable = (part for part in anatomy.parts if part.state == "trainable" and part.parameters)
    return _digests(model, {part.key for part in trainable})


def _digests(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return the digests of the parts and buffers with these names."""
    anatomy, slots = survey(model)
    chosen = {
        part.key: (slots[part.name], part.rows) for part in anatomy.parts if part.key in names
    }
    digests = {key: digest(slot.read(rows)) for key, (slot, rows) in chosen.items()}
    buffers = unwrapped(model).named_buffers()
    return digests | {name: digest(buffer) for name, buffer in buffers if name in names}

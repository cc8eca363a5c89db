"""Whether what is frozen stayed what it was, part by part."""

from collections.abc import Sequence

from torch import nn

from frostlab.anatomy import unwrapped
from frostlab.anatomy.parts import gathered
from frostlab.errors import BadInput, FrozenWeightsMoved, UnknownArchitecture
from frostlab.flow.facts import PartFacts
from frostlab.surgery import Audit, audit
from frostlab.surgery.origin import digest


class Proof:
    """The digests of what is frozen: an audit, or parameter by parameter without an anatomy."""

    def __init__(self, model: nn.Module) -> None:
        self._audit: Audit | None = None
        self._digests: dict[str, str] = {}
        try:
            self._audit = audit(model)
        except UnknownArchitecture:
            frozen = (n for n, p in unwrapped(model).named_parameters() if not p.requires_grad)
            self._digests = {name: _digest(model, name) for name in frozen}
        except BadInput:
            pass  # nothing is frozen

    def moved(self, model: nn.Module, parts: Sequence[PartFacts]) -> list[str]:
        """The parts that hold a tensor whose bits changed."""
        names = {n for n, value in self._digests.items() if _digest(model, n) != value}
        if self._audit is not None:
            try:
                self._audit.verify(model)
            except FrozenWeightsMoved as error:
                names = set(error.names)
        return [p.name for p in parts if names & (set(p.tensors) - set(p.learning))]


def _digest(model: nn.Module, name: str) -> str:
    return digest(gathered(unwrapped(model).get_parameter(name).detach()))

"""Splitting of partly frozen parameters in modules that keep their own forward pass.

A partly frozen parameter is stored in two pieces: its frozen rows and its trainable rows. A plain
linear module is replaced by `SplitProjection` (`frostlab.surgery.split`), whose backward pass is
faster, and nn.MultiheadAttention has a split of its own (`frostlab.surgery.multihead`). This file
is for all other modules: for example a convolution, experts that share one tensor, a module that
multiplies by a raw parameter, or a linear module with a forward of its own. Such a module gets a
subclass of its class, with a property in the place of each split parameter. Whenever the forward
pass reads the parameter, the property joins the pieces. Autograd then gives the trainable rows
their gradient, and the frozen rows none. State dicts keep the names and shapes of the unmodified
module.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.roles.parts import Piece, Rows, SlotPieces, Split, join
from frostlab.surgery.split import load_pieces, save_pieces

_STATES = ("frozen", "trainable")


@dataclass(frozen=True)
class Frozen:
    """The frozen rows of one parameter."""

    axis: int
    rows: Rows


class SplitModule(nn.Module, Split):
    """A module, some of whose parameters are stored in a frozen and a trainable piece."""

    _frostlab_frozen: dict[str, Frozen]  # name of a parameter → its frozen rows

    def slots(self) -> dict[str, SlotPieces]:
        """Return the whole shape of each split parameter, the axis of its rows, and its pieces."""
        slots = {}
        for local, frozen in self._frostlab_frozen.items():
            pieces = tuple(
                Piece(rows, self._piece(state, local))
                for state, rows in zip(_STATES, (frozen.rows, frozen.rows.rest()), strict=True)
            )
            shape = list(pieces[0].parameter.shape)
            shape[frozen.axis] = frozen.rows.size
            slots[local] = (tuple(shape), frozen.axis, pieces)
        return slots

    def joined(self) -> nn.Module:
        """Return this module with its original class and its whole parameters again."""
        whole = {
            local: nn.Parameter(self._whole(local).detach()) for local in self._frostlab_frozen
        }
        parameters = dict(self._parameters)
        self._parameters.clear()
        pieces = {f"{state}_{local}": local for local in whole for state in _STATES}
        # keep the order, because optimizer states refer to parameters by their index
        for name, parameter in parameters.items():
            local = pieces.get(name, name)
            self._parameters[local] = whole.get(local, parameter)
        del self._frostlab_frozen
        self.__class__ = type(self).__bases__[1]
        return self

    def _piece(self, state: str, local: str) -> nn.Parameter:
        piece = self._parameters[f"{state}_{local}"]
        assert piece is not None
        return piece

    def _whole(self, local: str) -> Tensor:
        """Join the pieces of a parameter; gradients flow to the trainable rows."""
        frozen, trainable = (self._piece(state, local) for state in _STATES)
        where = self._frostlab_frozen[local]
        return join(where.rows, frozen, trainable, where.axis)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        with self._without_pieces():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        save_pieces(self.slots(), destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        read_keys = load_pieces(
            self, self.slots(), state_dict, prefix, local_metadata, missing_keys, error_msgs
        )
        unexpected: list[str] = []
        with self._without_pieces():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs
            )
        unexpected_keys += [key for key in unexpected if key not in read_keys]

    @contextmanager
    def _without_pieces(self) -> Iterator[None]:
        """Take the pieces out of the module's parameters, and put them back in place afterwards."""
        before = dict(self._parameters)
        names = {f"{state}_{local}" for local in self._frostlab_frozen for state in _STATES}
        for name in names:
            del self._parameters[name]
        try:
            yield
        finally:
            now = dict(self._parameters)
            self._parameters.clear()
            for name, parameter in before.items():
                self._parameters[name] = parameter if name in names else now[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let copies and pickles name the original class: the subclass is made at run time."""
        original, names = type(self).__bases__[1], tuple(self._frostlab_frozen)
        return _empty, (original, names), self.__getstate__()


def _empty(original: type[nn.Module], names: tuple[str, ...]) -> SplitModule:
    kind = _split_class(original, names)
    return kind.__new__(kind)


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[SplitModule]] = {}


def _split_class(original: type[nn.Module], names: tuple[str, ...]) -> type[SplitModule]:
    """Return a subclass in which properties take the places of these parameters."""

    def whole(local: str) -> property:
        return property(lambda self: self._whole(local))

    if (original, names) not in _CLASSES:
        space: dict[str, Any] = {name: whole(name) for name in names}
        space |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
        _CLASSES[original, names] = type(original.__name__, (SplitModule, original), space)
    return _CLASSES[original, names]


def can_split(original: type[nn.Module]) -> bool:
    """Return whether a class can be split: whether properties can replace its parameters.

    An RNN, for example, reads its parameters from a list, and not by their names.
    """
    if issubclass(original, nn.RNNBase | torch.jit.ScriptModule):
        return False
    try:
        _split_class(original, ())
    except TypeError:  # its metaclass is incompatible with SplitModule's
        return False
    return True


def split_module(module: nn.Module, frozen: Mapping[str, Frozen]) -> None:
    """Store these parameters of a module in two pieces each, in place."""
    parameters = dict(module._parameters)
    module._parameters.clear()
    for name, parameter in parameters.items():
        if parameter is None or name not in frozen:
            module._parameters[name] = parameter
            continue
        where, whole = frozen[name], parameter.detach()
        for state, rows in zip(_STATES, (where.rows, where.rows.rest()), strict=True):
            piece = rows.take(whole, where.axis).clone()
            module._parameters[f"{state}_{name}"] = nn.Parameter(piece, state == "trainable")
    names = tuple(name for name in parameters if name in frozen)
    module._frostlab_frozen = {name: frozen[name] for name in names}  # type: ignore[assignment]
    module.__class__ = _split_class(type(module), names)

"""nn.MultiheadAttention with its fused input projection split into query, key and value.

torch supports separate weights but needs a fused bias, so the biases are concatenated in each
forward pass. Checkpoints keep `in_proj_weight` and `in_proj_bias`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from frostlab.roles.parts import Piece, Rows, SlotPieces, Split
from frostlab.surgery.split import load_pieces, save_pieces

_LETTERS = ("q", "k", "v")
_ORDER = (  # order of nn.MultiheadAttention's parameters
    "in_proj_weight",
    *(f"{letter}_proj_weight" for letter in _LETTERS),
    "in_proj_bias",
    "bias_k",
    "bias_v",
)


class SplitMultiheadAttention(nn.MultiheadAttention, Split):
    """An nn.MultiheadAttention with separate parameters for query, key and value."""

    _was_fused: bool  # whether query, key and value weights were one parameter before the split

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        """The fused bias, which torch's forward reads; gradients flow to the trainable rows."""
        parameters = [self._parameters.get(f"{letter}_bias") for letter in _LETTERS]
        biases: list[Tensor] = [bias for bias in parameters if bias is not None]
        return torch.cat(biases) if biases else None

    def slots(self) -> dict[str, SlotPieces]:
        """Map in_proj_weight and in_proj_bias to their shapes and the parameters of their rows."""
        width = self.embed_dim
        slots: dict[str, SlotPieces] = {}
        if self._was_fused:
            pieces = self._pieces([self._parameters[f"{x}_proj_weight"] for x in _LETTERS])
            slots["in_proj_weight"] = ((3 * width, width), 0, pieces)
        if "q_bias" in self._parameters:
            pieces = self._pieces([self._parameters[f"{x}_bias"] for x in _LETTERS])
            slots["in_proj_bias"] = ((3 * width,), 0, pieces)
        return slots

    def joined(self) -> nn.MultiheadAttention:
        """Return this module as an nn.MultiheadAttention again."""
        join_attention(self)
        return self

    def _pieces(self, parameters: list[Any]) -> tuple[Piece, ...]:
        width = self.embed_dim
        return tuple(
            Piece(Rows(3 * width, 1, ((i * width, (i + 1) * width),)), parameter)
            for i, parameter in enumerate(parameters)
        )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        slots = self.slots()
        save_pieces(slots, destination, prefix)
        saved = {id(piece.parameter) for _, _, pieces in slots.values() for piece in pieces}
        for name, parameter in self._parameters.items():
            if parameter is not None and id(parameter) not in saved:
                destination[prefix + name] = parameter if keep_vars else parameter.detach()

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
        # torch's own loading must not look for the split parameters, so they are removed meanwhile
        split = {
            name: self._parameters.pop(name)
            for name in [f"{x}_bias" for x in _LETTERS]
            + [f"{x}_proj_weight" for x in _LETTERS if self._was_fused]
            if name in self._parameters
        }
        unexpected: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs
        )
        self._parameters.update(split)
        unexpected_keys += [key for key in unexpected if key not in read_keys]


def split_attention(attention: nn.MultiheadAttention) -> None:
    """Split the input projection of an nn.MultiheadAttention, in place."""
    attention.__class__ = SplitMultiheadAttention
    assert isinstance(attention, SplitMultiheadAttention)
    attention._was_fused = attention._qkv_same_embed_dim
    parameters = attention._parameters
    if attention._was_fused:
        weight = parameters["in_proj_weight"]
        assert weight is not None
        for letter, rows in zip(_LETTERS, weight.detach().chunk(3), strict=True):
            parameters[f"{letter}_proj_weight"] = nn.Parameter(rows.clone())
        parameters["in_proj_weight"] = None
        attention._qkv_same_embed_dim = False
    bias = parameters.pop("in_proj_bias")
    if bias is not None:
        for letter, rows in zip(_LETTERS, bias.detach().chunk(3), strict=True):
            parameters[f"{letter}_bias"] = nn.Parameter(rows.clone())


def join_attention(attention: SplitMultiheadAttention) -> None:
    """Turn a split attention back into an nn.MultiheadAttention, in place."""
    parameters = attention._parameters
    for local, (_, _, pieces) in attention.slots().items():
        joined = torch.cat([piece.parameter.detach() for piece in pieces])
        parameters[local] = nn.Parameter(joined)
    if attention._was_fused:
        for letter in _LETTERS:
            parameters[f"{letter}_proj_weight"] = None
        attention._qkv_same_embed_dim = True
    for letter in _LETTERS:
        parameters.pop(f"{letter}_bias", None)
    parameters.setdefault("in_proj_bias", None)
    for name in _ORDER:  # torch's order, so that optimizer states keep their indices
        if name in parameters:
            parameters[name] = parameters.pop(name)
    del attention._was_fused
    attention.__class__ = nn.MultiheadAttention  # type: ignore[assignment]

"""Attention over a batch of rows or over sequences packed into one row, and a key/value cache."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.devices import on_gpu

QK_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Packing:
    """The positions of N sequences packed into one row of T tokens.

    Filler tokens after the last sequence complete the row. A sequence may be empty: in a batch
    with fewer than N examples, empty sequences take the place of the missing ones.
    """

    # (N + 2,) int32: tokens bounds[i]:bounds[i + 1] are sequence i, and for i = N the filler
    bounds: Tensor
    owners: Tensor  # (T,) the sequence index of each token; N for filler
    places: Tensor  # (T,) the position of each token in its sequence
    longest: int  # an upper bound on the length of each sequence and of the filler

    @property
    def firsts(self) -> Tensor:
        """The index of each sequence's first token, (N,); for an empty sequence, any index."""
        return self.bounds[:-2].clamp(max=len(self.owners) - 1)

    def lasts(self, mask: Tensor) -> Tensor:
        """Return the index of each sequence's last token that is true in the mask (T,): (N,).

        If the mask is false for all tokens of a sequence, return the index of its first token; for
        an empty sequence, 0.
        """
        indices = torch.arange(len(self.owners), device=self.owners.device)
        indices = torch.where(mask, indices, self.bounds[self.owners])
        lasts = torch.zeros(len(self.bounds) - 1, dtype=torch.long, device=indices.device)
        return lasts.scatter_reduce(0, self.owners, indices, "amax")[:-1]

    def mean(self, x: Tensor) -> Tensor:
        """Average (T, width) over each sequence by a matmul, which sums in a fixed order."""
        numbers = torch.arange(len(self.bounds) - 2, device=x.device)
        exact = torch.promote_types(x.dtype, torch.float32)
        members = (self.owners == numbers[:, None]).to(exact)  # (N, T)
        with torch.autocast(x.device.type, enabled=False):
            return members @ x.to(exact) / members.sum(1, keepdim=True).clamp(min=1.0)


class QKNorm(nn.Module):
    """RMSNorm of the queries and of the keys of every head, as in Qwen3.

    Queries and keys each have a gain for every unit of a head; all heads share these gains.
    """

    def __init__(self, size: int, eps: float = QK_NORM_EPS) -> None:
        super().__init__()
        self.query = nn.RMSNorm(size, eps)
        self.key = nn.RMSNorm(size, eps)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise tensors of shape (B, heads, T, size), in the precision of the gains."""
        exact = self.query.weight.dtype
        return self.query(query.to(exact)).to(query.dtype), self.key(key.to(exact)).to(key.dtype)


class KeyValueCache:
    """The keys and values of the tokens that one layer has read, for generation.

    Memory for `capacity` tokens per row is reserved at the first call of `extend`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._keys = self._values = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of T tokens, (B, heads, T, size); return those of all tokens."""
        start, stop = self.length, self.length + key.shape[2]
        if not start:
            batch, heads, _, size = key.shape
            self._keys = key.new_empty(batch, heads, self.capacity, size)
            self._values = torch.empty_like(self._keys)
        self._keys[:, :, start:stop] = key
        self._values[:, :, start:stop] = value
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        self._keys, self._values = self._keys[rows], self._values[rows]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    packing: Packing | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend with tensors of shape (B, heads, T, size), and return (B, T, heads, size).

    With fewer key/value heads than query heads, groups of query heads share a key/value head. A
    packing needs B = 1 and restricts attention to tokens of the same sequence; the mask is ignored
    then. Without a packing, a mask replaces `causal`.
    """
    if key.shape[1] < query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if packing is None:
        is_causal = causal and mask is None
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
        )
        return mixed.transpose(1, 2)
    packed = tuple(x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, heads, size)
    attend_packed = _in_one_kernel if _has_kernel(packed[0]) else _as_batch
    return attend_packed(packed, packing, causal, dropout, scale).unsqueeze(0)


def _has_kernel(query: Tensor) -> bool:
    """Return whether the flash kernel supports this device, dtype and head size."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return on_gpu(query) and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _in_one_kernel(
    packed: tuple[Tensor, ...], packing: Packing, causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """Call the kernel of torch's varlen_attn directly, because varlen_attn has no dropout."""
    bounds, longest = packing.bounds, packing.longest
    return torch.ops.aten._flash_attention_forward(
        *packed, bounds, bounds, longest, longest, dropout, causal, False, scale=scale
    )[0]


def _as_batch(
    packed: tuple[Tensor, ...], packing: Packing, causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """Attend with the sequences as a padded batch, and mask the padding."""
    places = torch.arange(packing.longest, device=packed[0].device)
    indices = packing.bounds[:-1, None] + places  # (N + 1, longest)
    real = indices < packing.bounds[1:, None]
    indices = torch.where(real, indices, 0)
    query, key, value = (
        x.index_select(0, indices.flatten()).unflatten(0, indices.shape).transpose(1, 2)
        for x in packed
    )  # each (N + 1, heads, longest, size)
    visible = (real | (places == 0))[:, None, None, :]  # empty sequences see one key, to avoid NaN
    if causal:
        visible = visible & (places[:, None] >= places)
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, dropout_p=dropout, scale=scale
    )
    in_batch = packing.owners * packing.longest + packing.places  # index of each token in the batch
    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, in_batch)

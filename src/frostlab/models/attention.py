"""Attention over whole rows, or within the sequences that share one row."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where N sequences lie in one row of T tokens; what is left at the row's end is filler.

    An empty sequence holds no token: it fills the place of an example that is not there.
    """

    bounds: Tensor  # (N + 2,) int32: sequence i is bounds[i]:bounds[i + 1]; the last is filler
    owners: Tensor  # (T,) the sequence of each token, N for filler
    places: Tensor  # (T,) each token's place in its sequence
    longest: int  # no sequence, nor the filler, is longer

    @property
    def firsts(self) -> Tensor:
        """(N,) where each sequence begins."""
        return self.bounds[:-2].clamp(max=len(self.owners) - 1)

    def lasts(self, counts: Tensor) -> Tensor:
        """(N,) where each sequence has the last token that counts, (T,) true or false."""
        places = torch.arange(len(self.owners), device=self.owners.device)
        places = torch.where(counts, places, self.bounds[self.owners])
        found = torch.zeros(len(self.bounds) - 1, dtype=torch.long, device=places.device)
        return found.scatter_reduce(0, self.owners, places, "amax")[:-1]

    def mean(self, x: Tensor) -> Tensor:
        """(T, width) averaged over each sequence, as a product that always adds in one order."""
        numbers = torch.arange(len(self.bounds) - 2, device=x.device)
        exact = torch.promote_types(x.dtype, torch.float32)
        chosen = (self.owners == numbers[:, None]).to(exact)  # (N, T)
        with torch.autocast(x.device.type, enabled=False):
            return chosen @ x.to(exact) / chosen.sum(1, keepdim=True).clamp(min=1.0)


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
    """Mix values: (B, heads, T, size) each, to (B, T, heads, size); fewer key heads are shared.

    A mask or a packing says what is hidden; without one, `causal` hides what comes later.
    """
    if key.shape[1] < query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if packing is None:
        hidden = causal and mask is None
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=hidden, scale=scale
        )
        return mixed.transpose(1, 2)
    rows = tuple(x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, heads, size)
    inside = _in_one_kernel if _has_kernel(rows[0]) else _side_by_side
    return inside(rows, packing, causal, dropout, scale).unsqueeze(0)


def _has_kernel(query: Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _in_one_kernel(
    rows: tuple[Tensor, ...], packing: Packing, causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """The kernel beneath torch's varlen_attn, which itself has no dropout."""
    bounds, longest = packing.bounds, packing.longest
    return torch.ops.aten._flash_attention_forward(
        *rows, bounds, bounds, longest, longest, dropout, causal, False, scale=scale
    )[0]


def _side_by_side(
    rows: tuple[Tensor, ...], packing: Packing, causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """Sequences as a batch of their own, for attention alone; what fills them up is hidden."""
    places = torch.arange(packing.longest, device=rows[0].device)
    at = packing.bounds[:-1, None] + places  # (N + 1, longest)
    real = at < packing.bounds[1:, None]
    at = torch.where(real, at, 0)
    query, key, value = (
        x.index_select(0, at.flatten()).unflatten(0, at.shape).transpose(1, 2) for x in rows
    )  # each (N + 1, heads, longest, size)
    seen = (real | (places == 0))[:, None, None, :]  # the empty, too: no NaN
    if causal:
        seen = seen & (places[:, None] >= places)
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, dropout_p=dropout, scale=scale
    )
    back = packing.owners * packing.longest + packing.places
    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, back)

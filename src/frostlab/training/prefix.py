"""The frozen layers below the first that learns: computed once for every example, then looked up.

Only where nothing random happens in them; the table is exact for float32, rounded once for bf16.
"""

import json
import os
import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from frostlab.data import Prepared, Tokens
from frostlab.data.cache import build_once, cache_folder, digest_of
from frostlab.errors import BadInput
from frostlab.models.stack import Stack, take_apart
from frostlab.recipe.settings import Train
from frostlab.surgery.origin import digest
from frostlab.training.batching import evaluation_order
from frostlab.training.packing import pack, row_lengths

_FORMAT = 1
_AT_ONCE = 32  # examples computed together
_GB = 10**9


@dataclass(frozen=True)
class Prefix:
    """What the first `depth` layers make of every token of the training split."""

    depth: int
    table: Tensor  # (tokens, width), on the device or mapped from a file
    starts: NDArray[np.int64]  # where each example's rows begin
    dtype: torch.dtype  # of the vectors when they are computed
    facts: dict[str, Any]

    def vectors(self, at: Tensor) -> Tensor:
        """(1, T) places in the table to (1, T, width)."""
        return self.table.index_select(0, at.flatten()).to(self.dtype).unsqueeze(0)


def prefix_depth(model: nn.Module) -> int:
    """How many layers lie below the first that learns; 0 where the embedding learns."""
    stack = take_apart(model)
    if stack is None:
        return 0
    with torch.no_grad():
        ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    if stack.embed(ids, None, None).requires_grad:
        return 0
    learns = [any(p.requires_grad for p in layer.parameters()) for layer in stack.layers]
    return learns.index(True) if True in learns else len(learns)


def check_prefix(
    model: nn.Module, prepared: Prepared, train: Train, precision: torch.dtype
) -> None:
    """Refuse a cache that could not be right, or would not fit."""
    asked, depth = "train.cache_prefix", prefix_depth(model)
    if not depth:
        raise BadInput(
            f"{asked} needs frozen layers below the first that learns, and all that comes before "
            "them frozen too, as by freeze: [all, '!layers[-1]', '!head']"
        )
    tokens = prepared.splits["train"]
    one, two = _two_passes(model, tokens, prepared.pad, depth)
    if not torch.equal(one, two):
        raise BadInput(f"{asked} needs frozen layers without dropout; set the model's to 0")
    needed = int(row_lengths(tokens).sum()) * one.shape[-1] * precision.itemsize / _GB
    if needed > train.cache_gb:
        raise BadInput(
            f"{asked} would take {needed:.1f} GB; train.cache_gb allows {train.cache_gb:g}"
        )


def _two_passes(model: nn.Module, tokens: Tokens, pad: int, depth: int) -> list[Tensor]:
    """The same examples twice, in training mode: anything random makes them differ."""
    training, seen = model.training, []
    model.train()
    rows = np.argsort(tokens.lengths, kind="stable")[:2]
    with torch.random.fork_rng([]), torch.no_grad():
        for seed in (0, 1):
            torch.manual_seed(seed)
            seen.append(_compute(model, tokens, rows, pad, depth, types=False)[0])
    model.train(training)
    return seen


def _compute(
    model: nn.Module, tokens: Tokens, rows: NDArray[np.int64], pad: int, depth: int, types: bool
) -> tuple[Tensor, Tensor]:
    """The vectors of some examples, one token a row, and their places in a table."""
    stack = take_apart(model)
    assert stack is not None
    batch = pack(tokens, rows, pad, types=types, table=starts_of(tokens))
    batch = batch.to(next(model.parameters()).device)
    ids, second = batch.inputs["input_ids"], batch.inputs.get("token_type_ids")
    x = stack.run(stack.embed(ids, second, batch.packing), batch.packing, 0, depth)
    return x.squeeze(0), batch.inputs["cached"].flatten()


def starts_of(tokens: Tokens) -> NDArray[np.int64]:
    """Where each example's rows begin in a table of all tokens."""
    lengths = row_lengths(tokens)
    return np.cumsum(lengths) - lengths


def build_prefix(
    model: nn.Module, prepared: Prepared, train: Train, precision: torch.dtype, types: bool
) -> Prefix:
    """Compute the table in memory, or find it on disk, where it outlives the run."""
    tokens, depth = prepared.splits["train"], prefix_depth(model)
    filler = _Filler(model, tokens, prepared.pad, depth, precision, types)
    if train.cache_prefix == "memory":
        table = torch.empty(filler.shape, dtype=precision, device=filler.device)
        filler.fill(table)
        facts = {"where": "memory", "reused": False}
    else:
        table, reused = _on_disk(filler, train.cache_gb)
        facts = {"where": "disk", "reused": reused}
    facts |= {"depth": depth, "bytes": table.nbytes}
    return Prefix(depth, table, starts_of(tokens), filler.dtype, facts)


class _Filler:
    """Computes a table, or a few of its rows to check one."""

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        pad: int,
        depth: int,
        precision: torch.dtype,
        types: bool,
    ) -> None:
        self.model, self.tokens, self.pad, self.depth = model, tokens, pad, depth
        self.precision, self.types = precision, types
        self.device = next(model.parameters()).device
        first, _ = self.compute(np.zeros(1, np.int64))
        self.dtype = first.dtype
        self.shape = (int(row_lengths(tokens).sum()), first.shape[-1])

    @torch.no_grad()
    def compute(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The vectors of some examples and their places."""
        training = self.model.training
        self.model.eval()
        half = self.precision == torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            made = _compute(self.model, self.tokens, rows, self.pad, self.depth, self.types)
        self.model.train(training)
        return made

    def fill(self, table: Tensor) -> None:
        """Write every example's rows."""
        for rows in evaluation_order(self.tokens.lengths, _AT_ONCE):
            vectors, at = self.compute(rows)
            table.index_copy_(0, at.to(table.device), vectors.to(table))

    def agrees(self, table: Tensor) -> bool:
        """Whether a table is this model's, shown on a few examples."""
        rows = np.linspace(0, len(self.tokens) - 1, 4).astype(np.int64)
        vectors, at = self.compute(np.unique(rows))
        kept = table.index_select(0, at.to(table.device)).float()
        room = 5e-2 if self.precision == torch.bfloat16 else 1e-4
        return torch.allclose(vectors.float().to(kept), kept, rtol=room, atol=room)

    def key(self) -> str:
        """A name for everything a table depends on."""
        stack = take_apart(self.model)
        assert stack is not None
        return digest_of(
            {
                "format": _FORMAT,
                "tokens": self.tokens.digest,
                "model": f"{type(self.model).__name__} {self.model.config}",
                "weights": _frozen_digests(self.model, stack, self.depth),
                "form": [self.depth, str(self.precision), self.device.type, self.types],
            }
        )[:32]


def _frozen_digests(model: nn.Module, stack: Stack, depth: int) -> list[str]:
    """Digests of all that is frozen below the first layer that learns."""
    above = {id(t) for layer in stack.layers[depth:] for t in layer.parameters()}
    tensors = chain(model.named_parameters(), model.named_buffers())
    return [
        f"{name} {digest(t)}" for name, t in tensors if id(t) not in above and not t.requires_grad
    ]


def _on_disk(filler: _Filler, limit: float) -> tuple[Tensor, bool]:
    """A table mapped from a file that is made once; one that does not agree is made again."""
    folder = cache_folder(None) / "prefixes" / filler.key()
    count = filler.shape[0] * filler.shape[1]

    def mapped(path: Path, shared: bool) -> Tensor:
        flat = torch.from_file(str(path), shared=shared, size=count, dtype=filler.precision)
        return flat.view(filler.shape)

    def build(place: Path) -> None:
        needed = count * filler.precision.itemsize
        _make_room(folder.parent, needed, int(limit * _GB))
        filler.fill(mapped(place / "vectors", shared=True))
        (place / "about.json").write_text(json.dumps({"shape": filler.shape, "bytes": needed}))

    for _ in range(2):
        reused = folder.is_dir()
        build_once(folder, build)
        os.utime(folder)
        table = mapped(folder / "vectors", shared=False)
        if not reused or filler.agrees(table):
            return table, reused
        shutil.rmtree(folder)
    raise AssertionError("a table just built is not checked")


def _make_room(parent: Path, needed: int, limit: int) -> None:
    """Remove the tables that were used longest ago until a new one fits."""
    found = [path.parent for path in parent.glob("*/about.json")]
    sizes = {f: json.loads((f / "about.json").read_text())["bytes"] for f in found}
    for folder in sorted(sizes, key=lambda f: f.stat().st_mtime):
        if sum(sizes.values()) + needed <= limit:
            return
        shutil.rmtree(folder, ignore_errors=True)
        del sizes[folder]

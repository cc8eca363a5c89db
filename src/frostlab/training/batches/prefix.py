"""The frozen layers below the first that learns: computed once for every example, then looked up.

Only where nothing random happens in them; the table is exact for float32, rounded once for bf16.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import frostlab
from frostlab.data.eeg.recordings import Material, text_of
from frostlab.data.tokens import Tokens
from frostlab.errors import BadInput, FrostlabError
from frostlab.models.stack import take_apart
from frostlab.recipe.settings import Train
from frostlab.storage import Lock, cache_folder, digest_of, file_digest
from frostlab.surgery.origin import digest
from frostlab.training.batches.batch import evaluation_order, row_lengths
from frostlab.training.batches.packing import pack

_AT_ONCE = 32  # examples computed together
_GB = 10**9


@dataclass(frozen=True)
class Prefix:
    """What the first `depth` layers make of every token of the training split."""

    depth: int
    table: Tensor  # (tokens, width), on the device or mapped from a file
    starts: NDArray[np.int64]  # where each example's rows begin
    dtype: torch.dtype  # of the vectors when they are computed
    below: tuple[Tensor, ...]  # the weights it was made with
    facts: dict[str, Any]

    def check(self) -> None:
        """Refuse to be used when what lies below has been thawed."""
        if any(weight.requires_grad for weight in self.below):
            raise FrostlabError("a layer learns whose outputs are cached: train.cache_prefix")

    def vectors(self, at: Tensor) -> Tensor:
        """(1, T) places in the table to (1, T, width)."""
        return self.table.index_select(0, at.flatten()).to(self.dtype).unsqueeze(0)


def prefix_depth(model: nn.Module) -> int:
    """How many layers lie below the first that learns; 0 where the embedding learns."""
    stack = take_apart(model)
    if stack is None:
        return 0
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    if stack.embed(ids, None, None).requires_grad:
        return 0
    learns = [any(p.requires_grad for p in layer.parameters()) for layer in stack.layers]
    return learns.index(True) if True in learns else len(learns)


def check_prefix(
    model: nn.Module, prepared: Material, train: Train, precision: torch.dtype
) -> None:
    """Refuse a cache that could not be right, or would not fit."""
    asked, depth = "train.cache_prefix", prefix_depth(model)
    if not depth:
        raise BadInput(
            f"{asked} needs frozen layers below the first that learns, and all that comes before "
            "them frozen too, as by freeze: [all, '!layers[-1]', '!head']"
        )
    text = text_of(prepared)
    tokens = text.splits["train"]
    one, two = _two_passes(model, tokens, text.pad, depth)
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
    return x[0, : batch.tokens], batch.inputs["cached"][0, : batch.tokens]  # without filler


def starts_of(tokens: Tokens) -> NDArray[np.int64]:
    """Where each example's rows begin in a table of all tokens."""
    lengths = row_lengths(tokens)
    return np.cumsum(lengths) - lengths


def build_prefix(
    model: nn.Module, prepared: Material, train: Train, precision: torch.dtype, types: bool
) -> Prefix:
    """Compute the table in memory, or find it on disk, where it outlives the run."""
    text, depth = text_of(prepared), prefix_depth(model)
    tokens = text.splits["train"]
    filler = _Filler(model, tokens, text.pad, depth, precision, types)
    if train.cache_prefix == "memory":
        table = torch.empty(filler.shape, dtype=precision, device=filler.device)
        filler.fill(table)
        facts = {"where": "memory", "reused": False}
    else:
        table, reused = kept_table(
            filler.key(), filler.shape, precision, int(train.cache_gb * _GB), filler.fill
        )
        facts = {"where": "disk", "reused": reused}
    facts |= {"depth": depth, "bytes": table.nbytes}
    return Prefix(depth, table, starts_of(tokens), filler.dtype, filler.below(), facts)


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
        first, _ = self.compute(np.array([tokens.lengths.argmax()]))
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

    def below(self) -> tuple[Tensor, ...]:
        """All that is frozen, and not in a layer above the cached ones."""
        stack = take_apart(self.model)
        assert stack is not None
        above = {id(t) for layer in stack.layers[self.depth :] for t in layer.parameters()}
        tensors = chain(self.model.parameters(), self.model.buffers())
        return tuple(t for t in tensors if id(t) not in above and not t.requires_grad)

    def key(self) -> str:
        """A name for everything a table depends on."""
        return digest_of(
            {
                "versions": [version("torch"), version("transformers"), frostlab.__version__],
                "tokens": self.tokens.digest,
                "model": f"{type(self.model).__name__} {self.model.config}",
                "weights": [digest(tensor) for tensor in self.below()],
                "form": [self.depth, str(self.precision), self.device.type, self.types],
            }
        )[:32]


def kept_table(
    key: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    limit: int,
    fill: Callable[[Tensor], None],
) -> tuple[Tensor, bool]:
    """Map a table from its file, filled first if it is not there or spoilt; say if it was there.

    One process at a time looks, fills and makes room. A table that another removes while it is
    mapped stays readable.
    """
    parent = cache_folder(None) / "prefixes"
    folder, needed = parent / key, shape[0] * shape[1] * dtype.itemsize
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with Lock(parent / "lock"):
            for left in parent.glob("*.part"):  # of a killed process: the lock is ours now
                shutil.rmtree(left)
            reused = _is_whole(folder, needed)
            if not reused:
                shutil.rmtree(folder, ignore_errors=True)
                _make_room(parent, needed, limit)
                part = folder.with_suffix(".part")
                _write(part, shape, dtype, fill)
                part.rename(folder)
            os.utime(folder)
            return _mapped(folder / "vectors", shape, dtype, shared=False), reused
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(
            f"the cache {parent} cannot be written: {reason}; set FROSTLAB_CACHE to another"
        ) from error


def _mapped(path: Path, shape: tuple[int, int], dtype: torch.dtype, shared: bool) -> Tensor:
    count = shape[0] * shape[1]
    return torch.from_file(str(path), shared=shared, size=count, dtype=dtype).view(shape)


def _write(
    folder: Path, shape: tuple[int, int], dtype: torch.dtype, fill: Callable[[Tensor], None]
) -> None:
    folder.mkdir()
    path, needed = folder / "vectors", shape[0] * shape[1] * dtype.itemsize
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is noticed here
                os.posix_fallocate(file.fileno(), 0, needed)
            file.truncate(needed)
        fill(_mapped(path, shape, dtype, shared=True))
        about = {"bytes": needed, "sha256": file_digest(path)}
        (folder / "about.json").write_text(json.dumps(about))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _is_whole(folder: Path, needed: int) -> bool:
    try:
        about = json.loads((folder / "about.json").read_text())
        path = folder / "vectors"
        return path.stat().st_size == needed and about["sha256"] == file_digest(path)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make_room(parent: Path, needed: int, limit: int) -> None:
    """Remove the tables that were used longest ago until a new one fits."""
    tables = [path.parent for path in parent.glob("*/vectors")]
    sizes = {folder: (folder / "vectors").stat().st_size for folder in tables}
    for folder in sorted(tables, key=lambda folder: folder.stat().st_mtime):
        if sum(sizes.values()) + needed <= limit:
            return
        shutil.rmtree(folder)
        del sizes[folder]

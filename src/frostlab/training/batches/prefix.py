"""The prefix cache: outputs of the frozen lowest layers, computed once per example.

The outputs form a table with one vector per token, in the precision of the run: in float32 nothing
is rounded, in bf16 each output is rounded once. Layers with dropout cannot be cached, because their
outputs differ from step to step.
"""

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
from frostlab.data.prepare import PreparedData, as_token_data
from frostlab.data.tokens import Tokens
from frostlab.errors import BadInput, FrostlabError
from frostlab.models.stack import take_apart
from frostlab.recipe.settings import Train
from frostlab.storage import Lock, build_once, cache_folder, digest_of, remove_temporary
from frostlab.surgery.origin import digest
from frostlab.training.batches.batch import evaluation_order, row_lengths
from frostlab.training.batches.packing import pack

_BATCH = 32  # examples per forward pass when the table is computed
_GB = 10**9


@dataclass(frozen=True)
class Prefix:
    """The outputs of the first `depth` layers for every token of the training split."""

    depth: int
    table: Tensor  # (tokens, width), on the run's device or mapped from a file
    starts: NDArray[np.int64]  # each example's first row in the table
    dtype: torch.dtype  # dtype of the layers' outputs; the table's may be narrower
    weights: tuple[Tensor, ...]  # buffers, and frozen weights that must stay frozen
    # for the run's record: where the table is, its depth and size, and whether it was reused
    facts: dict[str, Any]

    def check(self) -> None:
        """Raise an error if one of `weights` was thawed, because the table may then be wrong."""
        if any(weight.requires_grad for weight in self.weights):
            raise FrostlabError("train.cache_prefix: a weight was thawed after the cache was built")

    def vectors(self, rows: Tensor) -> Tensor:
        """Look up (1, T) row indices in the table; return (1, T, width) vectors."""
        return self.table.index_select(0, rows.flatten()).to(self.dtype).unsqueeze(0)


def prefix_depth(model: nn.Module) -> int:
    """Return the number of layers below the first trainable layer; 0 if the embedding learns.

    The result is also 0 if frostlab cannot run the model layer by layer.
    """
    stack = take_apart(model)
    if stack is None:
        return 0
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    if stack.embed(ids, None, None).requires_grad:
        return 0
    learns = [any(p.requires_grad for p in layer.parameters()) for layer in stack.layers]
    return learns.index(True) if True in learns else len(learns)


def check_prefix(
    model: nn.Module, prepared: PreparedData, train: Train, precision: torch.dtype
) -> None:
    """Refuse train.cache_prefix if no layer can be cached, or if the table would be too large."""
    key, depth = "train.cache_prefix", prefix_depth(model)
    if not depth:
        raise BadInput(
            f"{key} needs frozen layers below the first trainable layer, and a frozen embedding, "
            "e.g. freeze: [all, '!layers[-1]', '!head']"
        )
    text = as_token_data(prepared)
    tokens = text.splits["train"]
    first, second = _two_passes(model, tokens, text.pad, depth)
    if not torch.equal(first, second):
        raise BadInput(f"{key} needs frozen layers without dropout; set the model's dropout to 0")
    needed = int(row_lengths(tokens).sum()) * first.shape[-1] * precision.itemsize / _GB
    if needed > train.cache_gb:
        raise BadInput(
            f"{key} would take {needed:.1f} GB; train.cache_gb allows {train.cache_gb:g}"
        )


def _two_passes(model: nn.Module, tokens: Tokens, pad: int, depth: int) -> list[Tensor]:
    """Run the same examples twice in training mode; dropout makes the two outputs differ."""
    training, passes = model.training, []
    model.train()
    rows = np.argsort(tokens.lengths, kind="stable")[:2]  # the two shortest examples
    with torch.random.fork_rng([]), torch.no_grad():
        for seed in (0, 1):
            torch.manual_seed(seed)
            passes.append(_compute(model, tokens, rows, pad, depth, types=False)[0])
    model.train(training)
    return passes


def _compute(
    model: nn.Module, tokens: Tokens, rows: NDArray[np.int64], pad: int, depth: int, types: bool
) -> tuple[Tensor, Tensor]:
    """Run the first `depth` layers; return an output for each token, and its row in the table."""
    stack = take_apart(model)
    assert stack is not None
    batch = pack(tokens, rows, pad, types=types, cached_starts=starts_of(tokens))
    batch = batch.to(next(model.parameters()).device)
    ids, token_types = batch.inputs["input_ids"], batch.inputs.get("token_type_ids")
    x = stack.run(stack.embed(ids, token_types, batch.packing), batch.packing, 0, depth)
    return x[0, : batch.tokens], batch.inputs["cached"][0, : batch.tokens]  # without padding


def starts_of(tokens: Tokens) -> NDArray[np.int64]:
    """Return the index of each example's first token in a table of all tokens."""
    lengths = row_lengths(tokens)
    return np.cumsum(lengths) - lengths


def build_prefix(
    model: nn.Module, prepared: PreparedData, train: Train, precision: torch.dtype, types: bool
) -> Prefix:
    """Compute the table in memory or on disk; on disk, reuse an equal table of an earlier run."""
    text, depth = as_token_data(prepared), prefix_depth(model)
    tokens = text.splits["train"]
    builder = _TableBuilder(model, tokens, text.pad, depth, precision, types)
    if train.cache_prefix == "memory":
        table = torch.empty(builder.shape, dtype=precision, device=builder.device)
        builder.fill(table)
        facts = {"where": "memory", "reused": False}
    else:
        table, reused = cached_table(
            builder.key(), builder.shape, precision, int(train.cache_gb * _GB), builder.fill
        )
        facts = {"where": "disk", "reused": reused}
    facts |= {"depth": depth, "bytes": table.nbytes}
    return Prefix(depth, table, starts_of(tokens), builder.dtype, builder.weights(), facts)


class _TableBuilder:
    """A builder of a prefix's table, and of the key under which the table is stored on disk."""

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
        # one pass, over the longest example, to learn the dtype and the width of the outputs
        longest, _ = self.compute(np.array([tokens.lengths.argmax()]))
        self.dtype = longest.dtype
        self.shape = (int(row_lengths(tokens).sum()), longest.shape[-1])

    @torch.no_grad()
    def compute(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the outputs for some examples, one per token, and their indices in the table."""
        training = self.model.training
        self.model.eval()
        half = self.precision == torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            outputs = _compute(self.model, self.tokens, rows, self.pad, self.depth, self.types)
        self.model.train(training)
        return outputs

    def fill(self, table: Tensor) -> None:
        """Compute the outputs of every example, and write them to the table."""
        for rows in evaluation_order(self.tokens.lengths, _BATCH):
            vectors, table_rows = self.compute(rows)
            table.index_copy_(0, table_rows.to(table.device), vectors.to(table))

    def weights(self) -> tuple[Tensor, ...]:
        """Return all buffers, and the frozen parameters except those in layers above the prefix."""
        stack = take_apart(self.model)
        assert stack is not None
        above = {id(t) for layer in stack.layers[self.depth :] for t in layer.parameters()}
        tensors = chain(self.model.parameters(), self.model.buffers())
        return tuple(t for t in tensors if id(t) not in above and not t.requires_grad)

    def key(self) -> str:
        """Return a digest of everything the table depends on."""
        return digest_of(
            {
                "versions": [version("torch"), version("transformers"), frostlab.__version__],
                "tokens": self.tokens.digest,
                "model": f"{type(self.model).__name__} {self.model.config}",
                "weights": [digest(tensor) for tensor in self.weights()],
                "form": [self.depth, str(self.precision), self.device.type, self.types],
            }
        )[:32]


def cached_table(
    key: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    limit: int,
    fill: Callable[[Tensor], None],
) -> tuple[Tensor, bool]:
    """Map a table from its file; return it, and whether it was reused.

    A missing or damaged table is computed with `fill` first. Old tables are removed if all tables
    together would exceed `limit` bytes; a process that has mapped a table can still read it after
    its file was removed. A lock admits one process at a time.
    """
    parent = cache_folder(None) / "prefixes"
    needed, built = shape[0] * shape[1] * dtype.itemsize, False

    def build(folder: Path) -> None:
        nonlocal built
        built = True
        _make_room(parent, needed, limit)
        _write(folder / "vectors", shape, dtype, fill)

    try:
        parent.mkdir(parents=True, exist_ok=True)
        with Lock(parent / "lock"):
            remove_temporary(parent)
            path = build_once(parent / key, build) / "vectors"
            if path.stat().st_size != needed:
                raise FrostlabError(f"{path} has another size than the model's table; remove it")
            os.utime(path.parent)  # `_make_room` removes the least recently used tables
            return _mapped(path, shape, dtype, shared=False), not built
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(
            f"the cache {parent} cannot be read or written: {reason}; set FROSTLAB_CACHE to "
            "another folder"
        ) from error


def _mapped(path: Path, shape: tuple[int, int], dtype: torch.dtype, shared: bool) -> Tensor:
    count = shape[0] * shape[1]
    return torch.from_file(str(path), shared=shared, size=count, dtype=dtype).view(shape)


def _write(
    path: Path, shape: tuple[int, int], dtype: torch.dtype, fill: Callable[[Tensor], None]
) -> None:
    needed = shape[0] * shape[1] * dtype.itemsize
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):  # reserves the space: a full disk fails here
            os.posix_fallocate(file.fileno(), 0, needed)
        file.truncate(needed)
    fill(_mapped(path, shape, dtype, shared=True))


def _make_room(parent: Path, needed: int, limit: int) -> None:
    """Remove the least recently used tables until a new one fits into `limit` bytes."""
    tables = [path.parent for path in parent.glob("*/vectors")]
    sizes = {folder: (folder / "vectors").stat().st_size for folder in tables}
    for folder in sorted(tables, key=lambda folder: folder.stat().st_mtime):
        if sum(sizes.values()) + needed <= limit:
            return
        shutil.rmtree(folder)
        del sizes[folder]

"""Token arrays on disk: written in pieces, memory-mapped when read."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from frostlab.data.arrays import map_npy
from frostlab.data.split_record import Label, LengthRecord, SplitRecord
from frostlab.errors import BadInput
from frostlab.recipe.data import Task
from frostlab.storage import read_json
from frostlab.typed import read

FACTS = "prepared.json"  # name of the file with the metadata of a folder in the cache
_OPTIONAL = ("labels", "second", "scored_from")  # arrays that a split may lack
_TYPES = {"starts": np.int64, "stops": np.int64, "labels": np.int64} | dict.fromkeys(
    ("second", "scored_from"), np.int32
)
Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Tokens:
    """Tokens of one split; example i is `ids[starts[i]:stops[i]]`."""

    ids: npt.NDArray[Any]  # token ids; in a file uint16 if the vocabulary fits, else int32
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64] | None  # class of each example; None for language modelling
    # For pairs: the position in each example where the second text (token type 1) starts.
    second: npt.NDArray[np.int32] | None
    # The position in each example of the first token that a language model is scored on; None: 1,
    # because the first token is never predicted.
    scored_from: npt.NDArray[np.int32] | None
    digest: str  # digest of all arrays above; "" if they were never in a file

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each example."""
        return self.stops - self.starts


@dataclass(frozen=True)
class Prepared:
    """A recipe's token data, ready to be batched."""

    task: Task
    classes: int  # number of classes; 0 for language modelling
    vocabulary: int  # number of token ids
    pad: int  # token id that pads short examples
    # train, report and tune, which selects checkpoints; no tune if `data.splits` is published
    splits: dict[str, Tokens]
    origin: dict[str, str]  # where each split comes from, and how rows were held out or dropped
    caution: str | None  # a warning to show with every score
    known: dict[str, float]  # reference scores, such as chance
    digest: str  # digest of texts, tokenizer and settings
    tokenizer: Path | None  # tokenizer.json, or a pretrained tokenizer's folder; None if synthetic
    labels: tuple[Label, ...] | None = None  # the classes in order; None for language modelling
    described: dict[str, SplitRecord] = field(default_factory=dict)  # role → its record
    notes: tuple[str, ...] = ()  # remarks about possible mistakes, such as empty texts


class TokenWriter:
    """Writer of one split: appends token ids in pieces, then writes the bounds of the examples."""

    def __init__(self, folder: Path, role: str, vocabulary: int) -> None:
        self.folder, self.role, self.vocabulary = folder, role, vocabulary
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.int32)
        self.count = 0
        self._file = (folder / f"{role}.ids.npy").open("wb")
        self._digest = hashlib.sha256(self.dtype.str.encode())
        self._header = self._write_header()

    def _write_header(self) -> int:
        # NumPy leaves room in the header, so the final length can overwrite the initial 0.
        shape = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, shape)
        return self._file.tell()

    def append(self, ids: npt.ArrayLike) -> None:
        """Append token ids."""
        ids = np.asarray(ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(self.dtype).max:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise BadInput(f"token {wrong} is not in the vocabulary of {self.vocabulary:,} tokens")
        new = ids.astype(self.dtype)
        raw = new.tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self.count += len(new)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._write_header() != self._header:
            raise OSError(f"the header of {self._file.name} grew")
        self._file.close()

    def finish(self, arrays: dict[str, npt.NDArray[Any] | None]) -> str:
        """Write the arrays with one value per example; return the digest of all arrays."""
        for name, dtype in _TYPES.items():
            values = arrays.get(name)
            if values is not None:
                array = values.astype(dtype)
                np.save(self.folder / f"{self.role}.{name}.npy", array)
                self._digest.update(f"{name};".encode() + array.tobytes())
        return self._digest.hexdigest()


def load_tokens(folder: Path, role: str, digest: str) -> Tokens:
    """Memory-map a split that a `TokenWriter` wrote."""
    arrays: dict[str, Any] = {
        name: map_npy(path, np.dtype(dtype).name)
        for name, dtype in _TYPES.items()
        if (path := folder / f"{role}.{name}.npy").exists() or name not in _OPTIONAL
    }
    ids = map_npy(folder / f"{role}.ids.npy", "uint16", "int32")
    return Tokens(ids, digest=digest, **{**dict.fromkeys(_OPTIONAL), **arrays})


def save_facts(folder: Path, facts: Any, name: str = FACTS) -> None:
    """Write a dataclass with the metadata of a folder in the cache."""
    text = json.dumps(asdict(facts), indent=1)
    (folder / name).write_text(text, encoding="utf-8")


def load_facts(schema: type[Facts], folder: Path, name: str = FACTS) -> Facts:
    """Read the metadata that `save_facts` wrote."""
    return read(schema, read_json(folder / name), folder / name)


def length_record(lengths: npt.NDArray[np.int64], cut: int | None = None) -> LengthRecord | None:
    """Summarise the lengths of examples; None if there is no example."""
    if not len(lengths):
        return None
    return LengthRecord(
        least=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        most=int(lengths.max()),
        cut=cut,
    )


def concatenate(lists: Iterable[list[int]]) -> npt.NDArray[np.int64]:
    """Join lists of token ids into one array."""
    return np.array([token for ids in lists for token in ids], dtype=np.int64)

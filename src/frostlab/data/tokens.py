"""Token arrays on disk: written in pieces, memory-mapped when read."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from frostlab.recipe.data import Task

_OPTIONAL = ("labels", "second", "scored_from")  # arrays that a split may lack
_TYPES = {"starts": np.int64, "stops": np.int64, "labels": np.int64} | dict.fromkeys(
    ("second", "scored_from"), np.int32
)


@dataclass(frozen=True)
class Tokens:
    """Tokens of one split; example i is `ids[starts[i]:stops[i]]`."""

    ids: npt.NDArray[Any]  # uint16 if the vocabulary fits, else int32
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64] | None  # class of each example; None for language modelling
    # For pairs: the position in each example where the second text (token type 1) starts.
    second: npt.NDArray[np.int32] | None
    # The position in each example of the first token that is a target of the loss; None: all are.
    scored_from: npt.NDArray[np.int32] | None
    digest: str  # digest of all arrays above

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each example."""
        return self.stops - self.starts


@dataclass(frozen=True)
class Prepared:
    """A recipe's data, ready to be batched."""

    task: Task
    classes: int  # number of classes; 0 for language modelling
    vocabulary: int  # number of token ids
    pad: int  # token id that pads short examples
    splits: dict[str, Tokens]  # train, report, and tune unless the recipe has `splits: published`
    origin: dict[str, str]  # where each split comes from, and how rows were held out or dropped
    caution: str | None  # a warning to show with every score
    known: dict[str, float]  # reference scores, such as chance
    digest: str  # digest of texts, tokenizer and settings
    tokenizer: Path | None  # tokenizer.json, or a pretrained tokenizer's folder; None if synthetic


class TokenWriter:
    """Writer of one split: appends token ids in pieces, then writes the bounds of the examples."""

    def __init__(self, folder: Path, role: str, vocabulary: int) -> None:
        self.folder, self.role = folder, role
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
        new = np.asarray(ids).astype(self.dtype)
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

    def mapped(name: str) -> Any:
        path = folder / f"{role}.{name}.npy"
        return np.load(path, mmap_mode="r")

    optional = {
        name: mapped(name) if (folder / f"{role}.{name}.npy").exists() else None
        for name in _OPTIONAL
    }
    return Tokens(mapped("ids"), mapped("starts"), mapped("stops"), **optional, digest=digest)


def save_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write the metadata that all splits share."""
    (folder / "prepared.json").write_text(json.dumps(facts, ensure_ascii=False, indent=1))


def load_facts(folder: Path) -> dict[str, Any]:
    """Read the metadata that `save_facts` wrote."""
    facts: dict[str, Any] = json.loads((folder / "prepared.json").read_text())
    return facts


def concatenate(lists: Iterable[list[int]]) -> npt.NDArray[np.int64]:
    """Join lists of token ids into one array."""
    return np.array([token for ids in lists for token in ids], dtype=np.int64)

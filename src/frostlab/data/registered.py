"""Data sets that users register: a name, and a function that returns the rows of each split.

The rows are written to the cache as JSON lines, in a folder named by the digest of the rows. From
there they are read, split and tokenized like any other text.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from frostlab.data.files import is_label, shown, split_files
from frostlab.errors import BadInput, check_registration, nearest, same_function
from frostlab.recipe.data import LOADERS, Loader, TextTask, data_names
from frostlab.storage import build_once

ROLES = ("train", "tune", "report")


def register_data(
    name: str,
    load: Callable[[Path | None], Mapping[str, Iterable[Any]]],
    *,
    task: TextTask = "classification",
) -> None:
    """Register a data set for recipes with `data: {name: NAME}`.

    Args:
        name: a name that no other data set has.
        load: function that takes the folder of `--data-dir`, or None, and returns a dict of splits:
            the rows of `train` and, optionally, of `tune` (to select checkpoints) and `report` (for
            the final scores). If tune or report is missing, a share of train is held out.
            A row is (text, label) for classification and a text for language; the order of
            the rows must be the same in every call.
        task: `classification` or `language` (language modelling).

    A name can be registered again only with a function of the same module and name, as when a
    notebook cell runs again.
    """
    check_registration("register_data", name, load)
    if task not in get_args(TextTask):
        choices = get_args(TextTask)
        hint = nearest(str(task), choices)
        raise BadInput(f"register_data: task {task!r} should be one of {', '.join(choices)}{hint}")
    if name in data_names() and not (name in LOADERS and same_function(LOADERS[name].load, load)):
        raise BadInput(f"register_data: the name {name} is taken; choose another")
    LOADERS[name] = Loader(load, task)


def registered_files(name: str, data_dir: Path | None, cache: Path) -> dict[str, Path]:
    """Call a registered loader, write its rows to the cache, and return the file of each split."""
    loader = LOADERS[name]
    splits = loader.load(data_dir)
    if not isinstance(splits, Mapping) or "train" not in splits:
        kind = type(splits).__name__
        listed = ", ".join(map(str, splits)) or "nothing" if isinstance(splits, Mapping) else ""
        returned = f"{kind} of {listed}" if listed else kind
        raise BadInput(f"data.name {name}: load returned a {returned}, not a dict with train")
    if unknown := [split for split in splits if split not in ROLES]:
        hint = nearest(str(unknown[0]), ROLES) or f"; there are {', '.join(ROLES)}"
        raise BadInput(f"data.name {name}: {unknown[0]} is not a split{hint}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".registered-") as temporary:
        digest = hashlib.sha256()
        for split, rows in splits.items():
            if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
                raise BadInput(f"data.name {name}: {split} is {shown(rows)}, not a list of rows")
            digest.update(f"{split};{loader.task};".encode())
            path = Path(temporary) / f"{split}.jsonl"
            with path.open("w", encoding="utf-8") as file:
                for number, row in enumerate(rows, 1):
                    line = json.dumps(_columns(f"{name}: {split}", number, row, loader.task)) + "\n"
                    digest.update(line.encode())
                    file.write(line)
        folder = build_once(
            cache / "registered" / digest.hexdigest()[:32],
            lambda place: _move(Path(temporary), place),
        )
    return split_files(folder)


def _columns(place: str, number: int, row: Any, task: TextTask) -> dict[str, Any]:
    """Check a row and return its values by column."""
    if task == "language":
        if isinstance(row, str):
            return {"text": row}
        raise BadInput(f"data.name {place}: row {number} is {shown(row)}, not a text")
    if not isinstance(row, tuple | list) or len(row) != 2 or not isinstance(row[0], str):
        raise BadInput(f"data.name {place}: row {number} is {shown(row)}, not (text, label)")
    text, label = row
    with suppress(ValueError, RuntimeError):  # an array of several values
        label = label.item() if hasattr(label, "item") else label  # NumPy or torch scalar
    if not is_label(label):
        raise BadInput(
            f"data.name {place}: the label of row {number} is {shown(label)}, neither a whole "
            "number nor a short text"
        )
    return {"text": text, "label": label}


def _move(source: Path, target: Path) -> None:
    for path in source.iterdir():
        shutil.move(path, target / path.name)

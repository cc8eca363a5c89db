"""Sources of text: find a data set's splits on disk or the Hugging Face hub, and read their rows.

`plan_splits` gives each split a role: train, tune (to select checkpoints) or report (final scores).
With `splits: published` in the recipe, there is no tune: report selects checkpoints, too.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

from frostlab.data.builtin import docstring_files
from frostlab.data.files import (
    FORMATS,
    format_of,
    is_label,
    missing_column,
    named_path,
    nearest_data,
    read_lines,
    read_pieces,
    shown,
    split_files,
)
from frostlab.data.registered import registered_files
from frostlab.data.split_record import Label
from frostlab.errors import BadInput, Unavailable, first_line, nearest, require
from frostlab.recipe.data import Docstrings, Named, Own, Registered

TextData = Docstrings | Named | Own | Registered
HELD_OUT = 0.05  # share of train that replaces a missing tune split, and a missing report split
# The languages of XNLI.
LANGUAGES = (
    "ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh",
)  # fmt: skip
SPLIT_NAMES = ("train", "validation", "test")  # file names, without ending, with a role by default
_WHOLE_NUMBER = re.compile(r"-?\d{1,20}")
_TRUE = ("1", "true", "yes", "on")  # values of environment variables that mean yes


# Rows


@dataclass(frozen=True)
class Columns:
    """Columns to read; with `joined`, the rows are the lines of one document."""

    texts: tuple[str, ...]
    label: str | None
    joined: bool = False


class Row(NamedTuple):
    """One example, or a piece of a document; `ends` is False if pieces of the document follow."""

    line: int  # number of the line or row, from 1; 0 for a .txt file
    texts: tuple[str, ...]
    label: Label | None
    ends: bool


@dataclass(frozen=True)
class Split:
    """One split of a data set, in files or from the hub."""

    name: str
    place: str  # location to show in messages and records
    files: tuple[Path, ...]
    hub: Any = None  # the split as an object of the `datasets` library; None for a file

    def rows(self, columns: Columns) -> Iterator[Row]:
        """Yield the rows; raise an error if a text or label is missing or invalid."""
        if self.hub is None and format_of(self.files[0]) == "txt":
            yield from self._running_text(columns)
            return
        wanted = (*columns.texts, *(() if columns.label is None else (columns.label,)))
        lines = read_lines(self.files[0], wanted) if self.hub is None else self._hub_lines()
        line = 0
        for line, values in lines:
            yield _row(self.place, line, values, columns)
        if columns.joined and line:  # an empty piece ends the document
            yield Row(line, ("",), None, ends=True)

    def _running_text(self, columns: Columns) -> Iterator[Row]:
        if columns.label is not None or len(columns.texts) > 1:
            lacks = "no labels" if columns.label is not None else "one text, not pairs"
            raise BadInput(f"{self.place}: .txt has {lacks}; use a jsonl, csv, tsv or parquet file")
        for text, ends in read_pieces(self.files[0]):
            yield Row(0, (text,), None, ends)

    def _hub_lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        number = 0
        for batch in self.hub.iter(batch_size=256):
            for values in zip(*batch.values(), strict=True):
                number += 1
                yield number, dict(zip(batch, values, strict=True))

    @property
    def is_file(self) -> bool:
        """Whether the split is a file in the user's folders, not generated and not from the hub."""
        return self.hub is None and self.place == str(self.files[0])

    @property
    def source(self) -> str:
        """Location for `SplitRecord.source`: the absolute path of a file, else `place`."""
        return str(self.files[0].resolve()) if self.is_file else self.place

    def stamp(self) -> list[list[str | int]]:
        """Return the files' paths, sizes and modification times, to detect when a file changes."""
        try:
            states = [(path.resolve(), path.stat()) for path in self.files]
        except OSError as error:
            raise BadInput(f"{self.place} cannot be read: {error.strerror}") from error
        return [[str(path), state.st_size, state.st_mtime_ns] for path, state in states]


def _row(place: str, line: int, values: Mapping[str, Any], columns: Columns) -> Row:
    texts = tuple(_text(place, line, values, name) for name in columns.texts)
    label = None if columns.label is None else _label(place, line, values, columns.label)
    return Row(line, texts, label, not columns.joined)


def _cell(place: str, line: int, values: Mapping[str, Any], name: str) -> Any:
    try:
        return values[name]
    except KeyError:
        raise missing_column(place, line, name, values) from None


def _text(place: str, line: int, values: Mapping[str, Any], name: str) -> str:
    value = _cell(place, line, values, name)
    if not isinstance(value, str):
        raise BadInput(f"{place}:{line}: column {name} holds {shown(value)}, not text")
    return value


def _label(place: str, line: int, values: Mapping[str, Any], name: str) -> Label:
    value = _cell(place, line, values, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        value = value.strip()
        value = int(value) if _WHOLE_NUMBER.fullmatch(value) else value
    if value == -1:
        raise BadInput(f"{place}:{line}: label -1 means unlabelled; choose a split with labels")
    if is_label(value):
        return int(value) if isinstance(value, bool) else value
    raise BadInput(
        f"{place}:{line}: label {shown(value)} is neither a whole number nor a short text"
    )


# Roles of splits


@dataclass(frozen=True)
class SetDefaults:
    """Splits, columns and size of a data set; a number in place of a split is a share of train."""

    hub: tuple[str, str | None, str | None] = ("", None, None)  # name, configuration, revision
    tune: str | float = HELD_OUT
    report: str | float = "test"
    published: str | None = None  # replaces `report` if the recipe has `splits: published`
    texts: tuple[str, ...] = ("text",)
    classes: int | None = None
    joined: bool = False  # whether the rows are the lines of one document
    megabytes: int = 0  # approximate size of the download
    rows: Mapping[str, int] = field(default_factory=dict)  # examples by split; empty: not known


PUBLIC_SETS = {
    "sst2": SetDefaults(
        ("stanfordnlp/sst2", None, None),
        report="validation",
        texts=("sentence",),
        classes=2,
        megabytes=3,
        rows={"train": 67_349, "validation": 872},
    ),
    "mnli": SetDefaults(
        ("nyu-mll/glue", "mnli", None),
        report="validation_matched",
        texts=("premise", "hypothesis"),
        classes=3,
        megabytes=57,
        rows={"train": 392_702, "validation_matched": 9_815},
    ),
    "xnli": SetDefaults(
        ("facebook/xnli", "LANGUAGE", None),  # `hub_name` replaces LANGUAGE
        tune="validation",
        published="validation",
        texts=("premise", "hypothesis"),
        classes=3,
        megabytes=51,
        rows={"validation": 2_490, "test": 5_010},
    ),
    "imdb": SetDefaults(
        ("stanfordnlp/imdb", None, None),
        classes=2,
        megabytes=83,
        rows={"train": 25_000, "test": 25_000},
    ),
    "ag_news": SetDefaults(
        ("fancyzhx/ag_news", None, None),
        classes=4,
        megabytes=20,
        rows={"train": 120_000, "test": 7_600},
    ),
    "tinystories": SetDefaults(
        ("roneneldan/TinyStories", None, None), report="validation", megabytes=1_000
    ),
    "openwebtext": SetDefaults(
        ("Skylion007/openwebtext", None, None), report=HELD_OUT, megabytes=24_000
    ),
    "wikitext2": SetDefaults(
        ("Salesforce/wikitext", "wikitext-2-v1", None), tune="validation", joined=True, megabytes=7
    ),
    "wikitext2-raw": SetDefaults(
        ("Salesforce/wikitext", "wikitext-2-raw-v1", None),
        tune="validation",
        joined=True,
        megabytes=8,
    ),
    "wikitext103": SetDefaults(
        ("Salesforce/wikitext", "wikitext-103-raw-v1", None),
        tune="validation",
        joined=True,
        megabytes=313,
    ),
    "tinyshakespeare": SetDefaults(
        ("karpathy/tiny_shakespeare", None, "refs/convert/parquet"),
        report=HELD_OUT,
        joined=True,
        megabytes=1,
    ),
}


@dataclass(frozen=True)
class SplitPlan:
    """The split of each role; a number in place of a split is a share of train to hold out."""

    train: Split
    tune: Split | float | None  # None with `splits: published`: report also selects checkpoints
    report: Split | float
    columns: Columns
    classes: int | None  # number of classes; None: as many as train has labels
    unused: tuple[str, ...] = ()  # data files in the user's folder that no role uses


def plan_splits(data: TextData, data_dir: Path | None, cache: Path) -> SplitPlan:
    """Find the splits of a recipe's text and assign each its role."""
    if isinstance(data, Docstrings):
        pairs = data.name == "docstrings-pairs"
        files = docstring_files(data.per_package, pairs=pairs, cache=cache, classes=data.classes)
        texts = ("summary", "body") if pairs else ("text",)
        defaults = SetDefaults(tune="validation", texts=texts)
        return _assign_roles(data, _splits(files, data.name), defaults)
    if isinstance(data, Named):
        splits = public_splits(data.name, data.language, data_dir)
        # XNLI measures transfer to another language, so its models train on English MNLI.
        training = public_splits("mnli", "en", data_dir) if data.name == "xnli" else splits
        return _assign_roles(data, splits, PUBLIC_SETS[data.name], training=training)
    if isinstance(data, Registered):
        files = registered_files(data.name, data_dir, cache)
        tune, report = (role if role in files else HELD_OUT for role in ("tune", "report"))
        defaults = SetDefaults(tune=tune, report=report)
        return _assign_roles(data, _splits(files, data.name), defaults)
    if data.task == "language" and len(data.text) > 1:
        raise BadInput(f"data.text names {len(data.text)} columns; data.task language reads one")
    return _plan_own(data)


def _plan_own(data: Own) -> SplitPlan:
    """Find the splits in a user's folder or file; a missing tune or report is held out of train."""
    path = named_path(data.path, "data.path")
    if path.is_dir():
        files = split_files(path)
        if not files:
            raise BadInput(f"data.path {path} has no SPLIT.{{{','.join(FORMATS)}}}[.gz] in it")
        report = next((name for name in ("test", "validation") if name in files), HELD_OUT)
        has_tuning_split = (
            "validation" in files and report != "validation" and data.report != "validation"
        )
        defaults = SetDefaults(
            tune="validation" if has_tuning_split else HELD_OUT, report=report, texts=data.text
        )
        plan = _assign_roles(data, _splits(files), defaults, data.label)
        return replace(plan, unused=_unused_files(data, path, files))
    if path.exists() and not path.is_file():
        raise BadInput(f"data.path {path} is neither a regular file nor a folder")
    if not path.is_file():
        raise BadInput(f"data.path {path} does not exist{nearest_data(path)}")
    if format_of(path) is None:
        raise BadInput(f"data.path {path} is not one of .{', .'.join(FORMATS)}, plain or .gz")
    defaults = SetDefaults(report=HELD_OUT, texts=data.text)
    return _assign_roles(data, _splits({"train": path}), defaults, data.label)


def _unused_files(data: Own, folder: Path, files: dict[str, Path]) -> tuple[str, ...]:
    """Return the files that are not used: they have no role, and are not named like a split.

    Refuse them if neither `data.report` nor `data.tune` names a split: the rows of a file such as
    dev.csv would not be used, and nobody would notice. A text file next to labelled tables may be
    a readme, so it is allowed.
    """
    named = (*SPLIT_NAMES, data.train, data.tune, data.report)
    unused = [
        (name, path.name)
        for name, path in files.items()
        if name not in named and (data.task == "language" or format_of(path) != "txt")
    ]
    if unused and not isinstance(data.report, str) and not isinstance(data.tune, str):
        name, file = unused[0]
        raise BadInput(
            f"data.path {folder}: {file} would not be used; rename it to one of "
            f"{', '.join(SPLIT_NAMES)}, or set data.report: {name} or data.tune: {name}"
        )
    return tuple(file for _, file in unused)


def _splits(files: dict[str, Path], shown: str | None = None) -> dict[str, Split]:
    """Return a split for each file; messages show the file's path, or `shown` if it is given."""
    return {
        name: Split(name, str(path) if shown is None else f"{shown}: {name}", (path,))
        for name, path in files.items()
    }


def _assign_roles(
    data: TextData,
    splits: dict[str, Split],
    defaults: SetDefaults,
    label: str = "label",
    training: dict[str, Split] | None = None,
) -> SplitPlan:
    """Choose the split of each role: the recipe's or, if it names none, the default.

    If `training` is given, the split of train comes from it, and the others from `splits`.
    """
    train = _choose(training or splits, "data.train", data.train)
    published = data.splits == "published"
    report = data.report or (published and defaults.published) or defaults.report
    tune = None if published else defaults.tune if data.tune is None else data.tune
    if published and isinstance(report, float) and data.report is None:
        raise BadInput(
            f"data.splits: published, but {train.place} has no reporting split; "
            "set data.splits: honest, or set data.report to a share of train"
        )
    plan = SplitPlan(
        train=train,
        tune=_choose(splits, "data.tune", tune) if isinstance(tune, str) else tune,
        report=_choose(splits, "data.report", report) if isinstance(report, str) else report,
        columns=Columns(
            defaults.texts, label if data.task == "classification" else None, defaults.joined
        ),
        classes=defaults.classes,
    )
    for role, other in (("train", "tune"), ("train", "report"), ("tune", "report")):
        split = getattr(plan, role)
        if split == getattr(plan, other) and isinstance(split, Split):
            raise BadInput(
                f"data.{role} and data.{other} are both {split.name}; choose different splits"
            )
    return plan


def _choose(splits: dict[str, Split], key: str, name: str) -> Split:
    if name in splits:
        return splits[name]
    hint = nearest(name, splits) or f"; there are {', '.join(sorted(splits))}"
    first = next(iter(splits.values()))
    # The place of a split that is not a file ends with the split's name.
    where = first.place.removesuffix(f": {first.name}")
    if len(splits) > 1 and where == first.place:  # a folder with a file for each split
        where = str(Path(where).parent)
    raise BadInput(f"{key} {name} is not a split of {where}{hint}")


# Public sets


def public_splits(name: str, language: str, data_dir: Path | None) -> dict[str, Split]:
    """Return the splits of a public data set from the user's data folder, else from the hub."""
    check_language(name, language)
    subfolder = f"xnli/{language}" if name == "xnli" else name
    folder = data_folder(data_dir)
    searched = "neither --data-dir nor FROSTLAB_DATA is given"
    if folder is not None:
        searched = f"{folder / subfolder} has no split file"
        if (folder / subfolder).is_dir() and (files := split_files(folder / subfolder)):
            return _splits(files)
    defaults = PUBLIC_SETS[name]
    try:
        return hub_splits(*hub_name(defaults, language))
    except BadInput as error:
        raise Unavailable(
            f"data.name {name} was not found: {searched}, and {error}; put "
            f"{subfolder}/SPLIT.{{{','.join(FORMATS)}}}[.gz] in a folder and name it with "
            "--data-dir or FROSTLAB_DATA, or pip install 'frostlab[data]' and connect to the "
            f"network (`frostlab data fetch {subfolder}` downloads about {defaults.megabytes:,} MB)"
        ) from error


def check_language(name: str, language: str) -> None:
    """Refuse a language that XNLI does not have."""
    if name == "xnli" and language not in LANGUAGES:
        hint = nearest(language, LANGUAGES) or f"; there are {', '.join(LANGUAGES)}"
        raise BadInput(f"data.language {language} is not a language of xnli{hint}")


def data_folder(data_dir: Path | None) -> Path | None:
    """Return the user's data folder: `data_dir`, or the one in FROSTLAB_DATA, or None."""
    folder = data_dir or (Path(env) if (env := os.environ.get("FROSTLAB_DATA")) else None)
    if folder is None:
        return None
    folder = folder.expanduser()
    if not folder.is_dir():
        raise BadInput(f"the data folder {folder} does not exist")
    return folder


def hub_name(defaults: SetDefaults, language: str) -> tuple[str, str | None, str | None]:
    """Return a public data set's name, configuration and revision on the hub."""
    name, config, revision = defaults.hub
    return name, language if config == "LANGUAGE" else config, revision


def hub_splits(name: str, config: str | None, revision: str | None) -> dict[str, Split]:
    """Return the splits of a data set on the hub, or raise BadInput with the reason."""
    datasets = require("datasets", "data", f"the hub's {name}")
    reason = None if Path(name).is_dir() else unreachable()
    if reason is not None:
        raise BadInput(reason)
    had_progress_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(name, config, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise BadInput(f"the hub's {name}: {first_line(error)}") from error
    finally:
        if had_progress_bars:
            datasets.enable_progress_bars()
    place = name if config is None else f"{name} ({config})"
    return {
        str(split): Split(
            name=str(split),
            place=f"{place}{_revision(rows)}: {split}",
            files=tuple(Path(file["filename"]) for file in rows.cache_files),
            hub=rows,
        )
        for split, rows in splits.items()
    }


def _revision(rows: Any) -> str:
    """Return " at revision COMMIT" if the paths in the cache name the hub's commit, else ""."""
    for file in rows.cache_files:
        if match := re.search(r"/([0-9a-f]{40})/", str(file["filename"])):
            return f" at revision {match[1]}"
    return ""


def unreachable() -> str | None:
    """Return why the hub cannot be reached; None if its host is found, or in offline mode."""
    offline = any(
        os.environ.get(name, "").lower() in _TRUE
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    )
    if offline:  # offline, the libraries use their cache or fail at once
        return None
    host = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return f"{host} cannot be found; HF_HUB_OFFLINE=1 uses earlier downloads"
    return None

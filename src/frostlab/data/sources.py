"""Where each set is found, and which of its splits trains, tunes and reports."""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

from frostlab.data.builtin import docstring_files
from frostlab.data.files import FORMATS, format_of, read_lines, read_pieces, split_files
from frostlab.data.registered import registered_files
from frostlab.errors import BadInput, nearest, require
from frostlab.recipe.data import Docstrings, Named, Own, Registered

Label = int | str
Text = Docstrings | Named | Own | Registered
_WHOLE = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Columns:
    """Which columns to read; `joined`: the rows are the lines of one document."""

    texts: tuple[str, ...]
    label: str | None
    joined: bool = False


class Row(NamedTuple):
    """One example, or a piece of a document that ends here or goes on."""

    line: int
    texts: tuple[str, ...]
    label: Label | None
    ends: bool


@dataclass(frozen=True)
class Part:
    """One split in one place."""

    split: str
    place: str  # for messages and records
    files: tuple[Path, ...]  # where the bytes are
    hub: Any = None  # a split of the `datasets` library, or None for a file

    def rows(self, columns: Columns) -> Iterator[Row]:
        """Yield what the columns say, checked."""
        if self.hub is None and format_of(self.files[0]) == "txt":
            yield from self._running(columns)
            return
        lines = read_lines(self.files[0]) if self.hub is None else self._hub_lines()
        line = 0
        for line, values in lines:
            yield _row(self.place, line, values, columns)
        if columns.joined and line:
            yield Row(line, ("",), None, ends=True)

    def _running(self, columns: Columns) -> Iterator[Row]:
        if columns.label is not None or len(columns.texts) > 1:
            lacks = "no labels" if columns.label is not None else "one text, not pairs"
            raise BadInput(f"{self.place}: .txt has {lacks}; use jsonl, csv, tsv or parquet")
        for text, ends in read_pieces(self.files[0]):
            yield Row(0, (text,), None, ends)

    def _hub_lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        number = 0
        for batch in self.hub.iter(batch_size=256):
            for values in zip(*batch.values(), strict=True):
                number += 1
                yield number, dict(zip(batch, values, strict=True))

    def stamp(self) -> list[list[str | int]]:
        """Tell one state of the files from another without reading them."""
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
        names = [str(key) for key in values]
        hint = nearest(name, names) or f"; there are {', '.join(names)}"
        raise BadInput(f"{place}:{line}: no column {name}{hint}") from None


def _text(place: str, line: int, values: Mapping[str, Any], name: str) -> str:
    value = _cell(place, line, values, name)
    if not isinstance(value, str):
        raise BadInput(f"{place}:{line}: column {name} holds {value!r:.40}, not text")
    return value


def _label(place: str, line: int, values: Mapping[str, Any], name: str) -> Label:
    value = _cell(place, line, values, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        value = value.strip()
        value = int(value) if _WHOLE.fullmatch(value) else value
    if value == -1:
        raise BadInput(f"{place}:{line}: label -1 means unlabelled; choose a split with labels")
    if isinstance(value, int) or (isinstance(value, str) and value):
        return int(value) if isinstance(value, bool) else value
    raise BadInput(f"{place}:{line}: label {value!r:.40} is neither a whole number nor a word")


CARVED = 0.05
LANGUAGES = (
    "ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh",
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A public set: its hub name, its columns, and the splits it is used with."""

    hub: tuple[str, str | None, str | None]  # name, config, revision
    tune: str | float = CARVED
    report: str | float = "test"
    published: str | None = None  # the reporting split of `splits: published`; None: `report`
    texts: tuple[str, ...] = ("text",)
    classes: int | None = None
    joined: bool = False  # rows are the lines of one text


KNOWN = {
    "sst2": Known(
        ("stanfordnlp/sst2", None, None), report="validation", texts=("sentence",), classes=2
    ),
    "mnli": Known(
        ("nyu-mll/glue", "mnli", None),
        report="validation_matched",
        texts=("premise", "hypothesis"),
        classes=3,
    ),
    "xnli": Known(
        ("facebook/xnli", "LANGUAGE", None),
        tune="validation",
        published="validation",
        texts=("premise", "hypothesis"),
        classes=3,
    ),
    "imdb": Known(("stanfordnlp/imdb", None, None), classes=2),
    "ag_news": Known(("fancyzhx/ag_news", None, None), classes=4),
    "tinystories": Known(("roneneldan/TinyStories", None, None), report="validation"),
    "openwebtext": Known(("Skylion007/openwebtext", None, None), report=CARVED),
    "wikitext2": Known(
        ("Salesforce/wikitext", "wikitext-2-v1", None), tune="validation", joined=True
    ),
    "wikitext103": Known(
        ("Salesforce/wikitext", "wikitext-103-raw-v1", None), tune="validation", joined=True
    ),
    "tinyshakespeare": Known(
        ("karpathy/tiny_shakespeare", None, "refs/convert/parquet"), report=CARVED, joined=True
    ),
}


@dataclass(frozen=True)
class Plan:
    """Who plays which role: a split, or a share carved from the training split."""

    train: Part
    tune: Part | float | None  # None: `splits: published` selects on the report
    report: Part | float
    columns: Columns
    classes: int | None  # None: as the training split has them


def plan(data: Text, data_dir: Path | None, cache: Path) -> Plan:
    """Find a recipe's text and give its splits their roles."""
    if isinstance(data, Docstrings):
        pairs = data.name == "docstrings-pairs"
        files = docstring_files(data.per_package, pairs=pairs, cache=cache)
        known = Known(
            ("", None, None), tune="validation", texts=("summary", "body") if pairs else ("text",)
        )
        return _roles(data, _parts(files, data.name), known, "label")
    if isinstance(data, Named):
        known = KNOWN[data.name]
        parts = named_parts(data.name, data.language, data_dir)
        if data.name == "xnli":
            training = named_parts("mnli", "en", data_dir)
            return _roles(data, parts, known, "label", training)
        return _roles(data, parts, known, "label")
    if isinstance(data, Registered):
        files = registered_files(data.name, data_dir, cache)
        tune, report = (role if role in files else CARVED for role in ("tune", "report"))
        known = Known(("", None, None), tune=tune, report=report)
        return _roles(data, _parts(files, data.name), known, "label")
    if data.task == "language" and len(data.text) > 1:
        raise BadInput(f"data.text names {len(data.text)} columns; data.task language reads one")
    return _own(data)


def named_parts(name: str, language: str, data_dir: Path | None) -> dict[str, Part]:
    """Return a public set's splits from the local folder, else from the hub."""
    if name == "xnli" and language not in LANGUAGES:
        hint = nearest(language, LANGUAGES) or f"; there are {', '.join(LANGUAGES)}"
        raise BadInput(f"data.language {language} is not one of xnli's{hint}")
    inside = f"xnli/{language}" if name == "xnli" else name
    given = data_dir or (Path(env) if (env := os.environ.get("FROSTLAB_DATA")) else None)
    looked = "no --data-dir and no FROSTLAB_DATA"
    if given is not None:
        given = given.expanduser()
        if not given.is_dir():
            raise BadInput(f"the data folder {given} does not exist")
        looked = f"{given / inside} has no split file"
        if (given / inside).is_dir() and (files := split_files(given / inside)):
            return _parts(files)
    hub, config, revision = KNOWN[name].hub
    try:
        return hub_parts(hub, language if config == "LANGUAGE" else config, revision)
    except BadInput as error:
        raise BadInput(
            f"data.name {name} was not found: {looked}, and {error}; put "
            f"{inside}/SPLIT.{{{','.join(FORMATS)}}}[.gz] in a folder and name it with --data-dir "
            "or FROSTLAB_DATA, or pip install 'frostlab[data]' and connect to the network"
        ) from error


def _parts(files: dict[str, Path], shown: str | None = None) -> dict[str, Part]:
    return {
        split: Part(split, str(path) if shown is None else f"{shown}: {split}", (path,))
        for split, path in files.items()
    }


def _own(data: Own) -> Plan:
    path = Path(data.path).expanduser()
    if path.is_dir():
        files = split_files(path)
        if not files:
            raise BadInput(f"data.path {path} has no SPLIT.{{{','.join(FORMATS)}}}[.gz] in it")
        report = next((name for name in ("test", "validation") if name in files), CARVED)
        spare = "validation" in files and report != "validation" and data.report != "validation"
        known = Known(
            ("", None, None),
            tune="validation" if spare else CARVED,
            report=report,
            texts=data.text,
        )
        return _roles(data, _parts(files), known, data.label)
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise BadInput(f"data.path {path} does not exist{nearest(path.name, beside)}")
    if format_of(path) is None:
        raise BadInput(f"data.path {path} is not one of .{', .'.join(FORMATS)}, plain or .gz")
    known = Known(("", None, None), report=CARVED, texts=data.text)
    return _roles(data, {"train": Part("train", str(path), (path,))}, known, data.label)


def _roles(
    data: Text,
    parts: dict[str, Part],
    known: Known,
    label: str,
    training: dict[str, Part] | None = None,
) -> Plan:
    columns = Columns(known.texts, label if data.task == "classification" else None, known.joined)
    train = _part(training or parts, "data.train", data.train)
    published = data.splits == "published"
    report = data.report or (published and known.published) or known.report
    tune = None if published else known.tune if data.tune is None else data.tune
    if published and isinstance(report, float):
        raise BadInput(f"splits: published, but {train.place} has no reporting split; use honest")
    found = Plan(
        train=train,
        tune=_part(parts, "data.tune", tune) if isinstance(tune, str) else tune,
        report=_part(parts, "data.report", report) if isinstance(report, str) else report,
        columns=columns,
        classes=known.classes,
    )
    for one, other in (("train", "tune"), ("train", "report"), ("tune", "report")):
        if (part := getattr(found, one)) == getattr(found, other) and isinstance(part, Part):
            raise BadInput(f"data.{one} and data.{other} are both {part.split}; choose two")
    return found


def _part(parts: dict[str, Part], key: str, split: str) -> Part:
    if split in parts:
        return parts[split]
    hint = nearest(split, parts) or f"; there are {', '.join(sorted(parts))}"
    first = next(iter(parts.values()))
    where = first.place.removesuffix(f": {first.split}")  # as the hub's are called
    if len(parts) > 1 and where == first.place:  # a folder with a file for each split
        where = str(Path(where).parent)
    raise BadInput(f"{key} {split} is not a split of {where}{hint}")


_ON = ("1", "true", "yes", "on")


def unreachable() -> str | None:
    """Return why the hub cannot be asked, None when it can be or its own cache must answer."""
    offline = any(
        os.environ.get(name, "").lower() in _ON
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    )
    if offline:  # the libraries then answer from their cache, or fail without a try
        return None
    host = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return f"{host} cannot be found; HF_HUB_OFFLINE=1 uses what was downloaded before"
    return None


def hub_parts(name: str, config: str | None, revision: str | None) -> dict[str, Part]:
    """Return the splits of a hub set, or raise BadInput saying why there are none."""
    datasets = require("datasets", "data", f"the hub's {name}")
    reason = None if Path(name).is_dir() else unreachable()
    if reason is not None:
        raise BadInput(reason)
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(name, config, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(f"the hub's {name}: {reason}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    place = name if config is None else f"{name} ({config})"
    return {
        str(split): Part(
            split=str(split),
            place=f"{place}: {split}",
            files=tuple(Path(file["filename"]) for file in rows.cache_files),
            hub=rows,
        )
        for split, rows in splits.items()
    }

"""Where each set is found, and which of its splits trains, tunes and reports."""

import os
from dataclasses import dataclass
from pathlib import Path

from frostlab.data.docstrings import docstring_files
from frostlab.data.files import FORMATS, format_of, split_files
from frostlab.data.hub import hub_parts
from frostlab.data.rows import Columns, Part
from frostlab.errors import BadInput, nearest
from frostlab.recipe.data import Docstrings, Named, Own

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


def plan(data: Docstrings | Named | Own, data_dir: Path | None, cache: Path) -> Plan:
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
    data: Docstrings | Named | Own,
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

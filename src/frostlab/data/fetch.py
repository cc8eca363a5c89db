"""Data sets, tokenizers and weights that recipes need: find them on this machine, or fetch them.

A public data set is looked for in the user's data folder and then in the cache of the library
`datasets`; a tokenizer or weights, in the folder of that name and then in the cache of the Hugging
Face hub. `fetch` downloads into these caches, from which later runs read.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from frostlab.data.eeg.readers import find_folder
from frostlab.data.files import format_of, named_path, read_lines, split_files
from frostlab.data.sources import (
    PUBLIC_SETS,
    check_language,
    data_folder,
    hub_name,
    hub_splits,
    unreachable,
)
from frostlab.data.tokenizers import load_transformers_tokenizer, tokenizer_settings
from frostlab.errors import BadInput, first_line, require
from frostlab.recipe.data import Named, Own, PretrainedTokenizer, RecordedEEG
from frostlab.recipe.model import PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.text import size_text

Kind = Literal["data", "tokenizer", "weights"]
# Files of a model on the hub, except pickled weights and other libraries' formats.
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
_EXCERPT = 4  # a set with this many times fewer bytes than the public one is an excerpt of it
_COMMIT = re.compile(r"[0-9a-f]{40}")  # the name of a data set's innermost folder in the cache


@dataclass(frozen=True)
class Need:
    """Something that recipes need: a data set, a tokenizer or pretrained weights."""

    kind: Kind
    name: str  # as in a recipe; for XNLI with its language, such as xnli/en
    recipes: tuple[str, ...]  # the recipes that need it
    place: str | None = None  # where it was found; None: nowhere
    size: int | None = None  # bytes on disk if it is here, else to download; None: not known
    # approximate bytes of the whole public set; only for a set in the data folder whose examples
    # are not counted
    whole: int | None = None
    # split → number of examples here, and in the public set; None: not counted
    rows: dict[str, tuple[int, int]] | None = None
    problem: str | None = None  # why it cannot be used as it is; None: it can

    @property
    def state(self) -> Literal["here", "in part", "missing"]:
        """Whether it is on this machine, is there only in part, or is missing or unusable."""
        if self.place is None or self.problem is not None:
            return "missing"
        incomplete = any(here < whole for here, whole in (self.rows or {}).values())
        return "in part" if incomplete or self.is_excerpt else "here"

    @property
    def is_excerpt(self) -> bool:
        """Whether its files are far smaller than the public set's; False if rows are counted."""
        if self.size is None or self.whole is None:
            return False
        return _EXCERPT * self.size < self.whole

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"state": self.state}


def needs_of(recipes: dict[str, Recipe], data_dir: Path | None = None) -> list[Need]:
    """Return the data, tokenizers and weights that recipes need; nothing is downloaded.

    Docstrings, synthetic, simulated and registered data come from code on this machine, so they are
    not listed. If a public set is in the data folder and its number of examples is known, the
    examples there are counted, which reads the files.
    """
    needed: dict[tuple[Kind, str], list[str]] = {}
    sources: dict[tuple[Kind, str], Recipe] = {}
    for name, recipe in recipes.items():
        for key in _keys(recipe):
            needed.setdefault(key, []).append(name)
            sources.setdefault(key, recipe)
    needs = []
    for (kind, name), users in needed.items():
        need = Need(kind, name, tuple(users))
        if kind == "data":
            needs.append(_find_data(need, sources[kind, name], data_dir))
        else:
            needs.append(_find_model(need))
    return needs


def _keys(recipe: Recipe) -> Iterator[tuple[Kind, str]]:
    """Yield the kind and name of the data, tokenizer and weights that a recipe needs."""
    data, model = recipe.data, recipe.model
    if isinstance(data, Named):
        yield "data", f"xnli/{data.language}" if data.name == "xnli" else data.name
        if data.name == "xnli":  # its models train on MNLI
            yield "data", "mnli"
    elif isinstance(data, Own | RecordedEEG):
        yield "data", data.path
    tokenizer = tokenizer_settings(recipe) if data.form == "text" else None
    if isinstance(tokenizer, PretrainedTokenizer):
        yield "tokenizer", tokenizer.name
    if isinstance(model, PretrainedModel) and model.weights:
        yield "weights", model.name


# Data


def _find_data(need: Need, recipe: Recipe, data_dir: Path | None) -> Need:
    data = recipe.data
    if isinstance(data, Named):
        return _find_public(need, data_dir)
    try:
        if isinstance(data, RecordedEEG):
            path = find_folder(data.path, data_dir)
        else:
            path = named_path(need.name, "data.path")
            if not path.exists():
                raise BadInput(f"{path} does not exist")
    except BadInput as error:
        return replace(need, problem=str(error))
    return replace(need, place=str(path), size=_bytes_in([path]))


def _find_public(need: Need, data_dir: Path | None) -> Need:
    """Look for a public data set in the data folder, then in the cache of `datasets`."""
    name, _, language = need.name.partition("/")
    check_language(name, language)
    facts = PUBLIC_SETS[name]
    folder = data_folder(data_dir)
    if folder is not None and (folder / need.name).is_dir():
        files = split_files(folder / need.name)
        if files:
            rows = None
            if facts.rows:
                rows = {
                    split: (_count_rows(files[split]) if split in files else 0, whole)
                    for split, whole in facts.rows.items()
                }
            size, place = _bytes_in(files.values()), str(folder / need.name)
            whole = None if facts.rows else facts.megabytes * 10**6
            return replace(need, place=place, size=size, whole=whole, rows=rows)
    hub, config, _ = hub_name(facts, language)
    cached = _cached_set(hub, config)
    if cached is not None:
        return replace(need, place=str(cached), size=_bytes_in([cached]))
    return replace(need, size=facts.megabytes * 10**6)


def _count_rows(path: Path) -> int:
    return 0 if format_of(path) == "txt" else sum(1 for _ in read_lines(path))


def _cached_set(name: str, config: str | None) -> Path | None:
    """Return the folder of a data set in the cache of `datasets`; None if it is not there.

    The cache is laid out as OWNER___NAME/CONFIG/VERSION/COMMIT; the folder of an unfinished
    download has another name.
    """
    try:
        root = Path(require("datasets", "data", "the hub's cache").config.HF_DATASETS_CACHE)
    except BadInput:  # nothing can have been downloaded
        return None
    places = root.glob(f"{name.replace('/', '___')}/{config or '*'}/*/*/dataset_info.json")
    folders = [path.parent for path in places if _COMMIT.fullmatch(path.parent.name)]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


# Tokenizers and weights


def _find_model(need: Need) -> Need:
    """Look for a tokenizer or weights in a folder, then in the hub's cache."""
    folder = named_path(need.name, "model.name" if need.kind == "weights" else "tokenizer.name")
    if not folder.is_dir():
        cached = _cached_model(need.name)
        if cached is None:
            return replace(need, size=_SIZES.get((need.kind, need.name)))
        folder = cached
    files = _files_of(need.kind, folder)
    if not files:
        what = "tokenizer" if need.kind == "tokenizer" else "model.safetensors"
        return replace(need, place=str(folder), problem=f"{folder} has no {what}")
    return replace(need, place=str(folder), size=_bytes_in(files))


# Approximate bytes to download of the models that the shipped recipes name.
_SIZES: dict[tuple[str, str], int] = {
    ("weights", "bert-base-uncased"): 440 * 10**6,
    ("tokenizer", "bert-base-uncased"): 10**6,
    ("tokenizer", "gpt2"): 3 * 10**6,
}


def _cached_model(name: str) -> Path | None:
    """Return a model's folder in the hub's cache; None if it has not been downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        try:
            path = try_to_load_from_cache(name, file)
        except HFValidationError:  # not a name on the hub
            return None
        if isinstance(path, str):
            return Path(path).parent
    return None


def _files_of(kind: Kind, folder: Path) -> list[Path]:
    patterns = ("*.safetensors",) if kind == "weights" else ("*token*", "vocab*", "merges.txt")
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def _bytes_in(paths: Iterable[Path]) -> int:
    """Return the size of files, and of the files in folders."""
    files = (
        file
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.is_file()
    )
    return sum(file.stat().st_size for file in files)


# Fetching


def fetch(need: Need) -> None:
    """Download a missing data set, tokenizer or model into the Hugging Face cache.

    Raises:
        BadInput: the data are the user's own, the name is a path on this machine or not on the hub,
            the hub cannot be reached, or the disk is too full.
    """
    if need.kind == "data" and need.problem is not None:
        raise BadInput(f"{need.name} is your own data, which no hub has: {need.problem}")
    if need.kind != "data" and os.path.exists(named_path(need.name, "model.name")):
        problem = "" if need.problem is None else f"{need.problem}; "
        raise BadInput(f"{problem}{need.name} is a path on this machine, so it is not downloaded")
    cache = _cache_of(need.kind)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if need.size is not None and need.size > free:
        raise BadInput(
            f"{need.name} takes {size_text(need.size)}, and {cache} has {size_text(free)} "
            "free; set HF_HOME to a folder with more space"
        )
    if need.kind == "data":
        name, _, language = need.name.partition("/")
        hub_splits(*hub_name(PUBLIC_SETS[name], language))
    elif need.kind == "tokenizer":
        load_transformers_tokenizer(need.name)
    else:
        _fetch_weights(need.name)


def _fetch_weights(name: str) -> None:
    from huggingface_hub import snapshot_download

    reason = unreachable()
    if reason is None:
        try:
            snapshot_download(name, allow_patterns=list(_MODEL_FILES))
            return
        except Exception as error:  # the network and the hub raise many types of errors
            reason = first_line(error)
    raise BadInput(f"model.name {name} cannot be fetched: {reason:.300}")


def _cache_of(kind: Kind) -> Path:
    from huggingface_hub import constants

    if kind != "data":
        return Path(constants.HF_HUB_CACHE)
    return Path(require("datasets", "data", "fetching data").config.HF_DATASETS_CACHE)

"""Preparation of a recipe's data, once: text and synthetic tasks become token arrays in a cache.

EEG is loaded by data.eeg. A split has a role: train, tune (to select checkpoints) or report (for
the final scores); with `splits: published`, report selects checkpoints too, and there is no tune.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from frostlab.data.builtin import (
    DRAWN_AT_ONCE,
    SYNTHETIC_SEEDS,
    reference_scores,
    write_synthetic,
)
from frostlab.data.eeg.load import load_signals
from frostlab.data.eeg.recordings import MOST_VALUES, Signals
from frostlab.data.encode import Encoded, encode_labelled, encode_running
from frostlab.data.files import format_of
from frostlab.data.sources import Split, SplitPlan, TextData, plan_splits
from frostlab.data.split_record import Label, SplitRecord
from frostlab.data.splits import (
    Numbers,
    Portion,
    RowCounts,
    Survey,
    class_numbers,
    classes_of,
    count_rows,
    divide,
    limit_rows,
    single_labels,
    survey,
)
from frostlab.data.tokenizers import (
    Encoder,
    Pretrained,
    load_pretrained,
    load_trained,
    sample_texts,
    tokenizer_settings,
    train_tokenizer,
)
from frostlab.data.tokens import (
    Prepared,
    Tokens,
    TokenWriter,
    length_record,
    load_facts,
    load_tokens,
    save_facts,
)
from frostlab.errors import BadInput, FrostlabError
from frostlab.recipe.data import (
    BPE,
    DataSettings,
    Docstrings,
    EEGData,
    Generated,
    PretrainedTokenizer,
    SimulatedEEG,
    Synthetic,
    Words,
)
from frostlab.recipe.recipe import Recipe
from frostlab.storage import FORMAT, build_once, cache_folder, digest_of
from frostlab.text import joined, plain

# Warnings that are shown with the scores.
CAUTION = "checkpoint selected on the reporting split"
LEAK = "vocabulary made with the words of {}, too"
# the largest product of the number of examples drawn at once and data.symbols or data.length
MOST_DRAWN = 1 << 26
VERSION = 2  # version of the files that describe prepared data; raise it when they change
SHOWN_LABELS = 5  # labels that a note lists
MOST_PLACES = 10_000  # the most files and folders that are searched for data with a given digest

PreparedData = Prepared | Signals  # a recipe's data, ready to be batched: tokens or EEG


def as_token_data(prepared: PreparedData) -> Prepared:
    """Narrow the type to `Prepared`, in code that runs only for recipes with token data."""
    assert isinstance(prepared, Prepared)
    return prepared


@dataclass(frozen=True)
class _SyntheticFacts:
    """Cached metadata of synthetic data."""

    tokens: dict[str, str]  # role → digest of its tokens


@dataclass(frozen=True)
class _TextFacts:
    """Cached metadata of prepared text."""

    vocabulary: int  # number of token ids
    pad: int  # id of the padding token
    # role → its record, without source and files, so that a copy of the files uses the same cache
    splits: dict[str, SplitRecord]


def prepare(
    recipe: Recipe, data_dir: Path | None = None, cache: Path | None = None
) -> PreparedData:
    """Return a recipe's data, from the cache if they were prepared before.

    The result's `caution` is a warning to show with every score. It names a reduced scale of the
    recipe, such as tiny, stand-ins for missing data or weights, and what the data themselves need.
    """
    _check_sizes(recipe.data)
    cache = cache_folder(cache)
    prepared: PreparedData
    if isinstance(recipe.data, Synthetic):
        prepared = _prepare_synthetic(recipe.data, cache)
    elif isinstance(recipe.data, EEGData):
        prepared = load_signals(recipe.data, data_dir, cache)
    else:
        settings = tokenizer_settings(recipe)
        prepared = _TextPreparation(recipe.data, settings, data_dir, cache).prepared()
    return replace(prepared, caution=joined([recipe.caution, prepared.caution]))


def data_digest(recipe: Recipe, data_dir: Path | None = None, cache: Path | None = None) -> str:
    """Return the digest of a recipe's prepared data; text is read, but not encoded."""
    if isinstance(recipe.data, Generated | EEGData):
        return prepare(recipe, data_dir, cache).digest
    _check_sizes(recipe.data)
    settings = tokenizer_settings(recipe)
    return _TextPreparation(recipe.data, settings, data_dir, cache_folder(cache)).digest


def find_path(recipe: Recipe, digest: str, data_dir: Path | None) -> str | None:
    """Return a path of data with this digest, which the runs of a comparison have recorded.

    Return None if the recipe's data have no path. The recipe's own path is tried first, then the
    files and folders in the data folder, beginning with those that have the own path's name.
    """
    own = getattr(recipe.data, "path", None)
    if own is None:
        if (here := data_digest(recipe, data_dir)) != digest:
            raise BadInput(
                f"data.name {recipe.data.name}: the data here have the digest {here[:16]}, not "
                f"{digest[:16]} as in the comparison's runs"
            )
        return None
    parent = data_dir or (Path(env) if (env := os.environ.get("FROSTLAB_DATA")) else None)
    for path in _places(own, parent):
        data = recipe.data.model_copy(update={"path": path})
        with suppress(FrostlabError):  # a file of another kind
            if data_digest(recipe.model_copy(update={"data": data}), data_dir) == digest:
                return path
    searched = f"not at {own}" if parent is None else f"neither at {own} nor in {parent}"
    raise BadInput(
        f"data.path: the data of the comparison's runs (digest {digest[:16]}) are {searched}; "
        "name a folder that holds them with --data-dir"
    )


def _places(own: str, parent: Path | None) -> Iterator[str]:
    """Yield the recipe's own path, then places in `parent`, those with the same name first."""
    yield own
    if parent is None:
        return
    paths: list[Path] = []
    for place, folders, files in os.walk(parent.expanduser()):
        folders.sort()
        paths += [Path(place), *(Path(place, file) for file in sorted(files))]
        if len(paths) > MOST_PLACES:
            raise BadInput(
                f"{parent} holds more than {MOST_PLACES:,} files and folders; name a smaller one"
            )
    paths.sort(key=lambda path: path.name != Path(own).name)
    yield from (str(path) for path in paths if path.is_dir() or format_of(path) is not None)


def _check_sizes(data: DataSettings) -> None:
    """Refuse settings whose data would not fit into memory while they are generated."""
    if isinstance(data, Generated):
        drawn = min(max(data.examples, 256), DRAWN_AT_ONCE)
        for key in ("symbols", "length"):
            if drawn * getattr(data, key) > MOST_DRAWN:
                raise BadInput(
                    f"data.{key} {getattr(data, key)} is too large with data.examples "
                    f"{data.examples}; the most is {MOST_DRAWN // drawn:,}"
                )
    # simulated EEG has 64 channels
    if isinstance(data, SimulatedEEG) and data.seconds * data.rate * 64 > MOST_VALUES:
        raise BadInput(
            f"data.seconds {data.seconds:g} is too large at {data.rate:g} Hz; the most is "
            f"{MOST_VALUES / 64 / data.rate:.0f}"
        )


def _prepare_synthetic(data: Synthetic, cache: Path) -> Prepared:
    digest = digest_of([FORMAT, data.model_dump(mode="json")])

    def build(folder: Path) -> None:
        save_facts(folder, _SyntheticFacts(write_synthetic(data, folder)))

    folder = build_once(cache / "prepared" / digest[:32], build)
    tokens = load_facts(_SyntheticFacts, folder).tokens
    roles = ("train", "tune", "report")
    labels = None if data.task == "language" else tuple(range(data.symbols))
    splits = {role: load_tokens(folder, role, tokens[role]) for role in roles}
    return Prepared(
        task=data.task,
        classes=len(labels or ()),
        vocabulary=data.vocabulary,
        pad=data.vocabulary - 1,
        splits=splits,
        origin={role: f"{data.name}, drawn from seed {SYNTHETIC_SEEDS[role]}" for role in roles},
        caution=None,
        known=reference_scores(data),
        digest=digest,
        tokenizer=None,
        labels=labels,
        described={
            role: SplitRecord(
                source=data.name,
                examples=len(split),
                digest=split.digest,
                classes=_class_counts(split, len(labels or ())),
                lengths=length_record(split.lengths),
                tokens=int(split.lengths.sum()),
                seed=SYNTHETIC_SEEDS[role],
            )
            for role, split in splits.items()
        },
    )


def _class_counts(split: Tokens, classes: int) -> list[int] | None:
    """Return the number of examples of each class; None without labels."""
    labels = split.labels
    return None if labels is None else np.bincount(labels, minlength=classes).tolist()


class _TextPreparation:
    """The steps from text to token arrays: survey, divide into roles, train a tokenizer, encode.

    A survey holds the hash, size and label of each row. Its digest is part of the cache key.
    """

    def __init__(
        self,
        data: TextData,
        tokenizer: BPE | Words | PretrainedTokenizer,
        data_dir: Path | None,
        cache: Path,
    ) -> None:
        self.data, self.tokenizer, self.cache = data, tokenizer, cache
        self.plan: SplitPlan = plan_splits(data, data_dir, cache)
        roles = {"train": self.plan.train, "tune": self.plan.tune, "report": self.plan.report}
        self.splits = {role: split for role, split in roles.items() if isinstance(split, Split)}
        self.stamps = {role: split.stamp() for role, split in self.splits.items()}
        self.surveys: dict[str, Survey] = {
            role: survey(split, self.plan.columns, cache) for role, split in self.splits.items()
        }
        self.numbers: dict[str, Numbers] = {}  # role → class of each row; empty for language
        self.labels: tuple[Label, ...] | None = None
        if data.task == "classification":
            labels = classes_of(self.plan.train, self.surveys["train"], self.plan.classes)
            self.labels = labels
            self.numbers = {
                role: class_numbers(split, self.surveys[role], labels)
                for role, split in self.splits.items()
            }
        self.pretrained: Pretrained | None = None
        if isinstance(tokenizer, PretrainedTokenizer):
            self.pretrained = load_pretrained(tokenizer.name)

    @property
    def classes(self) -> int:
        """Number of classes; 0 for language."""
        return len(self.labels or ())

    @property
    def digest(self) -> str:
        """A digest of the texts, their division and the settings that encode them."""
        tokenizer = (
            self.pretrained.digest
            if self.pretrained
            else digest_of(self.tokenizer.model_dump(mode="json"))
        )
        sizes = [self.data.length, self.data.limit, self.data.evaluation_limit]
        sizes += [] if self.data.stride is None else [self.data.stride]
        return digest_of([self._division(), tokenizer, sizes])

    def prepared(self) -> Prepared:
        """Return the token arrays from the cache; build them first if necessary."""
        data, pretrained, digest = self.data, self.pretrained, self.digest
        folder = build_once(
            self.cache / "prepared" / digest_of([digest, VERSION])[:32],
            lambda folder: self._build(folder, pretrained),
        )
        facts = load_facts(_TextFacts, folder)
        splits = {role: load_tokens(folder, role, s.digest) for role, s in facts.splits.items()}
        balanced = isinstance(data, Docstrings) and self.classes  # whether classes have equal size
        return Prepared(
            task=data.task,
            classes=self.classes,
            vocabulary=facts.vocabulary,
            pad=facts.pad,
            splits=splits,
            origin={role: self._origin(role, split.note) for role, split in facts.splits.items()},
            caution=self._caution(),
            known={"chance": 1 / self.classes} if balanced else {},
            digest=digest,
            tokenizer=folder / ("tokenizer" if pretrained else "tokenizer.json"),
            labels=self.labels,
            described={
                role: replace(
                    split,
                    source=self.splits.get(role, self.plan.train).source,
                    files=list(self.surveys.get(role, self.surveys["train"]).files),
                )
                for role, split in facts.splits.items()
            },
            notes=tuple(self._notes(facts.splits)),
        )

    def _notes(self, splits: dict[str, SplitRecord]) -> Iterator[str]:
        """Yield remarks about possible mistakes in the data, such as unused files."""
        if self.plan.unused:
            place = Path(self.plan.train.place).parent
            yield f"files of {place} that are not used: {', '.join(map(plain, self.plan.unused))}"
        for role, split in splits.items():
            if split.empty:
                yield f"{split.empty:,} rows of {role} have an empty or blank text; they are kept"
            if split.contradictions:
                yield (
                    f"{split.contradictions:,} rows of {role} have the text of another row of "
                    f"{role}, but not its label; they are kept"
                )
        if lines := single_labels(self.surveys["train"]):
            some = [f"{plain(str(name)[:40])} (line {line})" for name, line in lines[:SHOWN_LABELS]]
            more = len(lines) - len(some)
            listed = ", ".join(some) + f" and {more:,} more" * (more > 0)
            yield f"labels that occur in only one row of {self.plan.train.place}: {listed}"
        if self.data.splits == "published" and "report" in self.surveys:
            train, report = (self.surveys[role].keys for role in ("train", "report"))
            if shared := int(np.isin(train, report, kind="sort").sum()):
                yield (
                    f"{shared:,} rows of train have a text that is also in report; data.splits "
                    "published keeps them"
                )

    def _caution(self) -> str | None:
        """Return the warning to show with every score, if there is one."""
        warnings = [CAUTION] if self.data.splits == "published" else []
        if isinstance(self.tokenizer, Words) and self.tokenizer.also:
            warnings.append(LEAK.format(" and ".join(self.tokenizer.also)))
        return " and ".join(warnings) or None

    def _division(self) -> list[Any]:
        """Return all values that decide the role of each text, as a part of cache keys."""
        roles = (self.plan.train, self.plan.tune, self.plan.report)
        shares = [role if not isinstance(role, Split) else "split" for role in roles]
        texts = {role: rows.digest for role, rows in self.surveys.items()}
        return [FORMAT, self.data.task, self.data.splits, self.classes, shares, texts]

    def _origin(self, role: str, note: str) -> str:
        place = self.splits.get(role, self.plan.train).place
        return f"{place}: {note}" if note else place

    def _build(self, folder: Path, pretrained: Pretrained | None) -> None:
        """Write the tokenizer, the token arrays and their metadata to a folder."""
        portions = divide(self.plan, self.surveys, self.numbers.get("train"))
        encoder: Encoder
        if pretrained is not None:
            encoder = pretrained.encoder
            pretrained.tokenizer.save_pretrained(folder / "tokenizer")
        else:
            path = self._train_tokenizer(portions)
            encoder = load_trained(path)
            shutil.copyfile(path, folder / "tokenizer.json")
        splits = {role: self._encode(p, encoder, folder, role) for role, p in portions.items()}
        for role, split in self.splits.items():
            if split.stamp() != self.stamps[role]:
                raise BadInput(f"{split.place} changed while it was read; run the command again")
        save_facts(folder, _TextFacts(encoder.vocabulary, encoder.pad, splits))

    def _train_tokenizer(self, portions: dict[str, Portion]) -> Path:
        """Return the file of the trained tokenizer, from the cache if it was trained before."""
        settings = self.tokenizer
        assert not isinstance(settings, PretrainedTokenizer)
        also = settings.also if isinstance(settings, Words) else ()
        sources = [portions[role] for role in ("train", *also)]
        name = digest_of([self._division(), settings.model_dump(mode="json")])[:32]

        def build(folder: Path) -> None:
            texts = chain.from_iterable(map(self._texts, sources))
            size = sum(portion.size for portion in sources)
            train_tokenizer(settings, sample_texts(texts, size), folder)

        return build_once(self.cache / "tokenizers" / name, build) / "tokenizer.json"

    def _texts(self, portion: Portion) -> Iterator[str]:
        if self.data.task == "language":
            yield from (text for text, _ in portion.pieces(self.plan.columns))
            return
        for number, row in enumerate(portion.split.rows(self.plan.columns)):
            if portion.taken[number]:
                yield from row.texts

    def _encode(self, portion: Portion, encoder: Encoder, folder: Path, role: str) -> SplitRecord:
        """Write the token arrays of one role and return their description."""
        data, columns = self.data, self.plan.columns
        limit_key = "limit" if role == "train" else "evaluation_limit"
        limit = getattr(data, limit_key)
        if data.task == "language":
            stride = data.stride or data.length
            writer = TokenWriter(folder, role, encoder.vocabulary)
            encoded = encode_running(portion, columns, encoder, data.length, stride, limit, writer)
            note = f"the first {limit:,} examples" if encoded.limited else ""
            note = ", ".join(text for text in (portion.note, note) if text)
            return _describe(replace(portion, note=note), None, None, encoded)
        special = encoder.special_tokens(pairs=len(columns.texts) == 2)
        if data.length <= special:
            raise BadInput(
                f"data.length {data.length} leaves no room for text after the tokenizer's "
                f"{special} special tokens; set data.length to at least {special + 1}"
            )
        numbers = self.numbers.get(role, self.numbers["train"])
        rows = limit_rows(portion, numbers, limit)
        beyond = int(portion.taken.sum()) - len(rows)
        if beyond:
            reason = f"beyond data.{limit_key} {limit}"
            portion = replace(portion, dropped={**portion.dropped, reason: beyond})
        writer = TokenWriter(folder, role, encoder.vocabulary)
        encoded = encode_labelled(portion, rows, numbers, columns, encoder, data.length, writer)
        classes = np.bincount(numbers[rows], minlength=self.classes).tolist()
        return _describe(portion, (rows, numbers), classes, encoded)


def _describe(
    portion: Portion,
    labelled: tuple[Numbers, Numbers] | None,
    classes: list[int] | None,
    encoded: Encoded,
) -> SplitRecord:
    """Describe an encoded portion.

    `labelled` holds the rows that became examples, and the class of each row of the source; it is
    None for running text.
    """
    whole = portion.characters is None
    rows = np.flatnonzero(portion.taken) if labelled is None else labelled[0]
    numbers = None if labelled is None else labelled[1]
    # A portion that is not whole rows but a range of characters holds parts of documents, so its
    # empty and repeated texts are not counted.
    counts = count_rows(portion.survey, rows, numbers) if whole else RowCounts()
    other = sum(portion.carved.values()) + sum(portion.dropped.values())
    return SplitRecord(
        source="",
        examples=len(encoded.lengths),
        digest=encoded.digest,
        rows=len(rows) + other,
        rows_digest=portion.survey.digest,
        carved_from=portion.carved_from,
        carved=dict(portion.carved),
        dropped=dict(portion.dropped),
        note=portion.note,
        classes=classes,
        lengths=length_record(encoded.lengths, encoded.cut),
        tokens=encoded.tokens,
        characters=int(portion.survey.sizes[rows].sum()) if whole else portion.size,
        empty=counts.empty,
        duplicates=counts.duplicates,
        contradictions=counts.contradictions,
    )

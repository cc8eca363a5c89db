"""A recipe's data, from text to mapped token arrays, each made once."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from frostlab.data.builtin import (
    SYNTHETIC_SEEDS,
    known_answer,
    synthetic_vocabulary,
    write_synthetic,
)
from frostlab.data.eeg.load import load_signals
from frostlab.data.eeg.recordings import Material
from frostlab.data.sources import Columns, Part, Plan, Text, plan
from frostlab.data.splits import Portion, Survey, class_numbers, classes_of, divide, limited, survey
from frostlab.data.tokenizers import (
    Coder,
    Pretrained,
    definition,
    load_pretrained,
    load_trained,
    sampled,
    train,
)
from frostlab.data.tokens import Prepared, Writer, flat, load_facts, load_tokens, save_facts
from frostlab.errors import BadInput
from frostlab.recipe.data import (
    BPE,
    Docstrings,
    EEGData,
    PretrainedTokenizer,
    Synthetic,
    Words,
)
from frostlab.recipe.recipe import Recipe
from frostlab.storage import FORMAT, build_once, cache_folder, digest_of

CAUTION = "selected on the reporting split"
LEAK = "made with a vocabulary that knows the words of {}"


def prepare(recipe: Recipe, data_dir: Path | None = None, cache: Path | None = None) -> Material:
    """Return the data of a recipe, prepared now or found as it was prepared before."""
    cache = cache_folder(cache)
    if isinstance(recipe.data, Synthetic):
        return _synthetic(recipe.data, cache)
    if isinstance(recipe.data, EEGData):
        return load_signals(recipe.data, data_dir, cache)
    return _Work(recipe.data, definition(recipe), data_dir, cache).prepared()


def _synthetic(data: Synthetic, cache: Path) -> Prepared:
    digest = digest_of([FORMAT, data.model_dump(mode="json")])

    def build(folder: Path) -> None:
        save_facts(folder, {"tokens": write_synthetic(data, folder)})

    folder = build_once(cache / "prepared" / digest[:32], build)
    tokens: dict[str, str] = load_facts(folder)["tokens"]
    roles = ("train", "tune", "report")
    return Prepared(
        task=data.task,
        classes=0 if data.task == "language" else data.symbols,
        vocabulary=synthetic_vocabulary(data),
        pad=synthetic_vocabulary(data) - 1,
        splits={role: load_tokens(folder, role, tokens[role]) for role in roles},
        origin={role: f"{data.name}, drawn from seed {SYNTHETIC_SEEDS[role]}" for role in roles},
        caution=None,
        known=known_answer(data),
        digest=digest,
        tokenizer=None,
    )


class _Work:
    """The steps from a recipe to its arrays, with what they share."""

    def __init__(
        self,
        data: Text,
        wanted: BPE | Words | PretrainedTokenizer,
        data_dir: Path | None,
        cache: Path,
    ) -> None:
        self.data, self.wanted, self.cache = data, wanted, cache
        self.plan: Plan = plan(data, data_dir, cache)
        parts = {"train": self.plan.train, "tune": self.plan.tune, "report": self.plan.report}
        self.parts = {role: part for role, part in parts.items() if isinstance(part, Part)}
        self.stamps = {role: part.stamp() for role, part in self.parts.items()}
        self.surveys: dict[str, Survey] = {
            role: survey(part, self.plan.columns, cache) for role, part in self.parts.items()
        }
        self.numbers: dict[str, npt.NDArray[np.int64]] = {}
        self.classes = 0
        if data.task == "classification":
            names = classes_of(self.plan.train, self.surveys["train"], self.plan.classes)
            self.classes = len(names)
            self.numbers = {
                role: class_numbers(part, self.surveys[role], names)
                for role, part in self.parts.items()
            }

    def prepared(self) -> Prepared:
        """Find or make the arrays."""
        data, wanted = self.data, self.wanted
        given = load_pretrained(wanted.name) if isinstance(wanted, PretrainedTokenizer) else None
        tokenizer = given.digest if given else digest_of(_spelled(wanted))
        settings = [data.length, data.limit, data.evaluation_limit]
        settings += [] if data.stride is None else [data.stride]
        digest = digest_of([self._division(), tokenizer, settings])
        folder = build_once(
            self.cache / "prepared" / digest[:32], lambda place: self._build(place, given)
        )
        facts = load_facts(folder)
        return Prepared(
            task=data.task,
            classes=self.classes,
            vocabulary=facts["vocabulary"],
            pad=facts["pad"],
            splits={role: load_tokens(folder, role, d) for role, d in facts["tokens"].items()},
            origin={role: self._origin(role, note) for role, note in facts["notes"].items()},
            caution=self._caution(),
            known={"chance": 1 / self.classes}
            if isinstance(data, Docstrings) and self.classes
            else {},
            digest=digest,
            tokenizer=folder / ("tokenizer" if given else "tokenizer.json"),
        )

    def _caution(self) -> str | None:
        """What is to be said wherever the numbers are."""
        said = [CAUTION] if self.data.splits == "published" else []
        if isinstance(self.wanted, Words) and self.wanted.also:
            said.append(LEAK.format(" and ".join(self.wanted.also)))
        return " and ".join(said) or None

    def _division(self) -> list[Any]:
        """Name what decides which text plays which role, wherever it lies."""
        roles = (self.plan.train, self.plan.tune, self.plan.report)
        named = [part if not isinstance(part, Part) else "split" for part in roles]
        texts = {role: found.digest for role, found in self.surveys.items()}
        return [FORMAT, self.data.task, self.data.splits, self.classes, named, texts]

    def _origin(self, role: str, note: str) -> str:
        place = self.parts.get(role, self.plan.train).place
        return f"{place}: {note}" if note else place

    def _build(self, folder: Path, given: Pretrained | None) -> None:
        portions = divide(self.plan, self.surveys, self.numbers.get("train"))
        coder: Coder
        if given is not None:
            coder = given.coder
            given.tokenizer.save_pretrained(folder / "tokenizer")
        else:
            path = self._trained(portions)
            coder = load_trained(path)
            shutil.copy(path, folder / "tokenizer.json")
        tokens = {role: self._encode(p, coder, folder, role) for role, p in portions.items()}
        for role, part in self.parts.items():
            if part.stamp() != self.stamps[role]:
                raise BadInput(f"{part.place} changed while it was read; run it again")
        save_facts(
            folder,
            {
                "vocabulary": coder.vocabulary,
                "pad": coder.pad,
                "tokens": tokens,
                "notes": {role: portion.note for role, portion in portions.items()},
            },
        )

    def _encode(self, portion: Portion, coder: Coder, folder: Path, role: str) -> str:
        data, columns = self.data, self.plan.columns
        limit = data.limit if role == "train" else data.evaluation_limit
        if data.task == "language":
            return encode_running(
                portion, columns, coder, data.length, limit, folder, role, data.stride
            )
        added = coder.added(pairs=len(columns.texts) == 2)
        if data.length <= added:
            raise BadInput(
                f"data.length {data.length} leaves no text beside the tokenizer's {added} special "
                f"tokens; {added + 1} is the least"
            )
        numbers = self.numbers.get(role, self.numbers["train"])
        rows = limited(portion, numbers, limit)
        return encode_labelled(portion, rows, numbers, columns, coder, data.length, folder, role)

    def _trained(self, portions: dict[str, Portion]) -> Path:
        assert not isinstance(self.wanted, PretrainedTokenizer)
        wanted = self.wanted
        also = wanted.also if isinstance(wanted, Words) else ()
        read = [portions[role] for role in ("train", *also)]
        name = digest_of([self._division(), _spelled(wanted)])[:32]

        def build(place: Path) -> None:
            texts = chain.from_iterable(map(self._texts, read))
            train(wanted, sampled(texts, sum(portion.size for portion in read)), place)

        return build_once(self.cache / "tokenizers" / name, build) / "tokenizer.json"

    def _texts(self, portion: Portion) -> Iterator[str]:
        if self.data.task == "language":
            yield from (text for text, _ in portion.pieces(self.plan.columns))
            return
        for number, row in enumerate(portion.part.rows(self.plan.columns)):
            if portion.taken[number]:
                yield from row.texts


def _spelled(wanted: BPE | Words | PretrainedTokenizer) -> dict[str, Any]:
    return wanted.spelled() if isinstance(wanted, Words) else wanted.model_dump(mode="json")


BATCH = 1 << 20  # characters encoded at once
ROWS = 1024  # and texts
T = TypeVar("T")


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items until they hold about BATCH characters or are ROWS."""
    batch: list[T] = []
    full = 0
    for item in items:
        batch.append(item)
        full += size(item)
        if full >= BATCH or len(batch) == ROWS:
            yield batch
            batch, full = [], 0
    if batch:
        yield batch


def encode_labelled(
    portion: Portion,
    rows: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
    columns: Columns,
    coder: Coder,
    length: int,
    folder: Path,
    role: str,
) -> str:
    """Write the chosen rows as examples of at most `length` tokens; return the digest."""
    chosen = np.zeros(len(portion.survey), dtype=np.bool_)
    chosen[rows] = True
    texts = (
        row.texts
        for number, row in enumerate(portion.part.rows(columns))
        if number < len(chosen) and chosen[number]
    )
    lengths: list[int] = []
    second: list[int] = []
    with Writer(folder, role, coder.vocabulary) as writer:
        for batch in batches(texts, lambda pair: sum(map(len, pair))):
            encoded = coder.examples(batch, length)
            ids = [found or [coder.end] for found, _ in encoded]  # never an example of nothing
            writer.append(flat(ids))
            lengths += map(len, ids)
            second += (begin for _, begin in encoded if begin is not None)
    stops = np.cumsum(lengths, dtype=np.int64)
    return writer.finish(
        {
            "starts": stops - np.array(lengths, dtype=np.int64),
            "stops": stops,
            "labels": numbers[rows],
            "second": np.array(second) if second else None,
        }
    )


def encode_running(
    portion: Portion,
    columns: Columns,
    coder: Coder,
    length: int,
    limit: int | None,
    folder: Path,
    role: str,
    stride: int | None = None,
) -> str:
    """Write documents as one stream of tokens, cut every `length`; return the digest.

    An example has one token more than `length`, the first of the next: the last target. With a
    longer stride examples share no token, or leave some out.
    """
    stride = stride or length
    most = None if limit is None else (limit - 1) * stride + length + 1
    with Writer(folder, role, coder.vocabulary) as writer:
        for ids in _stream(portion, columns, coder):
            writer.append(ids if most is None else ids[: most - writer.count])
            if writer.count == most:
                break
        count = writer.count
    if count < 2:
        raise BadInput(f"{portion.part.place} has {count} tokens for {role}; two are the least")
    starts = np.arange(0, count - 1, stride, dtype=np.int64)
    return writer.finish({"starts": starts, "stops": np.minimum(starts + length + 1, count)})


def _stream(portion: Portion, columns: Columns, coder: Coder) -> Iterator[npt.NDArray[np.int64]]:
    open_document = False
    for batch in batches(portion.pieces(columns), lambda piece: len(piece[0])):
        ids: list[list[int]] = []
        encoded = coder.running([text for text, _ in batch])
        for found, (_, ends) in zip(encoded, batch, strict=True):
            ids.append(found)
            open_document = open_document or bool(found)
            if ends and open_document:
                ids.append([coder.end])
                open_document = False
        yield flat(ids)

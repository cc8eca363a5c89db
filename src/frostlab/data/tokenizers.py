"""Tokenizers: trained on the training split alone, or a pretrained model's own."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from frostlab.data.files import WORD, word_end
from frostlab.data.sources import unreachable
from frostlab.errors import BadInput
from frostlab.recipe.data import BPE, PretrainedTokenizer, Words
from frostlab.recipe.model import PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.storage import digest_of

PAD, END, SEPARATOR, UNKNOWN = "<|pad|>", "<|end|>", "<|sep|>", "<unk>"
SAMPLE = 100_000_000  # characters a vocabulary is learned from at most
ENDLESS = 5_000_000  # of these, in words so long that each is kept: some 50 bytes a character
HEAD = 6  # characters a token has at most, mostly
Texts = tuple[str, ...]


class Coder(Protocol):
    """Text to numbers, a batch at a time."""

    vocabulary: int
    pad: int
    end: int

    def added(self, *, pairs: bool) -> int:
        """Return how many tokens of an example are not its text's."""

    def examples(self, batch: list[Texts], length: int) -> list[tuple[list[int], int | None]]:
        """Return each example's ids, at most `length`, and where its second text begins."""

    def running(self, batch: list[str]) -> list[list[int]]:
        """Return the ids of pieces of running text, nothing added."""


def definition(recipe: Recipe) -> BPE | Words | PretrainedTokenizer:
    """Return the recipe's tokenizer, or the default: the pretrained model's own, else BPE."""
    if recipe.tokenizer is not None:
        return recipe.tokenizer
    model = recipe.model
    if isinstance(model, PretrainedModel):
        folder = Path(model.name).expanduser()
        own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        if model.weights or own:
            return PretrainedTokenizer(kind="pretrained", name=model.name)
    return BPE(kind="bpe")


@dataclass
class Fast:
    """A tokenizer of the `tokenizers` library."""

    backend: Tokenizer
    vocabulary: int
    pad: int
    end: int
    types: bool = True  # the model tells the second text by token types

    def added(self, *, pairs: bool) -> int:
        """Count the special tokens of the template."""
        return self.backend.num_special_tokens_to_add(pairs)

    def examples(self, batch: list[Texts], length: int) -> list[tuple[list[int], int | None]]:
        """Truncate as the library does, of a pair the longer text first."""
        self.backend.enable_truncation(length)
        if len(batch[0]) == 1:
            return [(ids, None) for ids in self._single([text for (text,) in batch], length)]
        encoded = self.backend.encode_batch_fast(batch)
        if not self.types:
            return [(one.ids, None) for one in encoded]
        return [(one.ids, (*one.type_ids, 1).index(1)) for one in encoded]

    def _single(self, texts: list[str], length: int) -> list[list[int]]:
        """Encode the beginnings, which mostly fill the length, and whole texts where not."""
        words = self.backend.pre_tokenizer is not None  # no token reaches over white space
        heads = [text[: word_end(text, HEAD * length)] if words else text for text in texts]
        found = [one.ids for one in self.backend.encode_batch_fast(heads)]
        short = [
            number
            for number, ids in enumerate(found)
            if len(ids) < length and len(heads[number]) < len(texts[number])
        ]
        whole = self.backend.encode_batch_fast([texts[number] for number in short])
        for number, one in zip(short, whole, strict=True):
            found[number] = one.ids
        return found

    def running(self, batch: list[str]) -> list[list[int]]:
        """Encode without special tokens."""
        self.backend.no_truncation()
        return [one.ids for one in self.backend.encode_batch_fast(batch, add_special_tokens=False)]


def load_trained(path: Path) -> Fast:
    """Read a tokenizer that `train` saved."""
    backend = Tokenizer.from_file(str(path))
    backend.encode_special_tokens = True  # "<|end|>" in a text is text
    numbers = backend.get_vocab()
    return Fast(backend, len(numbers), numbers[PAD], numbers[END])


def train(wanted: BPE | Words, texts: Iterable[str], folder: Path) -> None:
    """Learn a vocabulary and save it with the form of its pairs."""
    backend = _bpe(wanted.size, texts) if isinstance(wanted, BPE) else _words(wanted, texts)
    separator = backend.token_to_id(SEPARATOR)
    backend.post_processor = processors.TemplateProcessing(
        single="$A",
        pair=f"$A {SEPARATOR} $B:1",
        special_tokens=[(SEPARATOR, separator)],
    )
    backend.save(str(folder / "tokenizer.json"))


def _bpe(size: int, texts: Iterable[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END, SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _words(wanted: Words, texts: Iterable[str]) -> Tokenizer:
    counting = Tokenizer(models.WordLevel({}, unk_token=UNKNOWN))
    _shape_words(counting, wanted.lowercase)
    trainer = trainers.WordLevelTrainer(vocab_size=1 << 31, min_frequency=0, show_progress=False)
    counting.train_from_iterator(texts, trainer)
    special = [PAD, END, SEPARATOR, UNKNOWN]
    counted = counting.get_vocab(with_added_tokens=False)
    words = [word for word in sorted(counted, key=counted.__getitem__) if word not in special]
    if wanted.size is not None:
        words = words[: wanted.size - len(special)]
    vocabulary = {word: number for number, word in enumerate((*special, *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    _shape_words(backend, wanted.lowercase)
    return backend


def _shape_words(backend: Tokenizer, lowercase: bool) -> None:
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def sampled(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield every k-th text, about SAMPLE characters of `size`, and few words without end."""
    step = -(-size // SAMPLE)
    endless = 0
    for text in islice(texts, 0, None, step):
        if len(text) >= WORD and len(text.split(None, 1)) == 1:
            endless += len(text)
            if endless > ENDLESS:
                continue
        yield text


@dataclass
class Slow:
    """A `transformers` tokenizer that has no fast form."""

    tokenizer: Any
    vocabulary: int
    pad: int
    end: int

    def added(self, *, pairs: bool) -> int:
        """Ask the tokenizer."""
        return int(self.tokenizer.num_special_tokens_to_add(pair=pairs))

    def examples(self, batch: list[Texts], length: int) -> list[tuple[list[int], int | None]]:
        """Encode one at a time, as the tokenizer does it itself."""
        found = []
        for texts in batch:
            one = self.tokenizer(
                *texts, truncation=True, max_length=length, return_token_type_ids=True
            )
            typed = len(texts) == 2 and "token_type_ids" in self.tokenizer.model_input_names
            second = (*one["token_type_ids"], 1).index(1) if typed else None
            found.append((list(one["input_ids"]), second))
        return found

    def running(self, batch: list[str]) -> list[list[int]]:
        """Encode without special tokens."""
        return [
            list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            for text in batch
        ]


@dataclass(frozen=True)
class Pretrained:
    """A pretrained tokenizer, how it is used here, and the digest of what it does."""

    tokenizer: Any
    coder: Coder
    digest: str


def load_pretrained(name: str) -> Pretrained:
    """Load a tokenizer; its end-of-text token fills up when it has none for that."""
    tokenizer = _loaded(name)
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id)
    pad = next((number for number in pads if number is not None), None)
    end = next((number for number in ends if number is not None), None)
    if pad is None or end is None:
        raise BadInput(f"tokenizer.name {name} has neither a padding nor an end-of-text token")
    types = "token_type_ids" in tokenizer.model_input_names
    if not tokenizer.is_fast:
        words = sorted(tokenizer.get_vocab().items())
        slow = Slow(tokenizer, len(tokenizer), pad, end)
        name = type(tokenizer).__name__
        return Pretrained(tokenizer, slow, digest_of([name, words, pad, end, types]))
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy to set up
    backend.no_padding()
    backend.no_truncation()
    fast = Fast(backend, len(tokenizer), pad, end, types)
    return Pretrained(tokenizer, fast, digest_of([backend.to_str(), pad, end, types]))


def _loaded(name: str) -> Any:
    transformers = importlib.import_module("transformers")
    folder = Path(name).expanduser()
    local = folder.is_dir()
    reason = None if local else unreachable()
    if reason is None:
        try:
            return transformers.AutoTokenizer.from_pretrained(str(folder) if local else name)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(": ")
    where = "in this folder" if local else "a folder here, or on the hub"
    raise BadInput(f"tokenizer.name {name}: no tokenizer {where} ({reason})")

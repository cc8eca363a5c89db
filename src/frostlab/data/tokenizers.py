"""Tokenizers: BPE or whole words, learned from a recipe's text, or a pretrained tokenizer."""

import importlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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

from frostlab.data.files import WORD, named_path, word_end
from frostlab.data.sources import unreachable
from frostlab.errors import BadInput, Unavailable, first_line
from frostlab.recipe.data import BPE, PretrainedTokenizer, Words
from frostlab.recipe.model import PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.storage import (
    MOST_BYTES,
    digest_of,
    open_regular,
    parse_json,
    read_json,
    read_text,
)

PAD, END, SEPARATOR, UNKNOWN = "<|pad|>", "<|end|>", "<|sep|>", "<unk>"
SAMPLE = 100_000_000  # a vocabulary is learned from about this many characters at most
# At most this many of them are in very long words, which take 50 bytes of memory per character.
ENDLESS = 5_000_000
# A text that is to be cut at n tokens is encoded from its first HEAD × n characters, unless these
# give fewer tokens, which is rare.
HEAD = 6
Texts = tuple[str, ...]  # one text, or the two texts of a pair


class Encoder(Protocol):
    """Encoder of text as token ids, one batch at a time."""

    vocabulary: int
    pad: int
    end: int
    truncated: int  # number of examples cut at their maximum length so far

    def special_tokens(self, *, pairs: bool) -> int:
        """Return the number of special tokens that are added to the text of an example."""

    def examples(self, batch: list[Texts], length: int) -> list[tuple[list[int], int | None]]:
        """Return each example's ids (at most `length`), and where its second text starts.

        The position is None for a single text, and if the model has no token types.
        """

    def running(self, batch: list[str]) -> list[list[int]]:
        """Return the ids of pieces of running text, without special tokens."""


def tokenizer_settings(recipe: Recipe) -> BPE | Words | PretrainedTokenizer:
    """Return the recipe's tokenizer, else the pretrained model's tokenizer, else BPE.

    Without pretrained weights, the model's tokenizer is used only if `model.name` is a folder that
    holds it.
    """
    if recipe.tokenizer is not None:
        return recipe.tokenizer
    model = recipe.model
    if isinstance(model, PretrainedModel):
        folder = named_path(model.name, "model.name")
        files = ("tokenizer.json", "tokenizer_config.json")
        if model.weights or any((folder / name).is_file() for name in files):
            return PretrainedTokenizer(kind="pretrained", name=model.name)
    return BPE(kind="bpe")


def train_tokenizer(settings: BPE | Words, texts: Iterable[str], folder: Path) -> None:
    """Learn a vocabulary and save the tokenizer, which joins the texts of a pair by SEPARATOR."""
    backend = (
        _train_bpe(settings.size, texts)
        if isinstance(settings, BPE)
        else _train_words(settings, texts)
    )
    separator = backend.token_to_id(SEPARATOR)
    backend.post_processor = processors.TemplateProcessing(
        single="$A",
        pair=f"$A {SEPARATOR} $B:1",
        special_tokens=[(SEPARATOR, separator)],
    )
    backend.save(str(folder / "tokenizer.json"))


def _train_bpe(size: int, texts: Iterable[str]) -> Tokenizer:
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


def _train_words(settings: Words, texts: Iterable[str]) -> Tokenizer:
    counting = Tokenizer(models.WordLevel({}, unk_token=UNKNOWN))
    _set_up_words(counting, settings.lowercase)
    trainer = trainers.WordLevelTrainer(vocab_size=1 << 31, min_frequency=0, show_progress=False)
    counting.train_from_iterator(texts, trainer)
    special = [PAD, END, SEPARATOR, UNKNOWN]
    counted = counting.get_vocab(with_added_tokens=False)
    # The trainer numbers words by frequency, the most frequent first.
    words = [word for word in sorted(counted, key=counted.__getitem__) if word not in special]
    if settings.size is not None:
        words = words[: settings.size - len(special)]
    vocabulary = {word: number for number, word in enumerate((*special, *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    _set_up_words(backend, settings.lowercase)
    return backend


def _set_up_words(backend: Tokenizer, lowercase: bool) -> None:
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def sample_texts(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield every n-th text, so that at most about SAMPLE of `size` characters remain.

    Texts that are one long word are skipped once such texts had ENDLESS characters in total.
    """
    step = -(-size // SAMPLE)
    in_long_words = 0
    for text in islice(texts, 0, None, step):
        if len(text) >= WORD and len(text.split(None, 1)) == 1:
            in_long_words += len(text)
            if in_long_words > ENDLESS:
                continue
        yield text


@dataclass
class Fast:
    """Encoder with a tokenizer of the `tokenizers` library."""

    backend: Tokenizer
    vocabulary: int
    pad: int
    end: int
    types: bool = True  # whether the model marks the second text by token types
    truncated: int = 0

    def special_tokens(self, *, pairs: bool) -> int:
        """Return the number of special tokens that the tokenizer adds."""
        return self.backend.num_special_tokens_to_add(pairs)

    def examples(self, batch: list[Texts], length: int) -> list[tuple[list[int], int | None]]:
        """Encode and truncate examples; the longer text of a pair is truncated first."""
        self.backend.enable_truncation(length)
        if len(batch[0]) == 1:
            return [(ids, None) for ids in self._single([text for (text,) in batch], length)]
        encoded = self._encode(batch)
        self.truncated += sum(_is_cut(encoding, length) for encoding in encoded)
        if not self.types:
            return [(encoding.ids, None) for encoding in encoded]
        return [(encoding.ids, (*encoding.type_ids, 1).index(1)) for encoding in encoded]

    def _single(self, texts: list[str], length: int) -> list[list[int]]:
        """Encode the beginning of each text; if that gives too few tokens, the whole text."""
        can_cut = self.backend.pre_tokenizer is not None  # then no token crosses the end of a word
        heads = [text[: word_end(text, HEAD * length)] if can_cut else text for text in texts]
        encoded = self._encode(heads)
        short = [
            number
            for number, encoding in enumerate(encoded)
            if not _is_cut(encoding, length) and len(heads[number]) < len(texts[number])
        ]
        full = self._encode([texts[number] for number in short])
        for number, encoding in zip(short, full, strict=True):
            encoded[number] = encoding
        self.truncated += sum(_is_cut(encoding, length) for encoding in encoded)
        return [encoding.ids for encoding in encoded]

    def running(self, batch: list[str]) -> list[list[int]]:
        """Encode without special tokens."""
        self.backend.no_truncation()
        return [encoding.ids for encoding in self._encode(batch, special=False)]

    def _encode(self, batch: Sequence[Any], special: bool = True) -> list[Any]:
        """Encode texts; a failure of the library, due to a bad tokenizer file, is a BadInput."""
        with _refused("the tokenizer cannot encode a text"):
            return list(self.backend.encode_batch_fast(batch, add_special_tokens=special))


def _is_cut(encoding: Any, length: int) -> bool:
    return len(encoding) >= length and bool(encoding.overflowing)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn errors of the tokenizers library into one line; a panic in Rust is a BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise BadInput(f"{what} ({first_line(error):.300})") from None
        raise


def load_trained(path: Path) -> Fast:
    """Read a tokenizer that `train_tokenizer` saved."""
    text = read_text(path)
    with _refused(f"{path} is not a tokenizer"):
        backend = Tokenizer.from_str(text)
    backend.encode_special_tokens = True  # treat "<|end|>" in a text as ordinary characters
    numbers = backend.get_vocab()
    for token in (PAD, END):
        if token not in numbers:
            raise BadInput(f"{path} is not frostlab's tokenizer: it has no token {token}")
    return Fast(backend, len(numbers), numbers[PAD], numbers[END])


def save_trained(path: Path, folder: Path) -> None:
    """Write a tokenizer of `train_tokenizer` as a folder that transformers can load, too.

    tokenizer.json is copied as it is; `split_special_tokens` makes transformers treat "<|end|>" in
    a text as ordinary characters, as `load_trained` does.
    """
    text = read_text(path)
    kind = parse_json(text, path)["model"]["type"]
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "pad_token": PAD,
        "eos_token": END,
        "sep_token": SEPARATOR,
    }
    if kind == "WordLevel":
        values["unk_token"] = UNKNOWN
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")


@dataclass
class Slow:
    """Encoder with a tokenizer of `transformers` that has no fast implementation."""

    tokenizer: Any
    vocabulary: int
    pad: int
    end: int
    truncated: int = 0

    def special_tokens(self, *, pairs: bool) -> int:
        """Return the number of special tokens that the tokenizer adds."""
        return int(self.tokenizer.num_special_tokens_to_add(pair=pairs))

    def examples(self, batch: list[Texts], length: int) -> list[tuple[list[int], int | None]]:
        """Encode texts one at a time."""
        encoded = []
        for texts in batch:
            encoding = self.tokenizer(
                *texts, truncation=True, max_length=length, return_token_type_ids=True
            )
            typed = len(texts) == 2 and "token_type_ids" in self.tokenizer.model_input_names
            second = (*encoding["token_type_ids"], 1).index(1) if typed else None
            ids = list(encoding["input_ids"])
            if len(ids) >= length:  # only such an example may be cut
                whole = self.tokenizer(*texts, truncation=False, verbose=False)["input_ids"]
                self.truncated += len(whole) > len(ids)
            encoded.append((ids, second))
        return encoded

    def running(self, batch: list[str]) -> list[list[int]]:
        """Encode without special tokens."""
        return [
            list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            for text in batch
        ]


@dataclass(frozen=True)
class Pretrained:
    """A pretrained tokenizer, an encoder that uses it, and a digest of its vocabulary and rules.

    Without a fast implementation, the digest covers the tokenizer's class instead of its rules.
    """

    tokenizer: Any
    encoder: Encoder
    digest: str


def load_pretrained(name: str) -> Pretrained:
    """Load a pretrained tokenizer; if it has no padding token, pad with the end-of-text token."""
    tokenizer = load_transformers_tokenizer(name)
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
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, changed below
    backend.no_padding()
    backend.no_truncation()
    fast = Fast(backend, len(tokenizer), pad, end, types)
    return Pretrained(tokenizer, fast, digest_of([backend.to_str(), pad, end, types]))


def load_transformers_tokenizer(name: str) -> Any:
    """Load a tokenizer of transformers from a folder or by its hub name."""
    transformers = importlib.import_module("transformers")
    folder = named_path(name, "tokenizer.name")
    local = folder.is_dir()
    if local:
        _check_folder(folder)
    reason = None if local else unreachable()
    if reason is None:
        try:
            return transformers.AutoTokenizer.from_pretrained(
                str(folder) if local else name, trust_remote_code=False
            )
        except Exception as error:  # damaged files raise many types of errors
            reason = first_line(error).rstrip(": ")
    where = "this folder" if local else "the hub, and no folder here has this name"
    problem = BadInput if local else Unavailable
    raise problem(f"tokenizer.name {name} cannot be loaded from {where} ({reason:.300})")


def _check_folder(folder: Path) -> None:
    """Refuse a tokenizer with Python code of its own, and files that are too large."""
    for path in sorted(folder.glob("*token*")) + sorted(folder.glob("vocab*")):
        if not path.is_dir():
            with open_regular(path) as file:
                if file.seek(0, io.SEEK_END) > MOST_BYTES:
                    raise BadInput(f"{path} is larger than {MOST_BYTES >> 20} MiB")
    for path in (folder / "tokenizer_config.json", folder / "config.json"):
        try:
            values = read_json(path)
        except FileNotFoundError:
            continue
        own = values.get("auto_map") if isinstance(values, dict) else None
        if own and (path.name == "tokenizer_config.json" or "AutoTokenizer" in own):
            raise BadInput(
                f"{path} has auto_map: the tokenizer would run Python code of this folder, which "
                "frostlab does not allow; save it as tokenizer.json with a fast tokenizer"
            )

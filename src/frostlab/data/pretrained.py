"""Pretrained tokenizers, by folder or hub name, through `transformers`."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from frostlab.data.cache import digest_of
from frostlab.data.hub import unreachable
from frostlab.data.vocabulary import Coder, Fast, Texts
from frostlab.errors import BadInput


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

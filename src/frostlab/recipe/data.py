"""What a recipe can say about its data and its tokenizer."""

from typing import Annotated, Any, Literal

from pydantic import Field

from frostlab.recipe.eeg import EEG
from frostlab.recipe.treatment import Positive, Strict

SYNTHETIC = ("majority", "recall", "induction")
NAMED = (
    "sst2", "mnli", "xnli", "imdb", "ag_news",
    "tinystories", "openwebtext", "wikitext2", "wikitext103", "tinyshakespeare",
)  # fmt: skip
TextTask = Literal["classification", "language"]
Task = TextTask | Literal["envelope"]
TEXT_ONLY = ("tinystories", "openwebtext", "wikitext2", "wikitext103", "tinyshakespeare")
PAIRS = ("docstrings-pairs", "mnli", "xnli")
Share = Annotated[float, Field(gt=0, lt=1)]


class Synthetic(Strict):
    """A task with a known answer, drawn from the seed of the data, not of the run."""

    name: Literal["majority", "recall", "induction"]
    examples: Positive = 4096
    length: Annotated[int, Field(ge=8)] = 32
    symbols: Annotated[int, Field(ge=2)] = 16

    @property
    def task(self) -> TextTask:
        return "language" if self.name == "induction" else "classification"


class Corpus(Strict):
    """Text from somewhere, and how it is divided."""

    task: TextTask = "classification"
    length: Annotated[int, Field(ge=2)] = 128  # tokens an example has at most
    stride: Positive | None = (
        None  # tokens from one example of running text to the next; null: length
    )
    splits: Literal["honest", "published"] = "honest"
    train: str = "train"
    tune: Share | str | None = None  # carved from train, or a split's name; null: the set's own
    report: str | None = None  # the split whose result is reported; null: the set's own
    limit: Positive | None = None  # training examples at most
    evaluation_limit: Positive | None = None  # examples of tune and of report at most


class Docstrings(Corpus):
    """The docstrings of installed scientific packages; nothing is downloaded."""

    name: Literal["docstrings", "docstrings-pairs"] = "docstrings"
    per_package: Positive = 1500


class Named(Corpus):
    """A public data set, from a local folder or from the hub."""

    name: Literal[NAMED]  # type: ignore[valid-type]
    language: str = "en"


class Own(Corpus):
    """A file or folder of the user's."""

    name: Literal["own"]
    path: str
    text: tuple[str, ...] = ("text",)  # one column, or two for pairs
    label: str = "label"


def data_kind(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if name in SYNTHETIC:
        return "synthetic"
    if name in EEG:
        return str(name)
    return "named" if name in NAMED else "own" if name == "own" else "docstrings"


class BPE(Strict):
    """Byte-level pairs, learned from the training split only."""

    kind: Literal["bpe"]
    size: Annotated[int, Field(ge=300)] = 8000


class Words(Strict):
    """Whole words, split at white space, counted in the training split and in no other."""

    kind: Literal["words"]
    size: Annotated[int, Field(ge=4)] | None = None  # null: every word of the training split
    lowercase: bool = True
    also: tuple[Literal["tune", "report"], ...] = ()  # counted too, which leaks: the run says so

    def spelled(self) -> dict[str, Any]:
        """Plain values for digests; those of stored data are from before there was `also`."""
        return self.model_dump(mode="json", exclude=None if self.also else {"also"})


class PretrainedTokenizer(Strict):
    """A Hugging Face tokenizer by folder or hub name."""

    kind: Literal["pretrained"]
    name: str

"""Data sections of a recipe: text, tokens or EEG, and tokenizers that turn text into tokens.

Each kind of data is a class in the union `Data`; `data.name` chooses the class, which checks its
settings for contradictions. The task is a setting of text data; other data have a fixed task.
`LOADERS` holds the data that users registered.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from frostlab.recipe.treatment import MOST_LISTED, Length, Positive, Strict, one_of

TextTask = Literal["classification", "language"]
Task = TextTask | Literal["envelope"]
Share = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Names = Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_LISTED)]
# name of the unavailable data set, tokenizer or model that this one replaces; null: none
StandsFor = Annotated[str, Field(min_length=1, max_length=200)] | None
_MOST_TOKENS = 10**9  # the most tokens of generated data
_MOST_HOURS = 1000  # the most hours of simulated EEG


class DataSettings(Strict):
    """Base class of all kinds of data; each has a name, a task and an example length."""

    form: ClassVar[Literal["text", "tokens", "signals"]]  # only text needs a tokenizer

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction between these settings."""
        yield from ()


class Generated(DataSettings):
    """Base class of sequences of symbols that are generated; the run's seed does not change them.

    A subclass limits `name` to its own names, and adds the property `task`.
    """

    form = "tokens"
    name: str
    examples: Positive = 4096
    length: Annotated[Length, Field(ge=8)] = 32
    symbols: Annotated[int, Field(ge=2, le=10**6)] = 16  # number of different symbols

    @property
    def vocabulary(self) -> int:
        """The number of token ids: one for each symbol, and padding."""
        return self.symbols + 1

    @property
    def classes(self) -> int:
        """The number of a classifier's outputs; 0 for a language model."""
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction between these settings."""
        if self.examples * self.length > _MOST_TOKENS:
            yield (
                f"data.examples {self.examples} of data.length {self.length} are "
                f"{self.examples * self.length:,} tokens; {_MOST_TOKENS:,} is the most"
            )


class Synthetic(Generated):
    """Generated sequences with a known answer.

    majority: the most frequent symbol. recall: the sequence lists keys and their values and ends
    with one of the keys; the answer is its value. induction: the sequence repeats, and each next
    symbol is to be predicted.
    """

    name: Literal["majority", "recall", "induction"]

    @property
    def task(self) -> TextTask:
        """The task: classifying a sequence, or for induction predicting the next symbol."""
        return "language" if self.name == "induction" else "classification"

    @property
    def vocabulary(self) -> int:
        """The number of ids: of the symbols (in recall, as keys and as values) and padding."""
        return (2 if self.name == "recall" else 1) * self.symbols + 1

    @property
    def classes(self) -> int:
        """The number of a classifier's outputs; 0 for a language model."""
        return 0 if self.task == "language" else self.symbols


class Corpus(DataSettings):
    """Base class of text data: the task, the length of examples, and the splits."""

    form = "text"
    task: TextTask = "classification"
    # maximum number of tokens per example; for language, of tokens that are predicted
    length: Annotated[Length, Field(ge=2)] = 128
    stride: Positive | None = None  # tokens between the starts of two examples; null: length
    # honest: the split `tune` selects the checkpoint, and `report` gives the final scores;
    # published: `report` does both
    splits: Literal["honest", "published"] = "honest"
    train: str = "train"  # name of the training split
    # tune and report: a share of train, or a split's name; null: the default of the data set
    tune: Share | str | None = None
    report: Share | str | None = None
    limit: Positive | None = None  # maximum number of training examples
    evaluation_limit: Positive | None = None  # maximum number of examples of tune, and of report

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction between these settings."""
        if self.splits == "published" and self.tune is not None:
            yield (
                "data.tune is given, but with data.splits: published, the split report selects the "
                "checkpoint; remove one of the two settings"
            )
        if self.stride is not None and self.task != "language":
            yield f"data.stride {self.stride} is for data.task language, not {self.task}"
        if self.stride is not None and self.stride < self.length:
            yield (
                f"data.stride {self.stride} is less than data.length {self.length}, so tokens "
                "would be counted twice"
            )


class Docstrings(Corpus):
    """The docstrings of installed scientific packages, so that nothing is downloaded."""

    name: Literal["docstrings", "docstrings-pairs"] = "docstrings"
    # maximum number of docstrings per package, over all splits; each split has at least two,
    # or three for three classes of pairs
    per_package: Positive = 1500
    # docstrings: number of packages to tell apart (null: all that are installed). docstrings-pairs
    # (a summary line and a body): 2 (the body belongs to the summary or not), or 3 (if not, whether
    # it is from the same package); null: 2
    classes: Annotated[int, Field(ge=2, le=4)] | None = None
    stands_for: StandsFor = None

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction between these settings."""
        if self.name == "docstrings-pairs" and self.classes == 4:
            yield f"data.classes {self.classes} is for docstrings; docstrings-pairs has 2 or 3"
        if self.task == "language" and self.classes is not None:
            yield f"data.classes {self.classes} is for classification; data.task is {self.task}"
        if self.name == "docstrings-pairs" and self.task != "classification":
            yield f"data.name {self.name} is for classification, not {self.task}"
        yield from super().problems()


class Named(Corpus):
    """A public data set, from a local folder or from the Hugging Face hub."""

    name: Literal[
        "sst2", "mnli", "xnli", "imdb", "ag_news",
        "tinystories", "openwebtext", "wikitext2", "wikitext2-raw", "wikitext103",
        "tinyshakespeare",
    ]  # fmt: skip
    language: str = "en"  # only for xnli

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction between these settings."""
        if self.name != "xnli" and self.language != "en":
            yield f"data.language {self.language} is given, but only xnli has languages"
        if self.name in _UNLABELLED and self.task != "language":
            yield f"data.name {self.name} has no labels; set data.task to language"
        if self.name in _LABELLED_ONLY and self.task != "classification":
            yield f"data.name {self.name} is for classification, not {self.task}"
        yield from super().problems()


_UNLABELLED = (
    "tinystories", "openwebtext", "wikitext2", "wikitext2-raw", "wikitext103", "tinyshakespeare",
)  # fmt: skip
_LABELLED_ONLY = ("mnli", "xnli", "sst2")  # pairs or phrases, not running text


def _as_columns(value: Any) -> Any:
    """Turn a single name or a list into a tuple; leave other values for pydantic to refuse."""
    return (
        tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value
    )


class Own(Corpus):
    """A file or folder that the user provides."""

    name: Literal["own"]
    path: str
    # one text column, or two for pairs; a single name is accepted as a list of one
    text: Annotated[tuple[str, ...], BeforeValidator(_as_columns)] = ("text",)
    label: str = "label"

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction between these settings."""
        yield from super().problems()
        if not 1 <= len(self.text) <= 2:
            yield f"data.text names {len(self.text)} columns; name one, or two for pairs"


class Loader(NamedTuple):
    """Data that a user registered: a function that returns the rows of each split, and the task."""

    load: Callable[[Path | None], Mapping[str, Iterable[Any]]]
    task: TextTask


LOADERS: dict[str, Loader] = {}  # data.name → loader; filled by frostlab.data.registered


def _known_name(name: Any) -> Any:
    """Refuse an unknown data name with the error that pydantic raises for a Literal."""
    return name if isinstance(name, str) and name in LOADERS else one_of(name, data_names())


class Registered(Corpus):
    """Data from the loader that `fl.register_data` registered under this name."""

    name: Annotated[str, BeforeValidator(_known_name)]

    @model_validator(mode="before")
    @classmethod
    def _take_task(cls, value: Any) -> Any:
        """Use the loader's task if the recipe does not set a task."""
        loader = LOADERS.get(str(value.get("name"))) if isinstance(value, dict) else None
        return value if loader is None else {"task": loader.task} | value

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction between these settings."""
        if self.task != LOADERS[self.name].task:
            yield (
                f"data.task {self.task} is given, but data.name {self.name} is registered for "
                f"{LOADERS[self.name].task}"
            )
        yield from super().problems()


class EEGData(DataSettings):
    """Base class of EEG data: EEG and the envelope of the heard speech, cut into windows."""

    form = "signals"
    name: str
    rate: Rate = 64.0  # Hz, sampling rate of EEG and envelope
    length: Annotated[Length, Field(ge=8)] = 640  # samples per window
    hop: Positive | None = None  # samples from one training window to the next; null: random starts
    # training windows that an epoch draws from each recording; null: as many as fit side by side
    windows: Annotated[int, Field(gt=0, le=10**6)] | None = None

    @property
    def task(self) -> Literal["envelope"]:
        """The task: decoding the envelope from the EEG."""
        return "envelope"

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction between these settings."""
        if self.hop is not None and self.windows is not None:
            yield (
                f"data.hop {self.hop} and data.windows {self.windows} both set the number of "
                "windows; set one of them to null"
            )


class SimulatedEEG(EEGData):
    """Simulated recordings, for which an upper bound on any decoder's correlation is known."""

    name: Literal["eeg-simulated"]
    subjects: Positive = 8
    unseen: Annotated[int, Field(ge=0, le=10**12)] = 4  # further subjects, in no training split
    # recordings per subject, including `tune` and `report`; an unseen subject has only `report`
    recordings: Positive = 6
    tune: Positive = 1  # recordings per subject
    report: Positive = 1  # recordings per subject
    seconds: Annotated[float, Field(gt=0, le=1e9)] = 60.0  # length of a recording
    snr: Annotated[float, Field(ge=-60, le=40)] = -10.0  # dB, averaged over channels and time
    responses: Literal["linear", "nonlinear"] = "linear"  # of the brain to the envelope
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of the simulation, not of the run
    stands_for: StandsFor = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        recordings = self.subjects * self.recordings + self.unseen * self.report
        hours = recordings * self.seconds / 3600
        if hours > _MOST_HOURS:
            raise ValueError(
                f"subjects {self.subjects} × recordings {self.recordings} and unseen {self.unseen} "
                f"× report {self.report}, each of seconds {self.seconds:g}, are {hours:.0f} hours; "
                f"{_MOST_HOURS} is the most"
            )
        if self.recordings <= self.tune + self.report:
            raise ValueError(
                f"recordings {self.recordings} leaves none to train on after "
                f"tune {self.tune} and report {self.report}"
            )
        if self.rate < 32:
            raise ValueError(f"rate {self.rate:g} Hz is too low for speech rhythm; 32 is the least")
        # best_r, the upper bound on any decoder's correlation, is computed on a frequency grid that
        # is too coarse for higher rates.
        if self.rate > 512:
            raise ValueError(f"rate {self.rate:g} Hz is too high to simulate; 512 is the most")
        if round(self.seconds * self.rate) < self.length:
            raise ValueError(
                f"seconds {self.seconds:g} at {self.rate:g} Hz are "
                f"{round(self.seconds * self.rate)} samples; a window has {self.length}"
            )
        return self


class RecordedEEG(EEGData):
    """Base class of recorded EEG: a folder, and the subjects to train on and to hold out."""

    # A relative path is looked up in the folder of the recipe's file or, if it comes from a setting
    # (--set), in the working folder. If it is not there, it is looked up in the data folder.
    path: str
    seen: Names | None = None  # the subjects to train on; null: all that are not unseen
    unseen: Names | Share | None = None  # subjects in no training split: names, or a share
    band: tuple[Rate, Rate] | None = None  # Hz, pass band of EEG and envelope; null: unfiltered

    @model_validator(mode="after")
    def _in_band(self) -> Self:
        if self.band is not None and not self.band[0] < self.band[1] < self.rate / 2:
            low, high = self.band
            raise ValueError(
                f"band {low:g}–{high:g} Hz should rise, and end below {self.rate / 2:g} Hz, "
                f"half the rate of {self.rate:g} Hz"
            )
        return self


class ChallengeEEG(RecordedEEG):
    """The Auditory EEG Challenge's folder, with files like `train_-_sub-001_-_STORY_-_eeg.npy`."""

    name: Literal["eeg-challenge"]
    file_rate: Rate = 64.0  # Hz; .npy files do not store it
    tune: Positive | None = None  # recordings per subject; null: the val_ files or, without any, 1
    report: Positive | None = None  # null: the test_ files or, without any, 1
    reference: Literal["none", "average"] = "none"  # what is subtracted: the mean of the channels


class MatlabEEG(RecordedEEG):
    """EEG at 128 Hz of listeners to two speakers at once, in files `BLOCK_TRIAL.mat`.

    The folder also holds `F_env.mat`, `M_env.mat` and `competing_speaker_order.mat`.
    """

    name: Literal["eeg-matlab"]
    path: str = "eeg_cocktail"
    # position, from 1, of the recording for report among a subject's recordings; the next recording
    # is for tune (after the last recording: the first)
    held_out: Positive = 1
    band: tuple[Rate, Rate] | None = (1.0, 9.0)
    reference: Literal["average", "mastoids", "none"] = "average"


class MneEEG(RecordedEEG):
    """Files that MNE reads: `sub-001_-_STORY_-_eeg.fif` (or .edf, .bdf, .set, .vhdr)."""

    name: Literal["eeg-mne"]
    envelope_rate: Rate | None = None  # Hz of the envelope files; null: the EEG's rate
    tune: Positive = 1
    report: Positive = 1
    reference: Literal["none", "average"] | Names = "none"  # or channels, such as [M1, M2]


def data_kind(value: Any) -> str:
    """Return the tag of a data section in the union `Data`: the name of its class."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if name is None:
        return Docstrings.__name__
    kinds = (kind for kind in KINDS if name in names_of(kind))
    return next(kinds, Registered).__name__


Data = Annotated[
    Annotated[Docstrings, Tag("Docstrings")]
    | Annotated[Synthetic, Tag("Synthetic")]
    | Annotated[Named, Tag("Named")]
    | Annotated[Own, Tag("Own")]
    | Annotated[SimulatedEEG, Tag("SimulatedEEG")]
    | Annotated[ChallengeEEG, Tag("ChallengeEEG")]
    | Annotated[MatlabEEG, Tag("MatlabEEG")]
    | Annotated[MneEEG, Tag("MneEEG")]
    | Annotated[Registered, Tag("Registered")],
    Discriminator(data_kind),
]
KINDS: tuple[type[DataSettings], ...] = tuple(
    get_args(member)[0] for member in get_args(get_args(Data)[0])
)
# simulated data.name → the data.name that replaces it if data.path is set without data.name.
RECORDED = {"eeg-simulated": "eeg-challenge"}


def names_of(kind: type[DataSettings]) -> tuple[str, ...]:
    """Return the values of `data.name` that select a kind of data."""
    if kind is Registered:
        return tuple(LOADERS)
    return get_args(kind.model_fields["name"].annotation)


def data_names() -> list[str]:
    """Return every name that `data.name` can have."""
    return [name for kind in KINDS for name in names_of(kind)]


class BPE(Strict):
    """Byte-level byte-pair encoding, learned from the training split only."""

    kind: Literal["bpe"]
    size: Annotated[int, Field(ge=300, le=10**6)] = 8000
    stands_for: StandsFor = None


class Words(Strict):
    """Vocabulary of whole words, separated by white space and counted in the training split."""

    kind: Literal["words"]
    # maximum number of words and special tokens; null: no limit
    size: Annotated[int, Field(ge=4, le=10**7)] | None = None
    lowercase: bool = True
    # Splits whose words are counted too; results then carry a warning about this leak.
    also: tuple[Literal["tune", "report"], ...] = ()


class PretrainedTokenizer(Strict):
    """A Hugging Face tokenizer by folder or hub name."""

    kind: Literal["pretrained"]
    name: str


Tokenizer = Annotated[BPE | Words | PretrainedTokenizer, Field(discriminator="kind")]

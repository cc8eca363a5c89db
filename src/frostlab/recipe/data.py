"""What a recipe can say about its data and its tokenizer."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

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


Rate = Annotated[float, Field(gt=0)]
Subjects = Annotated[tuple[str, ...], Field(min_length=1)]
EEG = ("eeg-simulated", "eeg-challenge", "eeg-matlab", "eeg-mne")


class EEGData(Strict):
    """EEG with the envelope of the speech that was heard, and how windows are cut from it."""

    name: str
    rate: Rate = 64.0  # Hz
    length: Annotated[int, Field(ge=8)] = 640  # samples of a window
    hop: Positive | None = None  # from one training window to the next; null: seeded offsets

    @property
    def task(self) -> Literal["envelope"]:
        return "envelope"


class SimulatedEEG(EEGData):
    """Recordings whose best decoder is known, drawn from the seed of the data."""

    name: Literal["eeg-simulated"]
    subjects: Positive = 8
    unseen: Annotated[int, Field(ge=0)] = 4  # subjects nobody trains on, more than `subjects`
    recordings: Positive = 6  # of each subject, `tune` and `report` among them
    tune: Positive = 1
    report: Positive = 1
    seconds: Annotated[float, Field(gt=0)] = 60.0
    snr: Annotated[float, Field(ge=-60, le=40)] = -10.0  # dB, mean power over channels
    responses: Literal["linear", "nonlinear"] = "linear"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.recordings <= self.tune + self.report:
            raise ValueError(
                f"recordings {self.recordings} leaves none to train on beside "
                f"tune {self.tune} and report {self.report}"
            )
        if self.rate < 32:
            raise ValueError(f"rate {self.rate:g} Hz is too low for speech rhythm; 32 is the least")
        if self.rate > 512:  # spectra are compared on a grid that is too coarse beyond
            raise ValueError(f"rate {self.rate:g} Hz is too high to know best_r; 512 is the most")
        if round(self.seconds * self.rate) < self.length:
            raise ValueError(
                f"seconds {self.seconds:g} at {self.rate:g} Hz are "
                f"{round(self.seconds * self.rate)} samples; a window has {self.length}"
            )
        return self


class RecordedEEG(EEGData):
    """Recordings of a folder, and which subjects and recordings are held out."""

    path: str  # as it stands, else under --data-dir or FROSTLAB_DATA
    seen: Subjects | None = None  # the subjects to train on; null: all that are not unseen
    unseen: Subjects | Share | None = None  # subjects nobody trains on: names, or a share
    band: tuple[Rate, Rate] | None = None  # Hz, of EEG and envelope alike; null: as it is

    @model_validator(mode="after")
    def _in_band(self) -> Self:
        if self.band is not None and not self.band[0] < self.band[1] < self.rate / 2:
            low, high = self.band
            raise ValueError(
                f"band {low:g}–{high:g} Hz does not rise, or ends above {self.rate / 2:g} Hz, "
                f"half the rate of {self.rate:g} Hz"
            )
        return self


class ChallengeEEG(RecordedEEG):
    """The Auditory EEG Challenge's folder: `train_-_sub-001_-_STORY_-_eeg.npy` and its kin."""

    name: Literal["eeg-challenge"]
    file_rate: Rate = 64.0  # Hz; .npy files do not say
    tune: Positive | None = None  # recordings of each subject; null: the val_ files, else 1
    report: Positive | None = None  # null: the test_ files, else 1
    reference: Literal["none", "average"] = "none"


class MatlabEEG(RecordedEEG):
    """Two competing speakers: `BLOCK_TRIAL.mat`, `F_env.mat`, `M_env.mat`, 128 Hz."""

    name: Literal["eeg-matlab"]
    path: str = "eeg_cocktail"
    held_out: Positive = 1  # which recording of each subject reports; the one after it tunes
    band: tuple[Rate, Rate] | None = (1.0, 9.0)
    reference: Literal["average", "mastoids", "none"] = "average"


class MneEEG(RecordedEEG):
    """Files MNE reads: `sub-001_-_STORY_-_eeg.fif` (.edf, .bdf, .set, .vhdr) with envelopes."""

    name: Literal["eeg-mne"]
    envelope_rate: Rate | None = None  # Hz of the envelope files; null: that of their EEG
    tune: Positive = 1
    report: Positive = 1
    reference: Literal["none", "average"] | Subjects = "none"  # or channels, such as [M1, M2]


AnyEEG = Annotated[
    SimulatedEEG | ChallengeEEG | MatlabEEG | MneEEG,
    Field(discriminator="name"),
]

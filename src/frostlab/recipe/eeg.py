"""What a recipe can say about EEG recordings and the speech envelopes heard with them."""

from frostlab.recipe.data import Share
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from frostlab.recipe.treatment import Positive, Strict

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

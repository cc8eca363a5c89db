"""Readers of folders of recordings, in three layouts.

The layouts are the Auditory EEG Challenge's .npy files, MATLAB's .mat files with two speakers, and
files that MNE reads. A reader lists the recordings of a folder as `Source`s, which are read later,
one at a time.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frostlab.data.arrays import read_npy
from frostlab.data.eeg.matlab import MatFiles
from frostlab.data.eeg.preprocess import Band, check_shape, preprocess, preprocess_eeg
from frostlab.data.eeg.recordings import MOST_VALUES, Recording
from frostlab.data.eeg.simulate import channel_names
from frostlab.data.eeg.splits import PREFIXES, Heading
from frostlab.data.files import named_path
from frostlab.errors import BadInput, Unavailable, first_line, nearest, require
from frostlab.recipe.data import ChallengeEEG, MatlabEEG, MneEEG, RecordedEEG
from frostlab.storage import open_regular

MATLAB_RATE = 128.0  # Hz; the files do not store the rate
ENDINGS = (".fif", ".edf", ".bdf", ".set", ".vhdr")  # endings of files that MNE reads
_ROLES = {prefix: role for role, prefix in PREFIXES.items()}  # prefix of a file's name → its split
_SEPARATOR = "_-_"  # separates the parts of a file's name
_TRIAL = re.compile(r"([12])_(\d+)\.mat")  # BLOCK_TRIAL.mat
# block → file of the attended speaker, file of the ignored speaker, and the variable that lists the
# ignored speaker's story in each trial
_BLOCKS = {1: ("F_env", "M_env", "blk1_M_Order"), 2: ("M_env", "F_env", "blk2_F_Order")}
_SUBJECT = "sub-001"  # the subject of trials outside sub-folders
_SHARED = ("F_env", "M_env", "competing_speaker_order")  # .mat files for the trials of all subjects


@dataclass(frozen=True)
class Source:
    """A recording that has not been read yet."""

    heading: Heading  # its name, subject and speech, which decide its split
    files: tuple[Path, ...]  # all files that `read` reads
    read: Callable[[], tuple[Recording, tuple[str, ...]]]  # returns recording, channel names


def find_folder(path: str, data_dir: Path | None) -> Path:
    """Find a folder by its path, relative to the working folder or to the user's data folder."""
    parent = data_dir or (Path(env) if (env := os.environ.get("FROSTLAB_DATA")) else None)
    places = [named_path(path, "data.path")]
    if parent is not None and not places[0].is_absolute():
        places.append(parent.expanduser() / path)
    for place in places:
        if place.is_dir():
            return place
    searched = " nor ".join(str(place.absolute()) for place in places)
    siblings = [p for place in places if place.parent.is_dir() for p in place.parent.iterdir()]
    hint = nearest(places[0].name, [sibling.name for sibling in siblings if sibling.is_dir()])
    more = "" if parent or hint else "; name its parent with --data-dir or FROSTLAB_DATA"
    raise Unavailable(f"data.path {path}: there is no folder {searched}{hint}{more}")


def pair_files(folder: Path, endings: Iterable[str]) -> list[tuple[list[str], Path, Path]]:
    """Return each recording's name (split at `_-_`), EEG file and envelope file, sorted by name."""
    eeg_endings = tuple(f"{_SEPARATOR}eeg{ending}" for ending in endings)
    pairs = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(f"{_SEPARATOR}envelope.npy"):
            stem = path.name.removesuffix("envelope.npy")
            if not any((folder / f"{stem}eeg{ending}").exists() for ending in endings):
                ending = eeg_endings[0].removeprefix(_SEPARATOR)
                raise BadInput(f"{path} has no partner {stem}{ending}")
        ending = next((ending for ending in eeg_endings if path.name.endswith(ending)), "")
        if not ending:
            continue
        stem = path.name.removesuffix(ending)
        partner = folder / f"{stem}{_SEPARATOR}envelope.npy"
        if not partner.exists():
            raise BadInput(f"{path} has no partner {partner.name}")
        pairs.append((stem.split(_SEPARATOR), path, partner))
    if not pairs:
        form = f"…SUBJECT{_SEPARATOR}STIMULUS{eeg_endings[0]}"
        raise BadInput(f"{folder} has no file {form}")
    return pairs


def load_array(path: Path) -> NDArray[np.float64]:
    """Read a .npy file of numbers."""
    return read_npy(path).astype(np.float64, copy=False)


def load_envelope(path: Path) -> NDArray[np.float64]:
    """Read an envelope (samples,) from a .npy file of one dimension, or with one row or column."""
    envelope = load_array(path)
    if envelope.ndim == 2 and 1 in envelope.shape:
        return envelope.reshape(-1)
    if envelope.ndim != 1:
        raise BadInput(f"{path} has shape {envelope.shape}; an envelope is one row of samples")
    return envelope


def challenge_sources(data: ChallengeEEG, folder: Path) -> list[Source]:
    """List the recordings in files `PREFIX_-_SUBJECT_-_STIMULUS_-_eeg.npy` and `…_-_envelope.npy`.

    PREFIX is train, val or test. Files with other features of the speech are ignored.
    """
    sources = []
    for parts, eeg, envelope in pair_files(folder, [".npy"]):
        if len(parts) < 3 or parts[0] not in _ROLES:
            raise BadInput(
                f"{eeg} is not named PREFIX_-_SUBJECT_-_STIMULUS_-_eeg.npy, where PREFIX is one of "
                f"{', '.join(_ROLES)}"
            )
        heading = Heading(
            _SEPARATOR.join(parts), parts[1], _SEPARATOR.join(parts[2:]), _ROLES[parts[0]]
        )
        sources.append(
            Source(heading, (eeg, envelope), _challenge_reader(data, heading, eeg, envelope))
        )
    return sources


def _challenge_reader(
    data: ChallengeEEG, heading: Heading, eeg: Path, envelope: Path
) -> Callable[[], tuple[Recording, tuple[str, ...]]]:
    def read() -> tuple[Recording, tuple[str, ...]]:
        measured = load_array(eeg)
        check_shape(str(eeg), measured)
        channels = channel_names(measured.shape[-1])
        recording = preprocess(
            heading.name,
            heading.subject,
            measured,
            [load_envelope(envelope)],
            channels=channels,
            rates=(data.file_rate, data.file_rate),
            rate=data.rate,
            band=data.band,
            reference=measured if data.reference == "average" else None,
        )
        return recording, channels

    return read


def matlab_sources(data: MatlabEEG, folder: Path) -> list[Source]:
    """List the recordings in files `BLOCK_TRIAL.mat`; each sub-folder holds one subject.

    Trials in the folder itself belong to the subject sub-001. Subjects attend to speaker F in
    block 1 and to speaker M in block 2. The number of a trial is also the number of the attended
    speaker's story; the file `competing_speaker_order.mat` lists the ignored speaker's story for
    each trial.
    """
    shared = _shared_files(folder)
    for name, path in shared.items():
        if not path.exists():
            raise BadInput(f"{folder} has no {name}.mat")
    mat = MatFiles()
    stories = _Stories(shared, mat)
    sources = []
    for path in sorted(folder.rglob("*.mat"), key=_trial_order):
        if not (match := _TRIAL.fullmatch(path.name)):
            continue
        block, trial = int(match[1]), int(match[2])
        subject = _SUBJECT if path.parent == folder else path.parent.name
        story = f"{_BLOCKS[block][0][0]}{trial}"
        heading = Heading(f"{subject}{_SEPARATOR}{block}_{trial}", subject, story)
        files = (path, *shared.values())
        read = _matlab_reader(data, heading, path, (block, trial), stories, mat)
        sources.append(Source(heading, files, read))
    if not sources:
        raise BadInput(f"{folder} has no BLOCK_TRIAL.mat, such as 1_1.mat")
    return sources


def _shared_files(folder: Path) -> dict[str, Path]:
    return {name: folder / f"{name}.mat" for name in _SHARED}


class _Stories:
    """The envelopes of both speakers' stories, which are read with the first trial."""

    def __init__(self, files: dict[str, Path], mat: MatFiles) -> None:
        self._files, self._mat = files, mat

    @cached_property
    def _order(self) -> dict[str, list[Any]]:
        path = self._files["competing_speaker_order"]
        return self._mat.read(path, *(order for _, _, order in _BLOCKS.values()))

    @cached_property
    def _envelopes(self) -> dict[str, list[Any]]:
        speakers = ("F_env", "M_env")
        return {name: self._mat.read(self._files[name], "stim1")["stim1"] for name in speakers}

    def of_trial(
        self, path: Path, block: int, trial: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the envelopes of the attended and of the ignored speaker in a trial."""
        attended, ignored, order_name = _BLOCKS[block]
        numbers = np.concatenate([part.ravel() for part in self._order[order_name]])
        heard, unheard = self._envelopes[attended], self._envelopes[ignored]
        order_file = self._files["competing_speaker_order"]
        if not 1 <= trial <= min(len(numbers), len(heard)):
            raise BadInput(
                f"{path}: trial {trial}, but {order_file.name} lists "
                f"{len(numbers)} trials, and {attended}.mat has {len(heard)} stories"
            )
        if numbers[trial - 1] not in range(1, len(unheard) + 1):
            raise BadInput(
                f"{order_file}: {order_name} names story {numbers[trial - 1]} for trial {trial}, "
                f"but {ignored}.mat has 1 to {len(unheard)}"
            )
        return heard[trial - 1], unheard[int(numbers[trial - 1]) - 1]


def _matlab_reader(
    data: MatlabEEG,
    heading: Heading,
    path: Path,
    trial: tuple[int, int],  # block and number
    stories: _Stories,
    mat: MatFiles,
) -> Callable[[], tuple[Recording, tuple[str, ...]]]:
    def read() -> tuple[Recording, tuple[str, ...]]:
        speech = stories.of_trial(path, *trial)
        measured, reference = _matlab_signals(data, path, mat)
        channels = channel_names(measured.shape[1])
        recording = preprocess(
            heading.name,
            heading.subject,
            measured,
            [speech[0].ravel(), speech[1].ravel()],
            channels=channels,
            rates=(MATLAB_RATE, MATLAB_RATE),
            rate=data.rate,
            band=data.band,
            reference=reference,
        )
        return recording, channels

    return read


def _matlab_signals(
    data: MatlabEEG, path: Path, mat: MatFiles
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Return the EEG of a trial, and the signals of its reference or None."""
    arrays = mat.read(path, "eeg", "mast")
    for key, values in arrays.items():
        if len(values) != 1:
            raise BadInput(f"{path}: {key} holds {len(values)} arrays, not one")
        check_shape(f"{path}: {key}", values[0])
    eeg = arrays["eeg"][0]
    return eeg, {"average": eeg, "mastoids": arrays["mast"][0], "none": None}[data.reference]


def _trial_order(path: Path) -> tuple[str, int, int]:
    """Return the sort key of a trial: its folder, block and number."""
    match = _TRIAL.fullmatch(path.name)
    return (str(path.parent), *((int(match[1]), int(match[2])) if match else (0, 0)))


def mne_sources(data: MneEEG, folder: Path) -> list[Source]:
    """List the recordings in files `SUBJECT_-_STIMULUS_-_eeg.fif`, or with another of ENDINGS."""
    require("mne", "eeg", f"data.name {data.name}")
    sources, mat = [], MatFiles(mne=True)
    for parts, eeg, envelope in pair_files(folder, ENDINGS):
        if len(parts) < 2:
            raise BadInput(f"{eeg} is not named SUBJECT_-_STIMULUS_-_eeg{eeg.suffix}")
        heading = Heading(_SEPARATOR.join(parts), parts[0], _SEPARATOR.join(parts[1:]))
        read = _mne_reader(data, heading, eeg, envelope, mat)
        sources.append(Source(heading, (eeg, envelope), read))
    return sources


def read_raw(eeg: Path, mat: MatFiles) -> Any:
    """Return an MNE Raw with the signals of a file in memory."""
    mne = require("mne", "eeg", f"reading {eeg}")
    try:
        if eeg.suffix == ".set":  # MATLAB's format
            file = mat.read_set(eeg, MOST_VALUES)
            info = mne.create_info(file.channels, file.rate, file.types, verbose="ERROR")
            return mne.io.RawArray(file.signals, info, copy="auto", verbose="ERROR")
        open_regular(eeg).close()
        raw = mne.io.read_raw(eeg, preload=False, verbose="ERROR")
        if raw.n_times * len(raw.ch_names) > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
        return raw.load_data(verbose="ERROR")
    except BadInput:
        raise
    except Exception as error:  # MNE raises many types of errors for a broken file
        raise BadInput(f"{eeg} cannot be read: {first_line(error)}") from error


def _mne_reader(
    data: MneEEG, heading: Heading, eeg: Path, envelope: Path, mat: MatFiles
) -> Callable[[], tuple[Recording, tuple[str, ...]]]:
    def read() -> tuple[Recording, tuple[str, ...]]:
        raw = read_raw(eeg, mat)
        recording = from_mne(
            raw,
            load_envelope(envelope),
            subject=heading.subject,
            name=heading.name,
            rate=data.rate,
            envelope_rate=data.envelope_rate,
            band=data.band,
            reference=data.reference,
        )
        return recording, eeg_channels(raw, data.reference)

    return read


def from_mne(
    raw: Any,
    envelope: ArrayLike,
    *,
    subject: str,
    name: str,
    rate: float = 64.0,
    envelope_rate: float | None = None,
    band: Band | None = None,
    reference: str | tuple[str, ...] = "none",
) -> Recording:
    """Return a recording with the EEG channels of an MNE Raw and the envelope of the speech.

    The envelope is sampled at `envelope_rate` (default: the Raw's rate); EEG and envelope are
    resampled to `rate` and filtered to `band`, all in Hz. `reference` is "none", "average" or
    channel names; the mean of named channels is subtracted from all others, and the recording
    omits the named channels.
    """
    if not (math.isfinite(raw.info["sfreq"]) and raw.info["sfreq"] > 0):
        raise BadInput(f"{name} has a rate of {raw.info['sfreq']:g} Hz; it should be above 0")
    eeg, channels, reference_signals = _raw_signals(raw, name, reference)
    return preprocess(
        name,
        subject,
        eeg,
        [np.asarray(envelope, dtype=np.float64)],
        channels=channels,
        rates=(float(raw.info["sfreq"]), envelope_rate or float(raw.info["sfreq"])),
        rate=rate,
        band=band,
        reference=reference_signals,
    )


def eeg_channels(raw: Any, reference: str | tuple[str, ...] = "none") -> tuple[str, ...]:
    """Return the names of a Raw's EEG channels, bad ones too, without those in `reference`."""
    picked = raw.copy().pick("eeg", exclude=()).ch_names
    return tuple(name for name in picked if name not in _reference_channels(reference))


def _reference_channels(reference: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(reference, tuple):
        return reference
    return () if reference in ("none", "average") else (reference,)


def _raw_signals(raw: Any, name: str, reference: str | tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Return the EEG (samples, channels), its channel names, and the reference signals or None."""
    try:
        channels = eeg_channels(raw, reference)
    except ValueError as error:
        raise BadInput(f"{name} has no EEG channel") from error
    named = _reference_channels(reference)
    for channel in named:
        if channel not in raw.ch_names:
            hint = nearest(channel, [*raw.ch_names, "none", "average"])
            raise BadInput(f"{name} has no channel {channel} to use as reference{hint}")
    if not channels:
        raise BadInput(f"{name} has no EEG channel besides the reference {', '.join(named)}")
    if bad := [channel for channel in (*channels, *named) if channel in raw.info["bads"]]:
        raise BadInput(
            f"{name} has channels marked as bad: {', '.join(bad)}; interpolate or drop them first"
        )
    eeg = raw.get_data(picks=list(channels)).T
    reference_signals = raw.get_data(picks=list(named)).T if named else eeg
    return eeg, channels, None if reference == "none" else reference_signals


def eeg_files(data: RecordedEEG, path: Path) -> list[Path]:
    """Return the EEG files of a folder, or the one file that is named."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise BadInput(f"{path} does not exist{nearest(path.name, siblings)}")
    if isinstance(data, MatlabEEG):
        paths = [p for p in path.rglob("*.mat") if _TRIAL.fullmatch(p.name)]
        paths.sort(key=_trial_order)
    else:
        endings = ENDINGS if isinstance(data, MneEEG) else (".npy",)
        paths = sorted(p for p in path.iterdir() if p.name.endswith(endings) and p.is_file())
        # a folder of a data set also has envelopes and other features of the speech
        paths = [p for p in paths if p.stem.endswith(f"{_SEPARATOR}eeg")] or paths
    if not paths:
        matlab = isinstance(data, MatlabEEG)
        form = "BLOCK_TRIAL.mat" if matlab else f"EEG file ({', '.join(endings)})"
        raise BadInput(f"{path} has no {form}")
    return paths


def read_eeg(
    data: RecordedEEG, path: Path, subjects: Collection[str]
) -> tuple[Recording, tuple[str, ...]]:
    """Read the EEG of a file, without the speech; return its channel names, too.

    The subject is the part of the file's name that is one of `subjects`, or "" if no part is. For
    MATLAB's files, the name of the folder is compared with `subjects` instead, or sub-001 if the
    folder also has the envelopes.
    """
    parts = path.stem.removesuffix(f"{_SEPARATOR}eeg").split(_SEPARATOR)
    name = _SEPARATOR.join(parts)
    if isinstance(data, MatlabEEG):
        folder = path.absolute().parent
        at_the_top = all(file.exists() for file in _shared_files(folder).values())
        parts = [_SUBJECT if at_the_top else folder.name]
        name = f"{parts[0]}{_SEPARATOR}{path.stem}"
    subject = next((part for part in parts if part in subjects), "")
    reference: Any = None
    if isinstance(data, MneEEG):
        raw = read_raw(path, MatFiles(mne=True))
        eeg, channels, reference = _raw_signals(raw, name, data.reference)
        measured_rate = float(raw.info["sfreq"])
    elif isinstance(data, MatlabEEG):
        eeg, reference = _matlab_signals(data, path, MatFiles())
        channels, measured_rate = channel_names(eeg.shape[-1]), MATLAB_RATE
    else:
        assert isinstance(data, ChallengeEEG)
        eeg, measured_rate = load_array(path), data.file_rate
        check_shape(str(path), eeg)
        channels = channel_names(eeg.shape[-1])
        reference = eeg if data.reference == "average" else None
    recording = preprocess_eeg(
        name,
        subject,
        eeg,
        channels=channels,
        measured_rate=measured_rate,
        rate=data.rate,
        band=data.band,
        reference=reference,
    )
    return recording, channels

"""Folders of recordings as they come: found and paired by name, read one at a time."""

import importlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frostlab.data.eeg.preprocess import Band, prepared
from frostlab.data.eeg.recordings import Recording
from frostlab.data.eeg.simulate import channel_names
from frostlab.data.eeg.splits import PREFIXES, Heading
from frostlab.errors import BadInput, nearest
from frostlab.recipe.data import ChallengeEEG, MatlabEEG, MneEEG

MATLAB_RATE = 128.0  # Hz; the files do not say
_ROLES = {prefix: role for role, prefix in PREFIXES.items()}
_CUT = "_-_"
_TRIAL = re.compile(r"([12])_(\d+)\.mat")
_BLOCKS = {1: ("F_env", "M_env", "blk1_M_Order"), 2: ("M_env", "F_env", "blk2_F_Order")}


@dataclass(frozen=True)
class Source:
    """A recording that was found and not yet read."""

    heading: Heading
    files: tuple[Path, ...]
    read: Callable[[], tuple[Recording, tuple[str, ...]]]  # with the channels' names


def find_folder(path: str, data_dir: Path | None) -> Path:
    """Return a folder by its path, else under the data folder, or say where it was looked for."""
    given = data_dir or (Path(env) if (env := os.environ.get("FROSTLAB_DATA")) else None)
    places = [Path(path).expanduser()]
    if given is not None and not places[0].is_absolute():
        places.append(given.expanduser() / path)
    for place in places:
        if place.is_dir():
            return place
    looked = " nor ".join(str(place.absolute()) for place in places)
    around = [p for place in places if place.parent.is_dir() for p in place.parent.iterdir()]
    beside = [p.name for p in around if p.is_dir()]
    hint = nearest(places[0].name, beside)
    more = "" if given or hint else "; name its parent with --data-dir or FROSTLAB_DATA"
    raise BadInput(f"data.path {path}: there is no folder {looked}{hint}{more}")


def load_array(path: Path) -> NDArray[np.float64]:
    """Read a .npy file of numbers."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    if array.dtype.kind not in "fiu" or array.ndim == 0:
        raise BadInput(f"{path} holds {array.dtype} of shape {array.shape}, not samples")
    return array.astype(np.float64)


def flat(path: Path, envelope: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return an envelope of one column as a line."""
    if envelope.ndim == 2 and 1 in envelope.shape:
        return envelope.reshape(-1)
    if envelope.ndim != 1:
        raise BadInput(f"{path} has shape {envelope.shape}; an envelope is one line of samples")
    return envelope


def paired(folder: Path, endings: Iterable[str]) -> list[tuple[list[str], Path, Path]]:
    """Return the parts of each recording's name, its EEG file and its envelope's, by name."""
    marks = tuple(f"{_CUT}eeg{ending}" for ending in endings)
    wanted = f"…{_CUT}SUBJECT{_CUT}STIMULUS{marks[0]}"
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(f"{_CUT}envelope.npy"):
            stem = path.name.removesuffix("envelope.npy")
            if not any((folder / f"{stem}eeg{ending}").exists() for ending in endings):
                raise BadInput(f"{path} has no partner {stem}eeg{marks[0].rpartition('eeg')[2]}")
        mark = next((mark for mark in marks if path.name.endswith(mark)), None)
        if mark is None:
            continue
        stem = path.name.removesuffix(mark)
        partner = folder / f"{stem}{_CUT}envelope.npy"
        if not partner.exists():
            raise BadInput(f"{path} has no partner {partner.name}")
        found.append((stem.split(_CUT), path, partner))
    if not found:
        raise BadInput(f"{folder} has no file {wanted}")
    return found


def challenge_sources(data: ChallengeEEG, folder: Path) -> list[Source]:
    """Find `ROLE_-_SUBJECT_-_STIMULUS_-_eeg.npy`; other features of the stimuli are ignored."""
    sources = []
    for parts, eeg, envelope in paired(folder, [".npy"]):
        if len(parts) < 3 or parts[0] not in _ROLES:
            raise BadInput(
                f"{eeg} is not named {'|'.join(_ROLES)}{_CUT}SUBJECT{_CUT}STIMULUS{_CUT}eeg.npy"
            )
        heading = Heading(_CUT.join(parts), parts[1], _CUT.join(parts[2:]), _ROLES[parts[0]])
        sources.append(
            Source(heading, (eeg, envelope), _challenge_reader(data, heading, eeg, envelope))
        )
    return sources


def _challenge_reader(
    data: ChallengeEEG, heading: Heading, eeg: Path, envelope: Path
) -> Callable[[], tuple[Recording, tuple[str, ...]]]:
    def read() -> tuple[Recording, tuple[str, ...]]:
        measured = load_array(eeg)
        channels = channel_names(measured.shape[-1])
        recording = prepared(
            heading.name,
            heading.subject,
            measured,
            flat(envelope, load_array(envelope)),
            channels=channels,
            rates=(data.file_rate, data.file_rate),
            rate=data.rate,
            band=data.band,
            reference=measured if data.reference == "average" else None,
        )
        return recording, channels

    return read


def matlab_sources(data: MatlabEEG, folder: Path) -> list[Source]:
    """Find `BLOCK_TRIAL.mat`: in block 1 F is attended to, in block 2 M.

    The attended speaker's story has the trial's number, the other's is listed in
    `competing_speaker_order.mat`. Folders within are subjects of their own.
    """
    names = ("F_env", "M_env", "competing_speaker_order")
    shared = {name: folder / f"{name}.mat" for name in names}
    for name, path in shared.items():
        if not path.exists():
            raise BadInput(f"{folder} has no {name}.mat")
    order = _load_mat(shared["competing_speaker_order"], "blk1_M_Order", "blk2_F_Order")
    stories = {name: _load_mat(shared[name], "stim1")["stim1"].ravel() for name in names[:2]}
    sources = []
    for path in sorted(folder.rglob("*.mat"), key=_trial):
        if not (found := _TRIAL.fullmatch(path.name)):
            continue
        block, trial = int(found[1]), int(found[2])
        attended, ignored, listed = _BLOCKS[block]
        numbers = order[listed].ravel()
        if not 1 <= trial <= min(len(numbers), len(stories[attended])):
            raise BadInput(
                f"{path}: trial {trial}, but {shared['competing_speaker_order'].name} lists "
                f"{len(numbers)}, and {attended}.mat has {len(stories[attended])}"
            )
        if numbers[trial - 1] not in range(1, len(stories[ignored]) + 1):
            raise BadInput(
                f"{shared['competing_speaker_order']}: {listed} names story {numbers[trial - 1]} "
                f"for trial {trial}, but {ignored}.mat has 1 to {len(stories[ignored])}"
            )
        subject = "sub-001" if path.parent == folder else path.parent.name
        heading = Heading(f"{subject}{_CUT}{block}_{trial}", subject, f"{attended[0]}{trial}")
        heard = (stories[attended][trial - 1], stories[ignored][int(numbers[trial - 1]) - 1])
        files = (path, *shared.values())
        sources.append(Source(heading, files, _matlab_reader(data, heading, path, heard)))
    if not sources:
        raise BadInput(f"{folder} has no BLOCK_TRIAL.mat, such as 1_1.mat")
    return sources


def _matlab_reader(
    data: MatlabEEG,
    heading: Heading,
    path: Path,
    heard: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> Callable[[], tuple[Recording, tuple[str, ...]]]:
    def read() -> tuple[Recording, tuple[str, ...]]:
        held = _load_mat(path, "eeg", "mast")
        for key, array in held.items():
            if array.dtype.kind not in "fiu":
                raise BadInput(f"{path}: {key} holds {array.dtype}, not samples")
        measured = held["eeg"].astype(np.float64)
        references = {"average": measured, "mastoids": held["mast"].astype(float), "none": None}
        channels = channel_names(measured.shape[1])
        recording = prepared(
            heading.name,
            heading.subject,
            measured,
            heard[0].ravel().astype(np.float64),
            channels=channels,
            rates=(MATLAB_RATE, MATLAB_RATE),
            rate=data.rate,
            band=data.band,
            reference=references[data.reference],
            other=heard[1].ravel().astype(np.float64),
        )
        return recording, channels

    return read


def _trial(path: Path) -> tuple[str, int, int]:
    found = _TRIAL.fullmatch(path.name)
    return (str(path.parent), int(found[1]), int(found[2])) if found else (str(path.parent), 0, 0)


def _load_mat(path: Path, *keys: str) -> dict[str, Any]:
    from scipy import io

    try:
        held: dict[str, Any] = io.loadmat(path, variable_names=keys)
    except Exception as error:  # scipy raises whatever a broken file makes it stumble over
        raise BadInput(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    for key in keys:
        if key not in held:
            there = ", ".join(name for name, _, _ in io.whosmat(path))
            raise BadInput(f"{path} has no variable {key}; it has {there}")
    return {key: held[key] for key in keys}


ENDINGS = (".fif", ".edf", ".bdf", ".set", ".vhdr")


def import_mne(purpose: str) -> Any:
    """Import MNE, or say in one line how to get it."""
    try:
        return importlib.import_module("mne")
    except ImportError as error:
        raise BadInput(f"{purpose} needs the package mne: pip install 'frostlab[eeg]'") from error


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
    """Return a recording of a Raw's EEG channels and the envelope heard meanwhile.

    The envelope is at the Raw's rate, or at `envelope_rate`; both end up at `rate`. The reference
    is "none", "average" or the names of channels, whose mean is taken off and which are left out.
    """
    eeg, channels, taken = _signals(raw, name, reference)
    return prepared(
        name,
        subject,
        eeg,
        np.asarray(envelope, dtype=np.float64),
        channels=channels,
        rates=(float(raw.info["sfreq"]), envelope_rate or float(raw.info["sfreq"])),
        rate=rate,
        band=band,
        reference=taken,
    )


def eeg_channels(raw: Any, reference: str | tuple[str, ...] = "none") -> tuple[str, ...]:
    """Return the names of a Raw's EEG channels less the reference, bad ones, too."""
    picked = raw.copy().pick("eeg", exclude=()).ch_names
    return tuple(name for name in picked if name not in _named(reference))


def _named(reference: str | tuple[str, ...]) -> tuple[str, ...]:
    """The channels of a reference."""
    if isinstance(reference, tuple):
        return reference
    return () if reference in ("none", "average") else (reference,)


def _signals(raw: Any, name: str, reference: str | tuple[str, ...]) -> tuple[Any, Any, Any]:
    """The EEG (samples, channels), its channels' names, and the signals to refer it to."""
    try:
        channels = eeg_channels(raw, reference)
    except ValueError as error:
        raise BadInput(f"{name} has no EEG channel") from error
    named = _named(reference)
    for one in named:
        if one not in raw.ch_names:
            choices = [*raw.ch_names, "none", "average"]
            raise BadInput(f"{name} has no channel {one} to refer to{nearest(one, choices)}")
    if not channels:
        raise BadInput(f"{name} has no EEG channel beside the reference {', '.join(named)}")
    if bad := [one for one in (*channels, *named) if one in raw.info["bads"]]:
        raise BadInput(
            f"{name} has channels marked as bad: {', '.join(bad)}; interpolate or drop them first"
        )
    eeg = raw.get_data(picks=list(channels)).T
    taken = raw.get_data(picks=list(named)).T if named else eeg
    return eeg, channels, None if reference == "none" else taken


def mne_sources(data: MneEEG, folder: Path) -> list[Source]:
    """Find `SUBJECT_-_STIMULUS_-_eeg.fif`, or another ending MNE reads, and their envelopes."""
    import_mne(f"data.name {data.name}")
    sources = []
    for parts, eeg, envelope in paired(folder, ENDINGS):
        if len(parts) < 2:
            raise BadInput(f"{eeg} is not named SUBJECT_-_STIMULUS_-_eeg{eeg.suffix}")
        heading = Heading("_-_".join(parts), parts[0], "_-_".join(parts[1:]))
        sources.append(Source(heading, (eeg, envelope), _mne_reader(data, heading, eeg, envelope)))
    return sources


def _mne_reader(
    data: MneEEG, heading: Heading, eeg: Path, envelope: Path
) -> Callable[[], tuple[Recording, tuple[str, ...]]]:
    def read() -> tuple[Recording, tuple[str, ...]]:
        mne = import_mne(f"reading {eeg}")
        try:
            raw = mne.io.read_raw(eeg, preload=True, verbose="ERROR")
        except Exception as error:  # MNE raises whatever a broken file makes it stumble over
            said = str(error).partition("\n")[0]
            raise BadInput(f"{eeg} cannot be read: {said}") from error
        recording = from_mne(
            raw,
            flat(envelope, load_array(envelope)),
            subject=heading.subject,
            name=heading.name,
            rate=data.rate,
            envelope_rate=data.envelope_rate,
            band=data.band,
            reference=data.reference,
        )
        return recording, eeg_channels(raw, data.reference)

    return read

"""Recordings from MNE: any Raw with the envelope that was heard, in memory or in files."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from frostlab.data.eeg.division import Heading
from frostlab.data.eeg.recordings import Recording
from frostlab.data.eeg.signals import Band, prepared
from frostlab.data.eeg.sources import Source, flat, load_array, paired
from frostlab.errors import BadInput, nearest
from frostlab.recipe.eeg import MneEEG

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

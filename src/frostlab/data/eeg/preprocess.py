"""Preprocessing of measured signals: check, rereference, resample, filter, standardize."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from frostlab.data.eeg.recordings import Recording, Signal
from frostlab.errors import BadInput

Array = NDArray[np.float64]
Band = tuple[float, float]
CHANNELS = 4096  # the most channels of a recording; EEG has up to 512
_ORDER = 3  # N of scipy's `butter`; the filter is applied once in each direction


def preprocess(
    name: str,
    subject: str,
    eeg: Array,
    speakers: Sequence[Array],
    *,
    channels: tuple[str, ...],
    rates: tuple[float, float],
    rate: float,
    band: Band | None,
    reference: Array | None = None,
) -> Recording:
    """Check and preprocess the signals of one recording.

    `speakers` are envelopes: of the speaker to whom the subject listened and, if there was one, of
    a second speaker, whom the subject ignored. `rates` are the sampling rates of EEG and envelopes
    in Hz; all signals are resampled to `rate`. The mean of the channels in `reference` (samples,
    channels) is subtracted from the EEG.
    """
    for speaker in speakers:
        check_signals(name, eeg, channels, speaker)
        check_durations(name, len(eeg), len(speaker), rates)

    check_reference(name, eeg, reference)

    signals = [_filtered(rereference(eeg, reference), rates[0], rate, band, name)]
    signals += [_filtered(speaker, rates[1], rate, band, name) for speaker in speakers]
    samples = min(map(len, signals))
    return Recording(name, subject, *(standardize(x[:samples]) for x in signals))


def preprocess_eeg(
    name: str,
    subject: str,
    eeg: Array,
    *,
    channels: tuple[str, ...],
    measured_rate: float,
    rate: float,
    band: Band | None,
    reference: Array | None = None,
) -> Recording:
    """Check and preprocess EEG alone; the recording's envelope, which is unknown, is all zeros."""
    check_shape(name, eeg)
    check_eeg(name, eeg, channels)
    check_reference(name, eeg, reference)
    filtered = _filtered(rereference(eeg, reference), measured_rate, rate, band, name)
    return Recording(name, subject, standardize(filtered), np.zeros(len(filtered), np.float32))


def _filtered(x: Array, measured_rate: float, rate: float, band: Band | None, name: str) -> Array:
    """Resample and filter a signal."""
    # Subtracting the first sample makes a flat channel exactly 0, before and after filtering.
    return bandpass(resample(x - x[0], measured_rate, rate, name), rate, band, name)


def check_shape(name: str, eeg: Array) -> None:
    """Refuse EEG that is not (samples, channels), is empty, or has too many channels."""
    if eeg.ndim != 2 or not eeg.size:
        raise BadInput(f"{name} has shape {eeg.shape}, not (samples, channels)")
    if eeg.shape[1] > CHANNELS:
        raise BadInput(f"{name} has {eeg.shape[1]:,} channels; the most is {CHANNELS:,}")


def check_reference(name: str, eeg: Array, reference: Array | None) -> None:
    """Refuse a reference with another number of samples than the EEG, or non-finite values."""
    if reference is None:
        return
    finite = int(np.isfinite(reference).all(axis=1).sum())
    if not len(reference) == len(eeg) == finite:
        raise BadInput(
            f"{name}: the EEG has {len(eeg)} samples and the reference {len(reference)}, "
            f"{finite} of them finite; the reference needs as many as the EEG, all finite"
        )


def check_signals(name: str, eeg: Array, channels: tuple[str, ...], envelope: Array) -> None:
    """Refuse signals that have a wrong shape, non-finite values or no variation."""
    if eeg.ndim != 2 or envelope.ndim != 1:
        raise BadInput(
            f"{name}: the EEG has shape {eeg.shape} and the envelope {envelope.shape}, "
            "not (samples, channels) and (samples,)"
        )
    if min(eeg.size, len(envelope)) == 0:
        raise BadInput(
            f"{name}: the EEG has shape {eeg.shape}, the envelope {envelope.shape}; "
            "neither may be empty"
        )
    if not np.isfinite(envelope).all():
        raise BadInput(f"{name}: NaN or infinity in the envelope")
    if np.ptp(envelope) <= 1e-9 * np.abs(envelope).max():
        raise BadInput(f"{name}: the envelope is flat, {envelope[0]:g} throughout")
    check_eeg(name, eeg, channels)


def check_eeg(name: str, eeg: Array, channels: tuple[str, ...]) -> None:
    """Refuse EEG with a wrong number of channel names, non-finite values or only flat channels."""
    if eeg.shape[1] != len(channels):
        raise BadInput(f"{name} has {eeg.shape[1]} channels and {len(channels)} channel names")
    finite = np.isfinite(eeg).all(axis=0)
    if not finite.all():
        bad = [channels[i] for i in np.flatnonzero(~finite)]
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise BadInput(f"{name}: NaN or infinity in channel{'s' * (len(bad) > 1)} {shown}")
    if not np.ptp(eeg, axis=0).any():
        raise BadInput(f"{name}: every channel of the EEG is flat")


def check_durations(name: str, eeg: int, envelope: int, rates: tuple[float, float]) -> None:
    """Refuse unequal durations; if the rates differ, a sample of the lower rate may be missing."""
    if abs(eeg / rates[0] - envelope / rates[1]) > (rates[0] != rates[1]) / min(rates) + 1e-9:
        raise BadInput(
            f"{name}: the EEG has {eeg} samples at {rates[0]:g} Hz and the envelope {envelope} at "
            f"{rates[1]:g} Hz, {eeg / rates[0]:.2f} s and {envelope / rates[1]:.2f} s; both must "
            "be equally long"
        )


def rereference(eeg: Array, reference: Array | None) -> Array:
    """Subtract the mean of the reference channels, if there are any, from every channel."""
    return eeg if reference is None else eeg - reference.mean(axis=1, keepdims=True)


def resample(x: Array, rate: float, wanted: float, name: str) -> Array:
    """Resample to a lower rate without aliasing or a shift in time."""
    from scipy import signal

    if rate == wanted:
        return x
    if rate < wanted:
        raise BadInput(
            f"{name} is at {rate:g} Hz and data.rate is {wanted:g} Hz; lower data.rate to {rate:g}"
        )
    ratio = Fraction(wanted / rate).limit_denominator(1000)
    if abs(float(ratio) * rate - wanted) > 1e-6 * wanted:
        raise BadInput(
            f"{name} is at {rate:g} Hz, which has no simple ratio to data.rate {wanted:g} Hz; "
            f"set data.rate to {rate / 2:g}, for example"
        )
    lowered: Array = signal.resample_poly(
        x, ratio.numerator, ratio.denominator, axis=0, padtype="line"
    )
    return lowered


def bandpass(x: Array, rate: float, band: Band | None, name: str) -> Array:
    """Apply a band-pass filter, if any, forwards and backwards, so that no time shift remains."""
    from scipy import signal

    if band is None:
        return x
    if len(x) < rate / band[0]:
        raise BadInput(
            f"{name} has {len(x) / rate:.1f} s, too short for a band from {band[0]:g} Hz"
        )
    sections = signal.butter(_ORDER, band, "bandpass", fs=rate, output="sos")
    pad = min(len(x) - 1, int(3 * rate / band[0]))  # three periods of the lowest frequency
    filtered: Array = signal.sosfiltfilt(sections, x, axis=0, padlen=pad)
    return filtered


def standardize(x: Array) -> Signal:
    """Scale every channel to mean 0 and standard deviation 1; a flat channel becomes 0."""
    centred = x - x.mean(axis=0)
    deviation = centred.std(axis=0)
    flat = deviation <= 1e-9 * np.abs(x).max(axis=0)
    return (centred * np.where(flat, 0, 1 / np.where(flat, 1, deviation))).astype(np.float32)

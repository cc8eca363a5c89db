"""EEG and the envelope (loudness over time) of the speech that a subject heard."""

from frostlab.data.eeg.load import gather, load_recordings
from frostlab.data.eeg.readers import from_mne
from frostlab.data.eeg.recordings import Recording, Recordings, windows

__all__ = ["Recording", "Recordings", "from_mne", "gather", "load_recordings", "windows"]

"""The cap is BioSemi's, and dipoles show where they lie."""

import numpy as np

from frostlab.data.eeg.simulate import BIOSEMI64, channel_names, positions, topographies


def test_the_cap_is_that_of_mne() -> None:
    import mne

    montage = mne.channels.make_standard_montage("biosemi64")
    placed = montage.get_positions()["ch_pos"]
    assert tuple(placed) == BIOSEMI64
    for mine, theirs in zip(positions(), placed.values(), strict=True):
        cosine = mine @ theirs / np.linalg.norm(theirs)
        assert np.degrees(np.arccos(min(cosine, 1))) < 0.5
    assert channel_names(128) == tuple(mne.channels.make_standard_montage("biosemi128").ch_names)
    assert channel_names(3) == ("1", "2", "3")


def test_a_dipole_is_strongest_above_itself() -> None:
    shown = topographies(np.array([[0, 0, 0.7], [0, -0.7, 0.1]]), np.array([[0, 0, 1], [0, -1, 0]]))
    assert BIOSEMI64[shown[:, 0].argmax()] == "Cz"
    assert BIOSEMI64[shown[:, 1].argmax()] == "Oz"
    np.testing.assert_allclose(shown.mean(axis=0), 0, atol=1e-12)

"""A Raw of MNE becomes a recording: EEG channels only, at one rate, in memory or from files."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frostlab.data.eeg.load import load_recordings
from frostlab.data.eeg.readers import from_mne
from frostlab.errors import BadInput
from frostlab.recipe.data import MneEEG


def raw(rate: float = 128.0, seconds: int = 10, seed: int = 0, types: Any = "eeg") -> Any:
    import mne

    names = ["Fz", "Cz", "M1", "M2", "EOG"]
    kinds = ["eeg"] * 4 + ["eog"] if types == "eeg" else types
    info = mne.create_info(names, rate, kinds)
    data = 1e-5 * np.random.default_rng(seed).normal(size=(5, round(rate * seconds)))
    return mne.io.RawArray(data, info, verbose="ERROR")


def envelope(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(samples)


def test_only_eeg_channels_at_one_rate() -> None:
    found = from_mne(raw(), envelope(1280), subject="s", name="s_-_a")
    assert found.eeg.shape == (640, 4)
    assert (found.name, found.subject) == ("s_-_a", "s")
    marked = raw()
    marked.info["bads"] = ["Cz", "EOG"]
    with pytest.raises(BadInput, match="a has channels marked as bad: Cz; interpolate or drop"):
        from_mne(marked, envelope(1280), subject="s", name="a")
    slow = from_mne(raw(), envelope(640), subject="s", name="a", envelope_rate=64.0)
    np.testing.assert_allclose(np.corrcoef(slow.envelope, envelope(640))[0, 1], 1, atol=1e-6)


def test_references() -> None:
    measured = raw()
    data = measured.get_data()
    found = from_mne(
        measured, envelope(1280), subject="s", name="a", rate=128.0, reference=("M1", "M2")
    )
    plain = data[:2] - data[2:4].mean(axis=0)
    np.testing.assert_allclose(found.eeg.T, plain / plain.std(1, keepdims=True), atol=0.1)
    assert np.corrcoef(found.eeg[:, 0], plain[0])[0, 1] > 0.99999
    found = from_mne(
        measured, envelope(1280), subject="s", name="a", rate=128.0, reference="average"
    )
    assert np.corrcoef(found.eeg[:, 0], data[0] - data[:4].mean(0))[0, 1] > 0.99999
    settings: Any = {"subject": "s", "name": "a", "rate": 128.0}
    one = from_mne(measured, envelope(1280), reference="M1", **settings)
    same = from_mne(measured, envelope(1280), reference=("M1",), **settings)
    assert one.eeg.shape == (1280, 3)
    np.testing.assert_array_equal(one.eeg, same.eeg)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rate": 256.0}, "a is at 128 Hz and data.rate is 256 Hz"),
        ({"envelope_rate": 64.0}, "1280 samples at 128 Hz and the envelope 1280 at 64 Hz"),
        ({"reference": ("M3",)}, "a has no channel M3 to refer to"),
        ({"reference": "averag"}, "averag to refer to; did you mean `average`"),
        ({"raw": {"types": "misc"}}, "a has no EEG channel"),
        ({"reference": ("Fz", "Cz", "M1", "M2")}, "no EEG channel beside the reference Fz, Cz"),
    ],
)
def test_what_does_not_fit(settings: dict[str, Any], said: str) -> None:
    measured = raw(**settings.pop("raw", {}))
    with pytest.raises(BadInput, match=said):
        from_mne(measured, envelope(1280), subject="s", name="a", **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "raws"
    place.mkdir()
    for story in range(4):
        stem = f"sub-001_-_story{story}_-_"
        raw(seed=story).save(place / f"{stem}eeg.fif", verbose="ERROR")
        np.save(place / f"{stem}envelope.npy", envelope(1280, story))
    return place


def mne_data(folder: Path, **settings: Any) -> MneEEG:
    return MneEEG.model_validate({"name": "eeg-mne", "path": str(folder)} | settings)


def test_a_folder_of_raws(folder: Path, tmp_path: Path) -> None:
    found = load_recordings(mne_data(folder, reference=("M1", "M2")), cache=tmp_path)
    assert found.channels == ("Fz", "Cz")
    assert [one.name for one in found.splits["report"]] == ["sub-001_-_story3"]
    same = from_mne(raw(seed=3), envelope(1280, 3), subject="x", name="x", reference=("M1", "M2"))
    np.testing.assert_allclose(found.splits["report"][0].eeg, same.eeg, atol=1e-4)
    np.testing.assert_allclose(found.splits["report"][0].envelope, same.envelope, atol=1e-6)


def test_bad_folders(folder: Path, tmp_path: Path) -> None:
    other = raw(seed=9).rename_channels({"Cz": "Oz"})
    other.save(folder / "sub-001_-_story2_-_eeg.fif", overwrite=True, verbose="ERROR")
    with pytest.raises(BadInput, match="story2 has channel Oz where others have Cz"):
        load_recordings(mne_data(folder), cache=tmp_path)
    (folder / "sub-001_-_story2_-_eeg.edf").write_bytes(b"")
    with pytest.raises(BadInput, match="2 recordings are called sub-001_-_story2"):
        load_recordings(mne_data(folder), cache=tmp_path)
    (folder / "sub-001_-_story2_-_eeg.edf").unlink()
    (folder / "sub-001_-_story2_-_eeg.fif").write_bytes(b"no file of MNE's, but long enough" * 9)
    with pytest.raises(BadInput, match="story2_-_eeg.fif cannot be read"):
        load_recordings(mne_data(folder), cache=tmp_path)


@pytest.mark.parametrize("kept", [0, 10_000])
def test_files_that_end_early(folder: Path, tmp_path: Path, kept: int) -> None:
    path = folder / "sub-001_-_story2_-_eeg.fif"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadInput, match="story2_-_eeg.fif cannot be read") as caught:
        load_recordings(mne_data(folder), cache=tmp_path)
    assert "\n" not in str(caught.value)


def test_without_mne(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mne", None)
    with pytest.raises(BadInput, match="needs the package mne: pip install 'frostlab\\[eeg\\]'"):
        load_recordings(mne_data(folder), cache=tmp_path)

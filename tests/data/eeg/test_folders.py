"""Folders of recordings are paired, divided and read once; what is wrong with one is said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frostlab.data.eeg import load as loading_module
from frostlab.data.eeg.load import load_recordings
from frostlab.data.eeg.recordings import Recording
from frostlab.errors import BadInput
from frostlab.recipe.data import ChallengeEEG


def write_pair(folder: Path, stem: str, seed: int, samples: int = 640, channels: int = 64) -> None:
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    np.save(folder / f"{stem}_-_eeg.npy", random.normal(3, 2, (samples, channels)))
    np.save(folder / f"{stem}_-_envelope.npy", random.random((samples, 1)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two subjects, one story, in the challenge's parts."""
    place = tmp_path / "split_data"
    for subject in (1, 2):
        for part, role in enumerate(("train", "val", "test")):
            write_pair(place, f"{role}_-_sub-00{subject}_-_audiobook_1", 10 * subject + part)
    np.save(place / "train_-_sub-001_-_audiobook_1_-_mel.npy", np.zeros((640, 10)))
    return place


def challenge(folder: Path, **settings: Any) -> ChallengeEEG:
    return ChallengeEEG.model_validate({"name": "eeg-challenge", "path": str(folder)} | settings)


def test_the_challenges_folder(folder: Path, tmp_path: Path) -> None:
    found = load_recordings(challenge(folder), cache=tmp_path)
    assert [one.name for one in found.splits["tune"]] == [
        "val_-_sub-001_-_audiobook_1",
        "val_-_sub-002_-_audiobook_1",
    ]
    assert found.subjects == ("sub-001", "sub-002")
    assert found.rate == 64
    assert found.channels[47] == "Cz"
    report = found.splits["report"][1]
    raw = np.load(folder / "test_-_sub-002_-_audiobook_1_-_eeg.npy")
    np.testing.assert_allclose(report.eeg, (raw - raw.mean(0)) / raw.std(0), atol=1e-5)
    heard = np.load(folder / "test_-_sub-002_-_audiobook_1_-_envelope.npy")[:, 0]
    assert np.corrcoef(report.envelope, heard)[0, 1] > 0.9999
    average = load_recordings(challenge(folder, reference="average"), cache=tmp_path)
    referred = raw - raw.mean(axis=1, keepdims=True)
    assert np.corrcoef(average.splits["report"][1].eeg[:, 5], referred[:, 5])[0, 1] > 0.9999
    assert average.digest != found.digest


def test_speech_that_was_trained_on_is_found_by_its_numbers(folder: Path, tmp_path: Path) -> None:
    assert load_recordings(challenge(folder), cache=tmp_path).caution is None
    for kind in ("eeg", "envelope"):
        known = np.load(folder / f"train_-_sub-001_-_audiobook_1_-_{kind}.npy")
        np.save(folder / f"test_-_sub-002_-_audiobook_1_-_{kind}.npy", known)
    found = load_recordings(challenge(folder), cache=tmp_path)
    assert found.caution == "speech of 1 of 2 report recordings was also heard in training"


def test_held_out_subjects_of_a_folder(folder: Path, tmp_path: Path) -> None:
    found = load_recordings(challenge(folder, unseen=("sub-001",)), cache=tmp_path)
    assert found.subjects == ("sub-002",)
    assert [one.name for one in found.splits["unseen"]] == ["test_-_sub-001_-_audiobook_1"]
    assert {one.subject for one in found.splits["train"]} == {"sub-002"}


def test_a_folder_without_held_out_parts_is_carved(tmp_path: Path) -> None:
    for story in range(4):
        write_pair(tmp_path / "d", f"train_-_sub-001_-_story{story}", story)
    found = load_recordings(challenge(tmp_path / "d", tune=1, report=1), cache=tmp_path)
    assert {role: [one.name[-1] for one in split] for role, split in found.splits.items()} == {
        "train": ["0", "1"], "tune": ["2"], "report": ["3"],
    }  # fmt: skip
    moved = (tmp_path / "d").rename(tmp_path / "e")
    assert load_recordings(challenge(moved), cache=tmp_path).digest == found.digest
    write_pair(moved, "train_-_sub-001_-_story0", 99)
    assert load_recordings(challenge(moved), cache=tmp_path).digest != found.digest


def test_resampled_and_in_band(tmp_path: Path) -> None:
    for story in range(3):
        write_pair(tmp_path / "d", f"train_-_sub-001_-_s{story}", story, samples=1280, channels=5)
    data = challenge(tmp_path / "d", file_rate=128.0, band=(1.0, 9.0))
    found = load_recordings(data, cache=tmp_path)
    one = found.splits["train"][0]
    assert one.eeg.shape == (640, 5)
    for signal in (one.eeg[:, 0], one.envelope):
        power = np.abs(np.fft.rfft(signal)) ** 2
        assert power[:101].sum() / power.sum() > 0.95  # up to 10 Hz
    assert found.channels == ("1", "2", "3", "4", "5")
    whole = load_recordings(data.model_copy(update={"band": None}), cache=tmp_path)
    assert whole.digest != found.digest, "not what the cache holds of another band"


def test_a_folder_that_changes_while_it_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = loading_module.Store.add

    def disturbed(self: Any, role: str, recording: Recording) -> None:
        write_pair(folder, "train_-_sub-001_-_audiobook_1", 99)
        add(self, role, recording)

    monkeypatch.setattr(loading_module.Store, "add", disturbed)
    with pytest.raises(BadInput, match="split_data changed while it was read; run it again"):
        load_recordings(challenge(folder), cache=tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache" / "eeg").iterdir() if p.is_dir()]


def break_name(folder: Path) -> None:
    write_pair(folder, "sub-001_-_audiobook_1", 0)


def break_channels(folder: Path) -> None:
    write_pair(folder, "test_-_sub-002_-_audiobook_1", 0, channels=63)


def break_file(folder: Path) -> None:
    (folder / "val_-_sub-001_-_audiobook_1_-_eeg.npy").write_bytes(b"\x93NUMPY")


def break_words(folder: Path) -> None:
    np.save(folder / "val_-_sub-001_-_audiobook_1_-_eeg.npy", np.array([["a"]]))


def break_kind(folder: Path) -> None:
    with (folder / "val_-_sub-001_-_audiobook_1_-_eeg.npy").open("wb") as file:
        np.savez(file, eeg=np.ones((640, 64)))


def break_envelope(folder: Path) -> None:
    np.save(folder / "val_-_sub-001_-_audiobook_1_-_envelope.npy", np.ones((640, 2)))


def break_length(folder: Path) -> None:
    np.save(folder / "val_-_sub-001_-_audiobook_1_-_envelope.npy", np.arange(1280.0))


def lose(kind: str) -> Any:
    return lambda folder: (folder / f"val_-_sub-001_-_audiobook_1_-_{kind}.npy").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lose("envelope"), "eeg.npy has no partner val_-_sub-001_-_audiobook_1_-_envelope.npy"),
        (lose("eeg"), "envelope.npy has no partner val_-_sub-001_-_audiobook_1_-_eeg.npy"),
        (break_name, "is not named train|val|test_-_SUBJECT"),
        (break_channels, "test_-_sub-002_-_audiobook_1 has 63 channels, train_-_sub-001.* has 64"),
        (break_file, "audiobook_1_-_eeg.npy cannot be read"),
        (break_words, "holds <U1"),
        (break_kind, "audiobook_1_-_eeg.npy cannot be read: the magic string"),
        (break_envelope, "has shape \\(640, 2\\); an envelope is one line"),
        (break_length, "640 samples at 64 Hz and the envelope 1280 at 64 Hz"),
    ],
)
def test_bad_folders(folder: Path, tmp_path: Path, spoil: Any, said: str) -> None:
    spoil(folder)
    with pytest.raises(BadInput, match=said) as caught:
        load_recordings(challenge(folder), cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    left = [p.name for p in (tmp_path / "cache").rglob("*") if p.is_dir() and p.name != "eeg"]
    assert not left


def test_where_a_folder_is_looked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FROSTLAB_DATA", raising=False)
    data = ChallengeEEG(name="eeg-challenge", path="split_data")
    with pytest.raises(BadInput, match="there is no folder /.*split_data; name its parent with"):
        load_recordings(data, cache=tmp_path)
    assert load_recordings(data, folder.parent, tmp_path).subjects
    monkeypatch.setenv("FROSTLAB_DATA", str(folder.parent))
    assert load_recordings(data, cache=tmp_path).subjects
    wrong = ChallengeEEG(name="eeg-challenge", path="split_dat")
    with pytest.raises(BadInput, match="nor .*split_dat; did you mean `split_data`"):
        load_recordings(wrong, cache=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="there is no folder .*/file$"):
        load_recordings(challenge(tmp_path / "file"), cache=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="empty has no file …_-_SUBJECT_-_STIMULUS_-_eeg.npy"):
        load_recordings(challenge(tmp_path / "empty"), cache=tmp_path)

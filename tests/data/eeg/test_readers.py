"""Readers of folders: the challenge's files, MATLAB's, and files that MNE reads."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import io

from cases import slow_unless
from frostlab.data.eeg import load as loading_module
from frostlab.data.eeg import readers
from frostlab.data.eeg.load import load_recordings
from frostlab.data.eeg.matlab import MatFiles
from frostlab.data.eeg.preprocess import resample, standardize
from frostlab.data.eeg.readers import eeg_files, from_mne, read_eeg
from frostlab.data.eeg.recordings import Recording
from frostlab.errors import BadInput
from frostlab.recipe.data import ChallengeEEG, MatlabEEG, MneEEG


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
    with pytest.raises(BadInput, match="split_data changed while it was read; run the command"):
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
        (break_name, "is not named PREFIX_-_SUBJECT"),
        (
            break_channels,
            "test_-_sub-002_-_audiobook_1 has 63 channels, but train_-_sub-001.* has 64",
        ),
        (break_file, "audiobook_1_-_eeg.npy cannot be read"),
        (break_words, "holds <U1"),
        (break_kind, "audiobook_1_-_eeg.npy cannot be read: the magic string"),
        (break_envelope, "has shape \\(640, 2\\); an envelope is one row"),
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
    with pytest.raises(BadInput, match="empty has no file …SUBJECT_-_STIMULUS_-_eeg.npy"):
        load_recordings(challenge(tmp_path / "empty"), cache=tmp_path)


ORDER = {"blk1_M_Order": [6, 8, 7, 5], "blk2_F_Order": [7, 5, 8, 6]}


def cells(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    held = np.empty((1, 8), dtype=object)
    for i in range(8):
        held[0, i] = random.normal(size=(1280, 1))
    return held


@pytest.fixture
def matlab_folder(tmp_path: Path) -> Path:
    place = tmp_path / "mat"
    (place / "Subject2").mkdir(parents=True)
    io.savemat(place / "competing_speaker_order.mat", ORDER)
    for name, seed in (("F_env", 1), ("M_env", 2)):
        io.savemat(place / f"{name}.mat", {"stim1": cells(seed)})
    random = np.random.default_rng(3)
    names = ["1_1", "1_2", "1_3", "2_4", "Subject2/1_4", "Subject2/2_1", "Subject2/2_2"]
    for name in names:
        eeg = random.normal(size=(1280, 6)).astype(np.float32)
        io.savemat(place / f"{name}.mat", {"eeg": eeg, "mast": eeg[:, :2] * 3})
    return place


def matlab(matlab_folder: Path, **settings: object) -> MatlabEEG:
    return MatlabEEG.model_validate(
        {"name": "eeg-matlab", "path": str(matlab_folder), "band": None} | settings
    )


def by_name(matlab_folder: Path, cache: Path, **settings: object) -> dict[str, Recording]:
    found = load_recordings(matlab(matlab_folder, **settings), cache=cache)
    return {one.name: one for split in found.splits.values() for one in split}


def heard(matlab_folder: Path, speaker: str, story: int) -> np.ndarray:
    held = io.loadmat(matlab_folder / f"{speaker}_env.mat")["stim1"][0, story - 1].ravel()
    return standardize(resample(held, 128, 64, ""))


def test_each_trial_has_its_own_two_speakers(matlab_folder: Path, tmp_path: Path) -> None:
    found = by_name(matlab_folder, tmp_path)
    assert len(found) == 7
    for name, attended, other in [
        ("sub-001_-_1_2", ("F", 2), ("M", 8)),
        ("sub-001_-_2_4", ("M", 4), ("F", 6)),
        ("Subject2_-_1_4", ("F", 4), ("M", 5)),
        ("Subject2_-_2_1", ("M", 1), ("F", 7)),
    ]:
        np.testing.assert_allclose(found[name].envelope, heard(matlab_folder, *attended), atol=1e-5)
        np.testing.assert_allclose(found[name].other, heard(matlab_folder, *other), atol=1e-5)
        assert found[name].eeg.shape == (640, 6)


@pytest.mark.parametrize("reference", slow_unless(["mastoids"], ["average", "mastoids", "none"]))
def test_references(matlab_folder: Path, tmp_path: Path, reference: str) -> None:
    found = by_name(matlab_folder, tmp_path, reference=reference)["sub-001_-_1_1"].eeg
    held = io.loadmat(matlab_folder / "1_1.mat")
    taken = {"average": held["eeg"].mean(1), "mastoids": held["mast"].mean(1), "none": 0}
    plain = held["eeg"] - np.reshape(taken[reference], (-1, 1))
    np.testing.assert_allclose(found, standardize(resample(plain, 128, 64, "")), atol=1e-4)


def test_stored_recordings_need_no_second_process(
    matlab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = by_name(matlab_folder, tmp_path)
    monkeypatch.setattr("frostlab.data.eeg.matlab._start", lambda modules: pytest.fail("started"))
    after = by_name(matlab_folder, tmp_path)
    for name, recording in before.items():
        np.testing.assert_array_equal(after[name].eeg, recording.eeg)


def test_leave_one_out(matlab_folder: Path, tmp_path: Path) -> None:
    found = load_recordings(matlab(matlab_folder, held_out=3), cache=tmp_path)
    names = {role: [one.name for one in split] for role, split in found.splits.items()}
    assert names["report"] == ["Subject2_-_2_2", "sub-001_-_1_3"]
    assert names["tune"] == ["Subject2_-_1_4", "sub-001_-_2_4"]
    with pytest.raises(BadInput, match="data.held_out 4, but Subject2 has 3 recordings"):
        load_recordings(matlab(matlab_folder, held_out=4), cache=tmp_path)


@pytest.mark.parametrize(
    "listed", slow_unless([[6, 1.5, 7, 5]], [[6, 9, 7, 5], [6, 0, 7, 5], [6, 1.5, 7, 5]])
)
def test_a_story_that_is_not_there(
    matlab_folder: Path, tmp_path: Path, listed: list[float]
) -> None:
    io.savemat(matlab_folder / "competing_speaker_order.mat", ORDER | {"blk1_M_Order": listed})
    said = rf"blk1_M_Order names story {listed[1]}(\.0)? for trial 2, but M_env.mat has 1 to 8"
    with pytest.raises(BadInput, match=said):
        load_recordings(matlab(matlab_folder), cache=tmp_path)


def test_references_that_do_not_fit(matlab_folder: Path, tmp_path: Path) -> None:
    held = {key: io.loadmat(matlab_folder / "1_1.mat")[key] for key in ("eeg", "mast")}
    io.savemat(matlab_folder / "1_1.mat", held | {"mast": held["mast"][:1200]})
    with pytest.raises(BadInput, match="1280 samples and the reference 1200, 1200 of them"):
        load_recordings(matlab(matlab_folder, reference="mastoids"), cache=tmp_path)
    io.savemat(matlab_folder / "1_1.mat", held | {"mast": np.full((1280, 2), np.nan)})
    with pytest.raises(BadInput, match="1280 samples and the reference 1280, 0 of them finite"):
        load_recordings(matlab(matlab_folder, reference="mastoids"), cache=tmp_path)
    io.savemat(matlab_folder / "1_1.mat", held | {"eeg": "words"})
    with pytest.raises(BadInput, match="1_1.mat: eeg holds <U5, not an array of integers"):
        load_recordings(matlab(matlab_folder), cache=tmp_path)


def test_eeg_to_decode_has_the_subjects_of_training(
    matlab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = MatFiles()  # one process for all
    monkeypatch.setattr(readers, "MatFiles", lambda: files)
    names = by_name(matlab_folder, tmp_path)
    for path in (matlab_folder, matlab_folder / "1_1.mat", matlab_folder / "Subject2"):
        for file in eeg_files(matlab(matlab_folder), path):
            decoded, _ = read_eeg(matlab(matlab_folder), file, ["sub-001", "Subject2"])
            assert decoded.subject == names[decoded.name].subject
    moved = tmp_path / "new" / "1_1.mat"
    moved.parent.mkdir()
    moved.write_bytes((matlab_folder / "1_1.mat").read_bytes())
    assert read_eeg(matlab(matlab_folder), moved, ["sub-001", "Subject2"])[0].subject == ""
    files.close()


@pytest.mark.parametrize(
    ("mastoids", "message"),
    [
        (np.ones((1200, 2)), "the EEG has 1280 samples and the reference 1200, 1200 of them"),
        (np.full((1280, 2), np.nan), "the EEG has 1280 samples and the reference 1280, 0 of them"),
        (np.ones((4, 1280, 2)), r"mast has shape \(4, 1280, 2\), not \(samples, channels\)"),
        (cells(1), "mast holds 8 arrays, not one"),
    ],
    ids=["short", "not finite", "three dimensions", "cells"],
)
def test_eeg_to_decode_has_its_reference_checked(
    matlab_folder: Path, mastoids: np.ndarray, message: str
) -> None:
    path = matlab_folder / "1_1.mat"
    io.savemat(path, {"eeg": io.loadmat(path)["eeg"], "mast": mastoids})
    with pytest.raises(BadInput, match=message):
        read_eeg(matlab(matlab_folder, reference="mastoids"), path, [])


def test_bad_files(matlab_folder: Path, tmp_path: Path) -> None:
    io.savemat(matlab_folder / "1_9.mat", {"eeg": np.ones((3, 2)), "mast": np.ones((3, 2))})
    with pytest.raises(
        BadInput, match="trial 9, but competing_speaker_order.mat lists 4 trials, and F_env.mat has"
    ):
        load_recordings(matlab(matlab_folder), cache=tmp_path)
    (matlab_folder / "1_9.mat").unlink()
    io.savemat(matlab_folder / "1_1.mat", {"data": np.ones((3, 2))})
    with pytest.raises(BadInput, match="1_1.mat has no variable eeg; it has data"):
        load_recordings(matlab(matlab_folder), cache=tmp_path)
    (matlab_folder / "1_1.mat").write_bytes(b"no MATLAB file at all")
    with pytest.raises(BadInput, match="1_1.mat cannot be read") as caught:
        load_recordings(matlab(matlab_folder), cache=tmp_path)
    assert "\n" not in str(caught.value)
    (matlab_folder / "M_env.mat").unlink()
    with pytest.raises(BadInput, match="mat has no M_env.mat"):
        load_recordings(matlab(matlab_folder), cache=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(os.environ.get("FROSTLAB_DATA", "."), "eeg_cocktail").is_dir(),
    reason="needs eeg_cocktail under FROSTLAB_DATA",
)
def test_the_attended_speaker_is_decoded_better(tmp_path: Path) -> None:
    """Leave one trial out: a ridge decoder of the attended speaker, 0–250 ms."""
    found = load_recordings(MatlabEEG(name="eeg-matlab"), cache=tmp_path)
    five = [one for split in found.splits.values() for one in split]
    lagged = []
    for one in five:
        padded = np.pad(one.eeg, ((0, 16), (0, 0)))
        lags = [padded[lag : lag + len(one)] for lag in range(17)]
        lagged.append(np.concatenate(lags, axis=1))
    squares = [x.T @ x for x in lagged]
    products = [x.T @ one.envelope for x, one in zip(lagged, five, strict=True)]
    attended, other = [], []
    for i, one in enumerate(five):
        square = sum(squares) - squares[i] + 1e5 * np.eye(len(squares[0]))
        said = lagged[i] @ np.linalg.solve(square, sum(products) - products[i])
        attended.append(np.corrcoef(said, one.envelope)[0, 1])
        assert one.other is not None
        other.append(np.corrcoef(said, one.other)[0, 1])
    assert np.mean(attended) == pytest.approx(0.106, abs=0.01)
    assert np.mean(other) < 0.07


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


def test_references_of_a_raw() -> None:
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
        ({"reference": ("M3",)}, "a has no channel M3 to use as reference"),
        ({"reference": "averag"}, "averag to use as reference; did you mean `average`"),
        ({"raw": {"types": "misc"}}, "a has no EEG channel"),
        ({"reference": ("Fz", "Cz", "M1", "M2")}, "no EEG channel besides the reference Fz, Cz"),
    ],
)
def test_what_does_not_fit(settings: dict[str, Any], said: str) -> None:
    measured = raw(**settings.pop("raw", {}))
    with pytest.raises(BadInput, match=said):
        from_mne(measured, envelope(1280), subject="s", name="a", **settings)


@pytest.fixture
def raw_folder(tmp_path: Path) -> Path:
    place = tmp_path / "raws"
    place.mkdir()
    for story in range(4):
        stem = f"sub-001_-_story{story}_-_"
        raw(seed=story).save(place / f"{stem}eeg.fif", verbose="ERROR")
        np.save(place / f"{stem}envelope.npy", envelope(1280, story))
    return place


def mne_data(raw_folder: Path, **settings: Any) -> MneEEG:
    return MneEEG.model_validate({"name": "eeg-mne", "path": str(raw_folder)} | settings)


def test_a_folder_of_raws(raw_folder: Path, tmp_path: Path) -> None:
    found = load_recordings(mne_data(raw_folder, reference=("M1", "M2")), cache=tmp_path)
    assert found.channels == ("Fz", "Cz")
    assert [one.name for one in found.splits["report"]] == ["sub-001_-_story3"]
    same = from_mne(raw(seed=3), envelope(1280, 3), subject="x", name="x", reference=("M1", "M2"))
    np.testing.assert_allclose(found.splits["report"][0].eeg, same.eeg, atol=1e-4)
    np.testing.assert_allclose(found.splits["report"][0].envelope, same.envelope, atol=1e-6)


def test_bad_folders_of_raws(raw_folder: Path, tmp_path: Path) -> None:
    other = raw(seed=9).rename_channels({"Cz": "Oz"})
    other.save(raw_folder / "sub-001_-_story2_-_eeg.fif", overwrite=True, verbose="ERROR")
    with pytest.raises(BadInput, match="story2 has channel Oz where others have Cz"):
        load_recordings(mne_data(raw_folder), cache=tmp_path)
    (raw_folder / "sub-001_-_story2_-_eeg.edf").write_bytes(b"")
    with pytest.raises(BadInput, match="2 recordings are called sub-001_-_story2"):
        load_recordings(mne_data(raw_folder), cache=tmp_path)
    (raw_folder / "sub-001_-_story2_-_eeg.edf").unlink()
    (raw_folder / "sub-001_-_story2_-_eeg.fif").write_bytes(
        b"no file of MNE's, but long enough" * 9
    )
    with pytest.raises(BadInput, match="story2_-_eeg.fif cannot be read"):
        load_recordings(mne_data(raw_folder), cache=tmp_path)


@pytest.mark.parametrize("kept", [0, 10_000])
def test_files_that_end_early(raw_folder: Path, tmp_path: Path, kept: int) -> None:
    path = raw_folder / "sub-001_-_story2_-_eeg.fif"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadInput, match="story2_-_eeg.fif cannot be read") as caught:
        load_recordings(mne_data(raw_folder), cache=tmp_path)
    assert "\n" not in str(caught.value)


def test_without_mne(raw_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mne", None)
    with pytest.raises(BadInput, match="needs the package mne: pip install 'frostlab\\[eeg\\]'"):
        load_recordings(mne_data(raw_folder), cache=tmp_path)


@pytest.mark.parametrize(
    ("eeg", "said"),
    [
        (np.ones((640, 64)) * 1j, "holds complex128 of shape"),
        (np.ones((0, 64)), "not (samples, channels)"),
        (np.ones((640, 0)), "not (samples, channels)"),
        (np.ones((2, 5000)), "has 5,000 channels; the most is 4,096"),
        (np.ones(640), "not (samples, channels)"),
        (np.array([["a"]]), "not an array of integers"),
        (np.full((640, 64), np.nan), "NaN or infinity in channels"),
    ],
)
def test_hostile_arrays_are_one_line(folder: Path, tmp_path: Path, eeg: Any, said: str) -> None:
    np.save(next(folder.glob("train*eeg.npy")), eeg)
    with pytest.raises(BadInput) as caught:
        load_recordings(challenge(folder), cache=tmp_path / "cache")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_channel_without_end_takes_no_memory(folder: Path, tmp_path: Path) -> None:
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1000000000000000000), }\n"
    content = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    next(folder.glob("train*eeg.npy")).write_bytes(content)
    with pytest.raises(BadInput, match="not \\(samples, channels\\)"):
        load_recordings(challenge(folder), cache=tmp_path / "cache")


@pytest.mark.parametrize("ending", [".fif", ".edf", ".bdf", ".set", ".vhdr"])
def test_damaged_files_of_mne_are_one_line(tmp_path: Path, ending: str) -> None:
    place = tmp_path / "mne"
    place.mkdir()
    for subject in ("a", "b", "c"):
        (place / f"{subject}_-_s_-_eeg{ending}").write_bytes(b"0       " + b"\xff1" * 300)
        np.save(place / f"{subject}_-_s_-_envelope.npy", np.ones(64))
    data = MneEEG(name="eeg-mne", path=str(place), seen=("a",), unseen=("b",))
    with pytest.raises(BadInput) as caught:
        load_recordings(data, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_path_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    for name in ("x" * 5000, "a\0b", "~nobody-has-this-name/x"):
        with pytest.raises(BadInput, match="data.path"):
            load_recordings(ChallengeEEG(name="eeg-challenge", path=name), cache=tmp_path)

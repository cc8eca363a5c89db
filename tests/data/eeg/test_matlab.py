"""Competing speakers from MATLAB files: each trial with the stories that were heard in it."""

import os
from pathlib import Path

import numpy as np
import pytest
from scipy import io

from frostlab.data.eeg.load import load_recordings
from frostlab.data.eeg.preprocess import normalised, resampled
from frostlab.data.eeg.recordings import Recording
from frostlab.errors import BadInput
from frostlab.recipe.data import MatlabEEG

ORDER = {"blk1_M_Order": [6, 8, 7, 5], "blk2_F_Order": [7, 5, 8, 6]}


def cells(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    held = np.empty((1, 8), dtype=object)
    for i in range(8):
        held[0, i] = random.normal(size=(1280, 1))
    return held


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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


def matlab(folder: Path, **settings: object) -> MatlabEEG:
    return MatlabEEG.model_validate(
        {"name": "eeg-matlab", "path": str(folder), "band": None} | settings
    )


def by_name(folder: Path, cache: Path, **settings: object) -> dict[str, Recording]:
    found = load_recordings(matlab(folder, **settings), cache=cache)
    return {one.name: one for split in found.splits.values() for one in split}


def heard(folder: Path, speaker: str, story: int) -> np.ndarray:
    held = io.loadmat(folder / f"{speaker}_env.mat")["stim1"][0, story - 1].ravel()
    return normalised(resampled(held, 128, 64, ""))


def test_each_trial_has_its_own_two_speakers(folder: Path, tmp_path: Path) -> None:
    found = by_name(folder, tmp_path)
    assert len(found) == 7
    for name, attended, other in [
        ("sub-001_-_1_2", ("F", 2), ("M", 8)),
        ("sub-001_-_2_4", ("M", 4), ("F", 6)),
        ("Subject2_-_1_4", ("F", 4), ("M", 5)),
        ("Subject2_-_2_1", ("M", 1), ("F", 7)),
    ]:
        np.testing.assert_allclose(found[name].envelope, heard(folder, *attended), atol=1e-5)
        np.testing.assert_allclose(found[name].other, heard(folder, *other), atol=1e-5)
        assert found[name].eeg.shape == (640, 6)


@pytest.mark.parametrize("reference", ["average", "mastoids", "none"])
def test_references(folder: Path, tmp_path: Path, reference: str) -> None:
    found = by_name(folder, tmp_path, reference=reference)["sub-001_-_1_1"].eeg
    held = io.loadmat(folder / "1_1.mat")
    taken = {"average": held["eeg"].mean(1), "mastoids": held["mast"].mean(1), "none": 0}
    plain = held["eeg"] - np.reshape(taken[reference], (-1, 1))
    np.testing.assert_allclose(found, normalised(resampled(plain, 128, 64, "")), atol=1e-4)


def test_leave_one_out(folder: Path, tmp_path: Path) -> None:
    found = load_recordings(matlab(folder, held_out=3), cache=tmp_path)
    names = {role: [one.name for one in split] for role, split in found.splits.items()}
    assert names["report"] == ["Subject2_-_2_2", "sub-001_-_1_3"]
    assert names["tune"] == ["Subject2_-_1_4", "sub-001_-_2_4"]
    with pytest.raises(BadInput, match="data.held_out 4, but Subject2 has 3 recordings"):
        load_recordings(matlab(folder, held_out=4), cache=tmp_path)


@pytest.mark.parametrize("listed", [[6, 9, 7, 5], [6, 0, 7, 5], [6, 1.5, 7, 5]])
def test_a_story_that_is_not_there(folder: Path, tmp_path: Path, listed: list[float]) -> None:
    io.savemat(folder / "competing_speaker_order.mat", ORDER | {"blk1_M_Order": listed})
    said = rf"blk1_M_Order names story {listed[1]}(\.0)? for trial 2, but M_env.mat has 1 to 8"
    with pytest.raises(BadInput, match=said):
        load_recordings(matlab(folder), cache=tmp_path)


def test_references_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    held = {key: io.loadmat(folder / "1_1.mat")[key] for key in ("eeg", "mast")}
    io.savemat(folder / "1_1.mat", held | {"mast": held["mast"][:1200]})
    with pytest.raises(BadInput, match="1280 samples and the reference 1200, 1200 of them"):
        load_recordings(matlab(folder, reference="mastoids"), cache=tmp_path)
    io.savemat(folder / "1_1.mat", held | {"mast": np.full((1280, 2), np.nan)})
    with pytest.raises(BadInput, match="1280 samples and the reference 1280, 0 of them finite"):
        load_recordings(matlab(folder, reference="mastoids"), cache=tmp_path)
    io.savemat(folder / "1_1.mat", held | {"eeg": "words"})
    with pytest.raises(BadInput, match="1_1.mat: eeg holds <U5, not samples"):
        load_recordings(matlab(folder), cache=tmp_path)


def test_bad_files(folder: Path, tmp_path: Path) -> None:
    io.savemat(folder / "1_9.mat", {"eeg": np.ones((3, 2)), "mast": np.ones((3, 2))})
    with pytest.raises(
        BadInput, match="trial 9, but competing_speaker_order.mat lists 4, and F_env.mat has 8"
    ):
        load_recordings(matlab(folder), cache=tmp_path)
    (folder / "1_9.mat").unlink()
    io.savemat(folder / "1_1.mat", {"data": np.ones((3, 2))})
    with pytest.raises(BadInput, match="1_1.mat has no variable eeg; it has data"):
        load_recordings(matlab(folder), cache=tmp_path)
    (folder / "1_1.mat").write_bytes(b"no MATLAB file at all")
    with pytest.raises(BadInput, match="1_1.mat cannot be read") as caught:
        load_recordings(matlab(folder), cache=tmp_path)
    assert "\n" not in str(caught.value)
    (folder / "M_env.mat").unlink()
    with pytest.raises(BadInput, match="mat has no M_env.mat"):
        load_recordings(matlab(folder), cache=tmp_path)


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

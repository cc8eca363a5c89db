"""Windows of recordings: on a grid, or drawn from seed and epoch."""

from pathlib import Path

import numpy as np
import pytest

from frostlab.data.eeg.load import load_signals
from frostlab.data.eeg.recordings import Recording, windows
from frostlab.errors import BadInput
from frostlab.recipe.data import ChallengeEEG, SimulatedEEG
from frostlab.recipe.load import load_recipe


def recordings(*lengths: int) -> list[Recording]:
    return [
        Recording(f"r{n}", "s", np.zeros((n, 2), np.float32), np.zeros(n, np.float32))
        for n in lengths
    ]


@pytest.mark.parametrize("hop", [1, 7, 32, 64])
def test_a_grid_covers_every_sample_once_or_more(hop: int) -> None:
    three = recordings(64, 100, 300)
    found = windows(three, 64, hop)
    assert len(np.unique(found, axis=0)) == len(found)
    for place, one in enumerate(three):
        starts = found[found[:, 0] == place, 1]
        assert np.diff(starts).max(initial=0) <= hop
        assert starts[0] == 0
        assert starts[-1] + 64 == len(one)


def test_drawn_windows() -> None:
    three = recordings(64, 640, 1000)
    first = windows(three, 64, seed=3, epoch=0)
    assert np.bincount(first[:, 0]).tolist() == [1, 10, 15]
    np.testing.assert_array_equal(first, windows(three, 64, seed=3, epoch=0))
    assert not np.array_equal(first, windows(three, 64, seed=3, epoch=1))
    assert not np.array_equal(first, windows(three, 64, seed=4, epoch=0))
    twins = windows(recordings(640, 640), 64, seed=3)[:, 1]
    assert not np.array_equal(twins[:10], twins[10:])
    every = np.concatenate([windows(three, 64, seed=3, epoch=e) for e in range(400)])
    for place, one in enumerate(three):
        starts = every[every[:, 0] == place, 1]
        assert starts.min() == 0
        assert starts.max() + 64 == len(one)


def test_a_given_number_of_windows_is_drawn_from_every_recording() -> None:
    two = recordings(64, 1000)
    drawn = windows(two, 64, seed=3, drawn=10)
    assert np.bincount(drawn[:, 0]).tolist() == [10, 10], "whatever its length"
    starts = drawn[10:, 1]
    ranges = np.linspace(0, 1000 - 64 + 1, 11)
    assert (starts >= np.floor(ranges[:-1])).all()
    assert (starts < np.ceil(ranges[1:])).all()
    assert not np.array_equal(drawn, windows(two, 64, seed=3, epoch=1, drawn=10))


def test_a_recording_shorter_than_a_window() -> None:
    with pytest.raises(
        BadInput, match="r50 has 50 samples, but a window has 64; set data.length to 50"
    ):
        windows(recordings(100, 50), 64)


@pytest.mark.parametrize("short", ["train", "val", "test"])
def test_a_short_recording_of_any_split_is_refused_at_once(tmp_path: Path, short: str) -> None:
    random = np.random.default_rng(0)
    for role in ("train", "val", "test"):
        samples = 60 if role == short else 100
        stem = tmp_path / f"{role}_-_sub-001_-_story_-_"
        np.save(f"{stem}eeg.npy", random.normal(size=(samples, 2)))
        np.save(f"{stem}envelope.npy", random.random(samples))
    data = ChallengeEEG(name="eeg-challenge", path=str(tmp_path), length=64)
    with pytest.raises(BadInput, match=f"{short}_-_.* has 60 samples, but a window has 64"):
        load_signals(data, None, tmp_path / "cache")


def test_only_training_windows_are_drawn_or_hop(tmp_path: Path) -> None:
    data = SimulatedEEG(
        name="eeg-simulated", subjects=1, unseen=1, recordings=3, seconds=6.5, length=64, hop=16
    )
    splits = load_signals(data, None, tmp_path).splits
    assert {role: split.hop for role, split in splits.items()} == {
        "train": 16, "tune": 64, "report": 64, "unseen": 64,
    }  # fmt: skip
    many = data.model_copy(update={"hop": None, "windows": 30})
    few = data.model_copy(update={"hop": None})
    lengths = [
        {role: len(split) for role, split in load_signals(d, None, tmp_path).splits.items()}
        for d in (many, few)
    ]
    assert [count["train"] for count in lengths] == [30, 6]
    assert lengths[0] | {"train": 6} == lengths[1], "evaluations stay as they are"
    assert len({load_signals(d, None, tmp_path).digest for d in (data, many, few)}) == 3
    stored = [path for path in (tmp_path / "eeg").iterdir() if path.is_dir()]
    assert len(stored) == 1, "the recordings are stored once"


def test_hop_and_windows_exclude_each_other() -> None:
    with pytest.raises(BadInput, match="data.hop 8 and data.windows 10 both set the number of"):
        load_recipe("eeg-conformer-v2", {"data.hop": 8, "data.windows": 10})

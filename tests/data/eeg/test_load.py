"""Recordings of a recipe: simulated or read once, then taken from the cache."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from frostlab.data.eeg import load as loading_module
from frostlab.data.eeg import simulate as simulated
from frostlab.data.eeg.load import gather, load_recordings, load_signals
from frostlab.data.eeg.recordings import Recording
from frostlab.data.eeg.simulate import best_correlation, head_of, mean_r
from frostlab.errors import BadInput
from frostlab.recipe.data import KINDS, ChallengeEEG, Data, EEGData, SimulatedEEG, names_of

SMALL = SimulatedEEG(
    name="eeg-simulated", subjects=2, unseen=1, recordings=4, report=2, seconds=10.0, snr=-5.0
)


def test_simulated_recordings(tmp_path: Path) -> None:
    found = load_recordings(SMALL, cache=tmp_path)
    assert {role: len(split) for role, split in found.splits.items()} == {
        "train": 2, "tune": 2, "report": 4, "unseen": 2,
    }  # fmt: skip
    assert found.subjects == ("sub-001", "sub-002")
    assert {one.subject for one in found.splits["unseen"]} == {"sub-003"}
    every = [one for split in found.splits.values() for one in split]
    assert len({one.name for one in every}) == len(every)
    assert every[0].name == "sub-001_-_story1"
    assert len({one.envelope.tobytes() for one in every}) == len(every)  # nobody hears it again
    for one in every:
        assert one.eeg.shape == (640, 64)
        assert one.envelope.shape == (640,)
        assert one.eeg.dtype == one.envelope.dtype == np.float32
        np.testing.assert_allclose(one.eeg.mean(axis=0), 0, atol=1e-4)
        np.testing.assert_allclose(one.eeg.std(axis=0), 1, atol=1e-4)
    assert len(found.channels) == 64
    assert found.caution is None


def test_what_is_known_is_of_these_subjects(tmp_path: Path) -> None:
    known = load_recordings(SMALL, cache=tmp_path).known
    seen = [best_correlation(head_of(SMALL, False, i), 64.0, "linear") for i in range(2)]
    unseen = best_correlation(head_of(SMALL, True, 0), 64.0, "linear")
    assert known["best_r"] == pytest.approx(mean_r(best.overall for best in seen))
    assert known["best_linear_r"] == pytest.approx(mean_r(one.linear for one in seen))
    assert known["best_r_unseen"] == pytest.approx(unseen.overall)
    assert known["best_linear_r_unseen"] == pytest.approx(unseen.linear)
    alone = SMALL.model_copy(update={"unseen": 0, "responses": "nonlinear"})
    found = load_recordings(alone, cache=tmp_path)
    assert set(found.known) == {"best_r", "best_linear_r"}
    assert "unseen" not in found.splits
    assert "rate-distortion theory" in (found.caution or "")


def test_simulated_once_and_by_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_recordings(SMALL, cache=tmp_path / "a")
    again = load_recordings(SMALL, cache=tmp_path / "b")
    assert first.digest == again.digest
    np.testing.assert_array_equal(first.splits["report"][1].eeg, again.splits["report"][1].eeg)
    windows = SMALL.model_copy(update={"length": 64, "hop": 8})
    monkeypatch.setattr(loading_module, "write_simulated", None)
    assert load_recordings(windows, cache=tmp_path / "a").digest == first.digest
    monkeypatch.undo()
    other = load_recordings(SMALL.model_copy(update={"seed": 1}), cache=tmp_path / "a")
    assert other.digest != first.digest
    assert not np.array_equal(other.splits["tune"][0].envelope, first.splits["tune"][0].envelope)


def test_the_digest_is_of_the_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_recordings(SMALL, cache=tmp_path / "a")
    plain = simulated.simulate

    def louder(*given: Any) -> Any:
        envelope, eeg = plain(*given)
        return envelope, eeg + 0.01 * envelope[:, None]

    monkeypatch.setattr(simulated, "simulate", louder)
    assert load_recordings(SMALL, cache=tmp_path / "b").digest != first.digest


def test_gathering_recordings_in_memory() -> None:
    random = np.random.default_rng(0)

    def made(name: str, subject: str, channels: int = 2) -> Recording:
        eeg = random.normal(size=(100, channels)).astype(np.float32)
        return Recording(name, subject, eeg, eeg[:, 0])

    four = [made(str(n), "a") for n in range(3)] + [made("3", "b")]
    found = gather(four, 64.0, ("Fz", "Cz"), unseen=("b",))
    assert [one.name for one in found.splits["unseen"]] == ["3"]
    assert found.subjects == ("a",)
    assert found.caution is None
    again = [*four[:3], replace(made("3", "b"), envelope=four[0].envelope)]
    caution = gather(again, 64.0, ("Fz", "Cz"), unseen=("b",)).caution
    assert caution == "speech of 1 of 1 unseen recordings was also heard in training"
    other = [*four[:3], made("3", "b")]
    assert gather(other, 64.0, ("Fz", "Cz"), unseen=("b",)).digest != found.digest
    with pytest.raises(BadInput, match="2 recordings are called 1"):
        gather([*four, made("1", "b")], 64.0, ("Fz", "Cz"))
    with pytest.raises(BadInput, match="4 has 3 channels, but the list of channels has 2"):
        gather([*four, made("4", "a", 3)], 64.0, ("Fz", "Cz"))
    with pytest.raises(BadInput, match="no recordings"):
        gather([], 64.0, ("Fz", "Cz"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "eeg-simulated", "recordings": 2}, "recordings 2 leaves none to train on"),
        ({"name": "eeg-simulated", "seconds": 9.0}, "576 samples; a window has 640"),
        ({"name": "eeg-simulated", "rate": 20.0}, "32 is the least"),
        ({"name": "eeg-simulated", "rate": 1024.0}, "512 is the most"),
        ({"name": "eeg-simulated", "path": "x"}, "Extra inputs"),
        ({"name": "eeg-challenge", "path": "x", "band": [1.0, 40.0]}, "end below 32 Hz"),
        ({"name": "eeg-matlab", "band": [9.0, 1.0]}, "band 9–1 Hz should rise"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(Data).validate_json(str(settings).replace("'", '"'))


def test_every_kind_is_eeg_data() -> None:
    for name in (name for kind in KINDS if issubclass(kind, EEGData) for name in names_of(kind)):
        path = {} if name == "eeg-simulated" else {"path": "x"}
        one: Any = TypeAdapter(Data).validate_python({"name": name} | path)
        assert isinstance(one, EEGData)
        assert one.length == 640


def test_files_are_recorded_with_their_checksums(tmp_path: Path) -> None:
    random, folder = np.random.default_rng(0), tmp_path / "eeg"
    folder.mkdir()
    for story in ("a", "b", "c"):
        stem = f"train_-_sub-001_-_{story}_-_"
        np.save(folder / f"{stem}eeg.npy", random.standard_normal((640, 4)))
        np.save(folder / f"{stem}envelope.npy", random.standard_normal(640))
    data = ChallengeEEG(name="eeg-challenge", path="eeg", length=64)
    found = load_signals(data, tmp_path, tmp_path / "cache")
    report = found.described["report"]
    assert report.source == str(folder)
    assert [Path(file.path).name for file in report.files] == [
        "train_-_sub-001_-_c_-_eeg.npy",
        "train_-_sub-001_-_c_-_envelope.npy",
    ]
    for file in report.files:
        raw = (folder / Path(file.path).name).read_bytes()
        assert (file.bytes, file.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert (report.recordings, report.subjects, report.seconds) == (1, 1, 10.0)

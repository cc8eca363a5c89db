"""Figures and the page: rows hold the numbers, charts are written, missing packages are named."""

import sys
from pathlib import Path

import numpy as np
import pytest

from eeg_made import RATE, people
from frostlab.envelopes.figures import (
    channel_rows,
    eeg_page,
    excerpt_rows,
    kernel_rows,
    scalp_positions,
    scalp_rows,
    subject_rows,
)
from frostlab.envelopes.scores import score_recordings
from frostlab.errors import BadInput

PEOPLE = people(3, 1)
SCORES = score_recordings({each.name: each.eeg[:, 0] for each in PEOPLE}, PEOPLE, RATE)


def test_rows_of_subjects_are_the_scores() -> None:
    rows = subject_rows({"model": SCORES, "ridge": SCORES})
    assert [(row["decoder"], row["subject"]) for row in rows] == [
        (name, f"s{s}") for name in ("model", "ridge") for s in range(3)
    ]
    assert [row["r"] for row in rows[:3]] == [each.r for each in SCORES.subjects]
    assert all(row["chance_low"] < row["chance_high"] for row in rows)


def test_an_excerpt_is_thinned_by_means() -> None:
    signal = np.arange(100.0)
    rows = excerpt_rows({"a": signal, "b": -signal}, 10.0, start=2.0, seconds=4.0, points=20)
    assert len(rows) == 40
    times = [row["second"] for row in rows if row["signal"] == "a"]
    np.testing.assert_allclose(times, 2.05 + 0.2 * np.arange(20))
    values = np.array([row["value"] for row in rows if row["signal"] == "b"])
    assert values.mean() == pytest.approx(0)
    assert values.std() == pytest.approx(1)
    assert (np.diff(values) < 0).all()
    rough = np.random.default_rng(0).standard_normal(100)
    thin = [row["value"] for row in excerpt_rows({"a": rough}, 10.0, points=50)]
    assert np.corrcoef(thin, (rough[::2] + rough[1::2]) / 2)[0, 1] == pytest.approx(1)
    with pytest.raises(BadInput, match="^no excerpt from 20 s in a, which ends at 10 s$"):
        excerpt_rows({"a": signal}, 10.0, start=20.0)


def test_kernels_are_the_courses_that_made_them() -> None:
    course, weak = np.array([0.0, 1.0, -3.0, 0.5]), np.array([1.0, 0.0, 0.0, 0.0])
    weights = np.stack([np.outer([0.1, 0.1], weak), np.outer([3.0, 4.0], course)])
    rows = kernel_rows(weights, 100.0, first=2)
    assert [row["filter"] for row in rows] == [1] * 4 + [0] * 4
    assert [row["ms"] for row in rows[:4]] == pytest.approx([20, 30, 40, 50])
    assert [row["weight"] for row in rows[:4]] == pytest.approx(list(-5 * course))
    assert len(kernel_rows(weights, 100.0, most=1)) == 4
    with pytest.raises(BadInput, match="must be"):
        kernel_rows(course, 100.0)


def test_channels_come_in_order_of_importance() -> None:
    rows = channel_rows([0.1, 0.9, 0.5], ["Fz", "Cz", "Pz"])
    assert [row["channel"] for row in rows] == ["Cz", "Pz", "Fz"]
    with pytest.raises(BadInput, match="^2 channels need as many values, not "):
        channel_rows([0.1], ["Fz", "Cz"])
    with pytest.raises(BadInput, match="not finite"):
        channel_rows([np.nan], ["Fz"])


def test_channels_sit_where_they_should() -> None:
    pytest.importorskip("mne")
    places = scalp_positions(["Cz", "Fz", "Oz", "T7", "T8", "C4"])
    assert np.hypot(*places["Cz"]) < 0.1
    assert places["Fz"][1] > 0.3 > abs(places["Fz"][0])
    assert places["Oz"][1] < -0.7
    assert -1.1 < places["T7"][0] < -0.8
    assert 0.3 < places["C4"][0] < places["T8"][0]
    a1 = scalp_positions([f"{bank}{i}" for bank in "ABCD" for i in range(1, 33)])["A1"]
    assert np.hypot(*a1) < 0.05  # BioSemi's vertex
    with pytest.raises(
        BadInput, match=r"^none of the montages .* \(the closest lacks EXG1\), so there is no map$"
    ):
        scalp_positions(["Cz", "EXG1"])


def test_the_map_runs_through_the_channels() -> None:
    places = [(0.0, 0.0), (0.6, 0.0), (-0.6, 0.0), (0.0, 0.6), (0.0, -0.6)]
    values = [1.0, 0.0, 0.2, 0.4, 0.6]
    rows = scalp_rows(values, places, cells=95)
    assert all(np.hypot(row["x"], row["y"]) < 1.2 for row in rows)
    for (x, y), value in zip(places, values, strict=True):
        (cell,) = [row for row in rows if row["x"] <= x < row["x2"] and row["y"] <= y < row["y2"]]
        assert cell["importance"] == pytest.approx(value, abs=0.05)


@pytest.mark.parametrize("count", [2, 4])
def test_channels_on_a_line_make_no_map(count: int) -> None:
    line = [(0.0, 0.2 * i) for i in range(count)]
    with pytest.raises(BadInput, match=f"^{count} channels on the head do not span a map$"):
        scalp_rows(np.arange(count), line)


def test_the_page_holds_tables_and_figures(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    page = eeg_page(
        tmp_path / "eeg",
        {"report": {"model <b>": SCORES, "ridge": SCORES}, "un/seen": {"model": SCORES}},
        best={"report": 0.7},
        excerpts={"s0": excerpt_rows({"envelope": PEOPLE[0].envelope}, RATE)},
        kernels=kernel_rows(np.random.default_rng(0).standard_normal((2, 3, 5)), RATE),
        importance=(["A", "B"], [0.1, 0.2]),
        caution="made up",
    )
    text = page.read_text()
    assert text.count("<svg") == 5
    assert f"{SCORES.summary.mean:.3f}" in text
    assert "model &lt;b&gt;" in text
    assert "<b>" not in text
    assert "best: 0.700, an upper bound on the r of any decoder" in text
    assert "<p>made up</p>" in text
    assert "<h2>Segments</h2>" in text
    assert str(SCORES.subjects[2].segments) in text
    assert "Channels as bars: " in text
    assert "://" not in text  # nothing is fetched
    assert "Liberation Sans" in text  # the theme of all charts
    assert "currentColor" in text
    pictures = sorted(path.name for path in page.parent.glob("*.png"))
    assert pictures == [
        "channels.png", "excerpt-1.png", "kernels.png", "r-report.png", "r-un-seen.png"
    ]  # fmt: skip
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in page.parent.glob("*.png"))


def test_a_missing_library_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("altair", "mne"):
        monkeypatch.setitem(sys.modules, name, None)
    report = r"^drawing figures needs the package altair: pip install 'frostlab\[report\]'$"
    with pytest.raises(BadInput, match=report):
        eeg_page(tmp_path / "eeg", {"report": {"model": SCORES}})
    assert not (tmp_path / "eeg").exists()
    eeg = r"^a scalp map needs the package mne: pip install 'frostlab\[eeg\]'$"
    with pytest.raises(BadInput, match=eeg):
        scalp_positions(["Cz"])

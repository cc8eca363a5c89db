"""Curves of runs against plain loops over their events."""

import json
import math
import statistics
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from frostlab import typed
from frostlab.errors import BadInput
from frostlab.pages import curves
from frostlab.pages.curves import mean_points, read_curve, span_of, thinned
from frostlab.pages.one_comparison.compared import document
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent, StepEvent


def step_event(first: int, losses: list[float | None], **changes: Any) -> dict[str, Any]:
    """Return a block of steps, each of 10 ms."""
    return {"kind": "step", "step": first + len(losses) - 1, "first": first, "loss": losses,
            "ms": [10.0] * len(losses), "warmup": 0, **changes}  # fmt: skip


def evaluation(step: int, value: float | None, **changes: Any) -> dict[str, Any]:
    return {"kind": "evaluation", "step": step, "epoch": step / 10, "total_seconds": step / 2,
            "metrics": {"accuracy": value, "loss": 0.5, "layers": {}}, **changes}  # fmt: skip


def write(folder: Path, *events: dict[str, Any] | str) -> Path:
    """Write a run's events, of which a text is a line as it is."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("span", [1, 3])
def test_a_curve_is_the_run(compared: Path, span: int) -> None:
    folder = next((compared / "runs").iterdir())
    record, curve = RunRecord(folder), read_curve(folder, span)
    assert curve is not None
    tuned = [event for event in record.events(EvaluationEvent) if event.checkpoint is None]
    assert tuned
    assert curve.seconds() == {event.step: event.total_seconds for event in tuned}
    for name in ("accuracy", "loss"):
        assert curve.metric(name) == {event.step: event.metrics[name] for event in tuned}
    losses = [loss for event in record.events(StepEvent) for loss in event.loss]
    times = [ms for event in record.events(StepEvent) for ms in event.ms]
    warmup = sum(event.warmup for event in record.events(StepEvent))
    groups = [losses[i : i + span] for i in range(0, len(losses), span)]
    ends = [min(span * (i + 1), len(losses)) for i in range(len(groups))]
    assert list(curve.losses) == ends
    assert list(curve.losses.values()) == pytest.approx([statistics.fmean(g) for g in groups])
    after = sum(times[warmup:]) / len(times[warmup:])
    if span == 1:
        assert statistics.fmean(curve.step_ms.values()) == pytest.approx(after)


def test_steps_that_were_taken_again_count_once(tmp_path: Path) -> None:
    resume = {"kind": "resume", "step": 4}
    folder = write(
        tmp_path / "run", step_event(1, [4.0, 3.0, 2.0, 1.0]), evaluation(4, 0.4),
        step_event(5, [9.0, 9.0]), evaluation(6, 0.9), resume,
        step_event(5, [0.5, 0.25]), evaluation(6, 0.6), evaluation(6, 0.1, checkpoint=6),
    )  # fmt: skip
    curve = read_curve(folder)
    assert curve is not None
    assert curve.losses == {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0, 5: 0.5, 6: 0.25}
    assert curve.metric("accuracy") == {4: 0.4, 6: 0.6}


def test_values_that_are_not_finite_and_truncated_lines_are_left_out(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "run", step_event(1, [1.0, None, 3.0, None]), '{"kind": "step", "st',
        evaluation(2, None), evaluation(4, 0.5),
    )  # fmt: skip
    curve = read_curve(folder, 2)
    assert curve is not None
    assert curve.losses == {2: 1.0, 4: 3.0}
    assert curve.metric("accuracy") == {4: 0.5}
    assert curve.metric("loss") == {2: 0.5, 4: 0.5}


@pytest.mark.parametrize(
    "damaged",
    [json.dumps(step_event(2, [2.0, 3.0])).replace("2.0, ", "2.0\n").splitlines(), ["[1]", "7"]],
)
def test_lines_that_are_no_objects_are_left_out(tmp_path: Path, damaged: list[str]) -> None:
    folder = write(tmp_path / "run", step_event(1, [1.0]), *damaged, step_event(4, [4.0]))
    curve = read_curve(folder)
    assert curve is not None
    assert curve.losses == {1: 1.0, 4: 4.0}


def test_the_times_of_the_warm_up_are_left_out(tmp_path: Path) -> None:
    steps = step_event(1, [1.0] * 4, ms=[900.0, 800.0, 10.0, 20.0], warmup=2)
    curve = read_curve(write(tmp_path / "run", steps))
    assert curve is not None
    assert curve.step_ms == {3: 10.0, 4: 20.0}
    assert len(curve.losses) == 4


def test_only_the_needed_kinds_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    whole = typed._parsed
    monkeypatch.setattr(typed, "_parsed", lambda lines: parsed.extend(lines) or whole(lines))
    noise = [{"kind": kind, "step": 1} for kind in ("flow", "checkpoint", "note", "epoch")] * 50
    curve = read_curve(write(tmp_path / "run", *noise, step_event(1, [1.0]), *noise))
    assert curve is not None
    assert curve.losses == {1: 1.0}
    assert len(parsed) == 1


def test_memory_does_not_grow_with_the_events(tmp_path: Path) -> None:
    events = (step_event(20 * k + 1, [1.0 / (k + 1)] * 20) for k in range(5000))
    folder = write(tmp_path / "run", *events)
    span = span_of(100_000)
    tracemalloc.start()
    curve = read_curve(folder, span)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert curve is not None
    assert len(curve.losses) == curves.POINTS
    assert peak < 400_000 < (folder / "events.jsonl").stat().st_size / 2


@pytest.mark.parametrize(("arms", "points"), [(1, 200), (10, 200), (20, 100), (500, 50)])
def test_many_curves_have_fewer_points_each(arms: int, points: int) -> None:
    assert curves.most_points(arms) == points
    line = mean_points([{step: float(step) for step in range(1000)}], log=False, most=points)
    assert 0.9 * points < len(line) <= points


def test_the_points_of_a_whole_figure_are_bounded(
    compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "_ALL_POINTS", 9)  # three for each of three arms
    monkeypatch.setattr(curves, "_FEWEST", 2)
    figures = {figure.name: figure for figure in document(compared, "en").figures}
    points = Counter(row["arm"] for row in figures["training-loss"].rows)
    assert points == {"baseline": 3, "oelm": 3, "oelm-random": 3}
    assert "mean of successive steps" in figures["training-loss"].caption


def test_a_run_without_events_has_no_curve(tmp_path: Path) -> None:
    assert read_curve(tmp_path / "gone") is None


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"kind": "step", "step": 1}, " is not a valid event"),
        (step_event(1, [1.0], step="two"), ": step should be a whole number, but is 'two'"),
        (step_event(1, [1.0], loss=["x"]), " is not a valid event"),
        (evaluation(1, 0.5, metrics=[]), " is not a valid event"),
        ({"kind": "resume"}, ": step should be a whole number, but is None"),
    ],
)
def test_a_damaged_event_is_named(tmp_path: Path, event: dict[str, Any], reason: str) -> None:
    folder = write(tmp_path / "run", step_event(1, [1.0]), event)
    with pytest.raises(BadInput, match=f"events.jsonl line 2{reason}$") as error:
        read_curve(folder)
    assert "\n" not in str(error.value)


def test_the_band_is_one_standard_deviation() -> None:
    runs = [{1: 1.0, 2: 3.0}, {1: 2.0, 2: 5.0}, {1: 6.0}]
    first, second = mean_points(runs, log=False)
    spread = statistics.stdev([1.0, 2.0, 6.0])
    assert first == {"step": 1, "x": 1, "mean": 3.0, "low": 3 - spread, "high": 3 + spread,
                     "runs": 3}  # fmt: skip
    assert (second["mean"], second["runs"]) == (4.0, 2)


def test_on_a_logarithmic_scale_the_mean_is_geometric() -> None:
    (point,) = mean_points([{1: 1.0}, {1: 100.0}], log=True)
    factor = math.exp(statistics.stdev([0.0, math.log(100)]))
    assert point["mean"] == pytest.approx(10)
    assert point["low"] == pytest.approx(10 / factor)
    assert point["high"] == pytest.approx(10 * factor)


def test_one_run_has_no_band_and_places_are_averaged() -> None:
    (alone,) = mean_points([{4: 0.5}], log=False)
    assert alone["low"] is alone["high"] is None
    points = mean_points([{1: 0.0}, {1: 1.0}], False, [{1: 10.0}, {1: 20.0}])
    assert [(point["x"], point["step"]) for point in points] == [(15.0, 1)]


@pytest.mark.parametrize("count", [1, 199, 200, 201, 5000])
def test_thinning_keeps_the_ends_and_the_extremes(count: int) -> None:
    points = [{"x": x, "mean": math.sin(7 * x) + (x == count // 3) * 9} for x in range(count)]
    kept = thinned(points, "mean")
    assert len(kept) <= 200
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert [point["x"] for point in kept] == sorted(point["x"] for point in kept)
    for extreme in (min, max):
        assert extreme(points, key=lambda p: p["mean"]) in kept
    if count <= 200:
        assert kept == points

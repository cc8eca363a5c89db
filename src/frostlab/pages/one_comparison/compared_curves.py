"""The curves of a comparison's report: metrics, losses and times in the course of its runs."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from frostlab.pages import chart_parts, figures
from frostlab.pages.content import Figure
from frostlab.pages.curves import Curve, mean_points, most_points, read_curve, span_of
from frostlab.recipe.settings import metric_facts
from frostlab.text import number, plain

if TYPE_CHECKING:
    from frostlab.pages.one_comparison.compared import Compared

_DECADE = 10.0  # a loss or perplexity has a logarithmic axis if max / min is larger
_SYMBOLS = 16  # about how many symbols a line has


def read_curves(compared: "Compared") -> dict[str, list[Curve]]:
    """Return the curves of each arm's finished, pairable runs that still have events.jsonl."""
    span = _span(compared)
    read = {
        arm: [read_curve(compared.folder / run.folder, span) for run in compared.runs(arm)]
        for arm in compared.arms
    }
    return {arm: [curve for curve in group if curve is not None] for arm, group in read.items()}


def _span(compared: "Compared") -> int:
    """Return the number of successive steps whose mean is one point of a curve."""
    steps = (run.steps for arm in compared.arms for run in compared.runs(arm))
    return span_of(max(steps, default=1), most_points(len(compared.arms)))


def training_curves(compared: "Compared") -> list[Figure]:
    """Draw the metric on the split that selects the checkpoint, and the training loss, by step."""
    metric, split = _selecting(compared)
    drawn = []
    if metric is not None:
        values = {
            arm: [curve.metric(metric) for curve in curves]
            for arm, curves in compared.curves.items()
        }
        drawn += _curves(
            compared, "training-curves", f"{plain(metric)} on the {split} split during training",
            plain(metric), values, _is_logarithmic(metric, values),
        )  # fmt: skip
    losses = {arm: [curve.losses for curve in curves] for arm, curves in compared.curves.items()}
    drawn += _curves(
        compared, "training-loss", "Training loss", "training loss", losses,
        _is_logarithmic("loss", losses), _averaged(compared),
    )  # fmt: skip
    return drawn


def step_times(compared: "Compared") -> list[Figure]:
    """Draw the time that training steps took in the course of the runs."""
    times = {arm: [curve.step_ms for curve in curves] for arm, curves in compared.curves.items()}
    note = f"The first steps, which are slower, are left out. {_averaged(compared)}".strip()
    return _curves(
        compared, "step-time-curve", "Time of a training step during the runs", "ms a step", times,
        False, note,
    )  # fmt: skip


def cost_curves(compared: "Compared") -> list[Figure]:
    """Draw the metric on the split that selects the checkpoint, by seconds and by FLOPs."""
    metric, split = _selecting(compared)
    if metric is None:
        return []
    values = {
        arm: [curve.metric(metric) for curve in curves] for arm, curves in compared.curves.items()
    }
    log = _is_logarithmic(metric, values)
    seconds = {
        arm: [curve.seconds() for curve in curves] for arm, curves in compared.curves.items()
    }
    jobs = compared.evidence.jobs
    note = "Seconds are the mean over the runs, and include evaluations."
    if jobs > 1:
        note += " Runs were trained in parallel on one machine, which makes them slower."
    drawn = _curves(
        compared, "metric-by-seconds", f"{plain(metric)} on the {split} split against time",
        plain(metric), values, log, note, _Across("seconds since the start of the run", seconds),
    )  # fmt: skip
    flops = _flops(compared, values)
    drawn += _curves(
        compared, "metric-by-flops", f"{plain(metric)} on the {split} split against FLOPs",
        plain(metric), {arm: runs for arm, runs in values.items() if arm in flops}, log,
        "FLOPs: those of a timed step's matrix products, times the number of steps.",
        _Across("FLOPs of the training steps", flops, short=True),
    ) if flops else []  # fmt: skip
    return drawn


def _flops(
    compared: "Compared", values: Mapping[str, Sequence[Mapping[int, float]]]
) -> dict[str, list[dict[int, float]]]:
    """Return the FLOPs until each evaluated step, for the arms whose steps were timed."""
    timing, flops = compared.evidence.timing, {}
    for arm, runs in values.items():
        limits = timing.arms[arm].limits if timing is not None and arm in timing.arms else None
        of_step = (limits or {}).get("flops")
        if isinstance(of_step, int | float) and of_step > 0:
            flops[arm] = [{step: step * float(of_step) for step in run} for run in runs]
    return flops


def _selecting(compared: "Compared") -> tuple[str | None, str]:
    """Return the metric to draw, and the split that selects the checkpoint.

    The metric is the plan's or, if that was not evaluated in training, the first that was.
    """
    data, metric = compared.evidence.data, compared.evidence.rules.metric
    split = "tune" if data is not None and "tune" in data.splits else "report"
    evaluations = [
        evaluation
        for curves in compared.curves.values()
        for curve in curves
        for evaluation in curve.evaluations[:1]
    ]
    if any(metric in evaluation.metrics for evaluation in evaluations):
        return metric, split
    names = (name for evaluation in evaluations for name in evaluation.metrics)
    return next(names, None), split


def _is_logarithmic(metric: str, values: Mapping[str, Sequence[Mapping[int, float]]]) -> bool:
    """Return whether the values of a metric such as a loss span more than a decade."""
    numbers = [value for runs in values.values() for run in runs for value in run.values()]
    if not metric_facts(metric).spans_decades or not numbers or min(numbers) <= 0:
        return False
    return max(numbers) / min(numbers) > _DECADE


def _averaged(compared: "Compared") -> str:
    return "" if _span(compared) == 1 else "Each point is the mean of successive steps."


class _Across(NamedTuple):
    """The x axis of curves: its title, and the place of each step on it, by arm and run."""

    title: str = "step"
    places: Mapping[str, Sequence[Mapping[int, float]]] = {}  # empty: the step is its place
    short: bool = False  # whether numbers are shown as 1k, 1M, 1G


_BY_STEP = _Across()


def _curves(
    compared: "Compared",
    name: str,
    title: str,
    y: str,
    values: Mapping[str, Sequence[Mapping[int, float]]],
    log: bool,
    note: str = "",
    across: _Across = _BY_STEP,
) -> list[Figure]:
    """Return a figure with each arm's mean and its band; no figure if no arm has two points."""
    points = []
    for arm, runs in values.items():
        line = mean_points(runs, log, across.places.get(arm, ()), most_points(len(compared.arms)))
        most = max((point["runs"] for point in line), default=0)
        between = max(1, math.ceil(len(line) / _SYMBOLS))
        for index, point in enumerate(line):
            following = line[index + 1] if index + 1 < len(line) else point
            points.append({
                "arm": arm, **point, "text": with_band(point), "all": point["runs"] == most,
                "turn": point["runs"] == most and following["runs"] < most,
                "dot": index % between == 0 or index == len(line) - 1,
            })  # fmt: skip
    if max((sum(row["arm"] == arm for row in points) for arm in values), default=0) < 2:
        return []
    cut_off = chart_parts.cut_off(points, y)
    chart = figures.curves(points, compared.arms, across.title, y, log, across.short)
    caption = "The line is the mean over the finished runs."
    if any(point["low"] is not None for point in points):
        caption += " The band is one standard deviation around it."
    if log:
        caption += " Means and deviations are geometric."
    if not all(point["all"] for point in points):
        caption += " The line is dashed where some runs have no value."
    files = tuple(f"{run.folder}/events.jsonl" for arm in values for run in compared.runs(arm))
    return [Figure(name, title, chart, f"{caption} {note}".strip() + cut_off, points, files)]


def with_band(point: Mapping[str, Any]) -> str:
    """Return the mean of a point and, if it has one, its band."""
    if point["low"] is None:
        return number(point["mean"])
    return f"{number(point['mean'])} [{number(point['low'])}, {number(point['high'])}]"

"""Training curves of runs, averaged from their events.

A run can have a million events. The losses and times of training steps are averaged over spans of
steps while they are read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from frostlab.errors import BadInput
from frostlab.records.events import effective_values
from frostlab.records.schema import EvaluationEvent, StepEvent

POINTS = 200  # most points of a curve
_ALL_POINTS = 2000  # approximate number of points of all curves in a figure
_FEWEST = 50  # points that a curve keeps in any figure, unless it has fewer
_EVENTS = "events.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the split that selects the checkpoint."""

    step: int
    epoch: float
    seconds: float  # total time of the run until this evaluation
    metrics: dict[str, float]  # the finite ones


@dataclass(frozen=True)
class Curve:
    """The evaluations and the training steps of one run."""

    evaluations: tuple[Evaluation, ...]
    losses: dict[int, float]  # last step of a span of steps → mean training loss over the span
    step_ms: dict[int, float]  # last step of a span → mean time of its steps after warm-up

    def metric(self, name: str) -> dict[int, float]:
        """Return a metric by step."""
        return {
            evaluation.step: evaluation.metrics[name]
            for evaluation in self.evaluations
            if name in evaluation.metrics
        }

    def seconds(self) -> dict[int, float]:
        """Return the run's time until each evaluation, by step."""
        return {evaluation.step: evaluation.seconds for evaluation in self.evaluations}


def most_points(curves: int) -> int:
    """Return how many points each curve of a figure may have, so that it can be drawn quickly."""
    return max(_FEWEST, min(POINTS, _ALL_POINTS // max(1, curves)))


def span_of(steps: int, most: int = POINTS) -> int:
    """Return the number of steps to average so that a run has at most `most` points."""
    return max(1, math.ceil(steps / most))


def read_curve(folder: Path, span: int = 1) -> Curve | None:
    """Read a run's curve, with `span` steps in each average; None if the run has no events."""
    path = folder / _EVENTS
    try:
        return _read(path, span)
    except FileNotFoundError:
        return None


def _read(path: Path, span: int) -> Curve:
    evaluations: dict[int, Evaluation] = {}
    losses, times = _Average(span), _Average(span)
    for number, values in effective_values(path, StepEvent, EvaluationEvent):
        try:
            if values["kind"] == StepEvent.kind:
                warmup, ms = values["warmup"], values["ms"]
                losses.add(values["first"], values["loss"])
                times.add(values["first"] + warmup, ms[warmup:] if warmup else ms)
            elif values.get("checkpoint") is None:  # else the final one, of the best checkpoint
                evaluation = Evaluation(values["step"], values["epoch"], values["total_seconds"],
                                        _finite(values["metrics"]))  # fmt: skip
                evaluations[evaluation.step] = evaluation
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise BadInput(f"{path} line {number} is not a valid event") from None
    in_order = tuple(evaluations[step] for step in sorted(evaluations))
    return Curve(in_order, losses.means(), times.means())


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


class _Average:
    """Means of finite values over spans of steps; a span ends at a multiple of `span`."""

    def __init__(self, span: int) -> None:
        self.span = span
        # span → sum and number of its values, and its last step so far
        self.spans: dict[int, tuple[float, int, int]] = {}

    def add(self, first: int, values: Sequence[float | None]) -> None:
        """Add the values of successive steps."""
        begin, size = 0, len(values)
        while begin < size:
            index = (first + begin - 1) // self.span
            end = min(size, (index + 1) * self.span - first + 1)
            part: Sequence[Any] = values[begin:end]
            try:
                total = math.fsum(part)
            except (TypeError, OverflowError):  # None stands for a value that is not finite
                total = math.nan
            if not math.isfinite(total):
                part = [value for value in part if value is not None and math.isfinite(value)]
                total = math.fsum(part)
            if part:
                before, count, last = self.spans.get(index, (0.0, 0, 0))
                last = max(last, first + end - 1)
                self.spans[index] = before + total, count + len(part), last
            begin = end

    def means(self) -> dict[int, float]:
        """Return the mean of each span by its last step, in order."""
        return {last: total / count for _, (total, count, last) in sorted(self.spans.items())}


def mean_points(
    runs: Sequence[Mapping[int, float]],
    log: bool,
    places: Sequence[Mapping[int, float]] = (),
    most: int = POINTS,
) -> list[dict[str, Any]]:
    """Return the mean over runs by step, with the ends of a band: mean ± standard deviation.

    With `log`, these are the geometric mean and standard deviation. `places` has each
    run's positions on the x axis by step, and x is their mean; by default x is the step. A point
    of one run has no band. If there are more than `most` steps, the points are `thinned`.
    """
    points = []
    for step in sorted({step for run in runs for step in run}):
        values = [run[step] for run in runs if step in run and (run[step] > 0 or not log)]
        if not values:
            continue
        at = [place[step] for place in places if step in place]
        if log:
            values = [math.log(value) for value in values]
        mean, spread = fmean(values), stdev(values) if len(values) > 1 else None
        low, high = (None, None) if spread is None else (mean - spread, mean + spread)
        ends = [None if end is None else math.exp(end) if log else end for end in (low, mean, high)]
        points.append({"step": step, "x": fmean(at) if at else step, "mean": ends[1],
                       "low": ends[0], "high": ends[2], "runs": len(values)})  # fmt: skip
    return thinned(points, "mean", most)


def thinned(points: Sequence[dict[str, Any]], key: str, most: int = POINTS) -> list[dict[str, Any]]:
    """Return at most `most` points: the ends, and the lowest and highest `key` of parts between."""
    if len(points) <= most:
        return list(points)
    parts = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for part in range(parts):
        begin, end = (1 + k * (len(points) - 2) // parts for k in (part, part + 1))
        kept.add(min(range(begin, end), key=lambda i: points[i][key]))
        kept.add(max(range(begin, end), key=lambda i: points[i][key]))
    return [points[i] for i in sorted(kept)]

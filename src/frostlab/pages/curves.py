"""Training curves of runs, read from their events line by line.

A run can have a million events. Only the kinds that a curve needs are parsed, and the losses and
times of training steps are averaged over spans of steps while they are read.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

from frostlab.errors import BadInput
from frostlab.storage import parse_json, read_lines
from frostlab.typed import parse

POINTS = 200  # most points of a curve
_ALL_POINTS = 2000  # approximate number of points of all curves in a figure
_FEWEST = 50  # points that a curve keeps in any figure, unless it has fewer
# matches an event of a kind that no curve needs
_SKIPPED = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(?!(?:step|evaluation|resume)")\w+"')
_EVENTS = "events.jsonl"
_BATCH = 1 << 14  # bytes of lines that are parsed at once


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
        curve, resumed = _read(path, span, ())
        if resumed:  # read it again, without the events that the resumed run repeated
            curve, _ = _read(path, span, resumed)
    except FileNotFoundError:
        return None
    return curve


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the values of each line that may be needed."""
    numbers: list[int] = []
    lines: list[bytes] = []
    size = 0
    for number, line in enumerate(read_lines(path), 1):
        if _SKIPPED.match(line):
            continue  # without parsing it, which takes most of the time
        numbers.append(number)
        lines.append(line)
        size += len(line)
        if size > _BATCH:
            yield from zip(numbers, _parsed(lines), strict=True)
            numbers, lines, size = [], [], 0
    yield from zip(numbers, _parsed(lines), strict=True)


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the values of each line; an empty dict for a line that is not a JSON object.

    All lines are parsed at once, which is almost twice as fast, unless one of them is damaged.
    """
    try:
        values = parse_json(b"[" + b",\n".join(lines) + b"]", "")
        if len(values) == len(lines) and set(map(type, values)) <= {dict}:
            return cast("list[dict[str, Any]]", values)
    except BadInput:
        pass
    return [parse(line) or {} for line in lines]


def _read(
    path: Path, span: int, resumed: Sequence[tuple[int, int]]
) -> tuple[Curve, list[tuple[int, int]]]:
    """Return a run's curve, and the line and the step of every resume.

    `resumed` has the resumes that an earlier reading found. If the resumed run took steps again,
    the curve has only the events of its last attempt at them.
    """
    evaluations: dict[int, Evaluation] = {}
    losses, times = _Average(span), _Average(span)
    last_valid = _last_valid(resumed)
    met = []
    for number, values in _lines(path):
        kind = values.get("kind")
        try:
            if kind == "resume":
                met.append((number, int(values["step"])))
            elif kind not in ("step", "evaluation") or values["step"] > last_valid(number):
                continue  # another event, or a step that the resumed run took again
            elif kind == "step":
                warmup, ms = values["warmup"], values["ms"]
                losses.add(values["first"], values["loss"])
                times.add(values["first"] + warmup, ms[warmup:] if warmup else ms)
            elif values.get("checkpoint") is None:  # not the final one, of the best checkpoint
                evaluation = Evaluation(values["step"], values["epoch"], values["total_seconds"],
                                        _finite(values["metrics"]))  # fmt: skip
                evaluations[evaluation.step] = evaluation
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BadInput(f"{path} line {number} is not a valid event") from None
    in_order = tuple(evaluations[step] for step in sorted(evaluations))
    return Curve(in_order, losses.means(), times.means()), met


def _last_valid(resumed: Sequence[tuple[int, int]]) -> Callable[[int], float]:
    """Return a function: number of a line → the last step that no later resume took again."""
    if not resumed:
        return lambda line: math.inf
    lines = [line for line, _ in resumed]
    least: list[float] = [math.inf]
    for _, step in reversed(resumed):
        least.append(min(least[-1], step))
    least.reverse()  # by the number of resumes before a line
    return lambda line: least[bisect_right(lines, line)]


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
    """Return the mean over runs by step, with the band mean ± standard deviation.

    On a logarithmic scale these are the geometric mean and standard deviation. `places` has each
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
    """Return at most `most` points: the ends, and the lowest and highest of parts between them."""
    if len(points) <= most:
        return list(points)
    parts = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for part in range(parts):
        begin, end = (1 + k * (len(points) - 2) // parts for k in (part, part + 1))
        kept.add(min(range(begin, end), key=lambda i: points[i][key]))
        kept.add(max(range(begin, end), key=lambda i: points[i][key]))
    return [points[i] for i in sorted(kept)]

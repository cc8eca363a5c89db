"""TensorBoard event files of gradient flow and metrics, written live or from a run's record."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from frostlab.errors import BadInput, require
from frostlab.flow.diagnosis import depth_ratios
from frostlab.flow.measurements import Flow, PartFacts, Report
from frostlab.flow.probe import Gradient, own_gradient
from frostlab.flow.tensors import local
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent
from frostlab.roles.read import unwrapped
from frostlab.text import plain, short, typed

_LONGEST = 300  # maximum number of characters of a tag
_VALUES, _BINS = 10_000, 64  # maximum number of sampled values, and number of bins, per histogram


class TensorBoard:
    """A writer of event files, e.g. `fl.watch(…, on_report=TensorBoard(folder).flow)`."""

    def __init__(self, folder: str | Path) -> None:
        package = require("tensorboardX", "tensorboard", "writing event files")
        try:
            self._writer: Any = package.SummaryWriter(str(folder))
        except OSError as error:
            raise BadInput(f"TensorBoard: {folder}: {error.strerror}") from None

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def flow(
        self, step: int, report: Report, parts: Sequence[PartFacts], at: float | None = None
    ) -> None:
        """Write a flow report: the norm of the whole gradient, and three values for each part.

        The values are the norms of gradient and update, and the update's norm relative to the
        weights. A value that was not measured, such as a frozen part's, gets no point; a part with
        NaN or infinity gets points as measured. `at` is the time of the step, by default now.
        """
        norms = [x for x in report.values["gradient"] if not math.isnan(x)]
        if norms or report.broken:
            norm = math.nan if report.broken else math.hypot(*norms)
            self._scalar("Gradient/norm", norm, step, at)
        for i, part in enumerate(parts):
            numbers = {
                "Gradient": report.of("gradient", i),
                "Update": report.of("update", i),
                "Ratio": report.ratio(i),
            }
            for group, number in numbers.items():
                if i in report.broken or not math.isnan(number):
                    self._scalar(f"{group}/{tag_of(part.name)}", number, step, at)
        # the gradient of the first layers relative to the output's
        front = depth_ratios([report]).front_ratio if report.largest else math.nan
        if not math.isnan(front):
            self._scalar("Depth/front_over_output", front, step, at)

    def metrics(self, step: int, metrics: Mapping[str, Any], at: float | None = None) -> None:
        """Write the metrics of an evaluation as `Validation/<metric>`, with NaN for None.

        Metrics of supervised layers are written as `Validation/layer_<number>/<metric>`.
        """
        layers = metrics.get("layers", {})
        groups = {"Validation": {k: v for k, v in metrics.items() if k != "layers"}}
        groups |= {f"Validation/layer_{number}": values for number, values in layers.items()}
        for group, values in groups.items():
            for name, value in values.items():
                self._scalar(f"{group}/{name}", math.nan if value is None else value, step, at)

    def histograms(self, step: int, model: nn.Module, gradient: Gradient = own_gradient) -> None:
        """Write `Weight/<parameter>` and, if it has a gradient, `Gradient/<parameter>`.

        A histogram samples at most 10,000 evenly spaced elements of a tensor and drops non-finite
        ones; if no element is finite, no histogram is written. In a sharded model, each process
        samples only its own shard.
        """
        for name, parameter in unwrapped(model).named_parameters():
            self._histogram(f"Weight/{name}", parameter, step)
            if (tensor := gradient(parameter)) is not None:
                self._histogram(f"Gradient/{name}", tensor, step)

    def close(self) -> None:
        """Write pending events, and close the files."""
        self._writer.close()

    def _scalar(self, tag: str, value: Any, step: int, at: float | None) -> None:
        if typed(value, int, float) is None:
            raise BadInput(f"TensorBoard: {plain(tag)} should be a number, but is {value!r:.60}")
        self._writer.add_scalar(_shown(tag), float(value), step, walltime=at)

    def _histogram(self, tag: str, tensor: Tensor, step: int) -> None:
        flat = local(tensor).detach().flatten()
        sample = flat[:: max(1, math.ceil(len(flat) / _VALUES))].float().cpu()
        sample = sample[sample.isfinite()]
        if len(sample):
            self._writer.add_histogram(_shown(tag), sample.double().numpy(), step, bins=_BINS)


def _shown(tag: str) -> str:
    """Return a tag as one line that event files can hold."""
    return short(plain(tag), _LONGEST)


def tag_of(part: str) -> str:
    """Return a part's name as a TensorBoard tag: `layers.0.query` for `layers[0].query`.

    The part `norm`, a layer norm outside the layers, becomes `outside.norm`, because the tag
    `Gradient/norm` holds the norm of the whole gradient.
    """
    name = re.sub(r"\[([^\]]*)\]", lambda match: "." + match[1].replace(":", "-"), part)
    return "outside.norm" if name == "norm" else name


def export_run(run: str | Path, out: str | Path, flows: Iterable[Flow] = ()) -> Path:
    """Write a recorded run's evaluations during training, and `flows`, as event files in `out`."""
    events = RunRecord(Path(run)).events()
    if not events:
        raise BadInput(f"export_run: {run} has no events; give the folder of a run")
    times = {event.step: event.at for event in events}
    with TensorBoard(out) as board:
        for event in events:
            if isinstance(event, EvaluationEvent) and event.checkpoint is None:
                board.metrics(event.step, event.metrics, event.at)
        for flow in flows:
            for report in flow.reports:
                board.flow(report.step, report, flow.parts, times.get(report.step))
    return Path(out)

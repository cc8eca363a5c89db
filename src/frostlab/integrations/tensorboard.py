"""TensorBoard: a flow, metrics and histograms as event files, live or from a finished run."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from frostlab.errors import BadInput, FrostlabError
from frostlab.flow.diagnosis import ends_of
from frostlab.flow.measurements import Flow, PartFacts, Report
from frostlab.flow.probe import Gradient, own_gradient
from frostlab.flow.tensors import local
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent
from frostlab.roles.read import unwrapped

_VALUES, _BINS = 10_000, 64  # of one histogram


class TensorBoard:
    """Writes event files; `fl.watch(…, tell=TensorBoard(folder).flow)` does it while training."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise FrostlabError(
                "event files need tensorboardX: pip install 'frostlab[tensorboard]'"
            ) from None
        try:
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise BadInput(f"TensorBoard: {folder}: {error.strerror}") from None

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def flow(
        self, step: int, report: Report, parts: Sequence[PartFacts], at: float | None = None
    ) -> None:
        """Write a report: the whole gradient's norm, then gradient, update and ratio a part.

        What is frozen or got no gradient has no point; what is NaN or infinite has a NaN.
        """
        known = [x for x in report.values["gradient"] if not math.isnan(x)]
        if known or report.broken:
            self._scalar(
                "Gradient/norm", math.nan if report.broken else math.hypot(*known), step, at
            )
        for i, part in enumerate(parts):
            numbers = {
                "Gradient": report.of("gradient", i),
                "Update": report.of("update", i),
                "Ratio": report.ratio(i),
            }
            for group, number in numbers.items():
                if i in report.broken or not math.isnan(number):
                    self._scalar(f"{group}/{tag_of(part.name)}", number, step, at)
        front = ends_of([report]).front_ratio if report.largest else math.nan
        if not math.isnan(front):
            self._scalar("Ends/front_over_output", front, step, at)

    def metrics(self, step: int, metrics: Mapping[str, Any], at: float | None = None) -> None:
        """Write the metrics of an evaluation as `Validation/<metric>`; null is NaN.

        Metrics of supervised layers are `Validation/layer_<number>/<metric>`.
        """
        layers = metrics.get("layers", {})
        groups = {"Validation": {k: v for k, v in metrics.items() if k != "layers"}}
        groups |= {f"Validation/layer_{number}": own for number, own in layers.items()}
        for group, own in groups.items():
            for name, value in own.items():
                self._scalar(f"{group}/{name}", math.nan if value is None else value, step, at)

    def histograms(self, step: int, model: nn.Module, gradient: Gradient = own_gradient) -> None:
        """Write `Weight/<parameter>` and, where there is one, `Gradient/<parameter>`.

        At most 10,000 numbers a tensor, evenly spaced in it; those that are not finite are left
        out, and a tensor without a finite one. Of a sharded model: this process's share.
        """
        for name, parameter in unwrapped(model).named_parameters():
            self._histogram(f"Weight/{name}", parameter, step)
            if (found := gradient(parameter)) is not None:
                self._histogram(f"Gradient/{name}", found, step)

    def close(self) -> None:
        """Write what is left, and end."""
        self._writer.close()

    def _scalar(self, tag: str, value: float, step: int, at: float | None) -> None:
        self._writer.add_scalar(tag, float(value), step, walltime=at)

    def _histogram(self, tag: str, tensor: Tensor, step: int) -> None:
        flat = local(tensor).detach().flatten()
        some = flat[:: max(1, math.ceil(len(flat) / _VALUES))].float().cpu()
        some = some[some.isfinite()]
        if len(some):
            self._writer.add_histogram(tag, some.double().numpy(), step, bins=_BINS)


def tag_of(part: str) -> str:
    """A part's name in TensorBoard's alphabet: `layers[0].query` is `layers.0.query`.

    The last norm, which lies outside the layers, is `outside.norm`: `norm` is the whole gradient's.
    """
    name = re.sub(r"\[([^\]]*)\]", lambda found: "." + found[1].replace(":", "-"), part)
    return "outside.norm" if name == "norm" else name


def export_run(run: str | Path, out: str | Path, flows: Iterable[Flow] = ()) -> Path:
    """Write a run's evaluations and flows, one a stage, as event files with their own times."""
    events = RunRecord(Path(run)).events()
    if not events:
        raise BadInput(f"export_run: {run} holds no events; give the folder of a run")
    times = {event.step: event.at for event in events}
    with TensorBoard(out) as board:
        for event in events:
            if isinstance(event, EvaluationEvent) and event.checkpoint is None:
                board.metrics(event.step, event.metrics, event.at)
        for flow in flows:
            for report in flow.reports:
                board.flow(report.step, report, flow.parts, times.get(report.step))
    return Path(out)

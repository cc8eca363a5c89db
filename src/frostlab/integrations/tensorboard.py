"""TensorBoard event files of losses, metrics and gradient flow, written live or from a record."""

import math
import re
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor, nn

from frostlab.errors import BadInput, first_line, require
from frostlab.flow.diagnosis import depth_ratios
from frostlab.flow.measurements import PartFacts, Report, flows_of, read_parts, read_report
from frostlab.flow.probe import Gradient, own_gradient
from frostlab.flow.tensors import local
from frostlab.recipe.recipe import Recipe
from frostlab.records.folder import RunRecord
from frostlab.records.schema import (
    EvaluationEvent,
    Event,
    FlowEvent,
    FlowPartsEvent,
    StepEvent,
    read_event,
)
from frostlab.roles.read import unwrapped
from frostlab.text import plain, short, typed

_LONGEST = 300  # maximum number of characters of a tag
_VALUES, _BINS = 10_000, 64  # maximum number of sampled values, and number of bins, per histogram


class TensorBoard:
    """A writer of event files, e.g. `fl.watch(…, on_report=TensorBoard(folder).flow)`."""

    def __init__(self, folder: str | Path, *, replaces: bool = False) -> None:
        """Create a new event file in a folder.

        With `replaces`, TensorBoard no longer shows the values of earlier files in the folder.
        """
        purpose = "writing event files"
        files = require("tensorboardX.event_file_writer", "tensorboard", purpose)
        self._summary = require("tensorboardX.summary", "tensorboard", purpose)
        self._event: Any = require("tensorboardX.proto.event_pb2", "tensorboard", purpose)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names, which hold the time in seconds
            self._file: Any = files.EventsWriter(f"{folder}/events", f".{time.time_ns()}")
        except OSError as error:
            raise BadInput(f"TensorBoard: {folder}: {error.strerror}") from None
        if replaces:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._file.write_event(self._event.Event(step=0, session_log=start))

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def flow(
        self, step: int, report: Report, parts: Sequence[PartFacts], at: float | None = None
    ) -> None:
        """Write a flow report: the whole gradient's norm, three values per part, and a depth ratio.

        The three values are the norms of gradient and update, and the update's norm relative to the
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

    def training(self, event: StepEvent) -> None:
        """Write the loss of each step that an event records, and the last step's learning rate.

        A step's time is the event's time less the durations of the later steps.
        """
        at = event.at - sum(event.ms) / 1e3
        for step, (loss, ms) in enumerate(zip(event.loss, event.ms, strict=True), event.first):
            at += ms / 1e3
            self._scalar("Training/loss", math.nan if loss is None else loss, step, at)
        self._scalar("Training/learning_rate", event.rate, event.step, event.at)

    def flush(self) -> None:
        """Write all values to the disk."""
        self._file.flush()

    def close(self) -> None:
        """Write all values to the disk, and close the file."""
        self._file.close()

    def _scalar(self, tag: str, value: Any, step: int, at: float | None) -> None:
        if typed(value, int, float) is None:
            raise BadInput(f"TensorBoard: {plain(tag)} should be a number, but is {value!r:.60}")
        self._write(self._summary.scalar(_shown(tag), float(value)), step, at)

    def _histogram(self, tag: str, tensor: Tensor, step: int) -> None:
        flat = local(tensor).detach().flatten()
        sample = flat[:: max(1, math.ceil(len(flat) / _VALUES))].float().cpu()
        sample = sample[sample.isfinite()]
        if len(sample):
            values = sample.double().numpy()
            self._write(self._summary.histogram(_shown(tag), values, _BINS), step, None)

    def _write(self, summary: Any, step: int, at: float | None) -> None:
        wall_time = time.time() if at is None else at
        self._file.write_event(self._event.Event(wall_time=wall_time, step=step, summary=summary))


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


def export_run(run: str | Path, out: str | Path) -> Path:
    """Write the losses, evaluations and gradient flow of a recorded run as event files in `out`.

    The files of a scaled run, or of one with stand-ins, are in a folder inside `out` that says so.
    """
    record = RunRecord(Path(run))
    events = record.events()
    if not events:
        raise BadInput(f"export_run: {run} has no events; give the folder of a run")
    flows_of(run)  # refuses a damaged flow before anything is written
    out = marked_folder(out, record.recipe)
    with TensorBoard(out) as board:
        writer = _EventWriter(board)
        for event in events:
            writer.write(event)
    return Path(out)


def marked_folder(folder: str | Path, recipe: Recipe) -> Path:
    """Return the folder for the event files of a recipe's run.

    TensorBoard names a run after its folder, so a scaled run, or one with stand-ins, has a folder
    such as `tiny-stand-in` inside `folder`.
    """
    return Path(folder) / recipe.marks.removeprefix("-")


class _EventWriter:
    """A writer of a run's events to TensorBoard, in their order."""

    def __init__(self, board: TensorBoard) -> None:
        self._board = board
        self._parts: Sequence[PartFacts] = ()  # of the current stage
        self._front: Sequence[str] = ()

    def write(self, event: Event) -> None:
        """Write the steps, evaluations and gradient flow; ignore other events.

        The evaluation of the best weights at the end of a run is ignored too, because it is not a
        point of a curve.
        """
        if isinstance(event, StepEvent):
            self._board.training(event)
        elif isinstance(event, EvaluationEvent) and event.checkpoint is None:
            self._board.metrics(event.step, event.metrics, event.at)
        elif isinstance(event, FlowPartsEvent):
            self._parts, self._front = read_parts(event), event.front
        elif isinstance(event, FlowEvent):
            report = read_report(event, self._parts, self._front)
            self._board.flow(event.step, report, self._parts, event.at)


def check_folder(folder: Path, run: Path, resumes: bool) -> None:
    """Refuse a folder with event files, unless the run is resumed, and a folder inside the run's.

    The curves of two runs would mix; a resumed run replaces the curves that it finds.
    """
    require("tensorboardX", "tensorboard", "writing event files")
    if folder.resolve().is_relative_to(run.resolve()):
        raise BadInput(f"--tensorboard {folder}: is in the run's folder; choose another folder")
    if not resumes and folder.is_dir() and any(folder.glob("events.out.tfevents.*")):
        raise BadInput(f"--tensorboard {folder}: holds event files already; choose another folder")


class LiveBoard:
    """A writer of a run's events while it runs, in a thread of its own: no step waits for it.

    A resumed run gives its earlier events, so that the curves are complete and no step is there
    twice. If writing fails during the run, the run goes on, and a warning is given at its end.
    """

    def __init__(self, folder: str | Path, earlier: Sequence[Event]) -> None:
        self._board = TensorBoard(folder, replaces=bool(earlier))
        self._folder = folder
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # None ends the thread
        self._error: str | None = None
        self._thread = threading.Thread(target=self._work, args=(earlier,), daemon=True)
        self._thread.start()

    def add(self, line: str) -> None:
        """Add an event, as a line of events.jsonl."""
        self._lines.put(line)

    def __enter__(self) -> "LiveBoard":
        return self

    def __exit__(self, *error: object) -> None:
        """Write all events, also those of a run that failed, and close the file."""
        self._lines.put(None)
        self._thread.join()
        if self._error is not None:
            warnings.warn(
                f"TensorBoard: {self._folder}: {self._error}; `frostlab diagnose RUN --tensorboard "
                "FOLDER` writes event files from the run's record",
                stacklevel=2,
            )

    def _work(self, earlier: Iterable[Event]) -> None:
        writer = _EventWriter(self._board)
        try:
            with self._board:
                for event in earlier:
                    writer.write(event)
                while (line := self._lines.get()) is not None:
                    if (recorded := read_event(line, "TensorBoard")) is not None:
                        writer.write(recorded)
                    if self._lines.empty():
                        self._board.flush()
        except Exception as error:  # nobody would see it in this thread
            self._error = getattr(error, "strerror", None) or first_line(error)

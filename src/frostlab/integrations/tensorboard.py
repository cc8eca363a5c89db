"""TensorBoard event files of losses, metrics and gradient flow, written live or from a record.

Gradient flow is the norms of gradients and updates in each part of a model (the tensors of one role
in one layer, or outside the layers); a report holds the norms of one step.
"""

import math
import re
import struct
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
# the largest number of values that a histogram samples, and the number of its bins
_MOST_SAMPLED, _BINS = 10_000, 64
_FILES = "events.out.tfevents.*"
_MOST_BYTES = 2**24  # largest size of an event in a file; a larger one is damaged


Samples = dict[str, NDArray[np.float32]]  # tag → values


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
            # TensorBoard reads files in the order of their names, in which tensorboardX writes the
            # time in whole seconds; the suffix makes the order certain
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
        weights. A value that was not measured, such as a frozen part's, gets no point, and NaN is a
        point only in a part whose numbers became NaN or infinite. The depth ratio is the gradient
        size of the first two layers divided by that of the head, if both are known. The tag
        `Gradient/norm` has the norm after clipping here, but the norm before clipping if `training`
        writes it. `at` is the time of the step, by default now.
        """
        norms = [x for x in report.values["gradient"] if not math.isnan(x)]
        if norms or report.broken:
            norm = math.nan if report.broken else math.hypot(*norms)
            self._scalar("Gradient/norm", norm, step, at)
        self.parts(step, report, parts, at)

    def parts(
        self, step: int, report: Report, parts: Sequence[PartFacts], at: float | None = None
    ) -> None:
        """Write a flow report without the norm of the whole gradient."""
        for i, part in enumerate(parts):
            numbers = {
                "Gradient": report.of("gradient", i),
                "Update": report.of("update", i),
                "Ratio": report.ratio(i),
            }
            for group, number in numbers.items():
                if i in report.broken or not math.isnan(number):
                    self._scalar(f"{group}/{tag_of(part.name)}", number, step, at)
        # gradient size of the front (the first two layers) over that of the output (the head)
        front = depth_ratios([report]).front_ratio if report.largest else math.nan
        if not math.isnan(front):
            self._scalar("Depth/front_over_output", front, step, at)

    def metrics(self, step: int, metrics: Mapping[str, Any], at: float | None = None) -> None:
        """Write the metrics of an evaluation as `Validation/<metric>`, with NaN for None.

        Metrics of supervised layers (layers with a loss of their own) are written as
        `Validation/layer_<number>/<metric>`.
        """
        layers = metrics.get("layers", {})
        groups = {"Validation": {k: v for k, v in metrics.items() if k != "layers"}}
        groups |= {f"Validation/layer_{number}": values for number, values in layers.items()}
        for group, values in groups.items():
            for name, value in values.items():
                self._scalar(f"{group}/{name}", math.nan if value is None else value, step, at)

    def histograms(self, step: int, model: nn.Module, gradient: Gradient = own_gradient) -> None:
        """Write a histogram of each parameter, and of its gradient if it has one.

        The tags are `Weight/<parameter>` and `Gradient/<parameter>`. `gradient` is a function that
        returns the gradient of a parameter, by default its `.grad`. A histogram samples at most
        10,000 evenly spaced elements of a tensor and drops non-finite ones; if no element is
        finite, no histogram is written. In a sharded model, each process samples only its own
        shard.
        """
        self.samples(step, sample(model, gradient))

    def samples(self, step: int, samples: "Samples", at: float | None = None) -> None:
        """Write histograms of sampled elements, by tag; `at` is their time, by default now."""
        for tag, values in samples.items():
            finite = values[np.isfinite(values)]
            if len(finite):
                summary = self._summary.histogram(_shown(tag), finite.astype(np.float64), _BINS)
                self._write(summary, step, at)

    def training(self, event: StepEvent) -> None:
        """Write the loss and the gradient's norm of an event's steps, and the last learning rate.

        The norm, `Gradient/norm`, is that of the whole gradient before clipping. A step's time is
        the event's time less the durations of the later steps.
        """
        at = event.at - sum(event.ms) / 1e3
        steps = zip(event.loss, event.norm, event.ms, strict=True)
        for step, (loss, norm, ms) in enumerate(steps, event.first):
            at += ms / 1e3
            self._scalar("Training/loss", math.nan if loss is None else loss, step, at)
            self._scalar("Gradient/norm", math.nan if norm is None else norm, step, at)
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

    def copy(self, event: Any) -> None:
        """Write an event of another file."""
        self._file.write_event(event)

    def _write(self, summary: Any, step: int, at: float | None) -> None:
        wall_time = time.time() if at is None else at
        self._file.write_event(self._event.Event(wall_time=wall_time, step=step, summary=summary))


def sample(model: nn.Module, gradient: Gradient = own_gradient) -> Samples:
    """Copy evenly spaced elements of every parameter and gradient to the host, by tag.

    There is one transfer for each device, because many small ones would be slow.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in unwrapped(model).named_parameters():
        # the tag `Gradient/norm` holds the norm of the whole gradient
        tag = "outside.norm" if name == "norm" else name
        tensors[f"Weight/{tag}"] = parameter
        if (tensor := gradient(parameter)) is not None:
            tensors[f"Gradient/{tag}"] = tensor
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for tag, tensor in tensors.items():
        flat = local(tensor).detach().flatten()
        elements = flat[:: max(1, math.ceil(len(flat) / _MOST_SAMPLED))].float()
        by_device.setdefault(elements.device, {})[tag] = elements
    samples: Samples = {}
    for by_tag in by_device.values():
        joined = torch.cat(list(by_tag.values())).cpu().numpy()  # `cat` copies, also on the CPU
        ends = np.cumsum([len(elements) for elements in by_tag.values()])
        samples |= dict(zip(by_tag, np.split(joined, ends[:-1]), strict=True))
    return {tag: samples[tag] for tag in tensors}


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

    If the run's recipe was reduced (scale tiny or small), or if stand-ins replaced missing data or
    weights, the files are in a folder inside `out` whose name says so.
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

    It is `folder` itself, unless the recipe was reduced (scale tiny or small), or stand-ins replace
    missing data or weights. TensorBoard shows the name of the folder as the name of the run, so
    such a run gets a folder inside `folder` with a name such as `tiny-stand-in`.
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
            self._board.parts(event.step, report, self._parts, event.at)


def check_folder(folder: Path, run: Path, resumes: bool) -> None:
    """Refuse a folder inside the run's folder and, for a new run, a folder with event files.

    With the event files of another run, the curves of both would mix. A resumed run replaces the
    curves that it finds.
    """
    require("tensorboardX", "tensorboard", "writing event files")
    if folder.resolve().is_relative_to(run.resolve()):
        raise BadInput(f"--tensorboard {folder} is in the run's folder; choose another folder")
    if not resumes and folder.is_dir() and any(folder.glob(_FILES)):
        raise BadInput(f"--tensorboard {folder} holds event files already; choose another folder")


@dataclass(frozen=True)
class _Histograms:
    """Sampled weights and gradients that wait to be written."""

    step: int
    at: float  # seconds since 1970
    samples: Samples


class LiveBoard:
    """A thread that writes the events of a run in progress, so that no step waits for the disk.

    A resumed run passes the events of its earlier part, which are written again to a new file, so
    that the curves are complete and no step is there twice. Histograms are not events, so the
    earlier ones are copied from the old event files. If writing fails during the run, the
    run goes on, and a warning is given at its end.
    """

    def __init__(self, folder: str | Path, earlier: Sequence[Event]) -> None:
        files = sorted(Path(folder).glob(_FILES)) if earlier else []
        self._board = TensorBoard(folder, replaces=bool(earlier))
        self._folder = folder
        self._waiting: SimpleQueue[str | _Histograms | None] = SimpleQueue()  # None ends the thread
        self._error: str | None = None
        self._thread = threading.Thread(target=self._work, args=(earlier, files), daemon=True)
        self._thread.start()

    def add(self, line: str) -> None:
        """Add an event, as a line of events.jsonl."""
        self._waiting.put(line)

    def histograms(self, step: int, model: nn.Module, gradient: Gradient = own_gradient) -> None:
        """Sample the weights and gradients now; their histograms are written later."""
        if self._thread.is_alive():  # else nobody would take the samples
            self._waiting.put(_Histograms(step, time.time(), sample(model, gradient)))

    def __enter__(self) -> "LiveBoard":
        return self

    def __exit__(self, *error: object) -> None:
        """Write all events, also those of a run that failed, and close the file."""
        self._waiting.put(None)
        self._thread.join()
        if self._error is not None:
            warnings.warn(
                f"TensorBoard: {self._folder}: {self._error}; `frostlab diagnose RUN --tensorboard "
                "FOLDER` writes event files from the run's record",
                stacklevel=2,
            )

    def _work(self, earlier: Sequence[Event], files: Sequence[Path]) -> None:
        writer = _EventWriter(self._board)
        try:
            with self._board:
                for event in earlier:
                    writer.write(event)
                if earlier:
                    for stored in _stored_histograms(files, earlier[-1].step):
                        self._board.copy(stored)
                while (item := self._waiting.get()) is not None:
                    if isinstance(item, _Histograms):
                        self._board.samples(item.step, item.samples, item.at)
                    elif (recorded := read_event(item, "TensorBoard")) is not None:
                        writer.write(recorded)
                    if self._waiting.empty():
                        self._board.flush()
        except Exception as error:  # nobody would see it in this thread
            self._error = getattr(error, "strerror", None) or first_line(error)


def _stored_histograms(files: Sequence[Path], last: int) -> Iterator[Any]:
    """Yield each histogram up to step `last` once, from the newest event file that has it.

    A record is the length of an event (8 bytes) and a checksum (4), the event, and a checksum (4).
    The end of a file may be damaged, as after a crash; records from there on are left out.
    """
    purpose = "reading event files"
    event_type: Any = require("tensorboardX.proto.event_pb2", "tensorboard", purpose).Event
    damage: Any = require("google.protobuf.message", "tensorboard", purpose).DecodeError
    copied: set[tuple[str, int]] = set()
    for path in reversed(files):
        with path.open("rb") as file:
            while len(head := file.read(12)) == 12:
                (length,) = struct.unpack("<Q", head[:8])
                if length > _MOST_BYTES or len(body := file.read(length + 4)) < length + 4:
                    break
                try:
                    event = event_type.FromString(body[:length])
                except damage:
                    break
                for value in event.summary.value:
                    key = (value.tag, event.step)
                    if value.HasField("histo") and event.step <= last and key not in copied:
                        copied.add(key)
                        yield event

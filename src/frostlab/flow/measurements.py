"""A `Flow`: facts about the parts of a model, one report per measured step, and their storage.

`fl.watch` fills a `Flow`. `Flow.save` writes it to a file, a watched run writes it as events, and
`load_flow` reads both.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostlab.errors import BadInput, first_line, nearest, require
from frostlab.recipe.settings import OPTIMIZERS
from frostlab.records.events import effective, read_events
from frostlab.records.folder import RunRecord
from frostlab.records.schema import (
    EvaluationEvent,
    Event,
    FlowEvent,
    FlowPartsEvent,
    ResumeEvent,
    StartEvent,
)
from frostlab.storage import finite, parse_json, read_bytes, write_whole
from frostlab.text import plain
from frostlab.typed import check_schema, read

if TYPE_CHECKING:
    from frostlab.flow.diagnosis import DepthRatios
    from frostlab.flow.judge import PartVerdict, Rules

SCHEMA = 1  # version of the file that `Flow.save` writes
# the kinds of events from which the flow of a run is read
_OF_FLOW = (StartEvent, ResumeEvent, EvaluationEvent, FlowPartsEvent, FlowEvent)
QUANTITIES = {
    "gradient": "norm of the gradient that the optimizer got, after unscaling and clipping",
    "before_clip": "norm of the gradient before clipping, where it was measured",
    "weight": "norm of the weights before the step",
    "update": "norm of the change that the step made",
    "distance": "distance from the weights at the start, divided by the norm at the start",
    "weight_cosine": "cosine between the weights and the weights at the start",
    "gradient_cosine": "cosine between this gradient and the gradient of the previous report",
}
_NORMS = ("gradient", "before_clip", "weight", "update")


@dataclass(frozen=True)
class PartFacts:
    """A part of a model: all tensors of one role in one layer, or of one role outside the layers.

    If the architecture is unknown, a part is all tensors of one module.
    """

    name: str  # such as layers[0].query
    peers: str  # the role; in an unknown architecture, the module's path with `*` for numbers
    stack: str  # such as "encoder"; empty if the model has one stack, or outside the stacks
    layer: int | None  # index in the stack; None if no layer, or several, hold the part
    state: str  # trainable, frozen, or fixed (never trained by the model)
    tensors: tuple[str, ...]  # names of its tensors
    learning: tuple[str, ...]  # tensors that require a gradient
    missing: tuple[str, ...]  # tensors that require a gradient and are in no optimizer
    groups: tuple[int, ...]  # indices of the optimizer groups that hold tensors of the part
    dtype: str  # of the first trainable tensor, or of the first tensor if none is trainable
    elements: int  # number of trainable elements

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PartFacts":
        """Build an instance from the values that `to_dict` returned."""
        arguments: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**arguments)


@dataclass(frozen=True)
class GroupFacts:
    """The settings of one optimizer parameter group that the verdicts depend on."""

    decay: float  # weight decay
    momentum: float  # 0 if the optimizer has none
    eps: float  # 0 if the optimizer has none
    coupled: bool = False  # weight decay is added to the gradient (L2), not decoupled (AdamW)

    @classmethod
    def of(cls, group: dict[str, Any], optimizer: str) -> "GroupFacts":
        """Read the settings from an element of `optimizer.param_groups`."""
        momentum, eps = group.get("momentum", 0.0), group.get("eps", 0.0)
        facts = OPTIMIZERS.get(optimizer)
        return cls(
            float(group.get("weight_decay", 0.0)),
            float(momentum) if isinstance(momentum, float | int) else 0.0,
            float(eps) if isinstance(eps, float | int) else 0.0,
            not group.get("decoupled_weight_decay", facts is None or not facts.coupled),
        )


@dataclass(frozen=True)
class Report:
    """One measured step: a value per quantity and part, NaN where it was not measured."""

    step: int
    values: dict[str, tuple[float, ...]]
    rates: tuple[float, ...]  # learning rate of each group; NaN if the group has none
    unreached: tuple[str, ...] = ()  # trainable tensors whose gradient was None
    # front (first two layers), back (last two) and output (head) → max |gradient| of a tensor,
    # averaged over the tensors
    largest: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, float] = field(
        default_factory=dict
    )  # tensor of the front → max - min of its weights
    broken: tuple[int, ...] = ()  # indices of the parts with NaN or infinity
    # module → fraction of its units that are (almost) 0 throughout the batch
    dead: dict[str, float] = field(default_factory=dict)
    # module → fraction of its activations that are close to a bound, such as ±1 of tanh
    saturated: dict[str, float] = field(default_factory=dict)
    # attention call → entropy of each head, as a fraction of the largest possible entropy
    entropy: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def of(self, quantity: str, part: int) -> float:
        """Return one quantity of one part."""
        return self.values[quantity][part]

    def ratio(self, part: int) -> float:
        """Return |update| / |weight|: how far the step moved a part, relative to its norm.

        If all weights are 0, the ratio is infinite, or NaN if the step did not move them.
        """
        weight, update = self.of("weight", part), self.of("update", part)
        if weight == 0.0:
            return float("inf") if update > 0.0 else float("nan")
        return update / weight

    def reindexed(self, indices: Sequence[int | None]) -> "Report":
        """Return this report for a new list of parts.

        Args:
            indices: the former index of each part, or None for a new part.
        """
        values = {
            quantity: tuple(math.nan if index is None else numbers[index] for index in indices)
            for quantity, numbers in self.values.items()
        }
        broken = tuple(i for i, index in enumerate(indices) if index in self.broken)
        return replace(self, values=values, broken=broken)


class Flow:
    """The reports on a model's parts, made by `fl.watch` or read by `fl.load_flow`."""

    def __init__(self, model: str, optimizer: str) -> None:
        self.model, self.optimizer = model, optimizer
        self.parts: tuple[PartFacts, ...] = ()
        self.groups: tuple[GroupFacts, ...] = ()  # optimizer groups
        self.moved: tuple[str, ...] = ()  # names of parts with a frozen tensor that changed
        self.verified = False  # whether frozen parts were compared with their digests
        self.caution: str | None = None  # a warning, e.g. that the data are a stand-in
        self.run: str | None = None  # the run that was watched: its folder's name, recipe and stage
        self._reports: list[Report] = []

    def __repr__(self) -> str:
        from frostlab.flow.diagnosis import sentence_of

        count = f"{len(self.reports)} report{'s' * (len(self.reports) != 1)}"
        about = f"{self.model}, {self.optimizer}, {count}: {sentence_of(self)}"
        return plain(f"{type(self).__name__}({about})")

    def _repr_html_(self) -> str:
        """Return the heat maps as HTML, which notebooks show; a table if altair is missing."""
        from frostlab.flow.show import as_html

        return as_html(self)

    @property
    def reports(self) -> list[Report]:
        """The reports so far, in the order of their steps."""
        return self._reports

    def series(self, part: str, quantity: str) -> dict[int, float]:
        """Return one quantity of one part by step; `ratio` is |update| / |weight|."""
        index = self._index_of(part)
        if quantity == "ratio":
            return {report.step: report.ratio(index) for report in self.reports}
        if quantity not in QUANTITIES:
            choices = ", ".join(("ratio", *QUANTITIES))
            raise BadInput(f"series: `{quantity}` is not measured; choose from {choices}")
        return {report.step: report.of(quantity, index) for report in self.reports}

    def norms(self, quantity: str = "gradient") -> dict[int, float]:
        """Return the norm over all parts by step: `gradient`, `before_clip`, `weight`, `update`.

        The norm is NaN if a part has NaN or infinity at that step, or if nothing was measured.
        """
        if quantity not in _NORMS:
            raise BadInput(f"norms: `{quantity}` is not a norm; choose from {', '.join(_NORMS)}")
        norms = {}
        for report in self.reports:
            measured = [value for value in report.values[quantity] if not math.isnan(value)]
            complete = measured and not report.broken
            norms[report.step] = math.hypot(*measured) if complete else math.nan
        return norms

    def ratios(self) -> dict[str, float]:
        """Return |update| / |weight| of each part at the last report; NaN for frozen parts."""
        if not self.reports:
            return {}
        return {part.name: self.reports[-1].ratio(i) for i, part in enumerate(self.parts)}

    def depth_ratios(self) -> "DepthRatios":
        """Compare the gradients of the first and last layers with the head's: see `DepthRatios`."""
        from frostlab.flow.diagnosis import depth_ratios

        return depth_ratios(self.reports)

    def first_broken(self) -> tuple[int, str] | None:
        """Return the first reported step with NaN or infinity, and the first such part's name."""
        for report in self.reports:
            if report.broken:
                return report.step, self.parts[report.broken[0]].name
        return None

    def verdicts(self, rules: "Rules | None" = None) -> dict[str, "PartVerdict"]:
        """Judge every part: a word, the reason, and a hint."""
        from frostlab.flow.judge import Rules, judge

        return judge(self, rules or Rules())

    def frozen_by_accident(self) -> "dict[str, PartVerdict]":
        """Return the verdicts on trainable parts that do not learn."""
        return {name: v for name, v in self.verdicts().items() if v.accident}

    def table(self, width: int | None = None) -> str:
        """Return the parts with the numbers of the last report and the verdicts, as text.

        With `width`, a table that is too wide has fewer columns, and lines of text are wrapped.
        """
        from frostlab.flow.show import as_text

        return as_text(self, width)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per reported step and part."""
        pandas = require("pandas", "data", "Flow.to_frame")
        rows = [
            {"step": report.step, "part": part.name, "layer": part.layer, "state": part.state,
             "ratio": report.ratio(i), **{q: v[i] for q, v in report.values.items()}}
            for report in self.reports
            for i, part in enumerate(self.parts)
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with None for NaN and infinity."""
        return {
            "schema": SCHEMA, "model": self.model, "optimizer": self.optimizer,
            "moved": list(self.moved), "verified": self.verified, "caution": self.caution,
            "run": self.run,
            "groups": [vars(group) for group in self.groups],
            "parts": [part.to_dict() for part in self.parts],
            "reports": [finite(vars(report)) for report in self.reports],
        }  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write the flow as JSON, atomically."""
        target = check_save_path(path)
        write_whole(target, json.dumps(self.to_dict(), allow_nan=False))
        return target

    def _index_of(self, part: str) -> int:
        names = [facts.name for facts in self.parts]
        if part not in names:
            raise BadInput(f"series: no part `{part}`{nearest(part, names)}")
        return names.index(part)


def check_save_path(path: str | Path) -> Path:
    """Return `path`; raise an error if it is a folder, or in a folder that does not exist."""
    target = Path(path)
    if target.is_dir():
        raise BadInput(f"save: {target} is a folder; name a file in it, such as flow.json")
    if not target.parent.is_dir():
        raise BadInput(f"save: the folder {target.parent} does not exist")
    return target


def load_flow(run_or_path: RunRecord | str | Path, stage: str | None = None) -> Flow:
    """Read the flow of a run, or of a file that `flow.save` wrote.

    Args:
        run_or_path: the record or folder of a run, or the path of a file. The flow of an
            unfinished run has the reports written so far.
        stage: the name of a stage of the run; default: the last stage that was watched.
    """
    path = Path(run_or_path.folder if isinstance(run_or_path, RunRecord) else run_or_path)
    if not path.is_dir() and not isinstance(run_or_path, RunRecord):
        if stage is not None:
            raise BadInput(f"load_flow: {path} is not a run, so it has no stage `{stage}`")
        return _load_file(path)
    flows = flows_of(path)
    if not flows:
        raise BadInput(
            f"load_flow: {path} was not watched; run it with --set watch.every_n_steps=10"
        )
    if stage is None:
        return next(reversed(flows.values()))
    if stage not in flows:
        hint = nearest(stage, flows) or f"; choose from {', '.join(flows)}"
        raise BadInput(f"load_flow: {path} has no stage `{stage}`{hint}")
    return flows[stage]


def flows_of(folder: str | Path) -> dict[str, Flow]:
    """Return the flow of each watched stage of a finished or running run, by stage name."""
    path = Path(folder)
    events = effective(read_events(path / "events.jsonl", *_OF_FLOW))
    if not events:
        raise BadInput(f"load_flow: {path} is not a run: it has no events")
    where = f"load_flow: the flow in {path}/events.jsonl"
    try:
        flows = _read_events(events, path.resolve().name)
    except (LookupError, ValueError) as error:  # lists whose lengths do not match the parts
        raise BadInput(f"{where} is damaged: {first_line(error)}") from None
    for flow in flows.values():
        _check_flow(flow, where)
    return flows


@dataclass(frozen=True)
class _StoredReport:
    """A report in a file, with null for NaN and infinity."""

    step: int  # optimizer steps done
    values: dict[str, list[float | None]]  # quantity → value by part
    rates: list[float | None]  # learning rate by group
    unreached: list[str]  # trainable tensors without a gradient
    largest: dict[str, float | None]  # front, back and output → mean of the tensors' max |gradient|
    ranges: dict[str, float | None]  # tensor of the front → max - min of its weights
    broken: list[int]  # indices of parts with NaN or infinity
    dead: dict[str, float | None]  # module → fraction of dead units
    saturated: dict[str, float | None]  # module → fraction of saturated activations
    entropy: dict[str, list[float | None]]  # attention call → entropy by head


@dataclass(frozen=True)
class _StoredFlow:
    """The contents of a file that `Flow.save` wrote."""

    schema: int  # `SCHEMA` when it was written
    model: str  # class of the model
    optimizer: str  # class of the optimizer
    moved: tuple[str, ...]  # names of parts with a frozen tensor that changed
    verified: bool  # whether frozen parts were compared with their digests
    groups: tuple[GroupFacts, ...]  # parameter groups of the optimizer
    parts: tuple[PartFacts, ...]  # parts of the model
    reports: list[_StoredReport]  # measured steps, in order
    caution: str | None = None  # a warning to show with the numbers
    run: str | None = None  # the run that was measured, in words; null outside a run


def _load_file(path: Path) -> Flow:
    where = f"load_flow: {path}"
    try:
        data = parse_json(read_bytes(path), where)
    except FileNotFoundError:
        raise BadInput(f"{where}: No such file or directory") from None
    advice = "; `flow.save` writes such a file"
    stored = read(_StoredFlow, check_schema(data, SCHEMA, where, advice), where)
    flow = Flow(stored.model, stored.optimizer)
    flow.parts, flow.groups = stored.parts, stored.groups
    flow.moved, flow.verified, flow.caution = stored.moved, stored.verified, stored.caution
    flow.run = stored.run
    flow._reports = [
        Report(**{name: _nan_for_null(value) for name, value in vars(report).items()})
        for report in stored.reports
    ]
    _check_flow(flow, where)
    return flow


def _check_flow(flow: Flow, where: str) -> None:
    """Refuse negative steps and norms, and reports, parts and groups that do not fit together."""
    groups, parts = range(len(flow.groups)), range(len(flow.parts))
    for part in flow.parts:
        if any(group not in groups for group in part.groups):
            raise BadInput(f"{where}: the part {plain(part.name)} has a group that does not exist")
    for report in flow.reports:
        if report.step < 0:
            raise BadInput(f"{where}: the step {report.step} is negative")
        lengths = {len(numbers) for numbers in report.values.values()}
        if report.values.keys() != QUANTITIES.keys() or lengths != {len(parts)}:
            raise BadInput(f"{where}: `values` of step {report.step} do not fit the parts")
        if any(number < 0 for name in _NORMS for number in report.values[name]):
            raise BadInput(f"{where}: a norm of step {report.step} is negative")
        if len(report.rates) != len(groups):
            raise BadInput(f"{where}: `rates` of step {report.step} do not fit the groups")
        if any(index not in parts for index in report.broken):
            raise BadInput(
                f"{where}: `broken` of step {report.step} has a part that does not exist"
            )
        if report.largest.keys() != set(_DEPTHS):
            keys = ", ".join(_DEPTHS)
            raise BadInput(f"{where}: `largest` of step {report.step} should have the keys {keys}")


def _nan_for_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nan_for_null(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return tuple(_nan_for_null(inner) for inner in value)
    return math.nan if value is None else value


# A run stores its flow as events: one `flow_parts` event per stage, then one `flow` event per
# report. A `flow` event lists only the values of trainable parts, in the order of `parts`.
_DEPTHS = ("front", "back", "output")
_MODULES = ("dead", "saturated", "entropy")


def parts_event(flow: Flow, every_n_steps: int, front: Sequence[str]) -> dict[str, Any]:
    """Return the values of a `flow_parts` event; `front` names the tensors of `Report.ranges`."""
    return {
        "model": flow.model,
        "optimizer": flow.optimizer,
        "every": every_n_steps,
        "groups": [vars(group) for group in flow.groups],
        "parts": [part.to_dict() for part in flow.parts],
        "front": list(front),
    }


def report_event(report: Report, parts: Sequence[PartFacts]) -> dict[str, Any]:
    """Return the values of a `flow` event, without quantities that were not measured.

    Numbers are rounded to 5 significant digits; ranges to 7, because `DepthRatios.weight_change`
    is computed from small differences between ranges.
    """
    trainable = _trainable(parts)
    event: dict[str, Any] = {}
    for name in QUANTITIES:
        numbers = [report.values[name][i] for i in trainable]
        if not all(map(math.isnan, numbers)):
            event[name] = [_rounded(x) for x in numbers]
    event["rates"] = [_rounded(x) for x in report.rates]
    event["ends"] = [_rounded(report.largest[depth]) for depth in _DEPTHS]
    event["ranges"] = [_rounded(x, 7) for x in report.ranges.values()]
    for name in ("unreached", "broken"):
        if names := getattr(report, name):
            event[name] = list(names)
    for name in _MODULES:
        if modules := getattr(report, name):
            event[name] = {
                module: [_rounded(x) for x in value] if isinstance(value, tuple)
                else _rounded(value)
                for module, value in modules.items()
            }  # fmt: skip
    return event


def _read_events(events: Iterable[Event], folder: str) -> dict[str, Flow]:
    flows: dict[str, Flow] = {}
    reports: dict[str, dict[int, Report]] = {}
    stage, front, caution, recipe = "", list[str](), None, ""
    for event in events:
        if isinstance(event, StartEvent):
            caution = event.caution
            recipe = f"{event.name}, {event.treatment}, seed {event.seed}"
        elif isinstance(event, FlowPartsEvent):
            stage, front = event.stage, event.front
            flow = flows[stage] = Flow(event.model, event.optimizer)
            flow.caution, flow.run = caution, f"{folder} ({recipe}), stage {stage}"
            flow.parts = read_parts(event)
            flow.groups = tuple(GroupFacts(**vars(group)) for group in event.groups)
            reports.setdefault(stage, {})
        elif isinstance(event, FlowEvent):
            reports[stage][event.step] = read_report(event, flows[stage].parts, front)
        elif isinstance(event, EvaluationEvent) and stage:
            flows[stage].verified |= event.frozen_verified > 0
    for name, flow in flows.items():
        flow.reports.extend(reports[name][step] for step in sorted(reports[name]))
    return flows


def read_parts(event: FlowPartsEvent) -> tuple[PartFacts, ...]:
    """Return the parts that a `flow_parts` event lists."""
    return tuple(PartFacts.from_dict(vars(part)) for part in event.parts)


def read_report(event: FlowEvent, parts: Sequence[PartFacts], front: Sequence[str]) -> Report:
    """Return the report of a `flow` event; `front` names the tensors of `Report.ranges`."""
    values, trainable = {}, _trainable(parts)
    for name in QUANTITIES:
        numbers = [math.nan] * len(parts)
        measured = getattr(event, name)
        for i, number in zip(trainable, measured or (), strict=measured is not None):
            numbers[i] = _number(number)
        values[name] = tuple(numbers)
    return Report(
        step=event.step,
        values=values,
        rates=tuple(map(_number, event.rates)),
        unreached=tuple(event.unreached),
        largest={depth: _number(x) for depth, x in zip(_DEPTHS, event.ends, strict=True)},
        ranges={name: _number(x) for name, x in zip(front, event.ranges, strict=True)},
        broken=tuple(range(len(parts))[i] for i in event.broken),
        dead={name: _number(fraction) for name, fraction in event.dead.items()},
        saturated={name: _number(fraction) for name, fraction in event.saturated.items()},
        entropy={name: tuple(map(_number, heads)) for name, heads in event.entropy.items()},
    )


def _trainable(parts: Sequence[PartFacts]) -> list[int]:
    return [i for i, part in enumerate(parts) if part.state == "trainable"]


def _rounded(value: float, digits: int = 5) -> float | None:
    """Round to significant digits; return None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)

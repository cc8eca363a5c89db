"""What a flow is made of: facts about parts that do not change, and one report a measured step."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostlab.errors import BadInput, FrostlabError, nearest
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent, Event, FlowEvent, FlowPartsEvent
from frostlab.storage import write_whole

if TYPE_CHECKING:
    from frostlab.flow.diagnosis import Ends
    from frostlab.flow.judge import Rules, Verdict


@dataclass(frozen=True)
class PartFacts:
    """A part of a model: everything of one role in one layer."""

    name: str
    peers: str  # parts with the same word here are alike
    stack: str
    layer: int | None
    state: str  # trainable, frozen or fixed
    tensors: tuple[str, ...]
    learning: tuple[str, ...]  # those that require a gradient
    missing: tuple[str, ...]  # those of them that no optimizer holds
    groups: tuple[int, ...]  # the optimizer's groups that hold the others
    dtype: str
    elements: int  # how many numbers of it learn

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PartFacts":
        """Read what `to_dict` wrote."""
        read: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**read)


# Those of torch's optimizers whose groups do not say it themselves
_COUPLED = ("SGD", "ASGD", "RMSprop", "Adagrad", "Adadelta", "Adamax")


@dataclass(frozen=True)
class GroupFacts:
    """What an optimizer was told about a group of parameters."""

    decay: float
    momentum: float
    eps: float
    coupled: bool = False  # decay is added to the gradient, and goes the way it goes

    @classmethod
    def of(cls, group: dict[str, Any], optimizer: str) -> "GroupFacts":
        """Read them from one of `optimizer.param_groups`."""
        momentum, eps = group.get("momentum", 0.0), group.get("eps", 0.0)
        return cls(
            float(group.get("weight_decay", 0.0)),
            float(momentum) if isinstance(momentum, float | int) else 0.0,
            float(eps) if isinstance(eps, float | int) else 0.0,
            not group.get("decoupled_weight_decay", optimizer not in _COUPLED),
        )


QUANTITIES = {
    "gradient": "norm of the gradient the optimizer got: unscaled, after clipping",
    "before_clip": "norm of the gradient before clipping, where it is known",
    "weight": "norm of the weights before the step",
    "update": "norm of what the step changed",
    "change": "distance from the weights at the start, relative to their norm",
    "cosine": "cosine between the weights and those at the start",
    "agreement": "cosine between this gradient and the one of the report before",
}


@dataclass(frozen=True)
class Report:
    """One measured step: for each quantity a number a part, NaN where there is none."""

    step: int
    values: dict[str, tuple[float, ...]]
    rates: tuple[float, ...]  # the learning rate of every group, NaN for one that has none
    unreached: tuple[str, ...] = ()  # tensors that learn and got no gradient at all
    largest: dict[str, float] = field(default_factory=dict)  # front, back, output: mean of max |g|
    ranges: dict[str, float] = field(default_factory=dict)  # max - min of each front tensor
    broken: tuple[int, ...] = ()  # parts with a NaN or an infinity
    dead: dict[str, float] = field(default_factory=dict)  # module -> share of units
    saturated: dict[str, float] = field(default_factory=dict)
    entropy: dict[str, tuple[float, ...]] = field(default_factory=dict)  # attention -> heads

    def of(self, quantity: str, part: int) -> float:
        """One number of one part."""
        return self.values[quantity][part]

    def at(self, places: Sequence[int | None]) -> "Report":
        """The same of other parts: where each stood here, None for what was not there."""
        values = {
            quantity: tuple(math.nan if place is None else own[place] for place in places)
            for quantity, own in self.values.items()
        }
        broken = tuple(i for i, place in enumerate(places) if place in self.broken)
        return replace(self, values=values, broken=broken)

    def ratio(self, part: int) -> float:
        """How far the step moved a part, relative to its weights."""
        weight, update = self.of("weight", part), self.of("update", part)
        if weight == 0.0:
            return float("inf") if update > 0.0 else float("nan")
        return update / weight


SCHEMA = 1


class Flow:
    """Reports of a model's parts, step by step; made by `fl.watch` or read by `fl.load_flow`."""

    def __init__(self, model: str, optimizer: str) -> None:
        self.model, self.optimizer = model, optimizer
        self.parts: tuple[PartFacts, ...] = ()
        self.groups: tuple[GroupFacts, ...] = ()  # the optimizer's
        self.moved: tuple[str, ...] = ()  # parts that moved though they were frozen
        self.verified = False  # whether frozen parts were compared with their digests
        self._reports: list[Report] = []

    @property
    def reports(self) -> list[Report]:
        """What has been measured so far, a report a measured step."""
        return self._reports

    def series(self, part: str, quantity: str) -> dict[int, float]:
        """One quantity of one part by step; `ratio` is update over weight."""
        place = self._place(part)
        if quantity == "ratio":
            return {report.step: report.ratio(place) for report in self.reports}
        if quantity not in QUANTITIES:
            known = ", ".join(("ratio", *QUANTITIES))
            raise BadInput(f"series: `{quantity}` is not measured; one of {known}")
        return {report.step: report.of(quantity, place) for report in self.reports}

    def norms(self, quantity: str = "gradient") -> dict[int, float]:
        """The norm over all parts by step: of `gradient`, `before_clip`, `weight` or `update`."""
        if quantity not in ("gradient", "before_clip", "weight", "update"):
            raise BadInput(f"norms: `{quantity}` is no norm; gradient, before_clip, weight, update")
        found = {}
        for report in self.reports:
            known = [value for value in report.values[quantity] if not math.isnan(value)]
            whole = known and not report.broken
            found[report.step] = math.hypot(*known) if whole else math.nan
        return found

    def ratios(self) -> dict[str, float]:
        """Every part's update/weight at the last report; NaN for what is frozen."""
        if not self.reports:
            return {}
        return {part.name: self.reports[-1].ratio(i) for i, part in enumerate(self.parts)}

    def ends(self) -> "Ends":
        """Front and back layers against the output."""
        from frostlab.flow.diagnosis import ends_of

        return ends_of(self.reports)

    def first_broken(self) -> tuple[int, str] | None:
        """The first reported step with a NaN or an infinity, and the part it was seen in."""
        for report in self.reports:
            if report.broken:
                return report.step, self.parts[report.broken[0]].name
        return None

    def verdicts(self, rules: "Rules | None" = None) -> dict[str, "Verdict"]:
        """What to think of every part, and why."""
        from frostlab.flow.judge import Rules, judge

        return judge(self, rules or Rules())

    def frozen_by_accident(self, rules: "Rules | None" = None) -> "dict[str, Verdict]":
        """The parts that do not learn though nobody asked for that."""
        return {name: v for name, v in self.verdicts(rules).items() if v.accident}

    def table(self) -> str:
        """The parts as text, with the numbers of the last report and a verdict each."""
        from frostlab.flow.show import as_text

        return as_text(self)

    def to_frame(self) -> Any:
        """One row a part and reported step, as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise FrostlabError("to_frame needs pandas: pip install pandas") from None
        rows = [
            {"step": report.step, "part": part.name, "layer": part.layer, "state": part.state,
             "ratio": report.ratio(i), **{q: v[i] for q, v in report.values.items()}}
            for report in self.reports
            for i, part in enumerate(self.parts)
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; what is not a finite number is null."""
        return {
            "schema": SCHEMA, "model": self.model, "optimizer": self.optimizer,
            "moved": list(self.moved), "verified": self.verified,
            "groups": [vars(group) for group in self.groups],
            "parts": [part.to_dict() for part in self.parts],
            "reports": [_plain(vars(report)) for report in self.reports],
        }  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write the flow as JSON, whole or not at all."""
        target = can_save(path)
        write_whole(target, json.dumps(self.to_dict(), allow_nan=False))
        return target

    def _place(self, part: str) -> int:
        from frostlab.errors import nearest

        names = [each.name for each in self.parts]
        if part not in names:
            raise BadInput(f"series: no part `{part}`{nearest(part, names)}")
        return names.index(part)


def can_save(path: str | Path) -> Path:
    """Where a flow is to be written; refused before there is one."""
    target = Path(path)
    if target.is_dir():
        raise BadInput(f"save: {target} is a folder; name a file in it, such as flow.json")
    if not target.parent.is_dir():
        raise BadInput(f"save: the folder {target.parent} does not exist")
    return target


def load_flow(path: str | Path) -> Flow:
    """Read a flow that `save` wrote."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise BadInput(f"load_flow: {path}: {error.strerror}") from None
    except ValueError:
        raise BadInput(f"load_flow: {path} is not JSON") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise BadInput(f"load_flow: {path} is not a flow of schema {SCHEMA}; `flow.save` makes one")
    try:
        flow = Flow(data["model"], data["optimizer"])
        flow.parts = tuple(PartFacts.from_dict(part) for part in data["parts"])
        flow.groups = tuple(GroupFacts(**group) for group in data["groups"])
        flow.moved, flow.verified = tuple(data["moved"]), data["verified"]
        flow._reports = [_saved_report(values) for values in data["reports"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise BadInput(f"load_flow: {path} is not a whole flow: {error}") from None
    return flow


def _saved_report(values: dict[str, Any]) -> Report:
    read = {field.name: _numbers(values[field.name]) for field in fields(Report)}
    return Report(**read)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return tuple(_numbers(each) for each in value)
    return math.nan if value is None else value


_ENDS = ("front", "back", "output")
_MODULES = ("dead", "saturated", "entropy")


def parts_event(flow: Flow, every: int, front: Sequence[str]) -> dict[str, Any]:
    """What stays as it is over a stage; `front` names the tensors that have ranges."""
    return {
        "model": flow.model,
        "optimizer": flow.optimizer,
        "every": every,
        "groups": [vars(group) for group in flow.groups],
        "parts": [part.to_dict() for part in flow.parts],
        "front": list(front),
    }


def report_event(report: Report, parts: Sequence[PartFacts]) -> dict[str, Any]:
    """One report, what it does not have left out; numbers to 5 digits."""
    learning = _learning(parts)
    event: dict[str, Any] = {}
    for name in QUANTITIES:
        numbers = [report.values[name][i] for i in learning]
        if not all(map(math.isnan, numbers)):
            event[name] = [_short(x) for x in numbers]
    event["rates"] = [_short(x) for x in report.rates]
    event["ends"] = [_short(report.largest[end]) for end in _ENDS]
    event["ranges"] = [_short(x, 7) for x in report.ranges.values()]
    for name in ("unreached", "broken"):
        if found := getattr(report, name):
            event[name] = list(found)
    for name in _MODULES:
        if found := getattr(report, name):
            event[name] = {key: _shorten(value) for key, value in found.items()}
    return event


def flows_of(folder: str | Path) -> dict[str, Flow]:
    """The flow of every stage of a run, finished or running, by the stage's name."""
    path = Path(folder)
    events = RunRecord(path).events()
    if not events:
        raise BadInput(f"flow_of: {path} is no run: it has no events")
    try:
        return _read(events)
    except (KeyError, ValueError, IndexError) as error:
        raise BadInput(f"flow_of: {path}/events.jsonl holds no whole flow: {error!r}") from None


def flow_of(folder: str | Path, stage: str | None = None) -> Flow:
    """The flow that a run has measured so far, of its last stage or of the one that is named."""
    flows = flows_of(folder)
    if not flows:
        raise BadInput(f"flow_of: {folder} was not watched; run it with --set watch.every=10")
    if stage is None:
        return next(reversed(flows.values()))
    if stage not in flows:
        hint = nearest(stage, flows) or f"; there are {', '.join(flows)}"
        raise BadInput(f"flow_of: {folder} has no stage `{stage}`{hint}")
    return flows[stage]


def _read(events: Iterable[Event]) -> dict[str, Flow]:
    flows: dict[str, Flow] = {}
    reports: dict[str, dict[int, Report]] = {}
    stage, front = "", list[str]()
    for event in events:
        if isinstance(event, FlowPartsEvent):
            stage, front = event.stage, event.front
            flows[stage] = _flow(event)
            reports.setdefault(stage, {})
        elif isinstance(event, FlowEvent):
            reports[stage][event.step] = _event_report(event, flows[stage].parts, front)
        elif isinstance(event, EvaluationEvent) and stage:
            flows[stage].verified |= event.frozen_verified > 0
    for name, flow in flows.items():
        flow.reports.extend(reports[name][step] for step in sorted(reports[name]))
    return flows


def _flow(event: FlowPartsEvent) -> Flow:
    flow = Flow(event.model, event.optimizer)
    flow.parts = tuple(PartFacts.from_dict(vars(part)) for part in event.parts)
    flow.groups = tuple(GroupFacts(**vars(group)) for group in event.groups)
    return flow


def _event_report(event: FlowEvent, parts: Sequence[PartFacts], front: Sequence[str]) -> Report:
    values, learning = {}, _learning(parts)
    for name in QUANTITIES:
        numbers = [math.nan] * len(parts)
        measured = getattr(event, name)
        for i, number in zip(learning, measured or (), strict=measured is not None):
            numbers[i] = _long(number)
        values[name] = tuple(numbers)
    return Report(
        step=event.step,
        values=values,
        rates=tuple(map(_long, event.rates)),
        unreached=tuple(event.unreached),
        largest={end: _long(x) for end, x in zip(_ENDS, event.ends, strict=True)},
        ranges={name: _long(x) for name, x in zip(front, event.ranges, strict=True)},
        broken=tuple(range(len(parts))[i] for i in event.broken),
        dead={name: _long(share) for name, share in event.dead.items()},
        saturated={name: _long(share) for name, share in event.saturated.items()},
        entropy={name: tuple(map(_long, heads)) for name, heads in event.entropy.items()},
    )


def _learning(parts: Sequence[PartFacts]) -> list[int]:
    return [i for i, part in enumerate(parts) if part.state == "trainable"]


def _shorten(value: Any) -> Any:
    return [_short(x) for x in value] if isinstance(value, tuple) else _short(value)


def _short(value: float, digits: int = 5) -> float | None:
    """A number to so many digits; JSON has no NaN."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _long(value: float | None) -> float:
    return math.nan if value is None else float(value)

"""A flow in a run's events: written report by report, read again while the run still goes on.

What does not change is said once a stage, in a `flow_parts` event; a `flow` event is one report,
its lists in the order of the parts that learn.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput, nearest
from frostlab.flow.facts import QUANTITIES, GroupFacts, PartFacts, Report
from frostlab.flow.flow import Flow
from frostlab.records.folder import effective, read_events

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
    events = effective(read_events(path / "events.jsonl"))
    if not events:
        raise BadInput(f"flow_of: {path} is no run: it has no events")
    try:
        return _read(events)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
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


def _read(events: Iterable[dict[str, Any]]) -> dict[str, Flow]:
    flows: dict[str, Flow] = {}
    reports: dict[str, dict[int, Report]] = {}
    stage, front = "", list[str]()
    for event in events:
        if event["kind"] == "flow_parts":
            stage, front = event["stage"], event["front"]
            flows[stage] = _flow(event)
            reports.setdefault(stage, {})
        elif event["kind"] == "flow":
            reports[stage][event["step"]] = _event_report(event, flows[stage].parts, front)
        elif event["kind"] == "evaluation" and stage:
            flows[stage].verified |= event.get("frozen_verified", 0) > 0
    for name, flow in flows.items():
        flow.reports.extend(reports[name][step] for step in sorted(reports[name]))
    return flows


def _flow(event: dict[str, Any]) -> Flow:
    flow = Flow(event["model"], event["optimizer"])
    flow.parts = tuple(PartFacts.from_dict(part) for part in event["parts"])
    flow.groups = tuple(GroupFacts(**group) for group in event["groups"])
    return flow


def _event_report(event: dict[str, Any], parts: Sequence[PartFacts], front: Sequence[str]) -> Report:
    values, learning = {}, _learning(parts)
    for name in QUANTITIES:
        numbers = [math.nan] * len(parts)
        for i, number in zip(learning, event.get(name, ()), strict=name in event):
            numbers[i] = _long(number)
        values[name] = tuple(numbers)
    return Report(
        step=event["step"],
        values=values,
        rates=tuple(map(_long, event["rates"])),
        unreached=tuple(event.get("unreached", ())),
        largest={end: _long(x) for end, x in zip(_ENDS, event["ends"], strict=True)},
        ranges={name: _long(x) for name, x in zip(front, event["ranges"], strict=True)},
        broken=tuple(range(len(parts))[i] for i in event.get("broken", ())),
        dead=event.get("dead", {}),
        saturated=event.get("saturated", {}),
        entropy={name: tuple(heads) for name, heads in event.get("entropy", {}).items()},
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

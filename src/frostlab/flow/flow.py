"""A flow: what was seen of a model while it learned, and what can be asked of it."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostlab.errors import BadInput, FrostlabError
from frostlab.flow.facts import QUANTITIES, GroupFacts, PartFacts, Report
from frostlab.records.folder import write_whole

if TYPE_CHECKING:
    from frostlab.flow.front import Ends
    from frostlab.flow.rules import Rules, Verdict

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
        from frostlab.flow.front import ends_of

        return ends_of(self.reports)

    def first_broken(self) -> tuple[int, str] | None:
        """The first reported step with a NaN or an infinity, and the part it was seen in."""
        for report in self.reports:
            if report.broken:
                return report.step, self.parts[report.broken[0]].name
        return None

    def verdicts(self, rules: "Rules | None" = None) -> dict[str, "Verdict"]:
        """What to think of every part, and why."""
        from frostlab.flow.judging import judge
        from frostlab.flow.rules import Rules

        return judge(self, rules or Rules())

    def frozen_by_accident(self, rules: "Rules | None" = None) -> "dict[str, Verdict]":
        """The parts that do not learn though nobody asked for that."""
        return {name: v for name, v in self.verdicts(rules).items() if v.accident}

    def table(self) -> str:
        """The parts as text, with the numbers of the last report and a verdict each."""
        from frostlab.flow.table import as_text

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

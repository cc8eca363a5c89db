"""Questions about the runs in a folder: filters, order, settings that differ, groups.

A key is a fact about the run (`name`, `status`, `best` …), a reported metric (`accuracy`), or a
setting of its recipe (`optim.lr`).
"""

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from frostlab.errors import BadInput, nearest
from frostlab.records.finding.index import Summary, list_runs
from frostlab.text import plain, typed

_KEYS = {"value": "best", "tags": "tag", "notes": "note"}  # fields of Summary with another name
_WITHOUT_KEY = ("folder", "report", "caution", "settings")  # report and settings have keys inside
FACTS: dict[str, Callable[[Summary], Any]] = {
    _KEYS.get(field.name, field.name): operator.attrgetter(field.name)
    for field in fields(Summary)
    if field.name not in _WITHOUT_KEY
}
_MOMENTS = ("started", "ended")
_CONDITION = re.compile(r"\s*([^\s=!<>~\"']+)\s*(!=|<=|>=|==?|<|>|~)\s*(.*?)\s*", re.DOTALL)
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_MISSING = object()


def value_of(run: Summary, key: str) -> Any:
    """Return a run's value of a key; None if the run does not have it."""
    if key in FACTS:
        return FACTS[key](run)
    if run.report and key in run.report:
        return run.report[key]
    return None if key == run.metric else run.settings.get(key)


def keys_of(runs: Iterable[Summary]) -> list[str]:
    """Return all keys that any of the runs has, facts first."""
    keys = dict.fromkeys(FACTS)
    seen: set[int] = set()
    for run in runs:
        keys |= dict.fromkeys([*([run.metric] if run.metric else []), *(run.report or ())])
        if id(run.settings) not in seen:  # runs may share the object
            seen.add(id(run.settings))
            keys |= dict.fromkeys(run.settings)
    return list(keys)


def check_key(key: str, runs: Sequence[Summary], where: str) -> None:
    """Refuse a key that no run has; `where` names the option."""
    keys = keys_of(runs)
    if key not in keys:
        ends = [other for other in keys if other.rpartition(".")[2] == key]
        hint = f"; did you mean `{ends[0]}`?" if ends else nearest(key, keys)
        raise BadInput(f"{where}: no run has the key {key!r:.60}{hint or '; e.g. `optim.lr`'}")


# Filters


@dataclass(frozen=True)
class Condition:
    """One condition of a filter, such as `optim.lr>1e-4`."""

    key: str
    sign: str  # = != < <= > >= or ~, which means "contains"
    text: str

    def __str__(self) -> str:
        return f"{self.key}{self.sign}{self.text}"

    def matches(self, run: Summary) -> bool:
        """Return whether a run fulfils the condition; only = and != match a missing value."""
        value = value_of(run, self.key)
        if isinstance(value, tuple):  # tags or notes
            return self._matches_any(value)
        if self.sign in ("=", "!="):
            return self._equals(value) == (self.sign == "=")
        if value is None:
            return False
        if self.sign == "~":
            return self.text.lower() in _text(self.key, value).lower()
        number = typed(value, int, float)
        return number is not None and _ORDERS[self.sign](number, self._number())

    def _matches_any(self, values: tuple[str, ...]) -> bool:
        if self.sign == "~":
            return any(self.text.lower() in value.lower() for value in values)
        return (self.text in (values or ("null",))) == (self.sign == "=")

    def _equals(self, value: Any) -> bool:
        if value is None:
            return self.text == "null"
        if typed(value, int, float) is not None and self.key not in _MOMENTS:
            return bool(value == _number(self.text))
        if isinstance(value, list | dict):
            return json.dumps(value).replace(" ", "") == self.text.replace(" ", "")
        shown = _text(self.key, value)
        if self.key not in _MOMENTS:
            return shown == self.text
        day_or_minute = self.text.replace("T", " ")
        return shown.startswith(day_or_minute) or int(value) == int(_moment(self.text))

    def _number(self) -> float:
        if self.key in _MOMENTS:
            return _moment(self.text)
        number = _number(self.text)
        assert number is not None, "`check` has refused it"
        return number

    def check(self, runs: Sequence[Summary]) -> None:
        """Refuse an unknown key, and a value that cannot be compared with the runs' values."""
        check_key(self.key, runs, f"--where {self}")
        values = [value for run in runs if (value := value_of(run, self.key)) is not None]
        numbers = [value for value in values if typed(value, int, float) is not None]
        if self.key in _MOMENTS and self.sign != "~" and self.text != "null":
            _moment(self.text)
            return
        if self.sign in _ORDERS and values and not numbers:
            kind = plain(values[0])[:40]
            problem = f"{self.key} is not a number, e.g. {kind}; use = != or ~"
            raise BadInput(f"--where {self}: {problem}")
        wants_number = self.sign in _ORDERS or (
            self.sign in ("=", "!=") and numbers and len(numbers) == len(values)
        )
        if wants_number and _number(self.text) is None and self.text != "null":
            example = f"{self.key}{self.sign}{plain(numbers[0]) if numbers else 1}"
            raise BadInput(f"--where {self}: {self.text!r:.40} is not a number; e.g. {example}")
        if self.sign in _ORDERS and self.text == "null":
            raise BadInput(f"--where {self}: null has no order; use {self.key}!=null")
        boolean = bool(values) and all(isinstance(value, bool) for value in values)
        if self.sign in ("=", "!=") and boolean and self.text not in ("true", "false", "null"):
            raise BadInput(f"--where {self}: {self.key} is true or false")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _moment(text: str) -> float:
    """Return a date or time as seconds since 1970; without a time zone, it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"--where: {text!r:.40} is not a date; e.g. started>2026-01-31") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _text(key: str, value: Any) -> str:
    """Return a value as the text that filters compare."""
    if key in _MOMENTS:
        return moment_text(value)
    return plain(value)


def moment_text(seconds: float | None) -> str:
    """Format seconds since 1970 as a date and time in UTC."""
    try:
        return datetime.fromtimestamp(seconds or 0.0, UTC).isoformat(" ", "seconds")[:19]
    except (ValueError, OverflowError, OSError):
        return plain(seconds)


def conditions(text: str) -> list[Condition]:
    """Parse a filter: conditions separated by commas, all of which must hold."""
    parsed = []
    for part in _parts(text):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise BadInput(
                f"--where: {part.strip()!r:.60} is not a condition such as "
                "treatment=oelm,optim.lr>1e-4"
            )
        key, sign, value = match.groups()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        parsed.append(Condition(key, "=" if sign == "==" else sign, value))
    return parsed


def _parts(text: str) -> Iterator[str]:
    """Split a text at the commas outside quotes and brackets; skip empty parts."""
    part, quote, depth = "", "", 0
    for character in f"{text},":
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth <= 0:
            if part.strip():
                yield part
            part = ""
            continue
        part += character
    if part.strip(", "):  # a quote or bracket that is not closed
        yield part.rstrip(",")


def listed(text: str) -> list[str]:
    """Return the keys of a list such as `optim.lr,train.batch`."""
    return [part.strip() for part in text.split(",") if part.strip()]


def select(runs: Sequence[Summary], where: str = "", sort: str = "") -> list[Summary]:
    """Return the runs that fulfil all conditions of `where`, sorted by the keys of `sort`.

    A key with a minus sorts from the largest value to the smallest. Runs without a value are last.
    """
    if not runs:
        return []
    chosen = list(runs)
    for condition in conditions(where):
        condition.check(runs)
        chosen = [run for run in chosen if condition.matches(run)]
    for text in reversed(listed(sort)):  # the sort is stable, so sort by the first key last
        key = text.removeprefix("-")
        check_key(key, runs, f"--sort {text}")
        chosen = _sorted(chosen, partial(value_of, key=key), text.startswith("-"))
    return chosen


def _sorted(items: Iterable[Any], value: Callable[[Any], Any], down: bool) -> list[Any]:
    def order(item: Any) -> tuple[bool, float, str]:
        own = value(item)
        number = typed(own, int, float)
        return number is None, 0.0 if number is None else number, plain(own)

    known: list[Any] = []
    unknown: list[Any] = []
    for item in items:
        (unknown if value(item) in (None, ()) else known).append(item)
    return sorted(known, key=order, reverse=down) + unknown


# The settings that differ


def differing(runs: Sequence[Summary]) -> list[str]:
    """Return the settings that are not the same in all runs.

    Settings that all runs have come before others. Within both groups, settings that differ
    between runs with the same kinds of data and model come first. If a section, such as `watch`, is
    null in some runs, its settings are listed instead of the section. A damaged run without
    settings is left out, and so are facts such as `treatment` and `seed`.
    """
    settings = list({id(run.settings): run.settings for run in runs if run.settings}.values())
    families: dict[str, list[dict[str, Any]]] = {}
    for values in settings:
        family = plain([values.get("data.name"), values.get("model.kind")])
        families.setdefault(family, []).append(values)
    keys = dict.fromkeys(key for values in settings for key in values)
    sections = {key.rpartition(".")[0] for key in keys}
    keys = dict.fromkeys(key for key in keys if key not in FACTS and key not in sections)

    def rank(key: str) -> tuple[bool, bool]:
        within = any(_unequal(family, key) for family in families.values())
        return not all(key in values for values in settings), not within

    return sorted((key for key in keys if _unequal(settings, key)), key=rank)


def _unequal(settings: Sequence[dict[str, Any]], key: str) -> bool:
    first = settings[0].get(key, _MISSING)
    return any(values.get(key, _MISSING) != first for values in settings[1:])


# Groups


@dataclass(frozen=True)
class Mean:
    """The mean of a quantity over a group's runs, with its 95 % t interval."""

    n: int  # number of runs that have a value
    mean: float | None  # None without a value
    low: float | None  # None with fewer than two values
    high: float | None


@dataclass(frozen=True)
class Group:
    """Runs that are equal in some keys, such as runs that differ only in the seed."""

    keys: dict[str, Any]  # key → the value that all runs of the group have
    runs: tuple[Summary, ...]
    means: dict[str, Mean]  # quantity → its mean

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        means = {name: asdict(mean) for name, mean in self.means.items()}
        return {"keys": self.keys, "runs": [run.name for run in self.runs], "means": means}


def group_keys(runs: Sequence[Summary], text: str) -> list[str]:
    """Return the keys of `--group`; for `-seed`, all keys that differ between runs, except seed."""
    parts = listed(text)
    if not parts:
        raise BadInput("--group is empty; e.g. --group -seed, or --group treatment,optim.lr")
    for part in parts:
        check_key(part.removeprefix("-"), runs, f"--group {part}")
    left_out = {part[1:] for part in parts if part.startswith("-")}
    if not left_out:
        return parts
    if len(left_out) < len(parts):
        raise BadInput(
            f"--group {text}: give either keys to group by or keys with - to leave out, not both"
        )
    facts = [key for key in ("data", "model", "treatment", "seed") if _differs(runs, key)]
    keys = [*facts, *(key for key in differing(runs) if key not in ("data.name", "model.kind"))]
    return [key for key in keys if key not in left_out]


def _differs(runs: Sequence[Summary], key: str) -> bool:
    return len({plain(value_of(run, key)) for run in runs}) > 1


def grouped(
    runs: Sequence[Summary],
    keys: Sequence[str],
    quantities: Sequence[str],
    critical: Callable[[int, float], float],
    sort: str = "",
) -> list[Group]:
    """Group runs by keys, and average quantities over each group.

    Without `quantities`, the reported value of the metric that selects the checkpoint is averaged;
    runs with different metrics are then in different groups. `critical(n, alpha)` is the
    half-width of a t interval of n values, in standard errors.
    """
    metrics = list(dict.fromkeys(run.metric for run in runs if run.metric))
    if not quantities and len(metrics) > 1:
        keys = [*keys, "metric"]
    for key in quantities:
        check_key(key, runs, f"--columns {key}")
        if not any(typed(value_of(run, key), int, float) is not None for run in runs):
            raise BadInput(f"--columns {key}: no run has a number to average")
    members: dict[str, list[Summary]] = {}
    for run in runs:
        members.setdefault(json.dumps([value_of(run, key) for key in keys]), []).append(run)
    groups = []
    for group in members.values():
        if quantities:
            means = {
                name: _mean((value_of(r, name) for r in group), critical) for name in quantities
            }
        else:
            name = metrics[0] if len(metrics) == 1 else "report"
            reported = (r.report.get(r.metric) for r in group if r.report and r.metric)
            means = {name: _mean(reported, critical)}
        groups.append(Group({key: value_of(group[0], key) for key in keys}, tuple(group), means))
    return _sorted_groups(groups, sort)


def _mean(values: Iterable[Any], critical: Callable[[int, float], float]) -> Mean:
    numbers = [float(value) for value in values if typed(value, int, float) is not None]
    n = len(numbers)
    if n < 2:
        return Mean(n, numbers[0] if numbers else None, None, None)
    mean, half = fmean(numbers), critical(n, 0.05) * stdev(numbers) / math.sqrt(n)
    return Mean(n, mean, mean - half, mean + half)


def _sorted_groups(groups: list[Group], sort: str) -> list[Group]:
    names = dict.fromkeys(name for group in groups for name in (*group.keys, *group.means))
    for text in reversed(listed(sort)):
        key = text.removeprefix("-")
        if key not in names:
            hint = nearest(key, names) or f"; there are {', '.join(names)}"
            raise BadInput(f"--sort {text}: the groups have no {key!r:.60}{hint}")

        def value(group: Group, key: str = key) -> Any:
            return group.means[key].mean if key in group.means else group.keys[key]

        groups = _sorted(groups, value, text.startswith("-"))
    return groups


# Python


def runs(folder: str | Path = "runs", *, where: str = "", sort: str = "") -> list[dict[str, Any]]:
    """Return the runs in a folder as rows, for example for `pandas.DataFrame`.

    A row has the facts about a run, its reported metrics, and the settings of its recipe by dotted
    key. `where` and `sort` are as in `frostlab runs`.

    Args:
        folder: the folder that holds the runs.
        where: conditions that a run must fulfil, such as `"treatment=oelm,optim.lr>1e-4"`.
        sort: keys to sort by, such as `"-accuracy,name"`; by default, the oldest run comes first.
    """
    return [row(run) for run in select(list_runs(Path(folder)), where, sort)]


def row(run: Summary) -> dict[str, Any]:
    """Return everything that is known about a run by key."""
    facts = {key: fact(run) for key, fact in FACTS.items() if key not in ("tag", "note")}
    return {
        **run.settings,
        **facts,
        "tags": list(run.tags),
        "notes": list(run.notes),
        "caution": run.caution,
        "folder": str(run.folder),
        **(run.report or {}),
    }

"""Runs as text: many as a table, one in a fixed form that hides nothing it was not told."""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.records.index import EVENTS, RESULT, Summary, is_run, parse, part, read_run, typed

WIDTH = 100
NONE = "–"
_COLUMNS = ("name", "status", "treatment", "seed", "steps", "best", "report", "step ms", "total")
_NUMBERS = ("seed", "steps", "step ms", "total")
_MARKS = "*†‡§"
_SECONDS = {  # how show names the clocks; others keep their own names
    "total_seconds": "total",
    "train_seconds": "train",
    "validation_seconds": "validation",
    "data_seconds": "data wait",
    "epoch_seconds": "per epoch",
}


def hms(seconds: Any) -> str:
    """Write seconds as h:mm:ss, rounded."""
    if typed(seconds, int, float) is None or not math.isfinite(seconds):
        return NONE
    whole = round(abs(seconds))
    return f"{'-' * (seconds < 0)}{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def runs_table(summaries: Iterable[Summary]) -> str:
    """Set runs in aligned columns, within 100 characters where names allow it, with footnotes."""
    runs = list(summaries)
    if not runs:
        return "no runs"
    cautions = list(dict.fromkeys(run.caution for run in runs if run.caution))
    marks = {text: _MARKS[i] if i < 4 else f"[{i + 1}]" for i, text in enumerate(cautions)}
    rows = [_row(run, marks.get(run.caution or "", "")) for run in runs]
    lines = _aligned([list(_COLUMNS), *rows])
    lines += [f"{mark} {_plain(text)}" for text, mark in marks.items()]
    wrong = [run for run in runs if run.error]
    lines += [_short(_plain(f"{run.name}: {run.error}"), WIDTH) for run in wrong[:10]]
    lines += [f"and {len(wrong) - 10} more with an error"] * (len(wrong) > 10)
    return "\n".join(lines)


def _row(run: Summary, mark: str) -> list[str]:
    best = f"{run.metric}={_number(run.value)}{mark}" if run.metric else None
    value = (run.report or {}).get(run.metric or "")
    report = None if value is None else _number(value) + mark
    shown = (run.name, run.status, run.treatment, run.seed, run.steps, best, report)
    return [*map(_plain, shown), _number(run.step_ms), hms(run.total_seconds)]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for column, least in ((2, 10), (0, 16)):  # the treatment gives way first, then the name
        over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[column] = max(min(widths[column], least), widths[column] - max(0, over))
    lines = []
    for row in rows:
        cells = zip(_COLUMNS, map(_short, row, widths), widths, strict=True)
        text = (c.rjust(w) if name in _NUMBERS else c.ljust(w) for name, c, w in cells)
        lines.append("  ".join(text).rstrip())
    return lines


def show_json(folder: Path) -> dict[str, Any]:
    """Return all a run's files say, as plain values, null where they are absent or damaged."""
    if not is_run(folder):
        raise BadInput(f"{folder} is not a run: it has neither {EVENTS} nor {RESULT}")
    run = read_run(folder)
    events, damaged = _events(folder)
    recipe = _recipe(folder)
    changed, digest = _differences(recipe)
    return {
        **asdict(run),
        "folder": str(folder),
        "recipe": recipe,
        "recipe_file_digest": digest,
        "differences": changed,
        "environment": _object(folder / "environment.json"),
        "result": _object(folder / RESULT),
        "evaluations": [event for event in events if event.get("kind") == "evaluation"],
        "resumes": sum(event.get("kind") == "resume" for event in events),
        "notes": [event for event in events if event.get("kind") == "note"],
        "damaged_events": damaged,
    }


def show(folder: Path) -> str:
    """Set a run in fixed form: configuration, results, clocks, parameters, environment, notes."""
    from frostlab.records.environment import one_line

    run = show_json(folder)
    sections = {
        f"run {run['name']}": _status(run),
        "configuration": _configuration(run),
        "results": _results(run),
        "clocks": _clocks(part(run["result"] or {}, "clocks")),
        "parameters": _parameters(part(run["result"] or {}, "parameters")),
        "environment": [_plain(one_line(run["environment"] or {}) or None)],
        "notes": [_note(note) for note in run["notes"]] or [NONE],
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def _status(run: dict[str, Any]) -> list[str]:
    started = None
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        started = datetime.fromtimestamp(run["started"], UTC).isoformat(" ", "seconds")
    names = ("status", "error", "steps", "resumes", "damaged_events")
    return _pairs([("started", started), *((name.replace("_", " "), run[name]) for name in names)])


def _configuration(run: dict[str, Any]) -> list[str]:
    digest, now = run["recipe_digest"], run["recipe_file_digest"]
    if digest and now and digest != now:
        digest = f"{digest}, but recipe.yaml now has {now}"
    names = ("data", "model", "treatment", "seed")
    lines = _pairs([("digest", digest), *((name, run[name]) for name in names)])
    if run["differences"] is None:
        return [*lines, f"differences from the defaults: {NONE}"]
    changed = [f"  {line}" for line in _pairs(run["differences"].items()) or ["none"]]
    return [*lines, "differences from the defaults:", *changed]


def _results(run: dict[str, Any]) -> list[str]:
    result = run["result"] or {}
    best = f"{run['metric']} {_number(run['value'])}" if run["metric"] else None
    if best and (step := part(result, "best").get("step")) is not None:
        best += f" at step {step}"
    report = ", ".join(f"{name} {_number(value)}" for name, value in (run["report"] or {}).items())
    word = "best" if result else "latest"
    return _pairs([(word, best), ("report", report or None), ("caution", run["caution"])])


def _clocks(clocks: dict[str, Any]) -> list[str]:
    left = dict(clocks)
    lines = [(name, _duration(left.pop(key, None))) for key, name in _SECONDS.items()]
    step = left.pop("step_ms", None)
    if isinstance(step, dict):
        step = ", ".join(f"{name} {_number(step.get(name))}" for name in ("median", "mean", "p95"))
        step += f" ms, cv {_number(clocks['step_ms'].get('cv'))}"
    speed = _number(left.pop("tokens_per_second", None))
    return _pairs([*lines, ("step", step), ("tokens/s", speed), *sorted(left.items())])


def _duration(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(_duration, value[:4]))
        return f"{shown} … ({len(value)} in all)" if len(value) > 4 else shown or NONE
    return NONE if (text := hms(value)) == NONE else f"{text} ({value:.4g} s)"


def _parameters(counts: dict[str, Any]) -> list[str]:
    total = typed(counts.get("total"), int)
    known = [(name, typed(counts.get(name), int)) for name in ("total", "trainable", "frozen")]
    return _pairs((name, f"{n:,}  {n / total:.1%}" if n and total else n) for name, n in known)


def _note(event: dict[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("kind", "at", "step", "text")}
    words = [_plain(word) for word in (event.get("text"), rest) if word]
    return f"step {_plain(event.get('step'))}: {' '.join(words)}"


def _events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the events that can be read, and how many whole lines cannot."""
    try:
        lines = (folder / EVENTS).read_bytes().split(b"\n")[:-1]
    except OSError:
        return [], 0
    events = [event for line in lines if (event := parse(line)) is not None]
    return events, len(lines) - len(events)


def _object(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError):
        return parse(path.read_bytes())
    return None


def _recipe(folder: Path) -> dict[str, Any] | None:
    import yaml

    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        return typed(yaml.safe_load((folder / "recipe.yaml").read_text("utf-8")), dict)
    return None


def _differences(recipe: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str | None]:
    """Return what a recipe changes, dotted, and its digest; all of one that is no longer valid."""
    if recipe is None:
        return None, None
    from frostlab.recipe import Recipe

    try:
        whole = Recipe.model_validate_json(json.dumps(recipe))  # strict: JSON has no tuples
    except (TypeError, ValueError):
        return dict(_dotted(recipe)), None
    return dict(_dotted(whole.model_dump(mode="json", exclude_defaults=True))), whole.digest


def _dotted(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _pairs(items: Iterable[tuple[str, Any]]) -> list[str]:
    rows = [(_plain(name), _plain(value)) for name, value in items]
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _plain(value: Any) -> str:
    """Write a value on one line of printable characters."""
    if value is None:
        return NONE
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def _number(value: Any) -> str:
    return NONE if typed(value, int, float) is None else f"{value:.4g}"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"

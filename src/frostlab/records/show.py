"""One run in a fixed form."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.records.folder import effective, scores_lines
from frostlab.records.index import EVENTS, RESULT, Summary, is_run, parse, part, read_run
from frostlab.text import NONE, hms, number, plain, short, typed

_SECONDS = {  # how show names the clocks; others keep their own names
    "total_seconds": "total",
    "train_seconds": "train",
    "validation_seconds": "validation",
    "data_seconds": "data",
    "data_overlapped_seconds": "data overlapped",
    "checkpoint_seconds": "checkpoints",
    "setup_seconds": "set-up",
    "epoch_seconds": "per epoch",
}


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
        "scores": scores_lines(folder),
        "stages": stages_table((run["result"] or {}).get("stages")),
        "clocks": _clocks(run["result"] or {}),
        "parameters": _parameters(part(run["result"] or {}, "parameters")),
        "machine": _machine(run["result"] or {}),
        "environment": [plain(one_line(run["environment"] or {}) or None)],
        "notes": [_note(note) for note in run["notes"]],
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items() if lines)


def _status(run: dict[str, Any]) -> list[str]:
    started = None
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        started = datetime.fromtimestamp(run["started"], UTC).isoformat(" ", "seconds")
    always = [("started", started), ("status", run["status"]), ("steps", run["steps"])]
    rare = [(name, run[name]) for name in ("error", "resumes", "damaged_events") if run[name]]
    return _pairs([*always, *((name.replace("_", " "), value) for name, value in rare)])


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
    best = f"{run['metric']} {number(run['value'])}" if run["metric"] else None
    if best and (step := part(result, "best").get("step")) is not None:
        best += f" at step {step}"
    report = ", ".join(f"{name} {number(value)}" for name, value in (run["report"] or {}).items())
    each = part(part(result, "report"), "layers")
    layers = [(f"layer {n}", ", ".join(f"{m} {number(v)}" for m, v in part(each, n).items()))
              for n in each]  # fmt: skip
    word = "best" if result else "latest"
    caution = [("caution", run["caution"])] if run["caution"] else []
    return _pairs([(word, best), ("report", report or None), *layers, *caution])


def _clocks(result: dict[str, Any]) -> list[str]:
    clocks = part(result, "clocks")
    left = dict(clocks)
    taken = [e for e in typed(result.get("stepping"), list) or [] if isinstance(e, dict)]
    kinds = [f"{e.get('how')} ({e.get('reason')})" for e in taken]
    lines = [(name, _duration(left.pop(key, None))) for key, name in _SECONDS.items()]
    step = left.pop("step_ms", None)
    if isinstance(step, dict):
        step = ", ".join(f"{name} {number(step.get(name))}" for name in ("median", "mean", "p95"))
        step += f" ms, cv {number(clocks['step_ms'].get('cv'))}"
    warm = left.pop("warmup_ms", None)
    if step and isinstance(warm, list):
        step += f"; {len(warm)} warm-up steps not counted"
    unit = "samples" if "scores" in result else "tokens"  # of a recording, of a text
    left = {unit if key == "tokens" else key: value for key, value in left.items()}
    names = {"tokens_per_second": f"{unit}/s", "examples_per_second": "examples/s"}
    speeds = [(name, number(left.pop(key, None))) for key, name in names.items()]
    how = [("kind of step", ", then ".join(dict.fromkeys(kinds)))] if kinds else []
    return _pairs([*lines, ("step", step), *how, *speeds, *sorted(left.items())])


def _machine(result: dict[str, Any]) -> list[str]:
    """What the run took of the machine, as far as it was measured."""
    seen, gigabyte = part(result, "telemetry"), 2**30
    load = part(seen, "load_1min").get("mean")
    lines = [
        ("memory", _scaled(seen.get("host_peak_bytes"), gigabyte, "GiB at most")),
        ("GPU memory", _scaled(result.get("device_memory_peak"), gigabyte, "GiB at most")),
        ("load", _scaled(load, 1, "on average")),
    ]
    for key, name, unit in (
        ("gpu_utilisation_percent", "GPU utilisation", "%"),
        ("gpu_power_watts", "GPU power", "W"),
    ):
        lines.append((name, _scaled(part(seen, key).get("mean"), 1, f"{unit} on average")))
    before, after = (part(result, key).get("temperature_c") for key in ("gpu_before", "gpu_after"))
    if before is not None:
        lines.append(("GPU temperature", f"{number(before)} °C before, {number(after)} after"))
    return _pairs((name, text) for name, text in lines if text)


def _scaled(value: Any, unit: float, name: str) -> str | None:
    return None if typed(value, int, float) is None else f"{value / unit:.3g} {name}"


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
    words = [plain(word) for word in (event.get("text"), rest) if word]
    return f"step {plain(event.get('step'))}: {' '.join(words)}"


def _events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the events that can be read, and how many whole lines cannot."""
    try:
        lines = (folder / EVENTS).read_bytes().split(b"\n")[:-1]
    except OSError:
        return [], 0
    events = [event for line in lines if (event := parse(line)) is not None]
    return effective(iter(events)), len(lines) - len(events)


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
    from frostlab.recipe.recipe import Recipe

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
    rows = [(plain(name), plain(value)) for name, value in items]
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]


WIDTH = 100
_RUN_COLUMNS = (
    "name",
    "status",
    "treatment",
    "seed",
    "steps",
    "best",
    "report",
    "step ms",
    "total",
)
_NUMBERS = ("seed", "steps", "step ms", "total")
_MARKS = "*†‡§"


def runs_table(summaries: Iterable[Summary]) -> str:
    """Set runs in aligned columns, within 100 characters where names allow it, with footnotes."""
    runs = list(summaries)
    if not runs:
        return "no runs"
    cautions = list(dict.fromkeys(run.caution for run in runs if run.caution))
    marks = {text: _MARKS[i] if i < 4 else f"[{i + 1}]" for i, text in enumerate(cautions)}
    rows = [_run_row(run, marks.get(run.caution or "", "")) for run in runs]
    lines = _aligned([list(_RUN_COLUMNS), *rows])
    lines += [f"{mark} {plain(text)}" for text, mark in marks.items()]
    wrong = [run for run in runs if run.error]
    lines += [short(plain(f"{run.name}: {run.error}"), WIDTH) for run in wrong[:10]]
    lines += [f"and {len(wrong) - 10} more with an error"] * (len(wrong) > 10)
    return "\n".join(lines)


def _run_row(run: Summary, mark: str) -> list[str]:
    best = f"{run.metric}={number(run.value)}{mark}" if run.metric else None
    value = (run.report or {}).get(run.metric or "")
    report = None if value is None else number(value) + mark
    shown = (run.name, run.status, run.treatment, run.seed, run.steps, best, report)
    return [*map(plain, shown), number(run.step_ms), hms(run.total_seconds)]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    widths[2] = max(min(widths[2], 10), widths[2] - max(0, over))  # the name is needed whole
    lines = []
    for row in rows:
        cells = zip(_RUN_COLUMNS, map(short, row, widths), widths, strict=True)
        text = (c.rjust(w) if name in _NUMBERS else c.ljust(w) for name, c, w in cells)
        lines.append("  ".join(text).rstrip())
    return lines


_STAGE_COLUMNS = (
    "stage",
    "trainable",
    "of",
    "steps",
    "epochs",
    "best at",
    "best",
    "seconds",
    "ended",
)


def stages_table(stages: Any) -> list[str]:
    """A line a stage, under a line of names; nothing where there is only one."""
    known = [stage for stage in typed(stages, list) or [] if isinstance(stage, dict)]
    if len(known) < 2:
        return []
    rows = [list(_STAGE_COLUMNS), *map(_stage_row, known)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths)).rstrip() for row in rows]


def _stage_row(stage: dict[str, Any]) -> list[str]:
    best = part(stage, "best")
    counts = (typed(stage.get(key), int) for key in ("trainable", "total"))
    return [
        plain(stage.get("name")),
        *(plain(None) if count is None else f"{count:,}" for count in counts),
        plain(stage.get("steps")),
        number(stage.get("epochs")),
        f"epoch {number(best.get('epoch'))}",
        f"{plain(best.get('metric'))} {number(best.get('value'))}",
        number(stage.get("seconds")),
        "early" if stage.get("stopped_early") else "",
    ]


def _cells(row: list[str], widths: list[int]) -> list[str]:
    words = ("stage", "best at", "best", "ended")
    return [
        cell.ljust(width) if name in words else cell.rjust(width)
        for name, cell, width in zip(_STAGE_COLUMNS, row, widths, strict=True)
    ]

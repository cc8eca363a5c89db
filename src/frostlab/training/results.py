"""What a run came to, computed from its events: the result is never more than its record."""

import math
import statistics
from datetime import UTC, datetime
from typing import Any

from frostlab.records.checkpoints import checkpoint_name
from frostlab.records.folder import SCHEMA, RunFolder
from frostlab.training.boundary import stage_facts
from frostlab.training.progress import Progress
from frostlab.training.setting import Setting
from frostlab.training.stopwatch import OVERLAPPED, SETUP, training_seconds
from frostlab.training.treating import count_parameters


def result(
    setting: Setting,
    folder: RunFolder,
    progress: Progress,
    *,
    status: str,
    error: str | None,
    report: dict[str, float] | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Everything `result.json` says."""
    events, recipe = folder.events(), setting.recipe
    start = next(event for event in events if event["kind"] == "start")
    best, name = progress.best, checkpoint_name(progress.best.step or 0, progress.stage)
    return {
        "schema": SCHEMA,
        "status": status,
        "error": error,
        "name": start["name"],
        "recipe_digest": recipe.digest,
        "seed": recipe.seed,
        "treatment": recipe.treatment_name,
        "started": _iso(start["at"]),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": progress.step,
        "stopped_early": progress.stopped_early,
        "best": {"metric": best.metric, "value": best.value, "step": best.step},
        "report": report,
        "caution": setting.prepared.caution,
        "last": progress.last or None,
        "target": progress.target,
        "stepping": [event for event in events if event["kind"] == "stepping"],
        "clocks": clocks(events, progress.seconds),
        "parameters": count_parameters(setting.model),
        "stages": [*progress.ended, stage_facts(setting, progress)],
        "checkpoint": None if best.step is None else f"checkpoints/{name}",
        **extra,
    }


def clocks(events: list[dict[str, Any]], seconds: dict[str, float]) -> dict[str, Any]:
    """Totals, steps and rates; warm-up steps are counted apart."""
    blocks = [event for event in events if event["kind"] == "step"]
    times = [ms for block in blocks for ms in block["ms"][block["warmup"] :]]
    training = training_seconds(seconds)
    data, overlapped = seconds.get("data", 0.0), seconds.get(OVERLAPPED, 0.0)
    real, padded = (sum(block[key] for block in blocks) for key in ("tokens", "padded"))
    packed = any(event.get("packed") for event in events)
    examples = sum(block["examples"] for block in blocks)
    epochs = [event["seconds"] for event in events if event["kind"] == "epoch"]
    return {
        "total_seconds": round(seconds.get("total", 0.0), 4),
        "train_seconds": round(training, 4),
        "validation_seconds": round(seconds.get("validation", 0.0), 4),
        "data_seconds": round(data + overlapped, 4),
        "data_overlapped_seconds": round(overlapped, 4),
        "checkpoint_seconds": round(seconds.get("checkpoint", 0.0), 4),
        "setup_seconds": round(seconds.get(SETUP, 0.0), 4),
        "epoch_seconds": epochs,
        "step_ms": spread(times),
        "warmup_ms": [ms for block in blocks for ms in block["ms"][: block["warmup"]]],
        "tokens": real,
        "tokens_per_second": round(real / training, 1) if training > 0 else None,
        "examples_per_second": round(examples / training, 2) if training > 0 else None,
        "padding_share": round(1 - real / padded, 4) if padded else None,
        "packing_efficiency": round(real / padded, 4) if packed and padded else None,
    }


def spread(times: list[float]) -> dict[str, float | int] | None:
    """Median, mean, 95th percentile and coefficient of variation of some milliseconds."""
    if not times:
        return None
    mean = statistics.fmean(times)
    ordered = sorted(times)
    return {
        "count": len(times),
        "median": round(statistics.median(times), 4),
        "mean": round(mean, 4),
        "p95": round(ordered[min(len(times) - 1, math.ceil(0.95 * len(times)) - 1)], 4),
        "cv": round(statistics.pstdev(times) / mean, 4) if mean else 0.0,
    }


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")

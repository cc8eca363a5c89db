"""The records of a run that never happened, whole according to the schema."""

import json
from pathlib import Path
from typing import Any

from frostlab.records import SCHEMA

CAUTION = "checkpoint selected on the reporting split"
SHAPE = {
    "device": "cpu", "precision": "float32", "processes": 1, "threads": 1, "runs_at_once": 1,
}  # fmt: skip
START: dict[str, Any] = {
    "kind": "start", "at": 100.0, "step": 0, "schema": SCHEMA, "name": "imdb",
    "recipe_digest": "d1", "seed": 3, "treatment": "oelm", "data": "sst2", "model": "gpt",
    "origin": {"train": "train"}, "caution": None, "known": {}, **SHAPE,
}  # fmt: skip
CLOCKS: dict[str, Any] = {
    "total_seconds": 9.5, "train_seconds": 7, "validation_seconds": 1.0,
    "evaluation_seconds": [0.4, 0.6], "data_seconds": 0.5,
    "data_overlapped_seconds": 0.0, "checkpoint_seconds": 1.0, "setup_seconds": 0.25,
    "epoch_seconds": [3.5, 3.5],
    "step_ms": {"count": 25, "median": 4.5, "mean": 5, "p95": 9.0, "cv": 0.1},
    "warmup_ms": [90.0] * 5, "tokens": 6000, "tokens_per_second": 12345.6,
    "examples_per_second": 80.25, "padding_share": 0.5, "packing_efficiency": None,
    "wall": {
        "total": 14.0, "starting": 2.0, "data": 0.5, "building": 0.5, "setup": 0.25,
        "first_steps": 0.25, "new_shapes": 0.5, "steps": 7.0, "validation": 1.0, "checkpoints": 1.0,
        "report": 0.75, "other": 0.25, "turn": 0.0,
    },
}  # fmt: skip
SERIES = {"n": 2, "mean": 1.5, "min": 1.0, "p50": 1.5, "max": 2.0}
TELEMETRY: dict[str, Any] = {
    "interval_seconds": 1.0, "seconds": 9.0, "samples": 9, "errors": 0, "last_error": None,
    "gpu_reason": None, "gpu_energy_joules": None, "host_peak_bytes": 3 << 29,
    "sampling_cpu_seconds": 0.01, "load_1min": SERIES, "process_rss_bytes": SERIES,
    "process_cpu_percent": SERIES, "system_cpu_percent": SERIES,
}  # fmt: skip
BEST: dict[str, Any] = {"metric": "accuracy", "value": 0.8, "step": 20}
RESULT: dict[str, Any] = {
    "schema": SCHEMA, "status": "finished", "error": None, "name": "imdb", "recipe_digest": "d1",
    "seed": 3, "treatment": "oelm", "started": "2001-09-09T01:46:40+00:00",
    "ended": "2001-09-09T01:46:50+00:00", "steps": 30, "clipped_steps": 12,
    "stopped_early": False, "best": BEST,
    "report": {"accuracy": 0.0, "loss": 0.5}, "caution": CAUTION, "last": {"accuracy": 0.7},
    "target": None, "stepping": [], "clocks": CLOCKS,
    "parameters": {"total": 2000, "trainable": 1500, "frozen": 500},
    "stages": [{
        "name": "1", "steps": 30, "epochs": 2.0, "stopped_early": False,
        "best": {**BEST, "epoch": 1.0}, "metrics": {"accuracy": 0.8}, "seconds": 9.5,
        "trainable": 1500, "total": 2000,
    }],
    "checkpoint": "checkpoints/step-000000020", "gpu_before": None, "gpu_after": None,
    "telemetry": TELEMETRY, "device_memory_peak": None, "weights_digest": "w", "order_digest": "o",
    "runs_at_once": 1,
}  # fmt: skip


def step_event(step: int, **changes: Any) -> dict[str, Any]:
    """A block of one step."""
    return {
        "kind": "step", "at": 100.0 + step, "step": step, "first": step, "loss": [1 / step],
        "norm": [None], "ms": [4.5], "rate": 1e-3, "tokens": 200, "padded": 400, "examples": 32,
        "warmup": 0, "clipped": 1, "order": f"order-{step}",
    } | changes  # fmt: skip


def stage_event(step: int, **changes: Any) -> dict[str, Any]:
    """The beginning of a stage."""
    return {
        "kind": "stage", "at": 100.0 + step, "step": step, "name": "2", "steps": 9,
        "patience": None, "train": None, "freeze": [], "changed": [], "added": [], "trainable": 1,
        "total": 1, "lr": 0.1, "supervise": None, "best_before": None,
    } | changes  # fmt: skip


def evaluation_event(step: int, metrics: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An evaluation on the tune split."""
    return {
        "kind": "evaluation", "at": 100.0 + step, "step": step, "split": "tune",
        "metrics": metrics, "frozen_verified": 0, "best": True, "epoch": step / 15,
        "seconds": 0.5, "total_seconds": step / 4,
    } | changes  # fmt: skip


def write_events(folder: Path, *events: dict[str, Any]) -> None:
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text)

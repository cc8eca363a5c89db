"""Helpers of the benchmarks: interleaved rounds, ratios with their spread, JSON lines."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from frostlab.devices import synchronize


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(where: torch.device) -> str:
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def timed(work: Callable[[], Any], where: torch.device) -> float:
    """Return the seconds of one call, including the device's work."""
    synchronize(where)
    started = time.perf_counter()
    work()
    synchronize(where)
    return time.perf_counter() - started


def interleaved(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, where: torch.device
) -> dict[str, Any]:
    """Time both sides in alternating order, and return medians and the median paired ratio."""
    ours(), theirs()
    pairs = []
    for i in range(rounds):
        if i % 2:
            b = timed(theirs, where)
            a = timed(ours, where)
        else:
            a = timed(ours, where)
            b = timed(theirs, where)
        pairs.append((a, b))
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ours_ms": round(1e3 * statistics.median(a for a, _ in pairs), 4),
        "theirs_ms": round(1e3 * statistics.median(b for _, b in pairs), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(ratios[len(ratios) // 10], 4),
        "ratio_high": round(ratios[-1 - len(ratios) // 10], 4),
        "rounds": rounds,
        "device": device_name(where),
        "torch": torch.__version__,
    }


def repeated(work: Callable[[], Any], times: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(times):
            work()

    return repeat


def report(name: str, result: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": name, **result}), flush=True)

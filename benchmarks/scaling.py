"""Measure how costs grow: a step with its size, `frostlab runs` with runs, `show` with events.

    python benchmarks/scaling.py steps            step time and peak memory on a GPU, < 3 minutes
    python benchmarks/scaling.py steps --small    the same with tiny models, on any device
    python benchmarks/scaling.py runs             10 to 10,000 runs in a store
    python benchmarks/scaling.py events           10³ to 10⁶ events in a run
    python benchmarks/scaling.py draw RECORDS     figures of records, as SVG in docs/images

Results are JSON lines. `growth` is the exponent between a size and the next smaller one: 1 is
proportional to the size, 2 is quadratic.
"""

import argparse
import gc
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import report

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MOST_SECONDS = 170.0  # of the device; further sizes are left out

# Steps


@dataclass(frozen=True)
class Size:
    """The size of a language model's step."""

    batch: int = 16
    length: int = 512
    width: int = 512
    layers: int = 6


LARGE = Size()
LARGE_VALUES = {
    "batch": (4, 8, 16, 32, 64, 128),
    "length": (64, 128, 256, 512, 1024, 2048),
    "width": (128, 256, 512, 1024, 2048),
    "layers": (2, 4, 6, 12, 24, 48),
}
SMALL = Size(4, 32, 32, 2)
SMALL_VALUES = {"batch": (2, 4, 8), "length": (16, 32, 64), "width": (16, 32), "layers": (1, 2)}
VOCABULARY = 8192
ROUNDS, STEPS_PER_ROUND = 5, 10


def measure_steps(small: bool) -> None:
    """Time captured steps, or eager ones without a GPU, changing one size at a time."""
    from common import device, device_name

    where, began = device(), time.perf_counter()
    usual, values = (SMALL, SMALL_VALUES) if small else (LARGE, LARGE_VALUES)
    for axis, sizes in values.items():
        before: dict[str, Any] = {}
        for value in sizes:
            if time.perf_counter() - began > MOST_SECONDS:
                print(f"left out: {axis} {value}, after {MOST_SECONDS:.0f} s", file=sys.stderr)
                continue
            size = replace(usual, **{axis: value})
            facts = {"axis": axis, "size": value, **vars(size), **time_step(size, where)}
            facts |= growth(facts, before, "ms", "peak_mb")
            report("scaling_step", facts | {"device": device_name(where)})
            before = facts


def time_step(size: Size, where: Any) -> dict[str, Any]:
    """Return the median time of a step, and the peak of memory, preparation included."""
    import torch

    from common import timed
    from frostlab.devices import (
        allocated_bytes,
        default_precision,
        peak_bytes,
        release_cached_memory,
        reset_peak,
    )
    from frostlab.models.gpt import GPT, GPTConfig
    from frostlab.recipe.settings import Optim, Train
    from frostlab.training.batches.batch import Batch
    from frostlab.training.distributed import Compute
    from frostlab.training.step import build_step
    from frostlab.training.step.objective import Objective

    torch.manual_seed(0)
    reset_peak(where)
    held = allocated_bytes(where)
    config = GPTConfig(
        VOCABULARY, size.length, size.width, size.layers, max(1, size.width // 64), 4 * size.width,
        dropout=0.0,
    )  # fmt: skip
    objective = Objective(GPT(config).to(where)).train()
    compute = Compute(where, default_precision(where))
    step = build_step(objective, Optim(), Train(step="auto"), compute, steps=1)
    ids = torch.randint(5, VOCABULARY, (size.batch, size.length + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    batch = Batch({"input_ids": inputs}, targets, size.batch, inputs.numel(), targets.numel())

    take_steps(step, batch, 3)
    work = partial(take_steps, step, batch, STEPS_PER_ROUND)
    times = [timed(work, where) for _ in range(ROUNDS)]
    peak, kind = peak_bytes(where), step.kind
    step.close()
    del step, objective, work
    gc.collect()
    release_cached_memory()
    milliseconds = [1e3 * seconds / STEPS_PER_ROUND for seconds in times]
    return {
        "ms": round(statistics.median(milliseconds), 4),
        "low": round(min(milliseconds), 4),
        "high": round(max(milliseconds), 4),
        "peak_mb": None if peak is None else round((peak - held) / 1e6, 1),
        "kind": kind,
        "precision": str(compute.precision).removeprefix("torch."),
    }


def take_steps(step: Any, batch: Any, count: int) -> None:
    for _ in range(count):
        step([batch], batch.scored, 1e-5)


def growth(facts: dict[str, Any], before: dict[str, Any], *keys: str) -> dict[str, float]:
    """Return the exponents with which values grew since the next smaller size."""
    grown = {}
    for key in keys:
        if facts.get(key) and before.get(key):
            ratio = math.log(facts["size"] / before["size"])
            grown[f"{key}_growth"] = round(math.log(facts[key] / before[key]) / ratio, 2)
    return grown


# Runs in a store


RECIPE: dict[str, Any] = {
    "data": {"name": "majority", "examples": 64},
    "model": {"kind": "gpt", "width": 16, "layers": 1, "heads": 2},
    "train": {"steps": 20, "batch": 16},
    "evaluate": {"every": 5},
}


def measure_runs(most: int, repeats: int) -> None:
    """Time `frostlab runs` with and without its index, while a store grows."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "runs"
        first = train_once(root)
        recipe = (first / "recipe.yaml").read_text()
        before: dict[str, dict[str, Any]] = {}
        made = 1
        for count in powers(10, most):
            for i in range(made, count):
                copy_run(first, root / f"copy-{i}", recipe, i)
            made = count
            time.sleep(0.5)  # a run is indexed only some time after its last change
            for state in ("without an index", "with its index"):
                samples = []
                for _ in range(repeats):
                    if state == "without an index":
                        (root / ".index.json").unlink(missing_ok=True)
                    samples.append(command("runs", "--runs", str(root)))
                facts = {"state": state, "size": count, **summarise(samples)}
                facts |= growth(facts, before.get(state, {}), "work_s")
                report("scaling_runs", facts)
                before[state] = facts


def train_once(root: Path) -> Path:
    from frostlab.training.run import run

    folder = run(RECIPE, runs=root).folder
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(folder / "model", ignore_errors=True)
    return folder


def copy_run(first: Path, folder: Path, recipe: str, i: int) -> None:
    """Copy a run with another recipe: ten seeds of each learning rate."""
    shutil.copytree(first, folder)
    rate = f"lr: {1e-6 * (1 + i // 10):.6f}"
    changed = recipe.replace("lr: 0.0003", rate).replace("seed: 0", f"seed: {i % 10}")
    assert changed != recipe
    (folder / "recipe.yaml").write_text(changed)


# Events of a run


def measure_events(most: int, repeats: int) -> None:
    """Time `frostlab show` while a run's events grow: a run in one piece, and one often resumed."""
    with tempfile.TemporaryDirectory() as name:
        first = train_once(Path(name) / "runs")
        pattern = [json.loads(line) for line in (first / "events.jsonl").read_text().splitlines()]
        for state in ("in one piece", "resumed every 1,000 events"):
            before: dict[str, Any] = {}
            for count in powers(1000, most):
                with (first / "events.jsonl").open("w") as file:
                    for event in many_events(pattern, count, resumed=state != "in one piece"):
                        file.write(json.dumps(event) + "\n")
                samples = [command("show", str(first)) for _ in range(repeats)]
                size = (first / "events.jsonl").stat().st_size
                facts: dict[str, Any] = {"state": state, "size": count}
                facts["events_mb"] = round(size / 1e6, 1)
                facts |= summarise(samples)
                facts |= growth(facts, before, "work_s")
                report("scaling_events", facts)
                before = facts


def many_events(
    pattern: list[dict[str, Any]], count: int, resumed: bool
) -> Iterator[dict[str, Any]]:
    """Yield so many events: the steps, evaluations and checkpoints of a run again and again."""
    start, stage, stepping, *middle = pattern[:-2]  # without its report and end
    yield from (start, stage, stepping)
    resume = {key: start[key] for key in ("device", "precision", "processes", "threads")}
    last = middle[-1]["step"]
    for i in range(count - 5):
        turn, place = divmod(i, len(middle))
        event = middle[place]
        step = event["step"] + turn * last
        if resumed and i % 1000 == 999:
            yield {"kind": "resume", "at": event["at"], "step": step, **resume}
            continue
        event = event | {"step": step}
        if "first" in event:
            event["first"] += turn * last
        if "best" in event and event["kind"] == "checkpoint":
            event["best"] = step
        yield event
    yield from pattern[-2:]


# Both


def powers(least: int, most: int) -> Iterator[int]:
    while least <= most:
        yield least
        least *= 10


# Its peak of memory is in /proc; that of `getrusage` includes the process that started it.
COMMAND = """
import atexit, runpy, sys
def peak():
    status = open("/proc/self/status").read()
    print(status.split("VmHWM:")[1].split()[0], file=sys.stderr)
atexit.register(peak)
runpy.run_module("frostlab", run_name="__main__", alter_sys=True)
"""


def command(*arguments: str) -> dict[str, float]:
    """Run a frostlab command; return its seconds, its processor's seconds and its peak memory."""
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"frostlab {' '.join(arguments)} failed: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mb": int(done.stderr.split()[-1]) * 1024 / 1e6,
    }


def summarise(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians; `work_s` is the processor's time without that of the empty command."""
    median = {key: statistics.median(s[key] for s in samples) for key in samples[0]}
    empty = statistics.median(command("--version")["cpu_s"] for _ in range(3))
    return {
        "seconds": round(median["seconds"], 3),
        "low": round(min(s["seconds"] for s in samples), 3),
        "high": round(max(s["seconds"] for s in samples), 3),
        "cpu_s": round(median["cpu_s"], 3),
        "work_s": round(max(median["cpu_s"] - empty, 0.001), 3),
        "peak_mb": round(median["peak_mb"], 1),
        "load": round(os.getloadavg()[0], 1),
    }


# Figures


def draw(records: Path) -> None:
    """Draw the last record of every size, with logarithmic axes."""
    lines = [json.loads(line) for line in records.read_text().splitlines() if line.strip()]
    for name, rows in (("steps", step_rows(lines)), ("commands", command_rows(lines))):
        if rows:
            IMAGES.mkdir(exist_ok=True)
            (IMAGES / f"scaling-{name}.svg").write_text(figure(rows))
            print(IMAGES / f"scaling-{name}.svg")


def step_rows(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = {(r["axis"], r["size"]): r for r in lines if r["benchmark"] == "scaling_step"}
    return [
        {"panel": panel, "x": r["size"], "y": r[key], "series": axis}
        for panel, key in ((("size", "ms of a step"), "ms"), (("size", "peak MB"), "peak_mb"))
        for (axis, _), r in last.items()
        if r[key] is not None
    ]


def command_rows(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    panels = {
        "scaling_runs": ("runs in the store", "CPU seconds of `frostlab runs`"),
        "scaling_events": ("events of the run", "CPU seconds of `frostlab show`"),
    }
    last = {(r["benchmark"], r["state"], r["size"]): r for r in lines if r["benchmark"] in panels}
    return [
        {"panel": panels[name], "x": size, "y": r["cpu_s"], "series": state}
        for (name, state, size), r in last.items()
    ]


def figure(rows: list[dict[str, Any]]) -> str:
    """Return panels side by side, each with a line for every series."""
    from frostlab.charts import require_drawing, still

    altair, _ = require_drawing("drawing a figure")

    def axis(field: str, title: str) -> dict[str, Any]:
        return {"field": field, "type": "quantitative", "scale": {"type": "log"}, "title": title}

    panels = []
    for panel in dict.fromkeys(row["panel"] for row in rows):
        own = [{key: row[key] for key in "xy"} | {"series": row["series"]}
               for row in rows if row["panel"] == panel]  # fmt: skip
        legend = {"orient": "bottom", "columns": 1, "labelLimit": 300}
        colour = {"field": "series", "type": "nominal", "title": None, "sort": None,
                  "legend": legend}  # fmt: skip
        panels.append({
            "data": {"values": own},
            "mark": {"type": "line", "point": True},
            "width": 300,
            "height": 220,
            "encoding": {"x": axis("x", panel[0]), "y": axis("y", panel[1]), "color": colour},
        })  # fmt: skip
    spec = {
        "$schema": altair.SCHEMA_URL,
        "hconcat": panels,
        "resolve": {"scale": {"color": "independent"}},
    }
    return still(spec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="part", required=True)
    commands.add_parser("steps").add_argument("--small", action="store_true")
    for name, most in (("runs", 10_000), ("events", 1_000_000)):
        added = commands.add_parser(name)
        added.add_argument("--most", type=int, default=most)
        added.add_argument("--repeats", type=int, default=3)
    commands.add_parser("draw").add_argument("records", type=Path)
    options = parser.parse_args()
    if options.part == "steps":
        measure_steps(options.small)
    elif options.part == "runs":
        measure_runs(options.most, options.repeats)
    elif options.part == "events":
        measure_events(options.most, options.repeats)
    else:
        draw(options.records)


if __name__ == "__main__":
    main()

"""Time the whole command `frostlab report`, and its memory, for a small and for a large comparison.

The large one is the small one with copies of its arms, seeds and runs, whose events are repeated.

python benchmarks/report.py [--events 1000000]
"""

import argparse
import copy
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import report
from frostlab.comparison.evidence import read_evidence
from frostlab.comparison.oelm_json import comparison_json, timing_json
from frostlab.comparison.run import compare
from frostlab.records.folder import RunRecord

SMALL = {
    "recipe": {
        "data": {"name": "majority", "examples": 128},
        "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2},
        "train": {"epochs": 6, "batch": 16, "threads": 1},
        "evaluate": {"every": 4},
        "watch": {"every_n_steps": 4},
    },
    "arms": ["baseline", "oelm", "oelm-random"],
    "seeds": 6,
    "tune": [{"key": "optim.lr", "values": [0.001, 0.003]}],
    "clock": {"seconds": 1.0},
}
ARMS, SEEDS = 20, 12
EVENTS = "events.jsonl"
COMMAND = """
import sys
from frostlab.cli.main import app
sys.argv[1:] = ["report", sys.argv[1]]
try:
    app()
except SystemExit as error:
    assert not error.code, error.code
print("torch" in sys.modules)
"""


def main() -> None:
    """Compare arms once, time its report, and then that of the enlarged comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="a finished comparison to use as the small one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small", Path(name) / "large"
        if asked.folder is not None:
            shutil.copytree(asked.folder, small)
        else:
            compare(SMALL, out=small)
        measure("3 arms × 6 seeds", small, Path(name) / "cache")
        events = enlarge(small, large, asked.events)
        what = f"{ARMS} arms × {SEEDS} seeds, {events:,} events"
        measure(what, large, Path(name) / "cache")


def measure(what: str, folder: Path, cache: Path) -> None:
    """Report the seconds, the processor's seconds and the memory of the report of a folder.

    The memory is measured in a call of its own, because that takes time.
    """
    for state in ("empty cache" if not cache.exists() else "again", "again", "again", "memory"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        command = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"FROSTLAB_CACHE": str(cache)},
        )
        peak = most_memory(command) if state == "memory" else None
        output, _ = command.communicate()
        seconds = time.perf_counter() - began
        if command.returncode:
            raise SystemExit(command.returncode)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        report("report", {
            "of": what, "state": state, "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
            "peak_mb": peak, "imports_torch": output.split()[-1] == "True",
            "page_mb": round((folder / "report.html").stat().st_size / 1e6, 2),
            "load": round(os.getloadavg()[0], 1),
        })  # fmt: skip


def most_memory(command: subprocess.Popen[str]) -> int:
    """Return the most memory (MB) that a command and the processes it starts have at one time.

    Memory that processes share is counted once (proportional set size).
    """
    most = 0
    while command.poll() is None:
        most = max(most, sum(map(memory, family(command.pid))))
        time.sleep(0.02)
    return round(most * 1024 / 1e6)


def family(process: int) -> list[int]:
    """Return a process and those that it started."""
    started = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            started += [int(child) for child in file.read_text().split()]
    return [process, *(member for child in started for member in family(child))]


def memory(process: int) -> int:
    """Return the proportional set size of a process in KiB; 0 if it has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    size = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(size[1]) if size else 0


def enlarge(small: Path, large: Path, events: int) -> int:
    """Write a comparison of many arms and seeds from copies, and return its number of events."""
    large.mkdir()
    evidence = json.loads((small / "evidence.json").read_text())
    arms = {"baseline": evidence["baseline"]}
    arms |= {f"oelm-{number}": "oelm" for number in range(1, ARMS)}
    each = events // (ARMS * SEEDS)
    total, steps = 0, {}
    for arm, model in arms.items():
        runs = evidence["arms"][model]["runs"]
        for seed in range(SEEDS):
            source = small / runs[seed % len(runs)]["folder"]
            target = large / "runs" / f"{arm}-s{seed}"
            target.mkdir(parents=True)
            for file in (*source.glob("*.json"), source / "recipe.yaml"):
                shutil.copy(file, target)
            written, steps[arm, seed] = repeat_events(source, target, each)
            total += written

    def multiplied(by_arm: dict[str, Any]) -> dict[str, Any]:
        """Return values by arm for all arms."""
        return {arm: copy.deepcopy(by_arm[model]) for arm, model in arms.items() if model in by_arm}

    evidence["arms"] = multiplied(evidence["arms"])
    for arm, values in evidence["arms"].items():
        runs = values["runs"]
        values["runs"] = [
            runs[seed % len(runs)]
            | {"seed": seed, "folder": f"runs/{arm}-s{seed}", "steps": steps[arm, seed]}
            for seed in range(SEEDS)
        ]
    for key in ("verdicts", "confounds", "mcnemar", "flow"):
        evidence[key] = multiplied(evidence[key])
    for arm, values in evidence["verdicts"].items():
        values["arm"] = arm
    for metric in evidence["secondary"]:
        evidence["secondary"][metric] = multiplied(evidence["secondary"][metric])
    evidence["convergence"]["arms"] = multiplied(evidence["convergence"]["arms"])
    for tuning in evidence["tuning"]:
        for key in ("best", "on_edge", "curves"):
            tuning[key] = multiplied(tuning[key])
    if evidence["timing"] is not None:
        controls = {name: values for name, values in evidence["timing"]["arms"].items()
                    if name not in {*arms.values(), "oelm-random"}}  # fmt: skip
        evidence["timing"]["arms"] = multiplied(evidence["timing"]["arms"]) | controls
    plan = evidence["plan"]
    settings = {arm["name"]: arm for arm in plan["arms"]}
    plan["arms"] = [settings[model] | {"name": arm} for arm, model in arms.items()]
    plan["seeds"] = list(range(SEEDS))
    evidence |= {"orthogonality": None, "oelm": None, "repeat": None, "rounds": {}}
    (large / "evidence.json").write_text(json.dumps(evidence))
    (large / "plan.json").write_text(json.dumps(plan))
    read = read_evidence(large / "evidence.json")
    assert read is not None
    first = RunRecord(large / read.arms["baseline"].runs[0].folder)
    (large / "comparison.json").write_text(json.dumps(comparison_json(read, first)))
    (large / "timing.json").write_text(json.dumps(timing_json(read)))
    return total


def repeat_events(source: Path, target: Path, count: int) -> tuple[int, int]:
    """Write the events of a run and then its steps again and again, until there are `count`.

    Every twentieth repetition has an evaluation too. Return the numbers of events and of steps.
    """
    lines = [json.loads(line) for line in (source / EVENTS).read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    keys = ("step", "first")
    evaluation = next(line for line in lines if line["kind"] == "evaluation")
    last = max(line["step"] for line in steps)
    written, turn = len(lines), 1
    with (target / EVENTS).open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        while written < count:
            more = [line | {key: line[key] + turn * last for key in keys} for line in steps]
            if turn % 20 == 0:
                more.append(evaluation | {"step": (turn + 1) * last})
            more = more[: count - written]
            file.writelines(json.dumps(line) + "\n" for line in more)
            written, turn = written + len(more), turn + 1
    return written, more[-1]["step"] if turn > 1 else last


if __name__ == "__main__":
    main()

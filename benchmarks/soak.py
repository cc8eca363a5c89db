"""Disturb a matrix of tiny runs at random, and compare it with an undisturbed one.

Workers, the driver or everything is killed with kill -9; the disk is filled, or the folder of runs
becomes read-only, for a moment. Whenever the command has ended, the same command is started again,
until every run has finished. Then every run must have finished exactly once, and must have the same
weights, metrics and order of examples, bit by bit, as in a matrix that nobody disturbed.

It mounts a small tmpfs, so it needs root. It takes about 20 minutes on 2 cores:

python benchmarks/soak.py --kills 200 --full 20 --read-only 20 >> docs/records/soak.jsonl
"""

import argparse
import contextlib
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from common import report
from frostlab.matrix.store import holder_of
from frostlab.records.folder import RunRecord, finished_status

RECIPE: dict[str, Any] = {
    "data": {"name": "majority", "examples": 256, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2, "dropout": 0.1},
    "optim": {"lr": 3e-3},
    "train": {"batch": 8, "threads": 1, "checkpoint": 100},
    "evaluate": {"batch": 256},
}
SIZE = "300m"  # of the tmpfs
COMMAND = ["matrix", "soak.yaml", "--devices", "cpu", "--per-device", "2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1500, help="of every run")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--full", type=int, default=20, help="moments with a full disk")
    parser.add_argument("--read-only", type=int, default=20)
    parser.add_argument("--pause", type=float, default=3.0, help="mean seconds between two")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        write_matrix(folder, options.runs, options.steps)
        began = time.perf_counter()
        calm = folder / "calm"
        command(folder, calm).wait()
        calm_seconds = time.perf_counter() - began
        expected = results(calm)
        assert len(expected) == options.runs, "the undisturbed matrix has not finished"
        with small_disk(folder / "disk") as disk:
            soak = Soak(folder, disk / "runs", options)
            began = time.perf_counter()
            soak.work()
            found = results(disk / "runs")
            report("soak", {
                "runs": options.runs, "steps": options.steps, "seed": options.seed,
                "kills": dict(soak.kills), "full": soak.full, "read_only": soak.read_only,
                "drivers_started": soak.started, "resumes": resumes(disk / "runs"),
                "seconds": round(time.perf_counter() - began),
                "undisturbed_seconds": round(calm_seconds),
                "finished": len(found), "changed_after_they_finished": soak.changed,
                "bit_identical": sum(found.get(run) == facts for run, facts in expected.items()),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "torch": torch.__version__,
            })  # fmt: skip
            assert found == expected, "a run differs from the undisturbed one"
            assert not soak.changed, "a finished run was repeated"


def write_matrix(folder: Path, runs: int, steps: int) -> None:
    recipe = {**RECIPE, "train": {**RECIPE["train"], "steps": steps}}
    recipe["evaluate"] = {**RECIPE["evaluate"], "every": steps // 3}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    half = {"recipes": ["tiny.yaml"], "treatments": ["none", "oelm"], "seeds": runs // 2}
    (folder / "soak.yaml").write_text(yaml.safe_dump(half))


def command(folder: Path, runs: Path) -> subprocess.Popen[bytes]:
    """Start the matrix, or go on with it."""
    words = [sys.executable, "-m", "frostlab", *COMMAND, "--runs", str(runs)]
    with (folder / "driver.log").open("ab") as log:
        return subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)


def results(runs: Path) -> dict[str, Any]:
    """Return what must be equal, bit by bit, of every finished run."""
    found = {}
    for path in sorted(runs.glob("*-s*")):
        if finished_status(path) == "finished":
            result = RunRecord(path).result
            found[path.name] = (
                result.weights_digest, result.order_digest, result.report, result.best.value,
                result.steps, RunRecord(path).digests,
            )  # fmt: skip
    return found


def resumes(runs: Path) -> int:
    texts = (path.read_text() for path in runs.glob("*-s*/events.jsonl"))
    return sum(text.count('{"kind": "resume"') for text in texts)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """Mount a small file system that lives in memory."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "soak", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


class Soak:
    """The disturber of one matrix."""

    def __init__(self, folder: Path, runs: Path, options: argparse.Namespace) -> None:
        self.folder, self.runs, self.pause = folder, runs, options.pause
        self.kills: Counter[str] = Counter()
        self.full = self.read_only = self.started = 0
        self.changed: list[str] = []
        self._draw = random.Random(options.seed)
        self._left = [self._kill] * options.kills + [self._fill] * options.full
        self._left += [self._protect] * options.read_only
        self._draw.shuffle(self._left)
        self._ended: dict[str, tuple[int, int]] = {}
        self._driver: subprocess.Popen[bytes] | None = None

    def work(self) -> None:
        """Disturb until nothing is left to do, then let the matrix end."""
        while True:
            self._go_on()
            if self._driver is None:
                break
            time.sleep(self._draw.uniform(0, 2 * self.pause) if self._left else 1.0)
            self._look()
            if self._left and self._left[-1]():
                self._left.pop()
        if self._left:
            print(f"{len(self._left)} disturbances were left; raise --steps", file=sys.stderr)

    def _go_on(self) -> None:
        """Start the command if it does not run; leave `_driver` empty if all runs are finished."""
        if self._driver is not None and self._driver.poll() is None:
            return
        if self._driver is not None and self._driver.returncode == 0:
            self._driver = None
            return
        self.started += 1
        self._driver = command(self.folder, self.runs)

    def _look(self) -> None:
        """Note finished runs, and whether one that had finished was written again."""
        for path in self.runs.glob("*-s*/result.json"):
            name = path.parent.name
            with contextlib.suppress(OSError):
                if name not in self._ended and finished_status(path.parent) != "finished":
                    continue
                seen = (path.stat().st_mtime_ns, path.stat().st_size)
                if self._ended.setdefault(name, seen) != seen:
                    self.changed.append(name)

    def _kill(self) -> bool:
        """Kill a worker, the driver, or everything; return False if nothing was there to kill."""
        holder = holder_of(self.runs)
        if holder is None:
            return False
        try:
            driver = psutil.Process(holder.pid)
            workers = [child for child in driver.children() if "spawn_main" in str(child.cmdline())]
        except psutil.Error:
            return False
        if not workers:
            return False
        kind = self._draw.choices(["worker", "driver", "everything"], [6, 1, 1])[0]
        victims = {"worker": [self._draw.choice(workers)], "driver": [driver],
                   "everything": [driver, *workers]}[kind]  # fmt: skip
        for victim in victims:
            with contextlib.suppress(psutil.Error):
                victim.kill()
        if kind != "worker" and self._driver is not None:
            self._driver.wait()
        self.kills[kind] += 1
        return True

    def _fill(self) -> bool:
        """Fill the disk for a moment."""
        filler = self.runs.parent / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        time.sleep(self._draw.uniform(0.2, 2.0))
        filler.unlink(missing_ok=True)
        self.full += 1
        return True

    def _protect(self) -> bool:
        """Lay a read-only view of the folder of runs over itself for a moment."""
        if not self.runs.is_dir():
            return False
        subprocess.run(["mount", "--bind", self.runs, self.runs], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", self.runs], check=True)
        time.sleep(self._draw.uniform(0.2, 2.0))
        subprocess.run(["umount", "-l", self.runs], check=True)
        self.read_only += 1
        return True


if __name__ == "__main__":
    main()

"""What verifying checksums costs: the share of a start, and bytes a second.

    python benchmarks/checksums.py --rounds 3
    python benchmarks/checksums.py --reuse 4    # a cached prefix of 4 GB

Every round trains a GPT for a few steps in one process and resumes it in another. A start is the
time from the beginning of that process to its first step. It verifies the checksums of the data's
cache and of the checkpoint.

`--reuse` makes a cached prefix and reuses it, verified at every reuse, and only if it looks
changed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import device, device_name, report
from frostlab.storage import damaged_file, seal

SIZES: dict[str, dict[str, Any]] = {
    "small": {"kind": "gpt", "width": 128, "layers": 2, "heads": 4},
    "Medium-512": {"kind": "gpt"},  # 6 layers of width 512
}
DATA = {"name": "majority", "length": 128, "examples": 1024, "symbols": 8}


def start(recipe: str, out: str, resume: bool) -> None:
    """Run or resume a recipe; at its first step print the seconds so far and of verification."""
    import psutil

    began, spent = psutil.Process().create_time(), [0.0]
    import frostlab.records.checkpoint as checkpoint
    import frostlab.storage as storage
    from frostlab.training.run import run
    from frostlab.training.step_log import StepLog

    def timed(*arguments: Any) -> Any:
        before = time.perf_counter()
        try:
            return damaged_file(*arguments)
        finally:
            spent[0] += time.perf_counter() - before

    def add(log: StepLog, entry: Any) -> None:
        if log._first is None:
            print(json.dumps({"start": time.time() - began, "verify": spent[0]}), flush=True)
        original(log, entry)

    original, StepLog.add = StepLog.add, add  # type: ignore[method-assign]
    storage.damaged_file = checkpoint.damaged_file = timed  # type: ignore[attr-defined]
    stop = {"n": 0}
    if not resume:  # leave the run unfinished, with one checkpoint

        def killed(log: StepLog, entry: Any) -> None:
            stop["n"] += 1
            if stop["n"] == 3:
                os._exit(0)
            original(log, entry)

        StepLog.add = killed  # type: ignore[method-assign]
    run(recipe, out=out, resume=resume)


def measure(name: str, rounds: int) -> dict[str, Any]:
    shares, starts, verifies, size = [], [], [], 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as temporary:
            recipe, out = f"{temporary}/recipe.yaml", f"{temporary}/run"
            train = {"batch": 16, "steps": 4, "checkpoint": 2}
            values = {"data": DATA, "model": SIZES[name], "train": train}
            Path(recipe).write_text(json.dumps(values))
            lines = ""
            for again in ("", "--resume"):
                command = [
                    sys.executable,
                    __file__,
                    "--start",
                    recipe,
                    out,
                    *([again] * bool(again)),
                ]
                lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            times = json.loads(lines.splitlines()[0])
            size = sum(p.stat().st_size for p in Path(out).rglob("*.safetensors"))
            starts.append(times["start"])
            verifies.append(times["verify"])
            shares.append(times["verify"] / times["start"])
    return {
        "case": f"resuming GPT {name}",
        "checkpoint_mb": round(size / 1e6, 1),
        "start_s": round(statistics.median(starts), 3),
        "verify_s": round(statistics.median(verifies), 4),
        "share": round(statistics.median(shares), 5),
        "share_low": round(min(shares), 5),
        "share_high": round(max(shares), 5),
    }


def throughput(rounds: int) -> dict[str, Any]:
    """Seal a folder of 1 GB and verify it."""
    seconds = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(4):
            (folder / f"{number}.npy").write_bytes(os.urandom(1 << 20) * 256)
        seal(folder)
        for _ in range(rounds):
            began = time.perf_counter()
            assert damaged_file(folder) is None
            seconds.append(time.perf_counter() - began)
    return {
        "case": "verifying a cache of 1 GiB",
        "verify_s": round(statistics.median(seconds), 4),
        "gb_per_s": round((1 << 30) / 1e9 / statistics.median(seconds), 3),
        "verify_low": round(min(seconds), 4),
        "verify_high": round(max(seconds), 4),
    }


def reuse(gigabytes: float, rounds: int) -> None:
    """Time the reuse of a cached prefix, from the memory in which the system keeps files."""
    import torch

    from frostlab import storage
    from frostlab.training.batches.prefix import cached_table

    shape = (round(gigabytes * 1e9 / 2 / 1024), 1024)
    large = storage._LARGE

    def take(built: bool = False) -> float:
        began = time.perf_counter()
        table, reused = cached_table(
            "key", shape, torch.bfloat16, 10**12, lambda table: table.fill_(1)
        )
        seconds = time.perf_counter() - began
        assert reused != built
        assert float(table[-1, -1]) == 1
        return seconds

    def timed(case: str) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds = [take() for _ in range(rounds)]
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / rounds
        report("prefix_reuse", {
            "case": case, "gb": gigabytes, "seconds": round(statistics.median(seconds), 4),
            "low": round(min(seconds), 4), "high": round(max(seconds), 4),
            "cpu_s": round(cpu, 4), "rounds": rounds, "load": round(os.getloadavg()[0], 1),
            "device": device_name(device()),
        })  # fmt: skip

    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FROSTLAB_CACHE"] = temporary
        built = take(built=True)
        report("prefix_reuse", {"case": "built", "gb": gigabytes, "seconds": round(built, 2)})
        storage._LARGE = 1 << 60
        timed("verified at every reuse")
        storage._LARGE = large
        take()
        timed("verified only if it looks changed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--reuse", type=float, metavar="GB")
    options = parser.parse_args()
    if options.reuse:
        reuse(options.reuse, options.rounds)
        return
    if options.start:
        start(*options.start, resume=options.resume)
        return
    where = device_name(device())
    for name in SIZES:
        report("checksums", {**measure(name, options.rounds), "device": where})
    report("checksums", {**throughput(options.rounds), "device": where})


if __name__ == "__main__":
    main()

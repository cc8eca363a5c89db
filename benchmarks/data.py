"""Measure how fast batches are made, and how much memory a large text needs.

python benchmarks/data.py [--tokens 500_000_000] [--text-megabytes 100]
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from common import report
from frostlab.data.tokens import Tokens
from frostlab.training.batches.batch import collate, epoch_order

BATCH = 32


def anonymous_megabytes() -> float:
    """Return this process's own memory, without pages of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def classification(examples: int) -> Tokens:
    draw = np.random.default_rng(0)
    lengths = draw.integers(5, 65, examples)
    stops = np.cumsum(lengths)
    ids = draw.integers(0, 30000, int(stops[-1])).astype(np.uint16)
    return Tokens(ids, stops - lengths, stops, draw.integers(0, 2, examples), None, None, "")


def language(path: Path, tokens: int, length: int) -> Tokens:
    """Write and map a file of token ids, two bytes each, as `prepare` does."""
    ids = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(tokens,))
    for i in range(0, tokens, 10_000_000):
        ids[i : i + 10_000_000] = np.random.default_rng(i).integers(
            0, 30000, min(10_000_000, tokens - i)
        )
    del ids
    starts = np.arange(0, tokens - length - 1, length)
    mapped = np.load(path, mmap_mode="r")
    return Tokens(mapped, starts, starts + length + 1, None, None, None, "")


def rate(tokens: Tokens, batches: int) -> dict[str, float]:
    before, began = anonymous_megabytes(), time.perf_counter()
    order = epoch_order(tokens.lengths, BATCH, 0, 0, bucket=True)
    ordered = time.perf_counter() - began
    began = time.perf_counter()
    for rows in order[:batches]:
        collate(tokens, rows, 0)
    seconds = time.perf_counter() - began
    done = sum(map(len, order[:batches]))
    return {
        "examples": len(tokens),
        "order_seconds": round(ordered, 3),
        "examples_per_second": round(done / seconds),
        "grew_megabytes": round(anonymous_megabytes() - before, 1),
    }


PREPARE = r"""
import re, sys, time
from pathlib import Path
from frostlab.data.prepare import prepare
from frostlab.recipe.load import recipe_from
recipe = recipe_from({"data": {"name": "own", "path": sys.argv[1], "task": "language"}})
def high_water():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
before = high_water()
began = time.perf_counter()
material = prepare(recipe, cache=Path(sys.argv[2]))
seconds = time.perf_counter() - began
peak = high_water()
print(round(before), round(peak), round(seconds, 1), len(material.splits["train"].ids))
"""


def prepared(megabytes: int, folder: Path) -> dict[str, float]:
    draw, path = random.Random(0), folder / f"{megabytes}.txt"
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
             for _ in range(20000)]  # fmt: skip
    with path.open("w") as file:
        while file.tell() < megabytes << 20:
            file.write(" ".join(draw.choices(words, k=10000)) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(path), str(folder / "cache")],
        capture_output=True, text=True, check=True, env=os.environ,
    )  # fmt: skip
    before, peak, seconds, tokens = map(float, done.stdout.split())
    path.unlink()
    return {"text_megabytes": megabytes, "peak_before": before, "peak_megabytes": peak,
            "seconds": seconds, "training_tokens": tokens}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=500_000_000)
    parser.add_argument("--text-megabytes", type=int, nargs="*", default=[10, 100])
    options = parser.parse_args()
    report("batches", {"task": "classification"} | rate(classification(200_000), 3000))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = language(folder / "ids.npy", options.tokens, 512)
        size = {"task": "language, length 512", "file_megabytes": options.tokens * 2 >> 20}
        report("batches", size | rate(tokens, len(tokens)))
        for megabytes in options.text_megabytes:
            report("prepare", prepared(megabytes, folder))


if __name__ == "__main__":
    main()

"""Compare whole runs with different numbers of batch widths, each in a process of its own.

A width is assumed to cost so many times what frostlab assumes: at 0, every width of the batches is
used; the more a width costs, the fewer are used. `packed` packs the examples instead.

    python benchmarks/widths.py [--recipe imdb-gpt] [--data-dir FOLDER] [--rounds 1] [--scale tiny]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import report

WAYS = ("0", "0.25", "1", "4", "packed")


def measure(way: str, recipe: str, data_dir: str | None, scale: str, runs: Path) -> dict[str, Any]:
    """Run once, and return the widths, the padding and where the time went."""
    from frostlab.timing.clock import process_began
    from frostlab.training import setup
    from frostlab.training.batches.batch import TokenExamples
    from frostlab.training.batches.feed import Feed
    from frostlab.training.run import run

    settings = {"train.batching": "packed"} if way == "packed" else {}
    setup._WIDTH_WORK *= 1.0 if way == "packed" else float(way)
    feeds: list[Feed] = []
    choose = Feed.use_few_widths

    def watched(self: Feed, steps: int, cost: float) -> None:
        choose(self, steps, cost)
        feeds.append(self)

    Feed.use_few_widths = watched  # type: ignore[method-assign]
    record = run(
        recipe, settings, scale=scale or None, data_dir=data_dir, runs=runs, began=process_began()
    )  # type: ignore[arg-type]
    examples, shapes = feeds[0].examples, feeds[0].shapes
    widths = examples.widths if isinstance(examples, TokenExamples) else ()
    clocks = record.result.clocks
    return {
        "way": way,
        "recipe": recipe,
        "widths": widths if shapes is None else shapes.widths,
        "padding_share": clocks.padding_share,
        "step_ms": clocks.step_ms and clocks.step_ms.mean,
        "wall": clocks.wall and asdict(clocks.wall),
        "report": record.result.report,
        "device": record.environment["device_name"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="imdb-gpt")
    parser.add_argument("--data-dir")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scale", default="")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a single process
    options = parser.parse_args()
    if options.way is not None:
        with tempfile.TemporaryDirectory() as folder:
            given = (options.way, options.recipe, options.data_dir, options.scale, Path(folder))
            print(json.dumps(measure(*given)))
        return
    for number in range(options.rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--way", way],
                stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ),
            )  # fmt: skip
            report("widths", json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()

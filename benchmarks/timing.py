"""Measure the cost of timing every step on a GPU: blocks of steps in turn, with and without marks.

python benchmarks/timing.py [--rounds 40] [--batch 256]
"""

import argparse
import time
from collections.abc import Callable

import torch
from transformers import BertConfig, BertForSequenceClassification

from common import device, device_name, report
from frostlab.timing.clock import Stopwatch
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective
from loop import ratio

BLOCK = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    where = torch.device(device().type, 0)
    if where.type != "cuda":
        raise SystemExit("this benchmark needs a GPU")
    model = BertForSequenceClassification(BertConfig(num_labels=2)).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step = EagerStep(
        Objective(model), optimizer, Compute(next(model.parameters()).device, torch.bfloat16), 1.0
    )
    ids = torch.randint(1000, 20000, (options.batch, 128), device=where)
    labels = torch.zeros(options.batch, dtype=torch.long, device=where)
    parts = [Batch({"input_ids": ids}, labels, options.batch, ids.numel(), options.batch)]
    watch = Stopwatch(where)

    def block(timed: bool) -> Callable[[], float]:
        def run() -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            laps = []
            for _ in range(BLOCK):
                mark = watch.mark() if timed else None
                step(parts, options.batch, 1e-5)
                if timed:
                    laps.append((mark, watch.mark()))
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - began
            watch.milliseconds(laps)
            return elapsed / BLOCK

        return run

    timed, untimed = block(True), block(False)
    pairs = []
    for i in range(options.rounds + 1):
        if i % 2:
            with_marks, without_marks = timed(), untimed()
        else:
            without_marks, with_marks = untimed(), timed()
        pairs.append((with_marks, without_marks))
    began = time.perf_counter()
    for _ in range(2000):
        watch.mark(), watch.mark()
    marks = 1e6 * (time.perf_counter() - began) / 2000
    facts = {"model": "BERT-base", "batch": f"{options.batch} × 128", "device": device_name(where)}
    facts |= {"torch": torch.__version__, "rounds": options.rounds, "block": BLOCK}
    facts |= {"two_marks_us": round(marks, 2)}
    report("timing", facts | ratio(pairs[1:]))


if __name__ == "__main__":
    main()

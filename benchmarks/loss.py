"""Compare the chunked loss of a language-model head with the plain one and with torch's own.

Forward and backward are timed. Memory is the peak of a call above the memory used before it, on the
CPU in a fresh process each.

    python benchmarks/loss.py [--rounds 5] [--precision bfloat16]
    python benchmarks/loss.py --memory ours deep
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
import torch.nn.functional as F

from common import device, interleaved, report
from frostlab.training.step.head_loss import head_loss

MIB = 2**20


@dataclass(frozen=True)
class Case:
    classes: int
    width: int
    layers: int
    shape: tuple[int, int]
    cuda_only: bool = False


CASES = {
    "deep": Case(69_830, 64, 4, (64, 32)),
    "long": Case(69_830, 64, 1, (4, 2048)),
    "wide": Case(50_304, 512, 1, (8, 512)),
    "large": Case(50_304, 512, 1, (64, 512), cuda_only=True),
}


def work(case: Case, way: str, precision: str) -> Callable[[], None]:
    """Return a function that takes one forward and backward pass with a kind of loss."""
    where = device()
    torch.manual_seed(0)
    hidden = [
        torch.randn(*case.shape, case.width, device=where, requires_grad=True)
        for _ in range(case.layers)
    ]
    weight = (0.05 * torch.randn(case.classes, case.width, device=where)).requires_grad_()
    targets = torch.randint(case.classes, case.shape, device=where)

    def plain() -> torch.Tensor:
        logits = [F.linear(x, weight).flatten(0, -2).float() for x in hidden]
        return torch.stack(
            [F.cross_entropy(x, targets.flatten(), reduction="sum") for x in logits]
        ).sum()

    def torch_own() -> torch.Tensor:
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        options = torch.nn.LinearCrossEntropyOptions()
        head, flat = weight.to(dtype), targets.flatten()
        return torch.stack(
            [
                F.linear_cross_entropy(
                    x.flatten(0, -2).to(dtype), head, flat, reduction="sum", options=options
                )
                for x in hidden
            ]
        ).sum()

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: head_loss(hidden, weight, targets)[0],
        "plain": plain,
        "torch": torch_own,
    }

    def once() -> None:
        with torch.autocast(where.type, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = ways[way]()
        loss.backward()
        weight.grad = None
        for x in hidden:
            x.grad = None

    return once


def extra_bytes(once: Callable[[], None]) -> int:
    """Return the peak memory of a call above the memory used before it."""
    if device().type == "cuda":
        once()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        once()
        return torch.cuda.max_memory_allocated() - before
    process, done = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, process.memory_info().rss)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    once()
    done.set()
    watcher.join()
    return most - before


def memory(name: str, way: str, precision: str) -> int:
    if device().type == "cuda":
        return extra_bytes(work(CASES[name], way, precision))
    command = [sys.executable, __file__, "--precision", precision, "--memory", way, name]
    return int(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def compare(name: str, theirs: str, precision: str, rounds: int) -> None:
    case = CASES[name]
    sides = [work(case, way, precision) for way in ("ours", theirs)]
    result = interleaved(sides[0], sides[1], rounds, device())
    used = [memory(name, way, precision) for way in ("ours", theirs)]
    facts = {
        "case": name,
        "classes": case.classes,
        "width": case.width,
        "tokens": [case.layers, *case.shape],
        "precision": precision,
        "against": theirs,
        "ours_mib": round(used[0] / MIB, 1),
        "theirs_mib": round(used[1] / MIB, 1),
        "memory_ratio": round(used[0] / used[1], 4),
    }
    report("loss", facts | result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--memory", nargs=2, metavar=("WAY", "CASE"))
    options = parser.parse_args()
    if options.memory:
        way, name = options.memory
        work(
            Case(100, 8, 1, (2, 4)), way, options.precision
        )()  # allocates what libraries need once
        print(extra_bytes(work(CASES[name], way, options.precision)))
        return
    against = ["plain"] + ["torch"] * hasattr(F, "linear_cross_entropy")
    for name, case in CASES.items():
        if case.cuda_only and device().type != "cuda":
            continue
        for theirs in against:
            compare(name, theirs, options.precision, options.rounds)


if __name__ == "__main__":
    main()

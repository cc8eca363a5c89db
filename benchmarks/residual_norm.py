"""Time the kernels of residual sums and norms against torch's and the compiler's; CUDA only.

First the operation alone, forward and backward, captured in a graph, against the same work compiled
by torch. Then whole captured steps, compiled or not, with and without the kernels, in turn.

    python benchmarks/residual_norm.py [--rounds 12] [--case bert] [--only steps]
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import device_name, report
from frostlab import devices
from frostlab.models.fused import residual_norm
from frostlab.recipe.settings import Optim, Train
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep, seed_step
from frostlab.training.step.objective import Objective
from kinds import CASES, CUDA, MANY_STEPS, take

SHAPES = [(4096, 768), (4096, 512), (32768, 512)]
STEPS = [
    ("bert", True), ("gpt language 8", True), ("gpt language 64", True),
    ("gpt classifies", True), ("gpt classifies", False),
]  # fmt: skip
CHECKED = 4
TOLERANCE = (0.015, 0.05)  # of the first loss and of later ones, as in `frostlab bench`


@contextmanager
def kernels(used: bool) -> Iterator[None]:
    """Build steps with or without the kernels."""
    before = devices.HAS_TRITON
    devices.HAS_TRITON = before and used
    try:
        yield
    finally:
        devices.HAS_TRITON = before


def plain(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    total = x + F.dropout(branch, 0.1)
    return total, norm(total).to(torch.bfloat16)


def fused(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        total, _, low = residual_norm.residual_norm(
            x, branch, norm.weight, norm.bias, None, 0.1, norm.eps, True, False, True
        )
    assert total is not None
    return total, low


def captured(work: Callable[[], None]) -> Callable[[], None]:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def milliseconds(replay: Callable[[], None], times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def compare_alone(rows: int, width: int, rounds: int) -> None:
    norm = nn.LayerNorm(width).to(CUDA)
    x = torch.randn(rows, width, device=CUDA, requires_grad=True)
    branch = torch.randn(rows, width, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    by_total, by_norm = torch.randn_like(x), torch.randn_like(branch)
    inputs = [x, branch, norm.weight, norm.bias]
    ways = {"compiled": torch.compile(plain), "torch": plain, "kernels": fused}

    def work(way: Callable[..., tuple[Tensor, Tensor]]) -> None:
        torch.autograd.grad(way(x, branch, norm), inputs, (by_total, by_norm))

    times: dict[str, list[float]] = {name: [] for name in ways}
    replays = {name: captured(lambda way=way: work(way)) for name, way in ways.items()}
    for _ in range(rounds + 1):
        for name, replay in replays.items():
            times[name].append(1e3 * milliseconds(replay, 50))
    for name, values in times.items():
        report("residual norm alone", {
            "rows": rows, "width": width, "way": name,
            "us": round(float(np.median(values[1:])), 2),
            "us_p10_p90": [round(float(np.quantile(values[1:], q)), 2) for q in (0.1, 0.9)],
            "device": device_name(CUDA), "torch": torch.__version__,
        })  # fmt: skip


def build_side(
    build: Callable[[], Objective], batch: Batch, compiles: bool
) -> tuple[EagerStep, list[float]]:
    """Return a captured step that has taken some steps, and its first losses."""
    torch.manual_seed(0)
    torch.compiler.reset()
    step = build_step(
        build().to(CUDA).train(), Optim(), Train(step="captured"), Compute(CUDA, torch.bfloat16),
        steps=MANY_STEPS if compiles else 1,
    )  # fmt: skip
    losses = []
    for number in range(CHECKED):
        seed_step(0, number, 0, CUDA)
        losses.append(float(step([batch], batch.scored, 1e-5).loss))
    take(step, batch, 6)
    return step, losses


def compare_steps(case: str, compiles: bool, rounds: int) -> None:
    build, draw, shape = CASES[case]
    torch.manual_seed(1)
    batch = draw(*shape)
    sides: dict[bool, EagerStep] = {}
    losses: dict[bool, list[float]] = {}
    for used in (False, True):
        with kernels(used):
            sides[used], losses[used] = build_side(build, batch, compiles)
    off = np.abs(np.subtract(losses[True], losses[False])) / np.abs(losses[False])
    times: dict[bool, list[float]] = {False: [], True: []}
    count = 10 if batch.tokens <= 16384 else 4
    for number in range(rounds + 1):
        for used in (False, True) if number % 2 else (True, False):
            took = milliseconds(lambda used=used: sides[used]([batch], batch.scored, 1e-5), count)
            times[used].append(took)
    with_kernels, without = (np.array(times[used][1:]) for used in (True, False))
    ratios = with_kernels / without
    report("residual norm in steps", {
        "case": case, "compiled": compiles, "became": sides[True].kind,
        "reason": sides[True].reason, "ms": round(float(np.median(with_kernels)), 4),
        "without_ms": round(float(np.median(without)), 4),
        "ratio": round(float(np.median(ratios)), 4),
        "ratio_p10_p90": [round(float(np.quantile(ratios, q)), 4) for q in (0.1, 0.9)],
        "losses_differ_by": float(f"{off.max():.2g}"),
        "losses_equal": bool(off[0] <= TOLERANCE[0] and off.max() <= TOLERANCE[1]),
        "rounds": rounds, "device": device_name(CUDA), "torch": torch.__version__,
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--only", choices=["alone", "steps"])
    options = parser.parse_args()
    if options.only != "steps":
        for rows, width in SHAPES:
            compare_alone(rows, width, options.rounds)
    if options.only != "alone":
        for case, compiles in STEPS:
            if not options.case or case in options.case:
                compare_steps(case, compiles, options.rounds)


if __name__ == "__main__":
    main()

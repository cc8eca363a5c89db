"""Time the head's cross-entropy kernel against one with a fixed number of programs; CUDA only.

A row is read twice: for its sum, and for its gradient. With one program per row, more rows are
under way than the L2 cache holds. Programs that take one row after another can be so few that the
second read finds the row in the cache.

    python benchmarks/softmax_grid.py [--rounds 20]
"""

import argparse
import functools
import statistics

import torch
import triton
import triton.language as tl
from torch import Tensor

from common import device_name, report, timed
from frostlab.training.step.kernels import cross_entropy_rows

CUDA = torch.device("cuda", 0)
COLUMNS = 50_304
CALLS = 10


@triton.jit  # type: ignore[untyped-decorator]
def _few_programs(  # type: ignore[no-untyped-def]
    logits, labels, losses, rows, stride, columns, factor, block: tl.constexpr
):
    """Do what `frostlab.training.step.kernels._rows` does, a row after another."""
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = number.to(tl.int64)
        begin = logits + row * stride
        label = tl.load(labels + row)
        scored = label >= 0
        top = -float("inf")
        total = 0.0
        for start in range(0, columns, block):
            places = start + tl.arange(0, block)
            x = tl.load(begin + places, mask=places < columns, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        own = tl.load(begin + tl.where(scored, label, 0)).to(tl.float32)
        tl.store(losses + row, tl.where(scored, tl.log(total) + top - own, 0.0))
        tl.debug_barrier()
        for start in range(0, columns, block):
            places = start + tl.arange(0, block)
            x = tl.load(begin + places, mask=places < columns, other=0.0).to(tl.float32)
            gradient = factor * (tl.exp(x - top) / total - tl.where(places == label, 1.0, 0.0))
            gradient = tl.where(scored, gradient, 0.0)
            tl.store(begin + places, gradient.to(logits.dtype.element_ty), mask=places < columns)


def few_programs(
    logits: Tensor, labels: Tensor, factor: float, programs: int, block: int, warps: int
) -> Tensor:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _few_programs[(min(programs, len(logits)),)](
        logits, labels, losses, len(logits), logits.stride(0), logits.shape[1], factor,
        block=block, num_warps=warps,
    )  # fmt: skip
    return losses


def compare(rows: int, rounds: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(rows, COLUMNS, device=CUDA, dtype=torch.bfloat16)
    labels = torch.randint(COLUMNS, (rows,), device=CUDA)
    processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    ours = functools.partial(cross_entropy_rows, factor=1.0)
    sides = {"one per row": ours}
    for per_processor in (1, 2, 3, 4):
        for block, warps in ((4096, 8), (8192, 16), (8192, 8)):
            name = f"{per_processor} per processor, {block} × {warps}"
            sides[name] = functools.partial(
                few_programs, factor=1.0, programs=per_processor * processors, block=block,
                warps=warps,
            )  # fmt: skip
    expected = logits.clone()
    losses = ours(expected, labels)
    for name, side in sides.items():
        made = logits.clone()
        torch.testing.assert_close(side(made, labels), losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(made, expected, rtol=1e-2, atol=1e-6, msg=name)
        del made
    work = logits.clone()  # gradients of gradients: the work is the same

    def several(side: functools.partial[Tensor]) -> None:
        for _ in range(CALLS):
            side(work, labels)

    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(1e3 * timed(functools.partial(several, side), CUDA) / CALLS)
    base = statistics.median(times["one per row"])
    for name, each in times.items():
        ms = statistics.median(each)
        facts = {"rows": rows, "programs": name, "ms": round(ms, 4), "ratio": round(ms / base, 4)}
        facts["ms_low_high"] = [round(f(each), 4) for f in (min, max)]
        report("softmax grid", facts | {"device": device_name(CUDA), "torch": torch.__version__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for rows in (8 * 512, 16384):
        compare(rows, options.rounds)


if __name__ == "__main__":
    main()

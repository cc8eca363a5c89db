"""Time a captured step, and profile it by kind of kernel; CUDA only.

python benchmarks/where_time_goes.py [--case bert] [--freeze query,key] [--batch 256] [--top 20]
"""

import argparse
import statistics
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

import frostlab as fl
from common import device_name, report, timed
from frostlab.training.step.objective import Objective
from kinds import CASES, CUDA, prepare, take

STEPS = 5
KINDS = {
    "compiled elementwise and sums": ("triton_",),
    "convolutions": ("conv", "fprop", "wgrad", "dgrad", "cnn", "_correlate"),
    "matmul": ("nvjet", "gemm", "splitkreduce"),
    "attention": ("sdpa", "cudnn", "flash", "_attend"),
    "norms, sums and GELU": ("_norm_", "_sum_", "_gelu", "_add_shares"),
    "gradients of embeddings": ("_rank_ids", "_add_segments", "_add_parts", "radix", "embedding"),
    "optimizer": ("fusedopt", "fusedadam", "_adamw", "_count_steps"),
    "norm of the gradient": ("lpnorm", "tensorlistmetadata", "_squares", "_clipping"),
    "copies": ("memcpy", "memset"),
    "softmax of the head": ("_rows",),
}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="bert")
    parser.add_argument("--freeze", default="")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--top", type=int, default=0)
    options = parser.parse_args()
    build, draw, (batch, length) = CASES[options.case]
    inputs = draw(options.batch or batch, length)

    def objective() -> Objective:
        built = build()
        if options.freeze:
            fl.freeze(built.model, *options.freeze.split(","))
        return built

    step = prepare(objective, inputs)
    rounds = sorted(timed(lambda: take(step, inputs, 20), CUDA) / 20 for _ in range(9))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        take(step, inputs, STEPS)
    spent, count = Counter[str](), Counter[str]()
    kernels = [kernel for kernel in profiler.key_averages() if kernel.device_time_total]
    kernels.sort(key=lambda kernel: -kernel.device_time_total)
    for kernel in kernels:
        spent[kind_of(kernel.key)] += kernel.device_time_total / STEPS / 1e3
        count[kind_of(kernel.key)] += kernel.count // STEPS
    for kernel in kernels[: options.top]:
        print(f"{kernel.device_time_total / STEPS / 1e3:8.3f} ms {kernel.count // STEPS:4} × "
              f"{kernel.key[:100]}")  # fmt: skip
    facts = {
        "case": options.case,
        "batch": options.batch or batch,
        "freeze": options.freeze,
        "became": step.kind,
        "step_ms": [round(1e3 * f(rounds), 3) for f in (statistics.median, min, max)],
        "ms": {kind: round(value, 3) for kind, value in spent.most_common()},
        "kernels": dict(count),
        "sum_ms": round(sum(spent.values()), 3),
    }
    report("kernels", facts | {"device": device_name(CUDA), "torch": torch.__version__})


if __name__ == "__main__":
    main()

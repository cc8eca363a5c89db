"""Time captured steps with and without a process group whose all-reduce is in the graph; CUDA only.

The group is NCCL's, of one process: this is what flattening the gradients and recording the
all-reduce cost, without communication. `ratio` is the time in the group over the time without, of
the same round. `nccl_kernels` are NCCL's kernels in a replay; for the sum of one process it needs
none.

    python benchmarks/process_group.py [--rounds 20] [--case bert]
"""

import argparse
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from common import interleaved, report
from frostlab.recipe.settings import Optim, Train
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute, World
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep
from kinds import CASES, CUDA, take

STEPS_PER_ROUND = 20


def prepare(case: str, batch: Batch, world: World) -> EagerStep:
    torch.manual_seed(0)
    objective = CASES[case][0]().to(CUDA).train()
    step = build_step(
        objective, Optim(), Train(step="captured"), Compute(CUDA, torch.bfloat16, world), steps=1
    )
    take(step, batch, 6)
    assert step.kind == "captured", step.reason
    return step


def nccl_kernels(step: EagerStep, batch: Batch) -> list[str]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        take(step, batch, 1)
    names = {event.key for event in profiled.key_averages()}
    return sorted(name for name in names if "nccl" in name.lower() or "onerank" in name.lower())


def compare(case: str, rounds: int) -> None:
    _, draw, shape = CASES[case]
    batch = draw(*shape)
    alone, grouped = (prepare(case, batch, World(nccl=nccl)) for nccl in (False, True))
    sides = (functools.partial(take, step, batch, STEPS_PER_ROUND) for step in (grouped, alone))
    result: dict[str, Any] = interleaved(*sides, rounds, CUDA)
    for key in ("ours_ms", "theirs_ms"):
        result[key] = round(result[key] / STEPS_PER_ROUND, 4)
    parameters = sum(p.numel() for p in grouped.parameters)
    facts = {"case": case, "shape": shape, "ours": "in a group", "theirs": "without a group",
             "parameters": parameters, "nccl_kernels": nccl_kernels(grouped, batch)}  # fmt: skip
    report("process_group", facts | result)
    for step in (grouped, alone):
        step.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA)
    for case in options.case or ["bert", "gpt language 8", "gpt language 64"]:
        compare(case, options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

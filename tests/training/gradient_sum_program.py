"""What two processes do in test_gradient_sum: sum gradients without DDP, and agree with DDP."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import frostlab as fl
from frostlab.recipe.settings import Optim
from frostlab.training.batches.batch import Batch, collate, epoch_order, micro_batches
from frostlab.training.distributed import Compute, GradientSum, World, wrap_model
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import build_optimizer
from packed import PAD, classifies, exactly, tokens

CPU = torch.device("cpu")
Steps = list[tuple[list[Batch], int]]  # micro-batches, and the targets of all processes


def steps_of(name: str, rank: int, size: int) -> Steps:
    """An epoch of steps with two micro-batches each; the last step has fewer examples.

    All processes see new shapes at the same steps, as NCCL asks.
    """
    data = tokens(labels=classifies(name))
    made = []
    for rows in epoch_order(data.lengths, 16, 0, 0, bucket=False):
        scored = collate(data, rows, PAD, limit=32).scored
        parts = micro_batches(rows, rank, size, 2)
        made.append(([collate(data, part, PAD, width=32) for part in parts], scored))
    return made


def replayed(work: Callable[[], None]) -> Callable[[], None]:
    return work  # a stand-in for a CUDA graph: the work itself, done again


def take(kind: type[EagerStep], model: nn.Module, wrapped: Any, world: World, steps: Steps,
         **more: Any) -> list[float]:  # fmt: skip
    """Take the steps, and return this process's losses and the norms of all gradients."""
    optimizer = build_optimizer(model, Optim(decay=0.1), fused=True)
    if kind is CapturedStep:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        more["gradient_sum"] = GradientSum(wrapped, trained, world)
    step = kind(wrapped, optimizer, Compute(CPU, torch.float32, world), 0.5, **more)
    # the rate is exact in float32, in which graphs read it
    outcomes = [step(parts, scored, 2**-7) for parts, scored in steps * 2]
    if isinstance(step, CapturedStep):
        assert step.kind == "captured", step.reason
        assert step._graphs, "some steps were replayed"
        step.close()
        assert not step._graphs
    return torch.stack([outcome.values for outcome in outcomes]).flatten().tolist()


def compare(name: str, world: World) -> None:
    model = exactly(name).eval()  # no dropout
    fl.freeze(model, "query", "layers[0].key")
    model.register_parameter("unused", nn.Parameter(torch.ones(3, 3).double()))
    alone, averaged, summed = (copy.deepcopy(model) for _ in range(3))
    if world.rank == 1:
        with torch.no_grad():  # the weights and buffers of rank 0 are taken
            for tensor in (*summed.parameters(), *averaged.parameters()):
                tensor += 1.0
    one = take(EagerStep, alone, Objective(alone), World(), steps_of(name, 0, 1))
    mine = steps_of(name, world.rank, world.size)
    ddp = wrap_model(Objective(averaged), world, "ddp", unused=True)
    two = take(EagerStep, averaged, ddp, world, mine)
    ours = take(CapturedStep, summed, Objective(summed), world, mine, compiles=False,
                record=replayed)  # fmt: skip
    np.testing.assert_allclose(ours, two, rtol=1e-6, atol=1e-7)  # values in float32
    norms = [values[1::3] for values in (ours, one)]
    np.testing.assert_allclose(*norms, rtol=1e-6)
    moved = 0.0
    for (n, p), q, r, s in zip(
        summed.named_parameters(), averaged.parameters(), alone.parameters(), model.parameters(),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10, msg=lambda text, n=n: f"{n}: {text}")
        torch.testing.assert_close(p, r, rtol=0, atol=1e-10, msg=lambda text, n=n: f"{n}: {text}")
        moved = max(moved, float((p - s).detach().abs().max()))
    assert moved > 1e-3
    assert torch.equal(summed.get_parameter("unused"), model.get_parameter("unused"))


def different_gradients(world: World) -> None:
    model = nn.Linear(2, 2)
    parameters = list(model.parameters())
    gradient_sum = GradientSum(model, parameters, world)
    rows = torch.arange(4.0).view(2, 2) + 10 * world.rank
    pieces = [row.bfloat16() for row in rows.t()]  # not contiguous in the weight
    gradients: list[list[torch.Tensor]] = [pieces, [torch.arange(2.0) + world.rank]]
    gradient_sum(gradients)
    assert [piece.dtype for piece in pieces] == [torch.bfloat16] * 2
    found = [piece.tolist() for pieces in gradients for piece in pieces]
    assert found == [[10.0, 14.0], [12.0, 16.0], [1.0, 3.0]]
    with pytest.raises(fl.FrostlabError, match="gradients of other parameters than earlier steps"):
        gradient_sum([[], gradients[1]])
    gradient_sum.reset()
    with pytest.raises(fl.FrostlabError, match="processes have gradients of different parameters"):
        gradient_sum([[] if world.rank else gradients[0], gradients[1]])


def one_cannot_record(world: World) -> None:
    """If one process cannot record a graph, no process replays one."""

    def record(work: Callable[[], None]) -> Callable[[], None]:
        if world.rank:
            raise RuntimeError("no graph here")
        return work

    model = exactly("gpt").eval()
    optimizer = build_optimizer(model, Optim(), fused=True)
    objective = Objective(model)
    step = CapturedStep(
        objective, optimizer, Compute(CPU, torch.float32, world), None, compiles=False,
        record=record, gradient_sum=GradientSum(objective, list(model.parameters()), world),
    )  # fmt: skip
    for parts, scored in steps_of("gpt", world.rank, world.size) * 2:
        step(parts, scored, 2**-7)
    expected = "no graph here" if world.rank else "another process failed"
    assert (step.kind, step.reason) == ("eager", f"capturing failed: {expected}")
    assert not step._graphs


def thawed_between_steps(world: World) -> None:
    """A weight that learns from now on takes part in the sum."""
    model = exactly("gpt").eval()
    fl.freeze(model, "layers[0].up.weight")
    (frozen,) = (p for p in model.parameters() if not p.requires_grad)
    optimizer = build_optimizer(model, Optim(), fused=True)
    optimizer.add_param_group({"params": [frozen]})
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    objective = Objective(model)
    step = CapturedStep(
        objective, optimizer, Compute(CPU, torch.float32, world), None, compiles=False,
        record=replayed, gradient_sum=GradientSum(objective, trained, world),
    )  # fmt: skip
    first, *others = steps_of("gpt", world.rank, world.size)
    step(*first, 2**-7)
    before = frozen.detach().clone()
    frozen.requires_grad_(True)
    for parts, scored in others:
        step(parts, scored, 2**-7)
    assert not torch.equal(frozen, before)
    assert world.same(float(frozen.detach().sum())), "all processes have the same weights"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), dist.get_world_size())
    for name in ("gpt classifier", "gpt2"):
        compare(name, world)
    different_gradients(world)
    one_cannot_record(world)
    thawed_between_steps(world)
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main()

"""What two processes do in test_distributed: compiled steps that give the weights of eager ones."""

import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import frostlab as fl
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.training.batches.batch import Batch, collate, epoch_order, micro_batches
from frostlab.training.distributed import Compute, World
from frostlab.training.step import build_step
from frostlab.training.step.compiled import shape_key
from frostlab.training.step.objective import Objective
from packed import PAD, exactly, tokens

CPU, NAME = torch.device("cpu"), "gpt classifier"
Steps = list[tuple[list[Batch], int]]  # micro-batches, and the targets of all processes


def steps_of(rank: int, size: int) -> Steps:
    """Steps of few widths, which the processes meet at different steps."""
    data = tokens(labels=True)
    made = []
    for rows in epoch_order(data.lengths, 8, 0, 0, bucket=False):
        parts = micro_batches(rows, rank, size, 2)
        widths = [16 if data.lengths[part].max() <= 16 else 32 for part in parts]
        batches = [collate(data, p, PAD, width=w) for p, w in zip(parts, widths, strict=True)]
        made.append((batches, len(rows)))
    return made


def train(model: nn.Module, kind: StepKind, world: World, steps: Steps) -> torch.Tensor:
    """Take the steps; return the outcomes, whose losses are those of this process."""
    settings = Train(step=kind)
    step = build_step(Objective(model), Optim(decay=0.1), settings,
                      Compute(CPU, torch.float32, world), steps=9, unused=True)  # fmt: skip
    outcomes = []
    for parts, scored in steps:
        if kind == "compiled":
            step._try_compiling(parts, scored)  # type: ignore[attr-defined]
            graphs = counters["stats"]["unique_graphs"]
        outcomes.append(step(parts, scored, 1e-2).values)
        if kind == "compiled":
            assert counters["stats"]["unique_graphs"] == graphs > 0, "compiled in the dry run only"
    assert step.kind == kind, step.reason
    return torch.stack(outcomes)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), dist.get_world_size())
    mine = steps_of(world.rank, world.size)
    firsts = [shape_key(parts) for parts, _ in mine]
    all_firsts: list[list[object]] = [[], []]
    dist.all_gather_object(all_firsts, [firsts.index(key) for key in firsts])
    assert all_firsts[0] != all_firsts[1], "the processes compile at different steps"
    model = exactly(NAME).eval()  # no dropout
    fl.freeze(model, "query")
    model.register_parameter("unused", nn.Parameter(torch.ones(3, 3).double()))
    alone, eager, compiled = (copy.deepcopy(model) for _ in range(3))
    one = train(alone, "eager", World(), steps_of(0, 1))
    two = train(eager, "eager", world, mine)
    found = train(compiled, "compiled", world, mine)
    np.testing.assert_allclose(found, two, rtol=1e-6, atol=1e-7)  # outcomes are float32
    np.testing.assert_allclose(found[:, 1], one[:, 1], rtol=1e-6)  # norms
    for (name, p), q, r in zip(
        compiled.named_parameters(), eager.parameters(), alone.parameters(), strict=True
    ):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10, msg=lambda t, n=name: f"{n}: {t}")
        torch.testing.assert_close(p, r, rtol=0, atol=1e-10, msg=lambda t, n=name: f"{n}: {t}")
    moved = compiled.get_parameter("head.weight") - model.get_parameter("head.weight")
    assert float(moved.detach().abs().max()) > 1e-3
    dist.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main()

"""What two processes do in test_distributed: watch under DDP and FSDP2, and agree with one."""

import copy
import gc
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import frostlab as fl
from flowing import adamw, batch, tiny_gpt
from zoo import Inputs, build, loss_of


def train(model: nn.Module, inputs: Inputs, share: slice) -> fl.Flow:
    optimizer = adamw(model, lr=1e-2)
    with fl.watch(model, optimizer, every_n_steps=1, distance=True, gradient_cosine=True) as flow:
        for step in range(3):
            if not inputs:
                ids, classes = batch(step)
                F.cross_entropy(model(ids[share]), classes[share]).backward()
            else:
                loss_of(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flow


def check(found: fl.Flow, expected: fl.Flow) -> None:
    assert found.parts == expected.parts
    for mine, theirs in zip(found.reports, expected.reports, strict=True):
        for quantity, values in theirs.values.items():
            tolerance = 1e-3 if quantity != "gradient_cosine" else 0.02
            torch.testing.assert_close(
                torch.tensor(mine.values[quantity]), torch.tensor(values),
                rtol=tolerance, equal_nan=True,
                atol=1e-5 if quantity != "gradient_cosine" else 0.02,
                msg=lambda text, q=quantity: f"{q}: {text}",
            )  # fmt: skip
        for end, size in theirs.largest.items():
            assert math.isnan(size) or abs(mine.largest[end] - size) <= 1e-3 * size, end
        for tensor, spread in theirs.ranges.items():
            assert abs(mine.ranges[tensor] - spread) <= 1e-3 * spread + 1e-6, tensor
    assert not found.frozen_by_accident()
    assert not found.moved


def compare(name: str, layers: str) -> None:
    """One model in one process, in two with copies of it, and sharded."""
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    model, inputs = (tiny_gpt(layers=2), {}) if name == "gpt" else build(name)
    fl.freeze(model, "layers[0].query")
    alone = train(copy.deepcopy(model), inputs, slice(0, 8))
    if name == "gpt":
        copied = DistributedDataParallel(copy.deepcopy(model))
        check(train(copied, inputs, mine), alone)
    for block in getattr(model, layers):
        fully_shard(block)
    fully_shard(model)
    check(train(model, inputs, mine), alone)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, layers in (("gpt", "blocks"), ("gpt2", "h"), ("gpt_neox", "layers")):
        compare(name, layers)
    gc.collect()  # what shares its weights goes before the group does
    dist.barrier()
    dist.destroy_process_group()
    print("fine", flush=True)

"""The program of test_distributed: two processes train frozen models under DDP and FSDP2."""

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import frostlab as fl
from zoo import build, loss_of


def step(model: torch.nn.Module, inputs: dict, steps: int = 5) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()


def refused(call: object) -> bool:
    try:
        call()  # type: ignore[operator]
    except fl.BadInput as error:
        return "before wrapping" in str(error)
    return False


def full(state: dict) -> dict:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def main(name: str) -> None:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    model, inputs = build(name)
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key")
    start = copy.deepcopy(model.state_dict())

    alone = copy.deepcopy(model)
    step(alone, inputs)

    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    proof = fl.audit(ddp)
    assert refused(lambda: fl.freeze(ddp, "key"))
    step(ddp, inputs)
    proof.verify(ddp)
    assert fl.anatomy(ddp).count("frozen") == fl.anatomy(alone).count("frozen")
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(ddp.module.state_dict()[key], value, rtol=1e-4, atol=1e-4)

    sharded = copy.deepcopy(model)
    for layer in sharded.h if name == "gpt2" else sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert refused(lambda: fl.thaw(sharded))
    proof.verify(sharded)
    step(sharded, inputs)
    proof.verify(sharded)
    state = sharded.state_dict()
    assert set(state) == set(start), "checkpoints keep the canonical names"
    assert all(isinstance(v, DTensor) for k, v in state.items() if k.endswith("weight"))
    trained = full(state)
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-4)
    plain, _ = build(name)
    plain.load_state_dict(trained)  # a sharded checkpoint loads into an untouched model

    other, _ = build(name)
    fl.freeze(other, "query", "key")
    for layer in other.h if name == "gpt2" else other.layers:
        fully_shard(layer)
    fully_shard(other)
    other.load_state_dict(state)  # and back into a frozen, sharded one
    for key, value in full(other.state_dict()).items():
        assert torch.equal(value, trained[key]), key
    dist.destroy_process_group()
    print("fine", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""Learning rates follow their schedules; bf16 copies give the gradients of autocast."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

import frostlab as fl
from frostlab.recipe.settings import Optim, StepDecay
from frostlab.training.batches.batch import Batch, collate
from frostlab.training.distributed import Compute
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import Bf16Copies, rate_at, warmup_steps
from packed import MODELS, PAD, build, classifies, tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (7, 0), (50, 49), (1, 0)])
def test_schedules_follow_transformers(schedule: str, steps: int, warmup: int) -> None:
    """Ours is theirs, one step ahead in the warm-up: no step has rate 0."""
    optim = Optim(lr=0.5, warmup=float(warmup), schedule=schedule)  # type: ignore[arg-type]
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = (
        get_linear_schedule_with_warmup if schedule == "linear" else get_cosine_schedule_with_warmup
    )(made, warmup, steps)
    for step in range(steps):
        expected = theirs.get_last_lr()[0]
        if step < warmup:
            expected += 0.5 / warmup
        assert rate_at(step, steps, optim) == pytest.approx(expected, abs=1e-12)
        made.step()
        theirs.step()


def test_constant_and_step_decay() -> None:
    constant = Optim(lr=1.0, warmup=2.0, schedule="constant")
    assert [rate_at(s, 5, constant) for s in range(5)] == [0.5, 1, 1, 1, 1]
    stepped = Optim(lr=1.0, warmup=0.0, schedule=StepDecay(every=2, factor=0.5))
    assert [rate_at(s, 6, stepped) for s in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_warm_up_is_a_share_or_steps() -> None:
    assert warmup_steps(1000, Optim(warmup=0.1)) == 100
    assert warmup_steps(1000, Optim(warmup=30)) == 30
    assert warmup_steps(1000, Optim(warmup=0.0)) == 0
    assert warmup_steps(1000, Optim(warmup=1)) == 1


def batch(name: str) -> Batch:
    return collate(tokens(labels=classifies(name)), np.arange(8), PAD)


def step_with(model: nn.Module, copies: Bf16Copies | None) -> EagerStep:
    optimizer = torch.optim.AdamW(model.parameters())
    return EagerStep(Objective(model), optimizer, Compute(CPU, torch.bfloat16), None, copies=copies)


def all_gradients(step: EagerStep, parts: list[Batch]) -> dict[str, Tensor]:
    step.optimizer.zero_grad()
    step.gradients(parts, sum(part.scored for part in parts))
    named = ((name, step._gradient(p)) for name, p in step.objective.named_parameters())
    found = {name: gradient.float() for name, gradient in named if gradient is not None}
    if step.copies is not None:
        step.copies.clear()
    return found


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autocast_to_the_bit(name: str, frozen: bool) -> None:
    model = build(name).eval()
    if frozen:
        fl.freeze(model, "query", "key")
    copies = Bf16Copies(model)
    assert copies
    wanted = all_gradients(step_with(model, None), [batch(name)])
    found = all_gradients(step_with(model, copies), [batch(name)])
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert torch.equal(found[key], gradient), key


def test_what_is_copied() -> None:
    """Linear maps of layers; not what is tied, watched, in half precision, or outside of them."""
    model: Any = build("gpt")
    names = {id(p): name for name, p in model.named_parameters()}
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient)
    model.blocks[1].down.weight = model.blocks[0].down.weight
    model.blocks[1].out.bfloat16()
    copied = {names[id(entry.parameter)] for entry in Bf16Copies(model)._entries}
    layer = {
        f"{part}.{kind}" for part in ("qkv", "out", "up", "down") for kind in ("weight", "bias")
    }
    expected = {f"blocks.{i}.{name}" for i in range(2) for name in layer}
    left_out = {"blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.down.weight",
                "blocks.1.out.weight", "blocks.1.out.bias"}  # fmt: skip
    assert copied == expected - left_out
    assert not Bf16Copies(nn.Sequential(nn.Linear(2, 2)))  # a model that is not known


def test_copies_follow_their_weights() -> None:
    model: Any = build("gpt classifier")
    copies, up = Bf16Copies(model), model.blocks[0].up
    up.requires_grad_(False)
    with torch.no_grad():
        whole = up.weight.add_(1.0).clone()
    with copies.in_place():
        assert up.weight.dtype == torch.bfloat16
        assert not up.weight.requires_grad
        assert torch.equal(up.weight, whole.bfloat16())
    up.requires_grad_(True)
    model.load_state_dict(build("gpt classifier", seed=1).state_dict())
    copies.refresh()
    copy = copies.of(up.weight)
    assert copy is not None
    assert copy.requires_grad
    assert torch.equal(copy, up.weight.bfloat16())


def test_a_model_is_whole_again_whatever_happens() -> None:
    model = build("bert classifier")
    before = dict(model.named_parameters())

    def fail() -> None:
        with Bf16Copies(model).in_place():
            assert any(p.dtype == torch.bfloat16 for p in model.parameters())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(p is before[name] for name, p in model.named_parameters())


def test_several_parts_are_added_up_in_float32() -> None:
    model = build("gpt classifier").eval()
    parts = [collate(tokens(labels=True), rows, PAD) for rows in np.arange(8).reshape(2, 4)]
    step = step_with(model, Bf16Copies(model))
    step.gradients(parts, 8)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())

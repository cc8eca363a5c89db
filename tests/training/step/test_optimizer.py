"""Learning rates follow their schedules; bf16 copies give the gradients of autocast."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

import adamw_stand_ins
import frostlab as fl
from frostlab.models.fused.joined_linear import stacked
from frostlab.recipe.settings import Optim, StepDecay
from frostlab.surgery.split import SplitProjection
from frostlab.training.batches.batch import Batch, collate
from frostlab.training.distributed import Compute
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import (
    Bf16Copies,
    _allocate_side_by_side,
    build_optimizer,
    rate_at,
    warmup_steps,
)
from packed import MODELS, PAD, build, classifies, tokens

CPU = torch.device("cpu")
HALF = torch.bfloat16


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


@pytest.mark.parametrize(
    "frozen", [(), ("query", "key"), ("key",), ("query",), ("query.bias", "key"), ("value.weight",)]
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autocast_to_the_bit(name: str, frozen: tuple[str, ...]) -> None:
    model = build(name).eval()
    if "query.bias" in frozen and name.startswith(("llama", "decoder")):
        pytest.skip("it has no biases")
    if frozen:
        fl.freeze(model, *frozen)
    copies = Bf16Copies(model)
    assert copies
    split = [module for module in model.modules() if isinstance(module, SplitProjection)]
    copied = {id(entry.parameter) for entry in copies._entries}
    if not name.startswith("gpt2"):  # whose weights are (in, out): their rows are not contiguous
        assert all(id(p) in copied for module in split for p in module.parameters())
    wanted = all_gradients(step_with(model, None), [batch(name)])
    found = all_gradients(step_with(model, copies), [batch(name)])
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert torch.equal(found[key], gradient), key


def test_what_is_copied() -> None:
    """Linear maps of layers, but not what is tied, watched or in half precision; and the head."""
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
    assert copied == (expected - left_out) | {"tokens.weight"}, "the head, which is tied"
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
    (copy,) = (entry for entry in copies._entries if entry.parameter is up.weight)
    assert copy.leaf is not None
    assert copy.leaf.requires_grad
    assert torch.equal(copy.values, up.weight.bfloat16())


@pytest.mark.parametrize("frozen", [(), ("key",), ("value",), ("query", "value")])
@pytest.mark.parametrize("name", ["bert classifier", "llama"])
def test_copies_of_maps_in_one_module_lie_side_by_side(name: str, frozen: tuple[str, ...]) -> None:
    """In the order of a joined product: frozen ones first, and then as the module has them."""
    model = build(name)
    if frozen:
        fl.freeze(model, *frozen)
    whole = {n: p.detach().clone() for n, p in model.named_parameters()}
    seen = 0
    with Bf16Copies(model).in_place():
        for module in model.modules():
            maps = [m for m in module.children() if type(m) is nn.Linear and m.weight.dtype == HALF]
            same = [m for m in maps if m.in_features == maps[0].in_features]
            same.sort(key=lambda m: m.weight.requires_grad)
            for tensors in ([m.weight for m in same], [m.bias for m in same if m.bias is not None]):
                if len(tensors) > 1:
                    assert stacked(tensors).data_ptr() == tensors[0].data_ptr()
                    seen += 1
        for n, p in model.named_parameters():
            assert torch.equal(p, whole[n].to(p.dtype)), n
    layers = 2
    assert seen == layers * 2  # weights and biases of BERT's attention; Llama's attention and gate


def test_copies_of_odd_sizes_begin_where_the_kernel_may_use_wide_loads() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = nn.ModuleList(nn.Linear(5, rows) for rows in (3, 8, 7))

    model = Odd()
    maps = [(linear, ["weight", "bias"]) for linear in model.maps]
    found = _allocate_side_by_side(model, maps)
    for p in model.parameters():
        assert found[id(p)].shape == p.shape
        assert found[id(p)].is_contiguous()
        assert found[id(p)].data_ptr() % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 2
    for linear in model.maps:
        found[id(linear.weight)].copy_(linear.weight.detach())
    for linear in model.maps:  # none lies on another
        assert torch.equal(found[id(linear.weight)], linear.weight.bfloat16())


@pytest.mark.parametrize("frozen", [("key",), ("query",), ("query", "key")])
def test_a_fused_copy_has_the_rows_of_its_parts(frozen: tuple[str, ...]) -> None:
    """Trainable and frozen rows, also after they change; gradients only of the trainable ones."""
    whole, model = build("gpt classifier"), build("gpt classifier")
    fl.freeze(model, *frozen)
    copies = Bf16Copies(model)
    for weights in (whole, build("gpt classifier", seed=1)):
        state = weights.state_dict()
        model.load_state_dict(state)
        with copies.in_place():
            for i, block in enumerate(model.blocks):  # type: ignore[arg-type,union-attr]
                for local, fused in block.qkv.kept.items():  # type: ignore[union-attr]
                    assert torch.equal(fused, state[f"blocks.{i}.qkv.{local}"].bfloat16())
    step = step_with(model, copies)
    step.gradients([batch("gpt classifier")], 8)
    total, clip, broken = step._measure()
    gradients = [g.float() for p in model.parameters() if (g := step._gradient(p)) is not None]
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    assert [g.shape for g in gradients] == shapes
    expected = torch.stack([g.norm() for g in gradients]).norm()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0.0)
    assert (float(clip), int(broken)) == (1.0, -1)


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


@pytest.fixture(params=[adamw_stand_ins.use, adamw_stand_ins.interpret], ids=["torch", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels of AdamW on the CPU."""
    made: ModuleType = request.param(monkeypatch)
    return made


@pytest.mark.parametrize("name", ["gpt classifier", "gpt"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("frozen", [(), ("key",), ("query",), ("query", "key"), ("query.bias",)])
def test_the_kernels_table_has_every_stretch_once(
    frozen: tuple[str, ...], parts: int, name: str, kernels: ModuleType
) -> None:
    """Clipped steps are torch's, and copies follow; also of split rows."""
    rounding = 2.0**-7 if hasattr(kernels, "_adamw") else 0.0  # the interpreter cuts bits off
    model, twin = (build(name).eval() for _ in range(2))
    for each in (model, twin):
        if frozen:
            fl.freeze(each, *frozen)
    optim, copies = Optim(lr=1e-2, decay=0.1), Bf16Copies(model)
    ours = build_optimizer(model, optim, True, copies=copies)
    theirs = build_optimizer(twin, optim, True)
    step = EagerStep(Objective(model), ours, Compute(CPU, torch.bfloat16), 0.5, copies=copies)
    rows = np.arange(8).reshape(parts, -1)
    batches = [collate(tokens(labels=classifies(name)), row, PAD) for row in rows]
    for _ in range(3):
        step.gradients(batches, 8)
        for p, other in zip(model.parameters(), twin.parameters(), strict=True):
            gradient = step._gradient(p)
            other.grad = None if gradient is None else gradient.float().clone()
        norm, factor, broken = step._measure()
        learning = [p for p in twin.parameters() if p.grad is not None]
        expected = torch.nn.utils.clip_grad_norm_(learning, 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(factor, (0.5 / expected).clamp(max=1.0), rtol=1e-5, atol=0.0)
        assert float(broken) == -1.0
        assert len({id(p) for p in step.reached}) == len(learning)
        step._update(factor, broken)
        theirs.step()
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        for entry in copies._entries:
            rounded = entry.parameter.bfloat16()
            torch.testing.assert_close(entry.values, rounded, rtol=rounding, atol=0.0)
        for p, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, other, rtol=1e-5, atol=1e-6)
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    assert all(float(state["step"]) == 3 for state in ours.state.values())


def test_the_optimizer_of_captured_steps_imports_no_compiler() -> None:
    """Importing torch's compiler takes a second or more of every run that does not compile."""
    program = """
import sys, torch
from frostlab.training.step.compiled import uncompiled
from frostlab.training.step.head_loss import head_loss
from frostlab.training.step.optimizer import Bf16Copies, KernelAdamW
from frostlab.models.gpt import GPT, GPTConfig
model = GPT(GPTConfig(20, width=8, layers=1, heads=2, hidden=16))
optimizer = KernelAdamW([{"params": list(model.parameters())}], Bf16Copies(model), lr=0.1)
with uncompiled():
    hidden = torch.ones(3, 8, requires_grad=True)
    head_loss(hidden, model.head.weight, torch.ones(3, dtype=torch.long))[0].backward()
assert model.head.weight.grad is not None
optimizer.zero_grad()
assert model.head.weight.grad is None
print(len(optimizer.param_groups), [name for name in sys.modules if name == "torch._dynamo"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "[]"], done.stderr

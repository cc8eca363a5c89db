"""AdamW in one kernel is torch's, whatever it is given, and keeps copies in bf16."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import frostlab as fl
from frostlab.recipe.settings import Optim, Train
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import Bf16Copies, KernelAdamW, build_optimizer
from packed import build
from stepping import epochs, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
SIZES = [(7, 9), (16, 16), (5,), (64,), (3, 100), (300, 4096), (1,), (4097,)]


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList(torch.randn(*size) for size in SIZES)


def pair(shares: dict[str, float] | None = None) -> list[tuple[nn.Module, torch.optim.AdamW]]:
    made = []
    for ours in (True, False):
        model = Several().to(CUDA)
        optim = Optim(lr=1e-2, decay=0.1, betas=(0.9, 0.95))
        copies = Bf16Copies(model) if ours else None
        made.append((model, build_optimizer(model, optim, True, True, copies, shares)))
    return made


def give(sides: list[tuple[nn.Module, torch.optim.AdamW]], without: int | None = None) -> None:
    for i, size in enumerate(SIZES):
        gradient = torch.randn(*size, device=CUDA)
        for model, _ in sides:
            list(model.parameters())[i].grad = None if i == without else gradient.clone()


def assert_same(sides: list[tuple[nn.Module, torch.optim.AdamW]]) -> None:
    for one, other in zip(*(model.parameters() for model, _ in sides), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shares", [None, {"all.0": 0.1, "all.3": 0.1, "all.4": 0.5}])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_it_is_torchs(scale: float | None, shares: dict[str, float] | None) -> None:
    sides = pair(shares)
    assert isinstance(sides[0][1], KernelAdamW)
    for number in range(20):
        give(sides, without=2 if number < 5 else None)  # one begins to learn later
        for _, optimizer in sides:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(1e-2 * group["lr_scale"], device=CUDA)
            fused: Any = optimizer
            fused.grad_scale = None if scale is None else torch.tensor(scale, device=CUDA)
            fused.found_inf = torch.tensor(float(number == 7), device=CUDA)
            optimizer.step()
        assert_same(sides)
    ours, theirs = (optimizer.state_dict()["state"] for _, optimizer in sides)
    assert ours.keys() == theirs.keys()
    for number, state in ours.items():
        assert state.keys() == theirs[number].keys()
        for key in state:
            torch.testing.assert_close(state[key], theirs[number][key], rtol=1e-6, atol=1e-7)


def test_its_state_is_torchs() -> None:
    sides = pair()
    give(sides)
    sides[1][1].step()
    sides[0][1].load_state_dict(copy.deepcopy(sides[1][1].state_dict()))
    sides[0][0].load_state_dict(sides[1][0].state_dict())
    for _ in range(3):
        give(sides)
        for _, optimizer in sides:
            optimizer.step()
    assert_same(sides)


@pytest.mark.parametrize(
    ("name", "freeze"),
    [
        ("gpt classifier", ""),
        ("gpt classifier", "key"),
        ("gpt classifier", "query"),
        ("gpt classifier", "query,key"),
        ("gpt", "key"),
        ("bert classifier", ""),
        ("gpt2", ""),
        ("gpt2", "key"),
        ("llama", ""),
    ],
)
def test_steps_with_copies_are_steps_without(name: str, freeze: str) -> None:
    steps, losses = epochs(name, 60, packed=True), []
    for ours in (True, False):
        model = build(name).to(CUDA).eval()
        if freeze:
            fl.freeze(model, *freeze.split(","))
        if ours:
            step: EagerStep = build_step(
                Objective(model), Optim(lr=1e-3), Train(step="eager"),
                Compute(CUDA, torch.bfloat16), steps=60,
            )  # fmt: skip
            assert step.copies
        else:
            optimizer = build_optimizer(model, Optim(lr=1e-3), True)
            step = EagerStep(Objective(model), optimizer, Compute(CUDA, torch.bfloat16), 1.0)
        losses.append(train(step, steps))
        if ours:
            for entry in step.copies._entries:  # type: ignore[union-attr]
                assert torch.equal(entry.values, entry.parameter.bfloat16()), entry.name
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)


@pytest.mark.parametrize("captured", [False, True])
def test_weights_that_are_loaded_are_used(captured: bool) -> None:
    """A graph reads the copies: they must follow."""
    model = build("bert classifier").to(CUDA).eval()
    parts = epochs("bert classifier", 1, packed=True)[0]
    step = build_step(
        Objective(model), Optim(lr=1e-3), Train(step="captured" if captured else "eager"),
        Compute(CUDA, torch.bfloat16), steps=10,
    )  # fmt: skip
    first = [float(step(parts, parts[0].scored, 1e-2).loss) for _ in range(6)]
    assert step.kind == ("captured" if captured else "eager"), step.reason
    model.load_state_dict(build("bert classifier").state_dict())
    again = float(step(parts, parts[0].scored, 1e-2).loss)
    assert again == pytest.approx(first[0], rel=1e-2)
    assert abs(first[5] - first[0]) > 0.05


@pytest.mark.parametrize("stopped", [0.0, 1.0])
def test_it_says_what_it_moved(stopped: float) -> None:
    """Squared norms of weights before and of changes, of what has a gradient; whatever the form."""
    sides = pair()
    optimizer = sides[0][1]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    fused: Any = optimizer
    fused.sums = torch.zeros(len(held), 2, dtype=torch.float64, device=CUDA)
    fused.grad_scale, fused.found_inf = None, torch.tensor(stopped, device=CUDA)
    for number in range(3):
        give(sides, without=2)
        before = {id(p): p.detach().clone() for p in held}
        fused.measures = number != 1
        known = fused.sums.clone()
        optimizer.step()
        if number == 1:  # nobody asked
            assert fused.sums.equal(known)
            continue
        for row, p in zip(fused.sums, held, strict=True):
            was = before[id(p)]
            moved = (p.detach() - was).double().square().sum()
            wanted = torch.stack([was.double().square().sum(), moved])
            wanted = torch.zeros_like(wanted) if p.grad is None or stopped else wanted
            torch.testing.assert_close(row, wanted, rtol=1e-5, atol=0.0)

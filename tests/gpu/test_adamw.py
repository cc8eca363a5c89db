"""AdamW in a few kernels is torch's, whatever it is given, and keeps copies in bf16."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import frostlab as fl
from frostlab.recipe.settings import Optim, Train
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.captured import _Recorder
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


@pytest.mark.parametrize("clip", [None, 1.0, 1e6])
def test_clipping_and_skipping_are_torchs(clip: float | None) -> None:
    """Norm, clip factor, counts and weights; a gradient that is not finite skips the step."""
    sides = pair()
    steps = [
        EagerStep(model, optimizer, Compute(CUDA, torch.float32), clip,
                  copies=getattr(optimizer, "copies", None))
        for model, optimizer in sides
    ]  # fmt: skip
    for number in range(8):
        give(sides, without=2 if number < 2 else None)
        broken = {3: ([5, 7], math.nan), 4: ([0], math.inf), 5: ([7], -math.inf)}.get(number)
        before = [p.detach().clone() for p in sides[0][0].parameters()]
        measured = []
        for step, (model, _) in zip(steps, sides, strict=True):
            parameters = list(model.parameters())
            for index in broken[0] if broken else []:
                gradient = parameters[index].grad
                assert gradient is not None
                gradient.view(-1)[-1] = broken[1]  # type: ignore[index]
            norm, factor, at = step._measure()
            step._update(factor, at)
            names = {id(p): i for i, p in enumerate(parameters)}
            first = -1 if at < 0 else names[id(step.reached[int(at)])]
            measured.append((float(norm), float(factor), first))
        (norm, factor, first), theirs = measured
        assert (norm, factor) == pytest.approx(theirs[:2], rel=2e-6, nan_ok=True)
        assert first == theirs[2] == (broken[0][0] if broken else -1)
        assert_same(sides)
        moved = [
            not torch.equal(p, b) for p, b in zip(sides[0][0].parameters(), before, strict=True)
        ]
        assert moved == [broken is None and (number > 1 or i != 2) for i in range(len(SIZES))]
    counts = [[float(o.state[p]["step"]) for p in m.parameters()] for m, o in sides]
    assert counts[0] == counts[1] == [5.0 if i != 2 else 3.0 for i in range(len(SIZES))]


@pytest.mark.parametrize("name", ["gpt classifier", "bert classifier"])
@pytest.mark.parametrize("freeze", ["", "key"])
def test_the_norm_of_bf16_gradients_is_torchs(name: str, freeze: str) -> None:
    model = build(name).to(CUDA).eval()
    if freeze:
        fl.freeze(model, freeze)
    step = build_step(
        Objective(model), Optim(clip=0.01), Train(step="eager"), Compute(CUDA, torch.bfloat16),
        steps=10,
    )  # fmt: skip
    parts = [part.to(CUDA) for part in epochs(name, 1, packed=True)[0]]
    step.gradients(parts, parts[0].scored)
    pieces = [gradient for p in step.parameters for gradient in step._gradients(p)]
    assert {gradient.dtype for gradient in pieces} == {torch.bfloat16, torch.float32}
    expected = torch.stack([gradient.double().norm() for gradient in pieces]).norm()
    norm, factor, broken = (float(value) for value in step._measure())
    assert norm == pytest.approx(float(expected), rel=1e-6)
    assert (factor, broken) == (pytest.approx(0.01 / (norm + 1e-6), rel=1e-6), -1.0)
    gradient = step._gradients(step.parameters[3])[-1]
    gradient.view(-1)[-1] = math.nan
    norm, factor, broken = (float(value) for value in step._measure())
    assert math.isnan(norm)
    assert step.reached[int(broken)] is step.parameters[3]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99999)])
def test_corrections_are_exact(betas: tuple[float, float]) -> None:
    from frostlab.training.step import adamw_kernels

    counts = torch.tensor([0.0, 1.0, 2.0, 10.0, 999.0, 12345.0, 1e6], device=CUDA)
    rows, before = len(counts), counts.clone()
    table = torch.zeros(rows, 9, dtype=torch.int64, device=CUDA)
    table[:, 5] = counts.data_ptr() + 4 * torch.arange(rows, device=CUDA)
    corrections = torch.zeros(rows, 2, device=CUDA)
    logs = [adamw_kernels._log(beta) for beta in betas]
    adamw_kernels._count_steps[(1,)](
        table, corrections, None, rows, log_beta1=logs[0], log_beta2=logs[1], stops=False,
        columns=9, wide=8,
    )  # fmt: skip
    assert torch.equal(counts, before + 1)
    wanted = torch.stack([(1 - beta ** counts.double()).float() for beta in betas], 1)
    torch.testing.assert_close(corrections, wanted, rtol=6e-8, atol=0.0)


def test_a_replay_is_an_eager_step_to_the_bit() -> None:
    """Also a step that is skipped, and the counts."""
    sides = [pair()[0] for _ in range(2)]
    held = [list(model.parameters()) for model, _ in sides]
    optimizers: list[Any] = [optimizer for _, optimizer in sides]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-2, device=CUDA)
    give(sides)
    outcomes = torch.zeros(2, 3, device=CUDA)

    def take(side: int) -> None:
        _, *values = optimizers[side].measure(0.5)
        optimizers[side].step()
        outcomes[side].copy_(torch.stack(values))

    for side in (0, 1):
        take(side)
    recorder = _Recorder(CUDA)
    replay = recorder(lambda: take(1))
    tables = optimizers[1].fill_address_tables()
    assert len(tables) == 1
    for number in range(6):
        for i, size in enumerate(SIZES):
            gradient = torch.randn(*size, device=CUDA)
            if (number, i) == (2, 5):
                gradient[7, 7] = math.nan
            for parameters in held:
                parameters[i].grad.copy_(gradient)  # type: ignore[union-attr]
        take(0)
        replay()
        torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0.0, atol=0.0, equal_nan=True)
        for one, other in zip(*held, strict=True):
            assert torch.equal(one, other)
            states = (optimizers[0].state[one], optimizers[1].state[other])
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(states[0][key], states[1][key]), key
    assert all(float(optimizers[1].state[p]["step"]) == 6 for p in held[1])

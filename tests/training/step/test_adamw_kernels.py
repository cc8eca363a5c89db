"""The kernels of AdamW against float64: norm, clipping, skipped steps, counts, recorded tables.

Triton interprets the kernels on the CPU; where it is not installed, stand-ins take their place.
"""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import adamw_stand_ins
from frostlab.training.step import optimizer as module
from frostlab.training.step.optimizer import KernelAdamW

SIZES = [(7, 9), (16, 32), (5,), (64,), (3, 100), (1,), (601,), (1024,)]
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
RATES = (1e-2, 3e-3)  # of the two groups


@pytest.fixture(params=[adamw_stand_ins.use, adamw_stand_ins.interpret], ids=["torch", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels of AdamW on the CPU."""
    made: ModuleType = request.param(monkeypatch)
    return made


class Pieces:
    """Gradients in stretches, bf16 for every other parameter, as `Bf16Copies` returns them."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[Tensor, Tensor | None]]] = {}

    def pieces(self, p: nn.Parameter) -> list[tuple[Tensor, Tensor | None]]:
        return self.of.get(id(p), [])

    def rows_of(self, p: nn.Parameter) -> int:
        return 2

    def clear(self) -> None:
        self.of.clear()

    def give(self, p: nn.Parameter, gradient: Tensor, half: bool, shifted: bool) -> None:
        """Give a gradient in one or two stretches, at an address that may not be a multiple."""
        if half:
            gradient = gradient.bfloat16()
        if shifted:
            gradient = torch.cat([gradient.flatten()[:1], gradient.flatten()])[1:]
        copy = torch.zeros(p.numel(), dtype=torch.bfloat16) if half else None
        middle = (p.numel() // 32) * 16
        if not middle:
            self.of[id(p)] = [(gradient.flatten(), copy)]
            return
        parts = [slice(0, middle), slice(middle, p.numel())]
        self.of[id(p)] = [
            (gradient.flatten()[part], None if copy is None else copy[part]) for part in parts
        ]


class Reference:
    """AdamW with clipping in float64; a step with a gradient that is not finite is skipped."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = [weight.detach().double().clone() for weight in weights]
        self.means = [torch.zeros_like(weight) for weight in self.weights]
        self.squares = [torch.zeros_like(weight) for weight in self.weights]
        self.counts = [0] * len(weights)

    def step(self, gradients: list[Tensor | None], clip: float | None) -> tuple[float, float]:
        """Take a step, and return the norm and the clip factor."""
        present = [g.double() for g in gradients if g is not None]
        norm = float(torch.cat([g.flatten() for g in present]).norm())
        if not math.isfinite(norm):
            return norm, math.nan
        factor = min(1.0, (clip or math.inf) / (norm + 1e-6))
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            g, p, m, v = gradient.double() * factor, self.weights[i], self.means[i], self.squares[i]
            self.counts[i] += 1
            rate = RATES[i % 2]
            p.mul_(1 - rate * DECAY)
            m.lerp_(g, 1 - BETAS[0])
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
            root = (v / (1 - BETAS[1] ** self.counts[i])).sqrt() + EPS
            p.sub_(rate / (1 - BETAS[0] ** self.counts[i]) * m / root)
        return norm, factor


def optimizer_of(weights: list[nn.Parameter]) -> KernelAdamW:
    """Two groups, whose rates are tensors as in captured steps."""
    groups = [
        {"params": weights[i::2], "lr": torch.tensor(rate), "weight_decay": DECAY}
        for i, rate in enumerate(RATES)
    ]
    return KernelAdamW(groups, Pieces(), betas=BETAS, eps=EPS, lr=0.0)


def draw(weights: list[nn.Parameter], optimizer: KernelAdamW, absent: int) -> list[Tensor | None]:
    """Give every parameter but one a gradient; return the gradients as the kernels see them."""
    pieces: Any = optimizer.copies
    drawn: list[Tensor | None] = [None] * len(weights)
    for i, p in enumerate(weights):
        if i != absent:
            pieces.give(p, torch.randn(p.shape), half=i % 4 > 1, shifted=i in (1, 3))
            drawn[i] = torch.cat([g for g, _ in pieces.pieces(p)]).float().view_as(p)
    return drawn


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("clip", [None, 0.5, 1e3])
def test_steps_equal_those_in_float64(clip: float | None) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer, reference = optimizer_of(weights), Reference(weights)
    pieces: Any = optimizer.copies
    for number in range(6):
        gradients = draw(weights, optimizer, absent=2 if number < 2 else -1)
        broken = {3: (4, math.nan), 4: (7, math.inf)}.get(number)
        if broken is not None:
            for at in (broken[0], 6):  # the last element of two parameters
                pieces.pieces(weights[at])[-1][0][-1] = broken[1]
                gradients[at].view(-1)[-1] = broken[1]
        before = [(p.detach().clone(), dict(optimizer.state[p])) for p in weights]
        with np.errstate(all="ignore"):
            reached, norm, factor, index = optimizer.measure(clip)
            optimizer.step()
        wanted = reference.step(gradients, clip)
        assert [id(p) for p in dict.fromkeys(reached)] == [
            id(p) for i in (0, 1) for p in weights[i::2] if optimizer.copies.pieces(p)
        ]
        assert float(norm) == pytest.approx(wanted[0], rel=1e-6, nan_ok=True)
        if broken is not None:
            # the first of the two in the order of groups
            assert reached[int(index)] is (weights[4] if broken[0] == 4 else weights[6])
            for p, (weight, state) in zip(weights, before, strict=True):
                assert torch.equal(p, weight)
                assert all(optimizer.state[p][key].equal(value) for key, value in state.items())
        else:
            assert float(index) == -1.0
            assert float(factor) == pytest.approx(wanted[1], rel=1e-6)
        for i, p in enumerate(weights):
            torch.testing.assert_close(p.double(), reference.weights[i], rtol=1e-5, atol=1e-6)
            if state := optimizer.state.get(p):
                assert float(state["step"]) == reference.counts[i]
                for key, moment in (
                    ("exp_avg", reference.means),
                    ("exp_avg_sq", reference.squares),
                ):
                    torch.testing.assert_close(state[key].double(), moment[i], rtol=1e-5, atol=1e-7)
        optimizer.zero_grad()


@pytest.mark.parametrize("kernels", [adamw_stand_ins.interpret], indirect=True, ids=["triton"])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.99999])
def test_corrections_are_exact(beta: float, kernels: Any) -> None:
    counts = torch.tensor([0.0, 1.0, 2.0, 10.0, 999.0, 12345.0, 1e6])
    rows, before = len(counts), counts.clone()
    table, corrections = torch.zeros(rows, 9, dtype=torch.int64), torch.zeros(rows, 2)
    table[:, 5] = counts.data_ptr() + 4 * torch.arange(rows)
    log = kernels._log(beta)
    kernels._count_steps[(1,)](
        table, corrections, None, rows, log_beta1=log, log_beta2=log, stops=False, columns=9,
        wide=8,
    )  # fmt: skip
    assert torch.equal(counts, before + 1)
    wanted = (1 - beta ** counts.double()).float()
    torch.testing.assert_close(corrections, wanted[:, None].expand(-1, 2), rtol=6e-8, atol=0.0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kernels", [adamw_stand_ins.interpret], indirect=True, ids=["triton"])
def test_weights_and_their_changes_are_measured() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = optimizer_of(weights)
    optimizer.sums, optimizer.measures = torch.ones(len(weights), 2, dtype=torch.float64), True
    draw(weights, optimizer, absent=2)
    before = [p.detach().double() for p in weights]
    optimizer.measure(0.5)
    optimizer.step()
    changes = [p.detach() - earlier for p, earlier in zip(weights, before, strict=True)]
    before[2].zero_()  # without a gradient, it is not measured
    sums = [[t.square().sum() for t in (before[i], changes[i])] for i in range(len(weights))]
    wanted = torch.tensor([sums[i] for first in (0, 1) for i in range(first, len(weights), 2)])
    torch.testing.assert_close(optimizer.sums, wanted, rtol=1e-4, atol=0.0, check_dtype=False)


def test_recorded_steps_read_the_tables_that_are_filled_later(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording calls the kernels later, when it is replayed, with the tables that it got."""
    recorded: list[Any] = []
    measure, update = kernels.measure_gradients, kernels.adamw_blocks

    def later_measure(*args: Any, **options: Any) -> Tensor:
        values = torch.zeros(5)
        recorded.append(lambda: values.copy_(measure(*args, **options)))
        return values

    def later_update(*args: Any, **options: Any) -> None:
        recorded.append(lambda: update(*args, **options))

    ends = []
    for replays in (False, True):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(size)) for size in SIZES]
        optimizer = optimizer_of(weights)
        for number in range(3):
            draw(weights, optimizer, absent=2)
            if number and replays:
                with monkeypatch.context() as patched:
                    patched.setattr(kernels, "measure_gradients", later_measure)
                    patched.setattr(kernels, "adamw_blocks", later_update)
                    patched.setattr(module, "captures_graphs", lambda device: True)
                    patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                    optimizer.measure(0.5)
                    optimizer.step()
                    assert len(optimizer._unfilled) == 1
                tables = optimizer.fill_address_tables()
                assert len(tables) == len(optimizer._spare_tables) == 1
                for kernel in recorded:
                    kernel()
                recorded.clear()
            else:
                optimizer.measure(0.5)
                optimizer.step()
            optimizer.zero_grad()
        ends.append(weights)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.usefixtures("kernels")
def test_a_count_that_was_loaded_is_moved_to_its_weight() -> None:
    weight = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of([weight, nn.Parameter(torch.ones(3))])
    draw([weight], optimizer, absent=-1)
    optimizer.step()
    optimizer.state[weight]["step"] = torch.tensor(5.0, dtype=torch.float64)
    optimizer.step()
    count = optimizer.state[weight]["step"]
    assert (float(count), count.dtype, count.ndim) == (6.0, torch.float32, 0)


@pytest.mark.usefixtures("kernels")
def test_a_step_takes_the_gradients_that_there_are() -> None:
    """Not those that were measured before `zero_grad`."""
    ends = []
    for measured in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(40))
        optimizer = optimizer_of([weight, nn.Parameter(torch.ones(3))])
        draw([weight], optimizer, absent=-1)
        if measured:
            optimizer.measure(None)
        optimizer.zero_grad()
        draw([weight], optimizer, absent=-1)
        optimizer.step()
        ends.append(weight)
    assert torch.equal(*ends)

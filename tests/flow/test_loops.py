"""Loops as people write them: nothing moves, several optimizers, copies, pauses, half precision."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from frostlab.errors import BadInput
from frostlab.flow.diagnosis import Diagnosis, sentence_of
from frostlab.integrations.transformers import GradFlowCallback


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def inputs() -> Tensor:
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(1))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 6,
    loss: Callable[[Tensor], Tensor] = lambda out: out.float().pow(2).mean(),
    **asked: bool,
) -> fl.Flow:
    x = inputs().to(next(model.parameters()).dtype)
    with fl.watch(model, optimizer, every_n_steps=1, **asked) as flow:
        for _ in range(steps):
            loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flow


@pytest.mark.parametrize(
    ("rate", "dtype", "loss", "why"),
    [
        (1e-6, torch.bfloat16, lambda out: out.float().pow(2).mean(), "lost in rounding"),
        (1e-12, torch.float32, lambda out: out.pow(2).mean(), "a step moves it by"),
        (0.0, torch.float32, lambda out: out.pow(2).mean(), "its learning rate is 0"),
        (0.1, torch.float32, lambda out: out.sum() * 0.0, "its gradient is exactly zero"),
    ],
    ids=["rounding", "tiny rate", "no rate", "no gradient"],
)
def test_where_nothing_moves_nothing_learns(
    rate: float, dtype: torch.dtype, loss: Callable[[Tensor], Tensor], why: str
) -> None:
    model = network().to(dtype)
    flow = train(model, torch.optim.SGD(model.parameters(), lr=rate), loss=loss)
    assert set(flow.frozen_by_accident()) == {"0", "2"}
    assert why in flow.verdicts()["2"].why
    assert sentence_of(flow).startswith("2 of 2 parts do not learn: 0, 2")


def test_a_single_part_can_stand_still() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    still = train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda o: o.sum() * 0)
    assert set(still.frozen_by_accident()) == {"0"}
    learns = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not learns.frozen_by_accident()


def test_before_anything_is_measured_nothing_is_said_to_learn() -> None:
    model = network()
    with fl.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as flow:
        pass
    assert {v.word for v in flow.verdicts().values()} == {"not measured yet"}
    assert not flow.frozen_by_accident()
    assert sentence_of(flow) == "no step has been measured yet"
    told = Diagnosis(Path("run"), "running", None, 0, None, None, {"1": flow})
    assert told.healthy is None
    assert told.to_dict()["healthy"] is None


class Pair(nn.Module):
    """Two networks that learn in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.maker = network(), network(6)


@pytest.mark.parametrize("clears_first", [False, True])
def test_optimizers_that_take_turns_are_each_measured_at_their_own_step(clears_first: bool) -> None:
    pair, x, wanted = Pair(), inputs(), []
    turns = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in pair.children()]
    optimizers = [optimizer for _, optimizer in turns]
    with fl.watch(pair, optimizers, every_n_steps=1, gradient_cosine=True) as flow:
        for _ in range(5):
            for net, optimizer in turns:
                if clears_first:
                    optimizer.zero_grad()
                net(x).pow(2).mean().backward()
                norms = [p.grad.norm().item() for p in net[2].parameters() if p.grad is not None]
                wanted.append(torch.tensor(norms).norm().item())
                optimizer.step()
                if not clears_first:
                    optimizer.zero_grad()
    assert not flow.frozen_by_accident()
    for place, name in enumerate(("critic.2", "maker.2")):
        found = list(flow.series(name, "gradient").values())
        torch.testing.assert_close(found, wanted[place::2], rtol=1e-5, atol=0.0)
        agreed = list(flow.series(name, "gradient_cosine").values())[1:]
        assert all(0.5 < each <= 1.0 + 1e-6 for each in agreed), "the loss is smooth"


def test_units_of_a_copy_are_not_counted() -> None:
    shares = []
    for copies in (False, True):
        model, x = network(), inputs()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with fl.watch(model, optimizer, every_n_steps=1, dead_units=True) as flow:
            for _ in range(2):
                model(x).pow(2).mean().backward()
                if copies:
                    copy.deepcopy(model)(x * 0 - 100)
                optimizer.step()
        shares.append([report.dead for report in flow.reports])
    assert shares[0] == shares[1]


def test_a_pause_in_which_all_is_frozen_is_not_measured() -> None:
    model, x = network(), inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(6):
            model.requires_grad_(step not in (2, 3))
            if step not in (2, 3):
                model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [report.step for report in flow.reports] == [1, 2, 5, 6]
    assert not flow.frozen_by_accident()


def test_other_parameters_in_a_group_are_noticed() -> None:
    model, x = network(), inputs()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(8):
            if step == 4:
                optimizer.param_groups[0]["params"] = list(model[2].parameters())
            model(x).pow(2).mean().backward()
            optimizer.step()
            model.zero_grad()
    assert list(flow.frozen_by_accident()) == ["0"]
    assert "missing from the optimizer" in flow.verdicts()["0"].why


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_part_without_numbers_is_no_part() -> None:
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4), nn.Linear(4, 2))
    flow = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [part.name for part in flow.parts] == ["1", "2"]
    assert "0" not in flow.frozen_by_accident()


@pytest.mark.parametrize("scale", [1e-3, 3e3])
def test_agreement_of_half_precision_gradients_is_exact(scale: float) -> None:
    model, seen = network().half(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with fl.watch(model, optimizer, every_n_steps=1, gradient_cosine=True) as flow:
        for _ in range(4):
            optimizer.zero_grad()
            (model(inputs().half()).float().pow(2).mean() * scale).backward()
            grads = [p.grad.double().flatten() for p in model[2].parameters() if p.grad is not None]
            seen.append(torch.cat(grads))
            optimizer.step()
    wanted = [float(torch.cosine_similarity(a, b, 0)) for a, b in pairwise(seen)]
    found = list(flow.series("2", "gradient_cosine").values())[1:]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0.0)


def test_what_cannot_be_watched_or_written_is_said_before_training(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for wrong in (None, schedule, []):
        with pytest.raises(BadInput, match=r"no torch\.optim\.Optimizer"):
            fl.watch(model, wrong)  # type: ignore[arg-type]
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(BadInput, match=r"0\.weight has no shape yet"):
        fl.watch(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    with pytest.raises(BadInput, match="is a folder; name a file in it"):
        train(model, optimizer).save(tmp_path)
    callback = GradFlowCallback(path=tmp_path / "nowhere" / "flow.json")
    with pytest.raises(BadInput, match="nowhere does not exist"):
        callback.begin(model, optimizer, 0)

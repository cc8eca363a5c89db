"""Any loop is measured: several optimizers, hooks, freezing and growing while watched."""

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor

import frostlab as fl
from flowing import adamw, loss_at, tiny_gpt, watched
from frostlab.errors import BadInput
from frostlab.flow.diagnosis import Diagnosis, sentence_of
from frostlab.flow.judge import FROZEN, LEARNING, UNKNOWN
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
    diagnosis = Diagnosis(Path("run"), "running", None, 0, None, None, {"1": flow})
    assert diagnosis.healthy is None
    assert diagnosis.to_dict()["healthy"] is None


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
        with pytest.raises(BadInput, match=r"is not a torch\.optim\.Optimizer"):
            fl.watch(model, wrong)  # type: ignore[arg-type]
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(BadInput, match=r"0\.weight has no shape yet"):
        fl.watch(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    with pytest.raises(BadInput, match="is a folder; name a file in it"):
        train(model, optimizer).save(tmp_path)
    callback = GradFlowCallback(path=tmp_path / "nowhere" / "flow.json")
    with pytest.raises(BadInput, match="nowhere does not exist"):
        callback.start_flow(model, optimizer, 0)


def test_freezing_while_watched_is_seen() -> None:
    model = tiny_gpt()
    optimizer = adamw(model)
    start = model.head.weight.detach().clone()
    with fl.watch(model, optimizer, every_n_steps=1, distance=True) as flow:
        for step in range(3):
            if step == 1:
                model.blocks[0].up.requires_grad_(False)
            loss_at(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert flow.verdicts()["layers[0].up"].word == FROZEN
    assert not math.isnan(flow.series("layers[0].up", "ratio")[1])
    assert math.isnan(flow.series("layers[0].up", "ratio")[2])
    moved = float((model.head.weight.detach() - start).norm() / start.norm())
    assert flow.series("head", "distance")[3] == pytest.approx(moved, rel=1e-4)
    assert not flow.frozen_by_accident()


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_at(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_frozen_while_watched_is_proven_from_then_on() -> None:
    model = tiny_gpt()
    optimizer = adamw(model)
    with fl.watch(model, optimizer, every_n_steps=2) as flow:
        train_on(model, optimizer, range(2))
        model.blocks[0].requires_grad_(False)
        train_on(model, optimizer, range(2, 4))
        model.blocks[0].up.weight.data[0] += 1
    assert flow.moved == ("layers[0].up",)
    assert flow.verdicts()["layers[0].down"].word == FROZEN


def test_what_is_thawed_while_watched_may_move() -> None:
    """Also after the last report."""
    model = tiny_gpt()
    model.blocks[0].requires_grad_(False)
    optimizer = adamw(model)
    with fl.watch(model, optimizer, every_n_steps=10) as flow:
        train_on(model, optimizer, range(2))
        model.blocks[0].requires_grad_(True)
        train_on(model, optimizer, range(2, 4))
    assert flow.moved == ()
    thawed = {n for n, v in flow.verdicts().items() if v.word == UNKNOWN}
    assert thawed
    assert all(name.startswith("layers[0].") for name in thawed)
    assert {v.word for v in flow.verdicts().values()} == {LEARNING, UNKNOWN}


def test_a_tensor_in_the_place_of_another_is_seen() -> None:
    """A head replaced after the optimizer was built never learns."""
    model = tiny_gpt()
    optimizer = adamw(model)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        train_on(model, optimizer, range(2))
        model.head = nn.Linear(16, 2, bias=False)
        train_on(model, optimizer, range(2, 4))
    assert list(flow.frozen_by_accident()) == ["head"]
    assert flow.verdicts()["head"].why == "it is missing from the optimizer"


def test_a_model_frozen_as_a_whole_at_the_end() -> None:
    model = tiny_gpt()
    optimizer = adamw(model)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        train_on(model, optimizer, range(2))
        model.requires_grad_(False)
    assert len(flow.reports) == 2


def test_hooks_and_copies_go_with_the_watch() -> None:
    model = tiny_gpt()
    optimizer = adamw(model)
    flow = fl.watch(model, optimizer, every_n_steps=1, dead_units=True, attention_entropy=True)
    with flow:
        with pytest.raises(fl.BadInput, match="already watching"):
            flow.start()
        loss_at(model, 0).backward()
        optimizer.step()
        assert flow._probe is not None
        assert flow._probe._updates._before == []
    assert flow._probe is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    optimizer.step()
    assert [report.step for report in flow.reports] == [1]


def test_an_optimizer_without_a_learning_rate_is_watched() -> None:
    """Such as Adafactor, which makes its own from the weights."""
    model = tiny_gpt()
    lost = {id(p) for p in model.blocks[1].up.parameters()}
    kept = [p for p in model.parameters() if id(p) not in lost]
    flow = watched(model, Adafactor(kept), steps=6)
    assert all(math.isnan(rate) for report in flow.reports for rate in report.rates)
    assert list(flow.frozen_by_accident()) == ["layers[1].up"]
    words = {v.word for n, v in flow.verdicts().items() if n != "layers[1].up"}
    assert words == {"learning"}
    assert "of its weights" in flow.verdicts()["head"].why


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_numbers() -> None:
    plain, compiled = tiny_gpt(), tiny_gpt()
    expected = watched(plain, adamw(plain), steps=3, every_n_steps=1)
    found = watched(torch.compile(compiled), adamw(compiled), steps=3, every_n_steps=1)  # type: ignore[arg-type]
    assert found.parts == expected.parts
    for mine, theirs in zip(found.reports, expected.reports, strict=True):
        for quantity in ("gradient", "weight", "update"):
            assert mine.values[quantity] == pytest.approx(
                theirs.values[quantity], rel=1e-2, abs=1e-6
            )


def test_a_group_added_while_watched_is_seen() -> None:
    """Also one that holds what required a gradient all the time."""
    model = tiny_gpt()
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in head)]
    optimizer = torch.optim.AdamW(rest, lr=1e-3)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(6):
            if step == 3:
                assert list(flow.frozen_by_accident()) == ["head"]
                optimizer.add_param_group({"params": head, "lr": 2e-3})
            loss_at(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [report.rates for report in flow.reports] == [(1e-3,)] * 3 + [(1e-3, 2e-3)] * 3
    assert flow.frozen_by_accident() == {}
    assert [update > 0 for update in flow.series("head", "update").values()] == [False] * 3 + [
        True
    ] * 3


@pytest.mark.parametrize("at", ["bottom", "top"])
def test_layers_added_while_watched_keep_the_past_of_the_others(at: Any) -> None:
    model = tiny_gpt()
    optimizer = adamw(model)
    old = {id(p) for p in model.parameters()}
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(4):
            if step == 2:
                before = {part: flow.series(part, "gradient") for part in ("head", "layers[0].key")}
                fl.grow(model, layers=1, at=at)
                new = [p for p in model.parameters() if id(p) not in old]
                optimizer.add_param_group({"params": new})
            loss_at(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    was, came = ("layers[1]", "layers[0]") if at == "bottom" else ("layers[0]", "layers[3]")
    for name, part in (("head", "head"), ("layers[0].key", f"{was}.key")):
        assert dict(list(flow.series(part, "gradient").items())[:2]) == before[name]
    seen = flow.series(f"{came}.down", "weight")
    assert [math.isnan(weight) for weight in seen.values()] == [True, True, False, False]
    assert len(flow.table().splitlines()) > len(flow.parts)

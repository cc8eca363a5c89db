"""What is frozen, thawed or replaced while it is watched."""

import math

import pytest
import torch
from torch import nn

import frostlab as fl
from flowing import adamw, loss_at, tiny_gpt
from frostlab.flow.judge import FROZEN, LEARNING, UNKNOWN


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
    """A head made anew after the optimizer was built never learns."""
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

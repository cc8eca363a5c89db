"""What the chunked loss costs: work, memory, waiting, compiling."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from frostlab.training.step import head_loss as losses
from frostlab.training.step import head_loss as sweeping
from frostlab.training.step.head_loss import head_loss
from heads import assert_same, gradients, inputs, plain

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens of eleven classes a chunk."""
    monkeypatch.setattr(sweeping, "CPU_CHUNK", 3 * 11 * 4)


def flops(hidden: list[Tensor], weight: Tensor, targets: Tensor, backward: bool = True) -> int:
    with FlopCounterMode(display=False) as counter:
        total, _ = head_loss(hidden, weight, targets)
        if backward:
            total.backward()
    return counter.get_total_flops()


class Names(TorchDispatchMode):
    """The names of the operations called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def called(hidden: list[Tensor], weight: Tensor, targets: Tensor) -> set[str]:
    with Names() as seen:
        head_loss(hidden, weight, targets)
    return seen.names


@pytest.mark.usefixtures("small_chunks")
def test_what_is_frozen_costs_nothing() -> None:
    hidden, weight, _, targets = inputs(11, 4, (10,), layers=2)
    once = 2 * 2 * 10 * 4 * 11
    assert flops(hidden, weight, targets) == 3 * once
    frozen = weight.detach()
    assert flops(hidden, frozen, targets) == 2 * once
    assert frozen.grad is None
    inert = [x.detach() for x in hidden]
    assert flops(inert, weight, targets) == 2 * once
    assert flops([inert[0], hidden[1]], weight, targets) == 2.5 * once
    assert flops(inert, frozen, targets, backward=False) == once
    with torch.no_grad():
        assert flops(hidden, weight, targets, backward=False) == once
        assert "aten.exp_" not in called(hidden, weight, targets)  # no slope either
    assert "aten.exp_" in called(hidden, weight, targets)
    targets[:5] = -100
    assert flops(hidden, weight, targets) == 1.5 * once


class NoLooking(TorchDispatchMode):
    """Refuses what needs the values on the host, as a captured graph does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags, func
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dropped", [0.0, 0.4, 1.0])
def test_the_way_of_devices_needs_no_look_at_values(
    dropped: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias, targets = inputs(11, 4, (10, 2), layers=2)
    targets.masked_fill_(torch.rand(10, 2) < dropped, 3)
    leaves = [*hidden, weight, bias]
    options: dict[str, Any] = {"bias": bias, "weights": [0.3, 2.0], "ignore": 3}
    expected = plain(hidden, weight, targets, **options)[0]
    with pytest.raises(AssertionError), NoLooking():
        head_loss(hidden, weight, targets)
    for module in (losses, sweeping):
        monkeypatch.setattr(module, "on_host", lambda _: False)
    with NoLooking():
        total, _ = head_loss(hidden, weight, targets, **options)
        made = gradients(total, leaves)
    assert_same([total, *made], [expected, *gradients(expected, leaves)])
    with torch.no_grad():
        hidden[0][targets == 3] = torch.nan
    total, _ = head_loss(hidden, weight, targets, **options)
    assert_same(gradients(total, leaves), made)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        for one in tensors_in(made):
            if one.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return made


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_tensor_is_larger_than_a_chunk(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 400_000
    monkeypatch.setattr(sweeping, "CPU_CHUNK", bound)
    hidden, weight, bias, targets = inputs(5000, 8, (20, 10), layers=2, dtype=torch.float32)
    largest = []
    for way in (head_loss, plain):
        with Largest() as seen, torch.autocast("cpu", enabled=precision == "bfloat16"):
            way(hidden, weight, targets, bias=bias)[0].backward()
        largest.append(seen.bytes)
    assert largest[0] <= bound < 4 * 200 * 5000 == largest[1]
    frozen = weight.detach()
    monkeypatch.setattr(sweeping, "CPU_CHUNK", 80_000)
    with Largest() as seen:
        head_loss(hidden, frozen, targets)[0].backward()
    assert seen.bytes == 80_000 < 4 * weight.numel()


@pytest.mark.slow
def test_the_process_needs_less_than_a_quarter_of_the_memory() -> None:
    """Four layers of 64 × 32 tokens, 69,830 classes, forward and backward, in fresh processes."""
    used = {}
    for way in ("ours", "plain"):
        command = [sys.executable, str(ROOT / "benchmarks" / "loss.py"), "--memory", way, "deep"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        used[way] = json.loads(done.stdout)
    assert used["ours"] < used["plain"] / 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_a_compiled_caller() -> None:
    hidden, weight, _, targets = inputs(11, 4, (10,))
    targets[3] = -100

    def loss(x: Tensor, head: Tensor) -> Tensor:
        return head_loss(x.tanh(), 2 * head, targets)[0] * 3

    leaves = [hidden[0], weight]
    ours = torch.compile(loss)(*leaves)
    assert_same(gradients(ours, leaves), gradients(loss(*leaves), leaves))

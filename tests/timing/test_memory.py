"""The memory of a step: the bound lies below every measured peak, and the estimate near it."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import frostlab as fl
from frostlab.experiments.steps import measured_steps, planned_stages
from frostlab.matrix.check import estimate_memory
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.groups import group_names, load_group
from frostlab.recipe.load import load_recipe
from frostlab.recipe.settings import OPTIMIZERS, Optim
from frostlab.timing.memory import estimated_memory, least_memory
from frostlab.training.step.optimizer import build_optimizer

FACTS = Optim().facts


def moments(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors of a parameter's size that an optimizer keeps."""
    return sum(
        value.nbytes
        for p, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor) and value.shape == p.shape
    )


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if hasattr(torch.optim, name)])
def test_the_facts_about_an_optimizer_are_those_of_torch(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([weight], lr=1e-3)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert moments(optimizer) == OPTIMIZERS[name].state_bytes * weight.numel()


def test_the_state_of_a_step_has_the_moments_of_the_optimizer_of_a_recipe() -> None:
    model = GPT(GPTConfig(50, width=32, layers=3, heads=2, hidden=128, dropout=0.1, classes=2))
    fl.freeze(model, "query", "key")
    parts, optim = fl.anatomy(model), Optim()
    optimizer = build_optimizer(model, optim, fused=False)
    model(torch.randint(50, (4, 16))).sum().backward()
    optimizer.step()
    every = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    state = every + trained + moments(optimizer)
    assert estimated_memory(parts, 2, False, optim.facts).state == state
    assert least_memory(parts, 4, optim.facts).state == state
    without = OPTIMIZERS["SGD"]  # as torch's default is, without momentum
    assert estimated_memory(parts, 2, False, without).state == every + trained
    assert least_memory(parts, 2, without).state == every + trained // 2, "gradients in bf16"


def test_the_bound_is_below_every_measured_peak() -> None:
    checked, measured = set(), measured_steps()
    for group in map(load_group, group_names()):
        for name in group.experiments:
            recipe = group.recipe(name)
            if recipe.model.kind == "conformer":
                continue
            for planned in planned_stages(recipe, {}):
                step = planned.step
                if step not in measured or step in checked:
                    continue
                value_bytes = 2 if step.precision == "bfloat16" else 4
                least = least_memory(planned.parts, value_bytes, recipe.optim.facts)
                least_bytes = least.of(step.batch * step.length)
                assert least_bytes < measured[step].peak_bytes, step
                checked.add(step)
    assert len(checked) > 10


def test_the_estimate_is_near_the_measured_peaks_of_runs() -> None:
    peaks = {}
    for line in (Path(__file__).parents[2] / "docs/records/h200.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["benchmark"] == "memory of --check":
            peaks[record["recipe"]] = record["run_bytes"]
    ratios = {}
    for name, peak in peaks.items():
        estimate = estimate_memory(load_recipe(name))
        assert estimate is not None
        ratios[name] = round(estimate / peak, 2)
    assert ratios == {
        "imdb-lm-gpt": 1.04, "docstrings-gpt": 0.91, "eeg-conformer-v2": 0.65,
        "docstrings-deep": 0.95, "docstrings-decoder": 1.01,
    }  # fmt: skip


@pytest.mark.parametrize("frozen", [(), ("embedding", "position", "layers[0]")])
def test_the_bound_is_below_what_autograd_keeps(frozen: tuple[str, ...]) -> None:
    """Per token, in float32, counted while a model runs; the estimate is above the bound."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, width=32, layers=3, heads=2, hidden=128, dropout=0.1, classes=2))
    if frozen:
        fl.freeze(model, *frozen)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(50, (4, 16))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids).sum()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = sum(size for address, size in kept.items() if address not in own)
    least = least_memory(fl.anatomy(model), 4, FACTS).per_token * ids.numel()
    assert 0 < least < total
    assert least > total / 4
    assert least < estimated_memory(fl.anatomy(model), 4, False, FACTS).per_token * ids.numel()
    loss.backward()

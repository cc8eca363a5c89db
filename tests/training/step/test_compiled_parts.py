"""Front and head of a Conformer are compiled as well as its layers, and compute the same."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from frostlab.models.conformer import Conformer
from frostlab.recipe.model import EnvelopeLoss
from frostlab.recipe.settings import Optim, Train
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.compiled import compile_layers, uncompile
from frostlab.training.step.envelope_loss import EnvelopeObjective
from stepping import train
from zoo import CONFORMER


@pytest.fixture
def compiled_modules(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that are compiled, with a backend that takes no time."""
    modules, real = [], nn.Module.compile

    def compile_(self: nn.Module, **_: Any) -> None:
        modules.append(self)
        real(self, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", compile_)
    return modules


def envelope_objective(**changes: Any) -> EnvelopeObjective:
    torch.manual_seed(0)
    return EnvelopeObjective(Conformer(replace(CONFORMER, **changes)), EnvelopeLoss()).train()


@pytest.mark.parametrize("residual", ["gated", "plain"])
def test_front_and_head_of_a_conformer_are_compiled(
    residual: str, compiled_modules: list[nn.Module]
) -> None:
    objective = envelope_objective(residual=residual)
    compile_layers(objective)
    names = {name for name, m in objective.model.named_modules() if m in compiled_modules}
    gate = {"gate"} if residual == "gated" else set()
    assert names == {"cnn", "channels", "head", "blocks.0", "blocks.1"} | gate
    uncompile(objective)
    assert all(m._compiled_call_impl is None for m in objective.modules())


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_modules")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_conformer_equals_an_eager_one_in_several_shapes() -> None:
    """Torch would stop compiling after eight graphs; here are more."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    steps = []
    for rows in (2, 3, 4):
        eeg, heard = torch.randn(rows, 12, CONFORMER.channels), torch.randn(rows, 12)
        steps.append([Batch({"eeg": eeg}, heard, rows, rows * 12, rows)])
    results = []
    for kind in ("eager", "compiled"):
        step = build_step(envelope_objective(), Optim(lr=1e-3), Train(step=kind),
                          Compute(torch.device("cpu"), torch.float32), steps=9)  # fmt: skip
        results.append(train(step, steps))
        assert step.kind == kind, step.reason
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] > 8
    assert not counters["graph_break"]
    assert not counters["unimplemented"]

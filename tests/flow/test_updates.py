"""An optimizer that measures its own steps says what copies say, and saves the copies."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frostlab.flow.probe import Probe
from frostlab.flow.tensors import read_layout
from zoo import build, loss_of


class Telling(torch.optim.AdamW):
    """Measures its steps as the fused kernel does: only what has a gradient, if it is to."""

    sums: Tensor | None = None
    measures = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in held]
        super().step()
        if not self.measures or self.sums is None:
            return
        self.sums.zero_()
        for row, p, was in zip(self.sums, held, before, strict=True):
            if p.grad is not None:
                row[0], row[1] = was.double().square().sum(), (p - was).double().square().sum()


def measured(model: nn.Module, loss: Any, kind: type[torch.optim.AdamW]) -> tuple[Probe, Any]:
    groups = [list(model.parameters())[::2], list(model.parameters())[1::2]]  # in another order
    optimizer = kind([{"params": group} for group in groups], lr=1e-2)
    probe = Probe(read_layout(model, [optimizer]), [optimizer])
    for _ in range(2):
        loss(model).backward()
        next(model.parameters()).grad = None  # copied, as it will not be told of
        probe.before_step()
        optimizer.step()
        probe.after_step()
        optimizer.zero_grad()
    return probe, optimizer


@pytest.mark.parametrize("name", ["gpt2", "bert"])  # rows of fused weights; whole ones
def test_what_it_says_is_what_copies_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name)
    twin, copied = copy.deepcopy(model), []
    plain, known = torch.empty_like, {p.data_ptr(): p for p in model.parameters()}

    def keep(tensor: Tensor) -> None:
        if tensor.data_ptr() in known:  # AdamW makes others
            copied.append(known[tensor.data_ptr()])

    def loss(which: nn.Module) -> Tensor:
        return loss_of(which, inputs)

    expected, _ = measured(twin, loss, torch.optim.AdamW)
    monkeypatch.setattr(torch, "empty_like", lambda t, **k: keep(t) or plain(t, **k))
    found, optimizer = measured(model, loss, Telling)
    for quantity in ("weight", "update"):
        assert float(expected.views[quantity].sum()) > 0
        torch.testing.assert_close(
            found.views[quantity], expected.views[quantity], rtol=1e-5, atol=0.0
        )
    assert not optimizer.measures  # other steps cost nothing
    first, *fused = {id(t): t for t in copied}.values()
    assert first.shape == next(model.parameters()).shape
    assert len(fused) == (
        4 if name == "gpt2" else 0
    )  # c_attn's weights and biases: three parts each

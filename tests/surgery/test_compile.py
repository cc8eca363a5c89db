"""torch.compile takes a frozen model in one graph, and the frozen bits stay."""

import copy

import pytest
import torch

import frostlab as fl
from zoo import build, loss_of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "torch"])
def test_compiled_training_equals_eager(name: str) -> None:
    model, inputs = build(name)
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    twin = copy.deepcopy(model)
    step = torch.compile(loss_of, fullgraph=name != "torch")
    for m, forward in ((model, step), (twin, loss_of)):
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(4):
            forward(m, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    proof.verify(model)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-3, atol=1e-4)
    assert not torch.equal(
        model.state_dict()[fl.anatomy(model).select("value.weight")[0].name],
        build(name)[0].state_dict()[fl.anatomy(model).select("value.weight")[0].name],
    )

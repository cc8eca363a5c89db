"""Optimizers and compiled steps notice when freeze or thaw has changed what learns."""

import copy

import pytest
import torch

import frostlab as fl
from frostlab.surgery.stale import changes
from zoo import build, loss_of


@pytest.mark.parametrize("name", ["gpt2", "torch"])
def test_an_optimizer_built_too_early_is_refused(name: str) -> None:
    model, inputs = build(name)
    early = torch.optim.AdamW(model.parameters())
    loss_of(model, inputs).backward()
    early.step()
    fl.freeze(model, "query", "key")
    loss_of(model, inputs).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fl.StaleOptimizer, match="build a new optimizer"):
        early.step()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    late = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    late.step()
    fl.freeze(model, "query", "key")  # the same again replaces nothing
    late.step()
    fl.thaw(model)
    loss_of(model, inputs).backward()
    with pytest.raises(fl.StaleOptimizer, match="c_attn|in_proj"):
        late.step()


def test_an_optimizer_of_separate_weights_stays_good() -> None:
    """Nothing is replaced there, and a frozen weight with a momentum does not move."""
    model, inputs = build("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, inputs).backward()
    optimizer.step()
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    for _ in range(3):
        loss_of(model, inputs).backward()
        optimizer.step()
    proof.verify(model)


def test_thawed_parameters_without_an_optimizer_are_warned_of() -> None:
    model, inputs = build("bert")
    fl.freeze(model, "query", "key")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        loss_of(model, inputs).backward()
        optimizer.step()
    fl.thaw(model)
    loss_of(model, inputs).backward()
    optimizer.step()
    loss_of(model, inputs).backward()
    with pytest.warns(fl.LeftOutOfOptimizer, match=r"8 parameters, .*self\.query\.weight"):
        optimizer.step()
    optimizer.step()  # once is enough


def test_two_optimizers_that_share_the_work_are_fine() -> None:
    """Warnings are errors in tests, so none is raised."""
    model, inputs = build("gpt_neox")
    fl.freeze(model, "query", "key")
    learning = [p for p in model.parameters() if p.requires_grad]
    pair = [torch.optim.SGD(learning[::2], lr=1e-3), torch.optim.SGD(learning[1::2], lr=1e-3)]
    for _ in range(3):
        loss_of(model, inputs).backward()
        for optimizer in pair:
            optimizer.step()


def test_changes_are_counted_for_the_model_that_changed_only() -> None:
    (model, _), (other, _) = build("gpt2"), build("gpt2")
    whole = torch.nn.ModuleDict({"model": model})  # as an objective or a wrapper holds it
    counts = [changes(module) for module in (model, whole, other)]
    fl.freeze(other, "query", "key")
    assert [changes(model), changes(whole)] == counts[:2]
    assert changes(other) == counts[2] + 1
    fl.freeze(other, "query", "key")  # nothing is different
    assert changes(other) == counts[2] + 1
    fl.freeze(model, "layers[0]")
    fl.thaw(model)
    assert [changes(model), changes(whole)] == [counts[0] + 2, counts[1] + 2]
    fl.freeze(whole, "query")
    assert [changes(model), changes(whole)] == [counts[0] + 3, counts[1] + 3]
    assert changes(other) == counts[2] + 1


def test_another_models_steps_do_not_hide_the_warning() -> None:
    (model, inputs), (other, _) = build("bert"), build("bert")
    fl.freeze(model, "query", "key")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    fl.thaw(model)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        loss_of(other, inputs).backward()
        theirs.step()
    loss_of(model, inputs).backward()
    optimizer.step()
    with pytest.warns(fl.LeftOutOfOptimizer, match="8 parameters"):
        optimizer.step()


def test_an_optimizer_is_not_blamed_for_another_model() -> None:
    """Warnings are errors in tests, so none is raised until an optimizer of the model steps."""
    (model, inputs), (other, _) = build("bert"), build("bert")
    learning = list(model.parameters())[-2:]
    mine = torch.optim.SGD(learning, lr=0.1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    fl.freeze(model, "query", "key")
    fl.thaw(model)
    loss_of(model, inputs).backward()
    for _ in range(3):
        loss_of(other, inputs).backward()
        theirs.step()
    mine.step()
    with pytest.warns(fl.LeftOutOfOptimizer, match="8 parameters"):
        mine.step()


def test_every_piece_of_a_split_attention_is_expected() -> None:
    model, inputs = build("torch")
    fl.freeze(model, "all", "!norm")
    norms = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(norms, lr=1e-3)
    fl.freeze(model, "query")
    missing = sum(p.requires_grad for p in model.parameters()) - len(norms)
    loss_of(model, inputs).backward()
    optimizer.step()
    with pytest.warns(fl.LeftOutOfOptimizer, match=f"^{missing} parameters"):
        optimizer.step()

"""Frozen means not one bit moves, whatever the optimizer; and the audit would notice."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

import frostlab as fl
from flowing import tiny_gpt
from frostlab.surgery.audit import Audit, frozen_audit
from zoo import EVERY, LAYOUTS, build, loss_of


def adamw(parameters: list[nn.Parameter]) -> list[Optimizer]:
    return [AdamW(parameters, lr=1e-2, weight_decay=0.1)]


def sgd(parameters: list[nn.Parameter]) -> list[Optimizer]:
    return [SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=0.1)]


def muon(parameters: list[nn.Parameter]) -> list[Optimizer]:
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    return [Muon(matrices, lr=1e-2, weight_decay=0.1), *(adamw(rest) if rest else [])]


LONG = ("bert", "gpt2", "gpt_neox", "llama")  # apart, fused two ways, grouped


def train(model: nn.Module, inputs: dict, optimizers: list[Optimizer], steps: int) -> None:
    model.train()
    for _ in range(steps):
        loss_of(model, inputs).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(name, make, marks=() if name in names else pytest.mark.slow)
        for make, names in ((adamw, LAYOUTS), (sgd, ("gpt2",)), (muon, ("gpt2",)))
        for name in EVERY
    ],
)
def test_no_optimizer_moves_a_frozen_bit(
    name: str, make: Callable[[list[nn.Parameter]], list[Optimizer]]
) -> None:
    model, inputs = build(name)
    fl.orthogonalize(model, "query", "key")
    anatomy = fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    # every parameter is handed over, frozen ones too: structure must protect them
    optimizers = make(list(model.parameters()))
    train(model, inputs, optimizers, 100 if name in LONG and make is adamw else 5)
    proof.verify(model)
    after = model.state_dict()
    learned = {p.name for p in anatomy.parts if p.state == "trainable" and p.role == "value"}
    for key in learned:
        assert not torch.equal(before[key], after[key]), f"{key} did not learn"
    held = {id(p) for o in optimizers for p, state in o.state.items() if state}
    assert not any(id(p) in held for p in model.parameters() if not p.requires_grad)


def test_a_gradient_mask_on_the_same_rows_fails() -> None:
    """The way that does not work: zeroed gradients, and weight decay moves the rows anyway."""
    model, inputs = build("gpt2")
    proof = fl.audit(_frozen_copy(model))
    for part in fl.anatomy(model).select("query", "key"):
        parameter = model.get_parameter(part.name)
        rows = part.rows
        assert rows is not None

        def mask(grad: torch.Tensor, rows: object = rows, axis: int = part.axis) -> torch.Tensor:
            grad = grad.clone()
            rows.put(grad, torch.zeros_like(rows.take(grad, axis)), axis)  # type: ignore[attr-defined]
            return grad

        parameter.register_hook(mask)
    train(model, inputs, adamw(list(model.parameters())), 3)
    with pytest.raises(fl.FrozenWeightsMoved, match=r"8 frozen tensors moved: h\.0\.attn\.c_attn"):
        proof.verify(model)


def _frozen_copy(model: nn.Module) -> nn.Module:
    import copy

    twin = copy.deepcopy(model)
    fl.freeze(twin, "query", "key")
    return twin


@pytest.mark.parametrize("name", ["bert", "gpt_neox", "torch"])
def test_one_bit_is_enough(name: str) -> None:
    model, _ = build(name)
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    proof.verify(model)
    from frostlab.roles.read import survey

    anatomy, slots = survey(model)
    part = anatomy.select("layers[0].key")[0]
    slot = slots[part.name]
    value = slot.read(part.rows).clone()
    bits = value.flatten()[:1].view(torch.int32)
    bits ^= 1
    slot.write(value, part.rows)
    with pytest.raises(fl.FrozenWeightsMoved) as error:
        proof.verify(model)
    assert error.value.names == (part.key,)
    assert part.key in str(error.value)


def test_the_proof_survives_thawing_and_sees_a_changed_dtype() -> None:
    model, _ = build("gpt2")
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    fl.thaw(model)
    proof.verify(model)
    assert len(proof.digests) == 8
    assert proof.to_dict()["model"] == "GPT2Model"
    model.double()
    with pytest.raises(fl.FrozenWeightsMoved):
        proof.verify(model)


def test_nothing_frozen_cannot_be_audited() -> None:
    with pytest.raises(fl.BadInput, match="nothing is frozen"):
        fl.audit(build("bert")[0])


def test_bfloat16_and_compiled_wrappers_can_be_audited() -> None:
    model, _ = build("gpt2")
    model.to(torch.bfloat16)
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)

    class OptimizedModule(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    proof.verify(OptimizedModule(model))


def test_everything_trainable_moved() -> None:
    model, inputs = build("gpt2")
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    with pytest.raises(fl.TrainableWeightsStayed) as untrained:
        proof.verify(model, moved=True)
    trainable = [part.key for part in fl.anatomy(model).parts if part.state == "trainable"]
    assert list(untrained.value.names) == trainable
    train(model, inputs, adamw(list(model.parameters())), 1)
    proof.verify(model, moved=True)
    model.get_parameter("h.0.attn.c_proj.bias").data.zero_()  # one bit is enough to have moved
    proof.verify(model, moved=True)


def test_a_forgotten_weight_is_named() -> None:
    model, inputs = build("gpt2")
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    forgotten = model.get_parameter("h.1.mlp.c_fc.weight")
    train(model, inputs, adamw([p for p in model.parameters() if p is not forgotten]), 1)
    proof.verify(model)
    message = r"^1 trainable tensor did not move: h\.1\.mlp\.c_fc\.weight$"
    with pytest.raises(fl.TrainableWeightsStayed, match=message):
        proof.verify(model, moved=True)


def test_a_moved_frozen_weight_comes_first() -> None:
    model, _ = build("gpt2")
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    with pytest.raises(fl.FrozenWeightsMoved):
        proof.verify(model, moved=True)


def test_an_audit_of_frozen_weights_alone_knows_nothing_of_the_others() -> None:
    model, _ = build("gpt2")
    fl.freeze(model, "query", "key")
    with pytest.raises(fl.BadInput, match="has no trainable tensors; make it with fl.audit"):
        frozen_audit(model).verify(model, moved=True)
    with pytest.raises(fl.BadInput, match=r"the model no longer has wte\.weight; audit it again"):
        Audit("GPT2Model", {}, {"wte.weight": "0"}).verify(build("bert")[0], moved=True)


def test_a_grown_model_must_move_its_new_layer_too() -> None:
    model = tiny_gpt()
    fl.freeze(model, "layers[0].query")
    proof = fl.audit(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    growth = fl.grow(model, init="copy")
    renewed = proof.renewed(model, growth)
    with pytest.raises(fl.TrainableWeightsStayed) as error:
        renewed.verify(model, moved=True)
    assert all(name.startswith(growth.names[0]) for name in error.value.names)
    assert error.value.names

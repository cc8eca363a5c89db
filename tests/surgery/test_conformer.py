"""Surgery on the Conformer: its layers, its BatchNorms, its gate and head, saved and refused."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import frostlab as fl
from frostlab.roles.read import survey
from frostlab.surgery.split import SplitProjection
from zoo import build, loss_of, recordings


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        loss_of(model, recordings()).backward()
        optimizer.step()
        optimizer.zero_grad()


def statistics(model: nn.Module, layer: int) -> list[torch.Tensor]:
    return [b.clone() for b in model.blocks[layer].convolution.middle.buffers()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_frozen_layers_statistics_stand_still_and_the_audit_proves_it() -> None:
    model, inputs = build("conformer")
    before = [statistics(model, i) for i in range(2)]
    fl.freeze(model, "layers[0]")
    proof = fl.audit(model)
    assert {
        f"blocks.0.convolution.middle.{name}"
        for name in ("running_mean", "running_var", "num_batches_tracked")
    } <= set(proof.digests)
    assert not any(name.startswith("blocks.1.") for name in proof.digests)
    train(model)
    proof.verify(model)
    assert same(statistics(model, 0), before[0])
    assert not same(statistics(model, 1), before[1])
    # in training, a frozen layer gives what it gives in evaluation
    x = model.embed(**inputs)
    assert torch.equal(model.train().blocks[0](x), model.eval().blocks[0](x))
    fl.thaw(model)
    train(model, 1)
    with pytest.raises(fl.FrozenWeightsMoved, match=r"blocks\.0\.") as error:
        proof.verify(model)
    assert "blocks.0.convolution.middle.running_mean" in error.value.names


def test_the_audit_sees_statistics_that_move_without_a_weight() -> None:
    model, _ = build("conformer")
    fl.freeze(model, "all", "!head")
    proof = fl.audit(model)
    model.blocks[1].convolution.middle.running_var[0] *= 1.01
    with pytest.raises(fl.FrozenWeightsMoved) as error:
        proof.verify(model)
    assert error.value.names == ("blocks.1.convolution.middle.running_var",)


@pytest.mark.parametrize("name", ["conformer", "conformer-relative"])
def test_heads_of_queries_and_keys_become_orthonormal(name: str) -> None:
    model, _ = build(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fl.orthogonalize(model, "query", "key")
    for block in model.blocks:
        weight = block.attention.qkv.weight.detach()
        heads = weight[:64].unflatten(0, (2, 4, 8))  # query and key, each four heads of eight rows
        grams = heads @ heads.mT
        torch.testing.assert_close(grams, torch.eye(8).expand_as(grams), rtol=0, atol=1e-5)
    moved = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {f"blocks.{i}.attention.qkv.weight" for i in range(2)}
    assert torch.equal(weight[64:], before["blocks.1.attention.qkv.weight"][64:])


def test_freezing_splits_the_fused_projection_and_thawing_joins_it() -> None:
    model, inputs = build("conformer")
    expected = model(**inputs)
    fl.freeze(model, "layers[0].query", "layers[0].key")
    first, second = (block.attention.qkv for block in model.blocks)
    assert isinstance(first, SplitProjection)
    assert type(second) is nn.Linear
    torch.testing.assert_close(model(**inputs), expected)
    fl.freeze(model, "layers[0].query", "layers[0].key", "layers[0].value")
    assert type(model.blocks[0].attention.qkv) is nn.Linear
    fl.thaw(model)
    assert torch.equal(model(**inputs), expected)


def test_roles_and_layers_are_all_there() -> None:
    model, _ = build("conformer")
    anatomy = fl.anatomy(model)
    assert [layer.index for layer in anatomy.layers] == [0, 1]
    names = {role: {p.name for p in anatomy.select(role)} for role in
             ("embedding", "gate", "head", "other", "conv")}  # fmt: skip
    assert names["embedding"] == {"subjects.weight"}
    assert all(name.startswith("gate.") for name in names["gate"])
    assert names["head"] == {n for n, _ in model.named_parameters() if n.startswith("head.")}
    assert names["other"] == {n for n, _ in model.named_parameters() if n.startswith("channels.")}
    front = anatomy.select("conv", "!layers[:].conv")
    assert {p.name.split(".")[0] for p in front} == {"cnn"}
    assert len(front) == 6
    assert len(anatomy.select("layers[0].up")) == 4  # two halves, weight and bias
    relative = fl.anatomy(build("conformer-relative")[0])
    assert len(relative.select("position")) == 2 * 3


def test_trainable_weights_are_saved_with_changed_statistics(tmp_path: Path) -> None:
    model, inputs = build("conformer")
    base = copy.deepcopy(model)
    fl.freeze(model, "layers[0]", "query")
    train(model)
    fl.save_trainable(model, tmp_path / "delta")
    fl.load_trainable(base, tmp_path / "delta")
    assert torch.equal(base.eval()(**inputs), model.eval()(**inputs))
    assert same(statistics(base, 1), statistics(model, 1))
    _, slots = survey(base)
    assert "blocks.0.attention.qkv.weight" in slots


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (
            lambda m, _: fl.grow(m),
            "grow: Conformer cannot be grown; supported: frostlab's GPT and Decoder",
        ),
        (lambda m, d: fl.export(m, d / "x"), "export: Conformer is not a Hugging Face model"),
    ],
)
def test_unsupported_calls_are_refused_in_one_line(
    verb: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(fl.BadInput, match=message) as error:
        verb(build("conformer")[0], tmp_path)  # type: ignore[operator]
    assert "\n" not in str(error.value)

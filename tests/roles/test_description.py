"""Architectures are registered in a few lines, as docs/architectures.md shows."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from frostlab.roles.description import _by_class
from zoo import build


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TABLE = {
    "embed": "embedding",
    "blocks.{i}.norm": "norm",
    "blocks.{i}.qkv": fl.fused("query", "key", "value"),
    "blocks.{i}.out": "output",
    "blocks.{i}.mlp.0": "up",
    "blocks.{i}.mlp.2": "down",
    "head": "head",
}


@pytest.fixture(autouse=True)
def _unregister() -> Iterator[None]:
    before = dict(_by_class)
    yield
    _by_class.clear()
    _by_class.update(before)


def test_a_registered_model_can_be_read_frozen_and_trained() -> None:
    model = Mine()
    assert fl.anatomy(model).evidence.method == "probe"
    fl.register_architecture(Mine, TABLE, heads=4)
    assert fl.anatomy(model).evidence.method == "table"
    query = fl.anatomy(model).select("layers[1].query.weight")[0]
    assert query.heads == fl.Heads(4, 4, 4)
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(torch.randint(0, 50, (2, 5))).square().mean().backward()
        optimizer.step()
    proof.verify(model)


def test_heads_may_be_a_function_or_grouped() -> None:
    fl.register_architecture(Mine, TABLE, heads=lambda model: 2 * len(model.blocks))
    assert fl.anatomy(Mine()).select("query.weight")[0].heads == fl.Heads(4, 4, 4)
    fl.register_architecture(Mine, TABLE, heads=fl.Heads(8, 2, 4))
    parts = fl.anatomy(Mine()).select("layers[0].key.weight", "layers[0].query.weight")
    assert [p.shape for p in parts] == [(32, 16), (8, 16)]


def test_known_submodules_need_no_entry() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = build("bert")[0]
            self.classifier = nn.Linear(32, 3)

    # the shape is the weight's, not the bias's
    with pytest.raises(fl.UnknownArchitecture, match=r"with a role for `classifier`"):
        fl.anatomy(Wrapper())
    fl.register_architecture(Wrapper, {"classifier": "head"}, heads=4)
    anatomy = fl.anatomy(Wrapper())
    assert len(anatomy.select("query.weight")) == 2
    assert [p.name for p in anatomy.select("head.weight")] == [
        "encoder.pooler.dense.weight",
        "classifier.weight",
    ]


def test_two_known_models_side_by_side_are_two_stacks() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = build("bert")[0]
            self.right = build("gpt2")[0]

    anatomy = fl.anatomy(Towers())
    assert {layer.stack for layer in anatomy.layers} == {"left", "right"}
    assert all(p.name.startswith("right.") for p in anatomy.select("right.query"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"embed": "embeding"}, "`embeding` at `embed` is not a role; did you mean `embedding`?"),
        ({"": "head"}, "is not a path"),
        ({"a..b": "head"}, "is not a path"),
    ],
)
def test_bad_tables_are_refused(table: dict[str, str], message: str) -> None:
    with pytest.raises(fl.BadInput) as error:
        fl.register_architecture(Mine, table, heads=4)
    assert message in str(error.value)
    with pytest.raises(fl.BadInput, match="did you mean `query`"):
        fl.fused("qury", "key")
    with pytest.raises(ValueError, match="^33 rows cannot be divided into 8 of query, 8 of key$"):
        fl.fused("query", "key").rows(33, fl.Heads(2, 2, 4))


def test_rows_that_do_not_fit_the_heads_are_refused() -> None:
    fl.register_architecture(Mine, TABLE, heads=fl.Heads(5, 5, 4))
    with pytest.raises(fl.UnknownArchitecture, match=r"blocks.0.qkv.weight"):
        fl.anatomy(Mine())

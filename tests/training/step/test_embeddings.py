"""Gradients of small embeddings by a product are those of torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostlab.training.step import embeddings as module
from frostlab.training.step.embeddings import (
    EmbeddingByProduct,
    gradients_by_products,
    small_embeddings,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 8)
        self.places = nn.Embedding(16, 8)
        self.padded = nn.Embedding(16, 8, padding_idx=0)
        self.layers = nn.ModuleList([nn.ModuleDict({"inside": nn.Embedding(4, 8)})])


@pytest.mark.parametrize("shape", [(5,), (1, 7), (3, 11)])
def test_the_gradient_is_torchs(shape: tuple[int, ...]) -> None:
    ids = torch.randint(6, shape)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(*shape, 4, dtype=torch.float64)
    outputs = [EmbeddingByProduct.apply(weight, ids), F.embedding(ids, weight)]
    (ours,), (theirs,) = (torch.autograd.grad(out, weight, upstream) for out in outputs)
    assert torch.equal(*outputs)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)
    assert not ours[6:].any()


def test_only_small_plain_tables_outside_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    assert small_embeddings(model) == []  # on the CPU, torch's way is not slow
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    assert small_embeddings(model) == [model.places]
    model.layers = nn.ModuleList()
    assert small_embeddings(model) == []  # the whole model would be compiled


def test_only_reads_in_the_context_take_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    table, frozen, ids = nn.Embedding(5, 3), nn.Embedding(5, 3), torch.arange(5)
    frozen.requires_grad_(False)
    taken = []
    look_up = module._look_up
    monkeypatch.setattr(module, "_look_up", lambda e, ids: taken.append(e) or look_up(e, ids))
    with gradients_by_products([table, frozen]):
        table(ids).sum().backward()
        frozen(ids)
    table(ids)
    assert taken == [table]
    assert torch.equal(table.weight.grad, torch.ones(5, 3))
    assert "forward" not in vars(table)

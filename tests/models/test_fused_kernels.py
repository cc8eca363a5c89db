"""The Triton kernels of `frostlab.models.fused`, run by Triton's interpreter, against float64.

`make kernels` runs these tests: Triton must be told to interpret before it is imported.
"""

import importlib
import itertools
import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frostlab import devices
from fused_dropout import SEED, keeps

HEADS, SIZE = 2, 16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports modules of kernels so that they are interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("make kernels runs this test")
    pytest.importorskip("triton")
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 2)

    def load(name: str) -> ModuleType:
        for needed in ("sum_kernels", "dropout_kernels", name):
            path = f"frostlab.models.fused.{needed}"
            monkeypatch.delitem(sys.modules, path, raising=False)
            module = importlib.import_module(path)
        return module

    return load


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_dropout_is_fair_and_independent() -> None:
    """The rate, and no correlation of a row with itself shifted or with another row."""
    kept = (keeps(64, 4096, 0.1) > 0).double()
    assert abs(float(kept.mean()) - 0.9) < 5 * (0.09 / kept.numel()) ** 0.5
    assert (kept.mean(1) - 0.9).abs().max() < 5 * (0.09 / 4096) ** 0.5
    assert (kept.mean(0) - 0.9).abs().max() < 5.5 * (0.09 / 64) ** 0.5
    centred = (kept - 0.9) / 0.3
    for shift in (1, 2, 3, 7, 16, 64, 512):
        shifted = (centred * centred.roll(shift, 1)).mean()
        assert abs(float(shifted)) < 5 / kept.numel() ** 0.5
    between = centred @ centred.T / 4096
    between.fill_diagonal_(0.0)
    assert between.abs().max() < 5.5 / 4096**0.5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("length", "starts"),
    [(32, (0, 1, 2)), (21, (1, 2, 0)), (48, (2, 0, 1)), (70, (0, 1, 2))],
    ids=["whole", "ragged", "blocks", "ragged blocks"],
)
def test_attention(
    kernels: Any, causal: bool, dropout: float, length: int, starts: tuple[int, int, int]
) -> None:
    attention = kernels("joined_attention_kernels")
    attention.LONGEST_WHOLE = 32
    if length > 32:
        attention._forward_tiles = lambda length: [{"rows": 32, "keys": 16}]
        attention._backward_tiles = lambda length: [{"outer": 32, "inner": 16}]
    torch.manual_seed(0)
    width, scale = HEADS * SIZE, 0.3
    joined = torch.randn(2, length, 3 * width).half()
    places = [start * width for start in starts]
    seed = torch.tensor([SEED, 0])
    arguments = (seed, places, SIZE, scale, dropout, causal)
    out, sums = attention.attend(joined, *arguments)
    upstream = torch.randn_like(out)
    by_joined, by_bias = attention.differentiate(upstream, joined, out, sums, *arguments, True)
    assert attention.differentiate(upstream, joined, out, sums, *arguments, False)[1].numel() == 0

    exact = joined.double().requires_grad_()
    query, key, value = (
        exact[..., place : place + width].unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        for place in places
    )
    scores = query @ key.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    factors = keeps(2 * HEADS, length * length, dropout).view(scores.shape)
    mixed = (scores.softmax(-1) * factors) @ value
    wanted = mixed.transpose(1, 2).flatten(2)
    (gradient,) = torch.autograd.grad(wanted, exact, upstream.double())
    assert off(out, wanted.detach()) < 1e-3
    assert off(by_joined, gradient) < 1e-3
    assert off(by_bias, gradient.sum((0, 1))) < 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("keep", [False, True])
def test_residual_norm(kernels: Any, dropout: float, keep: bool) -> None:
    norms = kernels("residual_norm_kernels")
    torch.manual_seed(0)
    rows, width = 5, 48
    x, branch = torch.randn(rows, width), torch.randn(rows, width)
    weight, shift = torch.randn(width), torch.randn(width)
    seed = torch.tensor([SEED, 0]) if dropout else None
    total, full, half, means, scales = norms.normalise(
        x, branch, weight, shift, seed, dropout, 1e-5, keep, True, torch.float16
    )
    leaves = [t.double().requires_grad_() for t in (x, branch, weight, shift)]
    factors = keeps(rows, width, dropout)
    wanted = leaves[0] + leaves[1] * factors
    normed = F.layer_norm(wanted, (width,), leaves[2], leaves[3], 1e-5)
    assert off(full, normed.detach()) < 1e-6
    assert off(half, normed.detach()) < 1e-3
    if keep:
        assert off(total, wanted.detach()) < 1e-6
    by_total, by_full = torch.randn(rows, width), torch.randn(rows, width)
    found = norms.differentiate(
        total if keep else x, None if keep else branch, weight, seed, dropout, means, scales,
        by_total if keep else None, by_full, None, torch.float32, torch.float32,
    )  # fmt: skip
    outputs, upstream = [normed], [by_full.double()]
    if keep:
        outputs, upstream = [normed, wanted], [by_full.double(), by_total.double()]
    expected = torch.autograd.grad(outputs, leaves, upstream)
    for one, other in zip(found, (*expected, expected[1].sum(0)), strict=True):
        assert off(one, other) < 1e-5


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_residual_sum(kernels: Any, dropout: float) -> None:
    norms = kernels("residual_norm_kernels")
    torch.manual_seed(0)
    x, branch, by_total = (torch.randn(7, 48) for _ in range(3))
    seed, factors = torch.tensor([SEED, 0]) if dropout else None, keeps(7, 48, dropout)
    assert off(norms.add(x, branch, seed, dropout), x + branch * factors) < 1e-6
    by_branch, by_bias = norms.differentiate_sum(
        by_total, seed, dropout, torch.float32, torch.float32
    )
    assert off(by_branch, by_total * factors) < 1e-6
    assert off(by_bias, (by_total * factors).sum(0)) < 1e-6
    again, none = norms.differentiate_sum(by_total, seed, dropout, torch.float32, None)
    assert torch.equal(again, by_branch)
    assert none.numel() == 0


@pytest.mark.parametrize(
    ("count", "rows", "width"), [(5, 3, 7), (100, 7, 16), (64, 200, 40), (97, 5, 8), (40, 1, 70)]
)
@pytest.mark.parametrize("order", ["counted", "sorted"])
def test_rows_are_added_to_the_rows_of_their_ids(
    kernels: Any, count: int, rows: int, width: int, order: str
) -> None:
    """Ids that fill several chunks, that start or end with one, and that occur once."""
    embedding = kernels("embedding_kernels")
    embedding._CHUNK = 16
    embedding._COUNTED = 1000 if order == "counted" else 0
    torch.manual_seed(0)
    kinds = [
        torch.randint(rows, (count,)),
        torch.full((count,), rows - 1),
        (torch.rand(count) ** 4 * rows).long(),
        torch.arange(count) % rows,
    ]
    for ids, skipped, adds in itertools.product(kinds, (-1, 0), (False, True)):
        values = torch.randn(count, width)
        table = torch.randn(rows, width) if adds else torch.zeros(rows, width)
        kept = ids != skipped
        wanted = table.double().index_add(0, ids[kept], values[kept].double())
        embedding.add_rows(table, ids, values, skipped, adds)
        torch.testing.assert_close(table.double(), wanted, rtol=1e-5, atol=1e-5)

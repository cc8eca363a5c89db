"""The kernels of an embedding's gradient against torch."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostlab.models.fused.embedding import add_rows, look_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("count", [1, 100, 5000, 20000])
@pytest.mark.parametrize("rows", [1, 3, 700, 30000])
@pytest.mark.parametrize("width", [8, 300])
def test_rows_are_added_in_a_fixed_order(
    count: int, rows: int, width: int, no_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    """To the bit twice, and without waiting; half of the ids are one id, as padding is."""
    torch.manual_seed(0)
    ids = torch.randint(rows, (count,), device="cuda")
    ids[: count // 2] = rows // 2
    values = torch.randn(count, width, device="cuda")
    start = torch.randn(rows, width, device="cuda")
    found = [start.clone() for _ in range(2)]
    add_rows(start.clone(), ids, values)  # compiles
    with no_waiting():
        for table in found:
            add_rows(table, ids, values)
    assert torch.equal(*found)
    expected = start.double().index_add(0, ids, values.double())
    assert float((found[0] - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("padding", [None, 5])
def test_an_embedding_gets_torchs_gradient(padding: int | None) -> None:
    torch.manual_seed(0)
    module = nn.Embedding(50, 24, padding_idx=padding, device="cuda")
    ids = torch.randint(50, (7, 40), device="cuda")
    upstream = torch.randn(7, 40, 24, device="cuda")
    found, wanted = look_up(module, ids), F.embedding(ids, module.weight, padding)
    assert torch.equal(found, wanted)
    assert "Embedding" in type(found.grad_fn).__name__
    for one, other in zip(
        *(torch.autograd.grad(out, module.weight, upstream) for out in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_changed_embedding_is_called() -> None:
    module, ids = nn.Embedding(5, 3, device="cuda"), torch.tensor([1, 2], device="cuda")
    called = []
    module.register_forward_hook(lambda *_: called.append(True))
    look_up(module, ids)
    assert called == [True]

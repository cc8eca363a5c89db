"""The kernel of cross-entropy over rows of logits, run by Triton's interpreter, against float64.

`make kernels` runs these tests: Triton must be told to interpret before it is imported.
"""

import os

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="make kernels runs this test"
    ),
    # the interpreter computes with numpy, which warns of the row of NaN
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.mark.parametrize(("columns", "padding"), [(96, 0), (100, 12), (64, 0), (300, 4), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("scaled", [False, True])
def test_losses_and_gradients_of_rows(
    columns: int, padding: int, dtype: torch.dtype, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that stay in registers or are too long; padding; rows without a target, even of NaN."""
    pytest.importorskip("triton")
    from frostlab.training.step import kernels

    monkeypatch.setattr(kernels, "_BLOCK", 32)
    monkeypatch.setattr(kernels, "_HELD", 8)
    torch.manual_seed(0)
    logits = (4 * torch.randn(9, columns + padding)).to(dtype)
    labels = torch.randint(columns, (9,))
    labels[0], labels[1], labels[2] = 0, columns - 1, -100
    exact = logits[:, :columns].double().requires_grad_()
    losses = F.cross_entropy(exact, labels, reduction="none", ignore_index=-100)
    (wanted,) = torch.autograd.grad(losses.sum() * 0.5 * (3.0 if scaled else 1.0), exact)
    logits[2] = torch.nan
    scale = torch.full((1,), 3.0) if scaled else None
    unchanged = logits.clone()
    for factor in (None, 0.5):
        found = kernels.cross_entropy_rows(logits[:, :columns], labels, factor, scale)
        torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
        if factor is None:
            assert torch.equal(logits.nan_to_num(), unchanged.nan_to_num())
    close = (
        {"rtol": 2**-9, "atol": 1e-4} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-6}
    )
    torch.testing.assert_close(logits[:, :columns].double(), wanted, **close)
    assert not logits[:, columns:].any()

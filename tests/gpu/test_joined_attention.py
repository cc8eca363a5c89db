"""The kernels of attention over a joined product against float64, for every choice of tiles."""

from typing import Any

import pytest
import torch
from torch import Tensor

from frostlab.models.fused.joined_attention import attend, fits
from fused_dropout import SEED, keeps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


def off(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error; the gradients of queries and keys are 0 if there is one token."""
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-3))


def exactly(
    joined: Tensor, starts: tuple[int, ...], size: int, dropout: float, causal: bool
) -> Tensor:
    batch, length, stride = joined.shape
    width, heads = stride // 3, stride // 3 // size
    query, key, value = (
        joined[..., start : start + width].unflatten(-1, (heads, size)).transpose(1, 2)
        for start in starts
    )
    scores = query @ key.mT * size**-0.5
    if causal:
        hidden = ~torch.ones(length, length, device=CUDA).tril().bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    factors = 1.0
    if dropout:
        factors = keeps(batch * heads, length * length, dropout).to(CUDA).view(scores.shape)
    return ((scores.softmax(-1) * factors) @ value).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 17, 64, 100, 128, 129, 512])
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernels_equal_float64(length: int, size: int, causal: bool, dropout: float) -> None:
    torch.manual_seed(0)
    assert fits(torch.bfloat16, length, size)
    width = 2 * size
    starts: Any = (width, 2 * width, 0)
    # float16 has three more bits than bf16, so that the kernels' own errors are seen
    joined = torch.randn(3, length, 3 * width, device=CUDA).half().requires_grad_()
    bias = torch.zeros(2 * width, device=CUDA, requires_grad=True)
    seed = torch.tensor([SEED, 0], device=CUDA)
    out = attend(joined, [bias], starts, size, size**-0.5, dropout, causal, seed)
    upstream = torch.randn_like(out)
    by_joined, by_bias = torch.autograd.grad(out, [joined, bias], upstream)
    exact = joined.detach().double().requires_grad_()
    wanted = exactly(exact, starts, size, dropout, causal)
    (expected,) = torch.autograd.grad(wanted, exact, upstream.double())
    assert off(out, wanted) < 1e-3
    assert off(by_joined, expected) < 1.5e-3
    assert off(by_bias, expected.sum((0, 1))[width:]) < 1.5e-3


@pytest.mark.parametrize("causal", [False, True])
def test_many_sequences(causal: bool) -> None:
    """So many that the kernels with fewer registers run; to the bit the same twice."""
    torch.manual_seed(0)
    starts: Any = (0, 128, 256)
    joined = torch.randn(300, 256, 384, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(384, device=CUDA, requires_grad=True)
    runs = []
    for _ in range(2):
        out = attend(joined, [bias], starts, 64, 0.125, 0.0, causal)
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), [joined, bias])])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    exact = joined[:2].detach().double()
    assert off(runs[0][0][:2], exactly(exact, starts, 64, 0.0, causal)) < 1e-2

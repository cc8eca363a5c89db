"""The kernels of residual sums and norms against torch in float64, and in compiled layers."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.models.fused.gelu import gelu_of
from frostlab.models.fused.residual_norm import (
    add_and_norm,
    has_kernel,
    keep_and_norm,
    residual_norm,
)
from frostlab.training.step.compiled import joining_backend
from fused_dropout import SEED, keeps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
CUDA = torch.device("cuda", 0)
HALF, FULL = torch.bfloat16, torch.float32


def off(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm())


def limit(tensor: Tensor) -> float:
    return 1e-2 if tensor.dtype == HALF else 2e-6


@pytest.mark.parametrize("shape", [(3, 5, 48), (2, 130, 768), (4097, 512), (1, 1, 1000), (7, 8192)])
@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_kernels_equal_torch(
    shape: tuple[int, ...], dtype: torch.dtype, branches: bool, keeps: bool, shifted: bool
) -> None:
    torch.manual_seed(0)
    width = shape[-1]
    x = (3 * torch.randn(shape, device=CUDA) + 1).requires_grad_()
    branch = torch.randn(shape, device=CUDA).to(dtype).requires_grad_() if branches else None
    weight = torch.randn(width, device=CUDA).requires_grad_()
    shift = torch.randn(width, device=CUDA).requires_grad_() if shifted else None
    bias = torch.zeros(width, device=CUDA, dtype=dtype).requires_grad_() if branches else None
    leaves = [tensor for tensor in (x, branch, weight, shift, bias) if tensor is not None]
    with torch.autocast("cuda", HALF, enabled=dtype == HALF):
        results = residual_norm(x, branch, weight, shift, bias, 0.0, 1e-5, keeps, True, True)
    results = tuple(result for result in results if result is not None)
    upstream = [torch.randn_like(result) for result in results]
    gradients = torch.autograd.grad(results, leaves, upstream)
    exact = {id(leaf): leaf.detach().double().requires_grad_() for leaf in leaves}
    total = exact[id(x)]
    if branch is not None and bias is not None:
        total = total + exact[id(branch)] + exact[id(bias)]
    normed = F.layer_norm(
        total, (width,), exact[id(weight)], None if shift is None else exact[id(shift)], 1e-5
    )
    wanted = ([total] if keeps else []) + [normed, normed]
    expected = torch.autograd.grad(wanted, list(exact.values()), [u.double() for u in upstream])
    assert results[-1].dtype == dtype
    for found, right in zip((*results, *gradients), (*wanted, *expected), strict=True):
        assert off(found, right) < limit(found)


@pytest.mark.parametrize("keep", [False, True])
def test_dropout_follows_from_the_seed_and_its_gradient_too(keep: bool) -> None:
    x, branch = (torch.randn(9, 64, device=CUDA, requires_grad=True) for _ in range(2))
    weight, shift = (torch.randn(64, device=CUDA, requires_grad=True) for _ in range(2))
    leaves, upstream = [x, branch, weight, shift], torch.randn(9, 64, device=CUDA)
    seed = torch.tensor([SEED, 0], device=CUDA)
    found = residual_norm(x, branch, weight, shift, None, 0.4, 1e-5, keep, True, True, seed)
    total = x + branch * keeps(9, 64, 0.4).float().to(CUDA)
    wanted = [total, F.layer_norm(total, (64,), weight, shift, 1e-5)]
    sides = []
    for outputs in ([found[0], found[1]], wanted):
        used = outputs if keep else outputs[1:]
        sides.append([*used, *torch.autograd.grad(used, leaves, [upstream] * len(used))])
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_dropout_without_a_seed_follows_from_torchs_generator() -> None:
    norm, linear = nn.LayerNorm(64).to(CUDA), nn.Linear(32, 64).to(CUDA)
    x, inputs = torch.randn(9, 64, device=CUDA), torch.randn(9, 32, device=CUDA)
    assert has_kernel(x, norm)
    totals = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        totals.append(add_and_norm(x, linear, inputs, norm, 0.4)[0])
    assert torch.equal(totals[0], totals[1])
    assert not torch.equal(totals[0], totals[2])
    dropped = (totals[0] == x).float().mean()
    assert 0.3 < dropped < 0.5


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(3, 5, 48), (4097, 520)])
def test_gelu_equals_torchs(shape: tuple[int, ...], approximate: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, shape[-1]).to(CUDA, HALF)
    inputs = (8 * torch.randn(*shape[:-1], 32, device=CUDA)).to(HALF).requires_grad_()
    leaves = [inputs, linear.weight, linear.bias]
    out = gelu_of(linear, inputs, approximate)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, upstream)
    middle = linear(inputs).detach().double().requires_grad_()  # as rounded by the product
    wanted = F.gelu(middle, approximate=approximate)
    (by_middle,) = torch.autograd.grad(wanted, middle, upstream.double())
    by_middle = by_middle.flatten(0, -2)
    expected = [
        (by_middle @ linear.weight.double()).view_as(inputs),
        by_middle.t() @ inputs.detach().double().flatten(0, -2),
        by_middle.sum(0),
    ]
    for found, right in zip((out, *gradients), (wanted, *expected), strict=True):
        assert off(found, right.detach()) < 1e-2


def test_sums_do_not_depend_on_which_program_was_faster() -> None:
    norm = nn.LayerNorm(512).to(CUDA)
    x = torch.randn(20000, 512, device=CUDA, requires_grad=True)
    upstream = torch.randn(20000, 512, device=CUDA)
    runs = []
    for _ in range(5):
        _, normed = keep_and_norm(x, norm)
        runs.append(torch.autograd.grad(normed, [x, norm.weight, norm.bias], upstream))
    for run in runs[1:]:
        for found, first in zip(run, runs[0], strict=True):
            assert torch.equal(found, first)


def test_a_hooked_norm_is_called() -> None:
    norm, called = nn.LayerNorm(16).to(CUDA), []
    x = torch.randn(2, 16, device=CUDA)
    handle = norm.register_forward_hook(lambda *_: called.append(True))
    keep_and_norm(x, norm)
    assert called == [True]
    handle.remove()
    keep_and_norm(x, norm)
    assert called == [True]
    assert has_kernel(x, norm)
    assert not has_kernel(x.double(), norm.double())


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("gpt", ""),
        ("bert", ""),
        ("bert", "query key"),
        ("bert", "key"),
        ("bert", "query key value"),
    ],
)
@pytest.mark.parametrize("precision", [HALF, FULL])
def test_compiled_layers_with_fused_operations_equal_eager_ones(
    name: str, precision: torch.dtype, frozen: str
) -> None:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    from frostlab.models.gpt import GPTBlock, GPTConfig

    torch.manual_seed(0)
    layer: Any
    if name == "bert":
        config = BertConfig(
            hidden_size=64, num_attention_heads=4, intermediate_size=128, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        layer, arguments = BertLayer(config), ()
    else:
        layer, arguments = GPTBlock(GPTConfig(width=64, heads=4, hidden=128, dropout=0.0)), (None,)
    layer = layer.to(CUDA).train()
    for part, p in layer.named_parameters():
        p.requires_grad_(not any(f".{word}." in part for word in frozen.split()))
    x = torch.randn(4, 32, 64, device=CUDA)
    sides = []
    for compiled in (False, True):
        torch.compiler.reset()
        own = copy.deepcopy(layer)
        start = x.clone().requires_grad_()
        if compiled:
            own.compile(backend=joining_backend)
        with torch.autocast("cuda", HALF, enabled=precision == HALF):
            out = own(start, *arguments)
        out = out[0] if isinstance(out, tuple) else out
        upstream = torch.randn(
            out.shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1)
        )
        out.float().backward(upstream)
        # the gradient of the keys' bias is 0 but for rounding
        learned = [
            p.grad
            for part, p in own.named_parameters()
            if p.grad is not None and not part.endswith(("key.bias", "qkv.bias"))
        ]
        sides.append([out, start.grad, *learned])
    assert len(sides[0]) == len(sides[1])
    for found, wanted in zip(*sides, strict=True):
        assert off(found, wanted.double()) < (3e-2 if precision == HALF else 1e-4)

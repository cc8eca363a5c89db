"""The depthwise convolution and its gradients equal torch's, in its operators and its kernels.

The kernels need a GPU, but Triton can interpret them on the CPU; where it is not installed, the
operators are tested with torch's convolution in the place of the kernels.
"""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from frostlab import devices
from frostlab.models.fused import depthwise as module
from frostlab.models.fused.depthwise import Depthwise, depthwise, depthwise_sums, has_kernel

KERNELS = "frostlab.models.fused.depthwise_kernels"
HALF = torch.bfloat16


def convolve(x: Tensor, taps: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    weight = (taps.flip(0) if flipped else taps).t()[:, None].double()
    bias = None if bias is None else bias.double()
    padding = len(taps) // 2
    made = F.conv1d(x.double().mT, weight, bias, padding=padding, groups=x.shape[-1])
    return made.mT.to(x.dtype).contiguous()


def correlate(gradient: Tensor, x: Tensor, kernel: int) -> Tensor:
    gradient, x, width = gradient.double(), x.double(), x.shape[-1]
    by_weight = torch.nn.grad.conv1d_weight(
        x.mT, (width, 1, kernel), gradient.mT, padding=kernel // 2, groups=width
    )
    return torch.cat([by_weight[:, 0].t(), gradient.sum((0, 1))[None]]).float()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's convolution in the place of the kernels, used on the CPU."""
    kernels = ModuleType(KERNELS)
    kernels.convolve, kernels.correlate = convolve, correlate
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    monkeypatch.setattr(module, "has_kernel", lambda x, weight: True)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, run by Triton's interpreter on the CPU, in small blocks to be fast."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = importlib.util.find_spec(KERNELS)
    kernels = importlib.util.module_from_spec(found)
    found.loader.exec_module(kernels)
    kernels.ROWS, kernels.CHANNELS, kernels.STEPS = 4, 8, 2
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    monkeypatch.setattr(module, "has_kernel", lambda x, weight: True)


def errors(layer: Depthwise, x: Tensor, autocast: bool = False) -> dict[str, float]:
    """The relative errors of the result and all gradients against float64."""
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, HALF, enabled=autocast):
        made = layer(x)
    pull = torch.randn_like(made)
    layer.zero_grad()
    made.backward(pull)
    exact = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    padding, groups = layer.weight.shape[-1] // 2, x.shape[-1]
    wanted = F.conv1d(exact[0].mT, *exact[1:], padding=padding, groups=groups).mT
    wanted.backward(pull.double())
    found = {
        "result": made.detach(),
        "x": x.grad,
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
    }
    exact_values = [wanted.detach(), *(t.grad for t in exact)]
    return {
        name: float((value.double() - true).norm() / true.norm())
        for (name, value), true in zip(found.items(), exact_values, strict=True)
    }


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((2, 19, 10), 31), ((1, 18, 6), 5), ((2, 16, 16), 7), ((2, 1, 3), 31), ((1, 8, 3), 1)],
    ids=str,
)
def test_interpreted_kernels_equal_torchs_convolution(
    shape: tuple[int, int, int], kernel: int
) -> None:
    torch.manual_seed(0)
    found = errors(Depthwise(shape[-1], kernel), torch.randn(shape))
    assert max(found.values()) < 1e-6, found


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("given", [torch.float32, HALF], ids=["float32", "bf16"])
def test_interpreted_kernels_under_autocast_keep_sums_and_weights_in_float32(
    given: torch.dtype,
) -> None:
    torch.manual_seed(0)
    found = errors(Depthwise(10, 7), torch.randn(2, 21, 10).to(HALF).to(given), autocast=True)
    assert max(found["result"], found["x"]) < 5e-3, found
    assert max(found["weight"], found["bias"]) < 1e-6, found


@pytest.mark.usefixtures("stand_in")
def test_the_operators_keep_torchs_rules() -> None:
    x, taps, bias = (torch.randn(s, requires_grad=True) for s in ((2, 9, 6), (5, 6), (6,)))
    for given in ((x, taps, bias, False), (x, taps, None, True)):
        assert set(torch.library.opcheck(depthwise, given).values()) == {"SUCCESS"}
    found = torch.library.opcheck(depthwise_sums, (x.detach(), x.detach(), 5))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("frozen", [(), ("weight",), ("weight", "bias"), ("x",)], ids=str)
def test_only_what_learns_gets_a_gradient(
    frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, calls = sys.modules[KERNELS], []
    monkeypatch.setattr(
        kernels, "correlate", lambda *given: calls.append("sums") or correlate(*given)
    )
    layer, x = Depthwise(6, 5), torch.randn(2, 9, 6, requires_grad="x" not in frozen)
    for name in {"weight", "bias"} & set(frozen):
        layer.get_parameter(name).requires_grad_(False)
    layer(x).sum().backward()
    for name, tensor in {"x": x, **dict(layer.named_parameters())}.items():
        assert (tensor.grad is None) == (name in frozen)
    assert len(calls) == ({"weight", "bias"} > set(frozen) or "x" in frozen)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_operators_compile_without_a_break(autocast: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    layer, x = Depthwise(6, 5), torch.randn(2, 9, 6)
    plain = Depthwise(6, 5)
    plain.load_state_dict(layer.state_dict())
    layer.compile(backend="aot_eager", fullgraph=True)
    for each in (plain, layer):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", HALF, enabled=autocast):
            made = each(given)
        assert made.dtype == (HALF if autocast else torch.float32)
        made.backward(torch.ones_like(made))
        each.made, each.given = made.detach(), given.grad
    assert torch.equal(plain.made, layer.made)
    assert torch.equal(plain.given, layer.given)
    for a, b in zip(plain.parameters(), layer.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
        assert b.grad.is_contiguous(), "the fused optimizer needs that"


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        ((4, 9, 6, 31), {}),
        ((4, 9, 6, 5), {"dtype": HALF}),
        ((4, 9, 6, 33), {}),  # too many taps
        ((4, 9, 6, 4), {}),  # an even number of taps
        ((65536, 9, 6, 5), {}),  # more windows than a grid has
        ((4, 9, 6, 5), {"dtype": torch.float64}),
        ((4, 9, 6, 5), {"device": "cpu"}),
    ],
    ids=str,
)
def test_the_kernels_are_for_cuda_and_the_sizes_they_fit(
    size: tuple[int, ...], changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "HAS_TRITON", True)
    batch, length, width, kernel = size
    with FakeTensorMode():
        x = torch.empty(batch, length, width, **({"device": "cuda"} | changes))
        fits = has_kernel(x, torch.empty(width, 1, kernel))
    assert fits == (size[0] == 4 and kernel in (5, 31) and changes in ({}, {"dtype": HALF}))


@pytest.mark.parametrize("kernel", [1, 5, 31])
def test_the_fallback_equals_torchs_convolution(kernel: int) -> None:
    torch.manual_seed(0)
    found = errors(Depthwise(6, kernel).double(), torch.randn(2, 11, 6, dtype=torch.float64))
    assert max(found.values()) < 1e-12, found

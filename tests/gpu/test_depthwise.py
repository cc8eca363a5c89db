"""The kernels of the depthwise convolution on CUDA: exact, the same every time, in every step.

Compiled and captured steps of a whole Conformer are tested in test_conformer.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.models.conformer import ConformerConfig, Convolution
from frostlab.models.fused import depthwise as module
from frostlab.models.fused.depthwise import Depthwise, has_kernel
from frostlab.training.step.compiled import joining_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler's own
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
CUDA = torch.device("cuda", 0)
HALF, FULL = torch.bfloat16, torch.float32
SHAPES = [(3, 640, 512, 31), (2, 641, 70, 31), (4, 33, 256, 7), (2, 1, 16, 31), (1, 300, 130, 15)]
# Relative errors, as norms, against float64. Float32 sums of the weight's gradient over up to 2,000
# samples lose about 1e-6; bf16 results are rounded once, by at most 2^-9.
EXACT, ROUNDED = 5e-6, 4e-3


def gradients(layer: nn.Module, x: Tensor, pull: Tensor, autocast: bool = False) -> list[Tensor]:
    """The result, and the gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", HALF, enabled=autocast):
        made = layer(x)
    leaves = [x, *layer.parameters()]
    return [made.detach(), *torch.autograd.grad(made, leaves, pull.to(made.dtype))]


def exact(layer: Depthwise, x: Tensor, pull: Tensor) -> list[Tensor]:
    given = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    padding, groups = layer.weight.shape[-1] // 2, x.shape[-1]
    made = F.conv1d(given[0].mT, *given[1:], padding=padding, groups=groups).mT
    made.backward(pull.double())
    return [made.detach(), *(t.grad for t in given)]


def relative(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = zip(found, wanted, strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", [HALF, FULL], ids=["bf16", "float32"])
def test_results_and_gradients_equal_float64(
    shape: tuple[int, ...], precision: torch.dtype
) -> None:
    torch.manual_seed(0)
    *size, kernel = shape
    layer = Depthwise(size[-1], kernel).to(CUDA)
    x, pull = (torch.randn(size, device=CUDA).to(precision) for _ in range(2))
    assert has_kernel(x, layer.weight)
    found = gradients(layer, x, pull, autocast=precision == HALF)
    assert [t.dtype for t in found] == [precision, precision, FULL, FULL]
    apart = relative(found, exact(layer, x, pull))
    bound = ROUNDED if precision == HALF else EXACT
    assert max(apart[:2]) < bound, apart
    assert max(apart[2:]) < EXACT, apart


def test_gradients_are_the_same_every_time() -> None:
    torch.manual_seed(0)
    layer = Depthwise(512, 31).to(CUDA)
    x, pull = (torch.randn(16, 640, 512, device=CUDA, dtype=HALF) for _ in range(2))
    first = gradients(layer, x, pull)
    for _ in range(5):
        again = gradients(layer, x, pull)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_strided_input_and_gradient_give_the_same() -> None:
    torch.manual_seed(0)
    layer = Depthwise(64, 31).to(CUDA)
    x, pull = (torch.randn(2, 64, 50, device=CUDA).mT for _ in range(2))
    found = gradients(layer, x, pull)
    wanted = gradients(layer, x.contiguous(), pull.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_kernels_do_not_wait(
    no_waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    layer = Depthwise(64, 31).to(CUDA)
    x, pull = (torch.randn(2, 50, 64, device=CUDA) for _ in range(2))
    gradients(layer, x, pull)  # compiles the kernels
    torch.cuda.synchronize()
    with no_waiting():
        gradients(layer, x, pull)


@pytest.mark.parametrize("published", [False, True])
def test_a_compiled_convolution_module_equals_an_eager_one(
    published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the kernels: the three differ by rounding alone."""
    torch.compiler.reset()
    torch.manual_seed(0)
    config = ConformerConfig(dropout=0.0, variant="published" if published else "frostlab")
    plain, compiled = (Convolution(config).to(CUDA).train() for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    compiled.compile(backend=joining_backend, fullgraph=True)
    x, pull = (torch.randn(4, 320, config.width, device=CUDA) for _ in range(2))
    found = gradients(compiled, x, pull, autocast=True)
    wanted = gradients(plain, x, pull, autocast=True)
    monkeypatch.setattr(module, "has_kernel", lambda x, weight: False)
    without = gradients(plain, x, pull, autocast=True)
    for name, a, b, c in zip(
        ["result", "x", *(name for name, _ in plain.named_parameters())],
        found, wanted, without, strict=True,
    ):  # fmt: skip
        if name == "depthwise.bias":  # BatchNorm removes it: its gradient is rounding alone
            continue
        assert max(relative([a, b], [c.double(), c.double()])) < 3e-2, name


def test_a_captured_graph_replays_the_kernels() -> None:
    torch.manual_seed(0)
    layer = Depthwise(256, 31).to(CUDA)
    x, pull = (torch.randn(8, 640, 256, device=CUDA, dtype=HALF) for _ in range(2))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients(layer, x, pull)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = gradients(layer, x, pull)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    wanted = gradients(layer, x, pull)
    assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))

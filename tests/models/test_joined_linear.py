"""A joined linear map computes what its maps do, and reads weights that lie side by side in place.

`tests/training/step/test_compiled.py` compares whole layers, with any of their maps frozen.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from frostlab.models.fused.joined_linear import (
    _MULTIPLY,
    _MULTIPLY_BACK,
    joined_linear,
    multiply,
    multiply_back,
    stacked,
)

ROWS = (4, 3, 3)


def drawn(*size: int, dtype: torch.dtype = torch.float64, learns: bool = False) -> Tensor:
    return torch.randn(*size, dtype=dtype, requires_grad=learns)


@pytest.mark.parametrize("half", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize(("frozen", "flops"), [(0, 3.0), (1, 2.6), (2, 2.3), (3, 2.0)])
def test_it_is_the_plain_map_in_fewer_flops(
    frozen: int, flops: float, bias: bool, half: bool
) -> None:
    """Frozen rows have no gradient, which takes a third of the FLOPs of their rows."""
    dtype = torch.float32 if half else torch.float64  # autocast leaves float64 alone
    torch.manual_seed(0)
    learn = [i >= frozen for i in range(len(ROWS))]
    pairs = list(zip(ROWS, learn, strict=True))
    x = drawn(2, 5, 8, dtype=dtype, learns=True)
    weights = [drawn(rows, 8, dtype=dtype, learns=learns) for rows, learns in pairs]
    biases = [drawn(rows, dtype=dtype, learns=learns) for rows, learns in pairs] if bias else []
    leaves = [x, *weights[frozen:], *biases[frozen:]]
    found = []
    for ours in (True, False):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=half),
            FlopCounterMode(display=False) as counter,
        ):
            if ours:
                out = joined_linear(x, weights, biases, frozen)
            else:
                out = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
            made = torch.autograd.grad(out.to(dtype).square().sum(), leaves)
        found.append([out.detach(), *made])
        if ours:
            assert counter.get_total_flops() == pytest.approx(flops * 2 * 10 * 8 * 10)
    for one, other in zip(*found, strict=True):
        # bf16 keeps 8 bits; float32 sums of what it rounded differ in the order of the products
        close = {"rtol": 2**-7, "atol": 2**-5} if half else {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("size", [(5, 8), (8,), (0, 5, 8), (2, 5, 3, 8)])
def test_its_input_may_have_any_shape(size: tuple[int, ...]) -> None:
    weights, x = [drawn(rows, 8, learns=True) for rows in ROWS], drawn(*size)
    out = joined_linear(x, weights, [], 0)
    expected = F.linear(x, torch.cat(weights))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    made, wanted = (torch.autograd.grad(each.square().sum(), weights) for each in (out, expected))
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-10)


def test_an_input_without_gradient_takes_no_product() -> None:
    weights, x = [drawn(rows, 8, learns=True) for rows in ROWS], drawn(5, 8)
    with FlopCounterMode(display=False) as counter:
        joined_linear(x, weights, [], 0).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 5 * 8 * 10


def test_a_float32_bias_of_rounded_products_keeps_its_dtype() -> None:
    """Its gradient is added up in float32 and rounded once, as torch's is."""
    weights, biases = [drawn(3, 8, dtype=torch.float32)], [torch.zeros(3, requires_grad=True)]
    x = drawn(4000, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        joined_linear(x, weights * 2, biases * 2, 0).sum().backward()
    assert biases[0].grad is not None
    assert biases[0].grad.tolist() == [8000.0] * 3  # bf16 cannot count beyond 256 one by one


def test_adjacent_tensors_are_stacked_without_a_copy() -> None:
    memory = torch.arange(80.0)
    one, two, three = memory[8:].view(9, 8).split([4, 3, 2])
    for given in ([one, two, three], [two, three], [one]):
        found = stacked([torch.nn.Parameter(each) for each in given])
        assert torch.equal(found, torch.cat(given))
        assert found.data_ptr() == given[0].data_ptr()
        assert found.is_contiguous()


@pytest.mark.parametrize(
    "choose",
    [
        lambda one, two, three: [one, three],
        lambda one, two, three: [two, one, three],
        lambda one, two, three: [one, two.clone(), three],
        lambda one, two, three: [one, one],
        lambda one, two, three: [one[:, :4], two[:, :4]],
    ],
    ids=["gap", "order", "elsewhere", "twice", "columns"],
)
def test_other_tensors_are_concatenated(choose: object) -> None:
    given = choose(*torch.arange(72.0).view(9, 8).split([4, 3, 2]))  # type: ignore[operator]
    found = stacked(given)
    assert torch.equal(found, torch.cat(given))
    assert found.data_ptr() not in [each.data_ptr() for each in given]


def test_the_operators_tell_a_compiler_what_they_return() -> None:
    weights, biases = [drawn(rows, 8) for rows in ROWS], [drawn(rows) for rows in ROWS]
    x, upstream = drawn(5, 2, 8).transpose(0, 1), drawn(2, 5, 10)
    for operator, arguments in (
        (_MULTIPLY, (x, weights, biases)),
        (_MULTIPLY, (x, weights, [])),
        (_MULTIPLY_BACK, (upstream, weights)),
    ):
        torch.library.opcheck(operator, arguments)
    assert multiply(x, weights, []).is_contiguous()
    assert multiply_back(upstream, weights).is_contiguous()

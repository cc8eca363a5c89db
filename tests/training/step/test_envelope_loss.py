"""Envelope losses: scipy's r, right gradients, nothing that breaks on silence, one sum a batch."""

from typing import Any

import pytest
import torch
from scipy.stats import pearsonr
from torch import Tensor

import frostlab as fl
from frostlab.recipe.model import EnvelopeLoss
from frostlab.training.step.envelope_loss import KINDS, envelope_loss, pearson, window_losses


def windows(batch: int = 3, length: int = 40) -> tuple[Tensor, Tensor]:
    """Predictions and targets that have something, not all, in common."""
    target = torch.randn(batch, length)
    return 0.5 * target + torch.randn(batch, length) + 0.3, target


def scipy_r(x: Tensor, y: Tensor) -> list[float]:
    pairs = zip(x.double().numpy(), y.double().numpy(), strict=True)
    return [float(pearsonr(a, b).statistic) for a, b in pairs]


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_r_is_scipys_at_any_scale_and_offset(scale: float, offset: float) -> None:
    x, y = windows()
    x = (x + offset) * scale
    assert pearson(x, y).tolist() == pytest.approx(scipy_r(x, y), abs=2e-5)
    assert pearson(y, x).tolist() == pytest.approx(scipy_r(x, y), abs=2e-5)


def test_r_of_itself_is_one_and_of_its_mirror_minus_one() -> None:
    x, _ = windows()
    torch.testing.assert_close(pearson(x, 3 * x - 7), torch.ones(3))
    torch.testing.assert_close(pearson(x, -x), -torch.ones(3))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_right(kind: Any) -> None:
    x, y = (t.double().requires_grad_() for t in windows(2, 20))
    assert torch.autograd.gradcheck(lambda a, b: envelope_loss(kind, a, b), (x, y))
    assert torch.autograd.gradcheck(lambda a: envelope_loss(kind, 1e6 * a, y), (x,))


@pytest.mark.parametrize("length", [16, 639, 640])
@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e6 + 0.3, 1e-35, 1e30])
def test_silence_correlates_with_nothing(value: float, length: int) -> None:
    """A constant is constant even where its mean is rounded; other windows are untouched."""
    x, y = windows(2, length)
    x[0] = value
    expected = scipy_r(x[1:], y[1:])[0]
    for one, other in ((x, y), (y, x)):
        one = one.clone().requires_grad_()
        other = other.clone().requires_grad_()
        r = pearson(one, other)
        assert r.tolist() == [0.0, pytest.approx(expected, abs=1e-5)]
        r.sum().backward()
        for tensor in (one, other):
            assert tensor.grad is not None
            assert not tensor.grad[0].any()
            assert tensor.grad[1].any()
            assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_silence_are_finite(kind: Any) -> None:
    x = torch.zeros(2, 16, requires_grad=True)
    loss = envelope_loss(kind, x, torch.zeros(2, 16))
    loss.backward()
    assert loss.item() == {"mse-pearson": 2.0}.get(kind, 0.0)
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_losses_are_what_they_say() -> None:
    x, y = windows()
    r = torch.tensor(scipy_r(x, y))
    l1, mse = (x - y).abs().mean(1), (x - y).square().mean(1)
    for kind, weight, wanted in (
        ("pearson", None, -r),
        ("pearson-l1", None, -r + l1),
        ("pearson-l1", 0.25, -r + 0.25 * l1),
        ("mse-pearson", None, mse + (1 - r) ** 2),
        ("mse-pearson", 0.25, mse + 0.25 * (1 - r) ** 2),
    ):
        found = window_losses(kind, x, y, weight=weight)  # type: ignore[arg-type]
        torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-5)
        summed = envelope_loss(kind, x, y, weight=weight)  # type: ignore[arg-type]
        torch.testing.assert_close(summed, found.sum())


def test_many_scales_are_averaged_and_pooled() -> None:
    x, y = windows(length=43)  # the last three samples do not fill a step of four
    each = []
    for scale in (1, 4):
        whole = 43 // scale * scale
        pooled = [t[:, :whole].unflatten(1, (-1, scale)).mean(-1) for t in (x, y)]
        each.append(-torch.tensor(scipy_r(*pooled)))
    wanted = torch.stack(each).mean(0).float()
    torch.testing.assert_close(window_losses("multiscale", x, y, scales=(1, 4)), wanted)
    assert not torch.allclose(window_losses("multiscale", x, y), wanted, atol=1e-3)
    perfect = envelope_loss("multiscale", y, y, scales=(1, 2, 4, 8))
    torch.testing.assert_close(perfect, torch.tensor(-3.0))  # as −r itself: −1 a window
    torch.testing.assert_close(
        window_losses("multiscale", x, y, scales=(1,)), window_losses("pearson", x, y)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_halves_lose_nothing_but_their_input(kind: Any) -> None:
    x, y = windows()
    x = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = envelope_loss(kind, x, y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, envelope_loss(kind, x.float(), y), rtol=0, atol=0)


def test_a_batch_is_the_sum_of_its_parts() -> None:
    x, y = windows(batch=5)
    parts = envelope_loss("mse-pearson", x[:2], y[:2]) + envelope_loss("mse-pearson", x[2:], y[2:])
    torch.testing.assert_close(envelope_loss("mse-pearson", x, y), parts)


@pytest.mark.parametrize(
    ("kind", "shapes", "options", "said"),
    [
        ("pearsen", [(2, 9), (2, 9)], {}, "`pearsen` is not a loss; did you mean `pearson`"),
        ("pearson", [(2, 9), (2, 8)], {}, r"\(2, 9\) and \(2, 8\), not both \(B, T\)"),
        ("pearson", [(9,), (9,)], {}, r"\(9,\) and \(9,\)"),
        ("pearson", [(2, 9), (2, 9)], {"weight": 0.5}, "weight 0.5 is given, but pearson has one"),
        ("pearson-l1", [(2, 9), (2, 9)], {"scales": (1,)}, "scales are given, but kind is pearson"),
        ("multiscale", [(2, 9), (2, 9)], {"scales": ()}, r"scales \(\) must be one or more"),
        (
            "multiscale",
            [(2, 9), (2, 9)],
            {"scales": (2, 0)},
            r"scales \(2, 0\) must be one or more",
        ),
        ("multiscale", [(2, 9), (2, 9)], {}, "gives fewer than two means at scale 8; .* fits is 4"),
        ("pearson", [(2, 1), (2, 1)], {}, "a window of 1 samples has no correlation; .* is 2"),
    ],
)
def test_what_cannot_be_is_one_line(kind: Any, shapes: Any, options: Any, said: str) -> None:
    first, second = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(fl.BadInput, match=said) as error:
        envelope_loss(kind, first, second, **options)
    assert "\n" not in str(error.value)


def test_settings_and_losses_know_the_same_kinds() -> None:
    x, y = windows()
    for kind in KINDS:
        chosen = EnvelopeLoss(kind=kind)
        assert (
            envelope_loss(chosen.kind, x, y, weight=chosen.weight, scales=chosen.scales).dim() == 0
        )
    assert len(EnvelopeLoss.model_json_schema()["properties"]["kind"]["enum"]) == len(KINDS)

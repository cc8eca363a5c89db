"""Passes that hide something: what compiled functions do is seen, and the rest is named."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import frostlab as fl

WIDTH = 16


@torch.jit.script
def scripted_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(query, key.transpose(-1, -2)), -1), value)


@torch.jit.script
def scripted_projection(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight.t())


class Model(nn.Module):
    """An attention, parts of which its subclasses compute in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def keys(self, x: Tensor) -> Tensor:
        return self.key(x)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        sides = [
            side.unflatten(-1, (2, -1)) for side in (self.query(x), self.keys(x), self.value(x))
        ]
        mixed = self.mixed(*(side.transpose(1, 2) for side in sides))
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class ScriptedAttention(Model):
    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scripted_attention(query, key, value)


class ScriptedKeys(Model):
    def keys(self, x: Tensor) -> Tensor:
        return scripted_projection(x, self.key.weight) + self.key.bias


@pytest.mark.parametrize("kind", [ScriptedAttention, ScriptedKeys])
def test_functions_that_torch_has_scripted_are_seen(kind: type[Model]) -> None:
    called = torch.jit.ScriptFunction.__call__
    found = {part.name: part.role for part in fl.anatomy(kind()).parts}
    assert found == {part.name: part.role for part in fl.anatomy(Model()).parts}
    assert torch.jit.ScriptFunction.__call__ is called


class WithoutGradients(Model):
    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


class InInference(Model):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return super().forward(ids)


class Complex(Model):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def keys(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.turn).real


def refusal(model: nn.Module, batch: Any = None) -> str:
    with pytest.raises(fl.UnknownArchitecture) as error:
        fl.anatomy(model, batch)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", [WithoutGradients, InInference])
@pytest.mark.parametrize("batch", [None, torch.arange(12).view(2, 6)], ids=["guessed", "given"])
def test_a_pass_without_gradients_is_called_that(kind: type[Model], batch: Any) -> None:
    said = refusal(kind(), batch)
    assert "its forward pass turns gradients off (torch.no_grad or torch.inference_mode)" in said
    assert "small batch" not in said


def test_complex_weights_are_called_complex() -> None:
    said = refusal(Complex())
    assert "turn is complex (complex64), and only real weights can be probed" in said
    assert "quantised" not in said


@pytest.mark.parametrize("normed", [spectral_norm, parametrizations.spectral_norm])
def test_a_parametrization_that_hides_a_weight_is_named(normed: Any) -> None:
    model = Model()
    normed(model.query)
    said = "; its weight is computed by a parametrization (SpectralNorm): remove it first"
    assert said in refusal(model)

"""Growing of models that no table describes: tried, compared, and undone if it does not do."""

import functools
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from labelled import LABELLED
from zoo import outputs

EXPERTS = ("qwen3_moe", "deepseek_v3")


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    """Free the grown models, whose new parameters an optimizer is expected to take."""
    yield
    gc.collect()


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """In float64, but for experts: transformers multiplies them in at most float32."""
    case = LABELLED[name]
    model = case.build()
    return model if name in EXPERTS else model.double(), case.inputs()


@pytest.mark.parametrize(
    ("name", "at"),
    [(n, at) for n in ("granite", "olmo2", "codegen") for at in ("top", 1)]
    + [(n, "top") for n in EXPERTS],
)
def test_new_layers_that_add_nothing_leave_outputs_unchanged(name: str, at: str | int) -> None:
    model, inputs = build(name)
    fl.freeze(model, "query", "key")
    before = outputs(model, inputs)[0]
    frozen = {p.key for p in fl.anatomy(model).parts if p.state == "frozen"}
    growth = fl.grow(model, 2, at=at)  # type: ignore[arg-type]
    first = 2 if at == "top" else 1
    assert growth.layers == (first, first + 1)
    allowed = 1e-6 if name in EXPERTS else 1e-12
    torch.testing.assert_close(outputs(model, inputs)[0], before, rtol=allowed, atol=allowed)
    anatomy = fl.anatomy(model)
    assert [layer.index for layer in anatomy.layers] == [0, 1, 2, 3]
    assert model.config.num_hidden_layers == 4  # type: ignore[union-attr]
    still = {p.key for p in anatomy.parts if p.state == "frozen"}
    assert still == {_renamed(growth, key) for key in frozen}
    outputs(model, inputs)[0].square().mean().backward()
    new = [p for n, p in model.named_parameters() if n.startswith(growth.names)]
    assert any(p.grad is not None and bool(p.grad.any()) for p in new)


def _renamed(growth: fl.Growth, key: str) -> str:
    name, bracket, role = key.partition("[")
    return growth.renamed(name) + bracket + role


def test_layers_that_end_with_a_norm_are_not_grown_into_an_identity() -> None:
    model, inputs = build("camembert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = outputs(model, inputs)[0]
    with pytest.raises(fl.BadInput, match=r"would change the outputs of CamembertModel by .*norm"):
        fl.grow(model)
    assert model.config.num_hidden_layers == 2  # type: ignore[union-attr]
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(outputs(model, inputs)[0], result)
    assert fl.grow(model, init="copy").layers == (2,)
    layers = model.encoder.layer  # type: ignore[union-attr]
    for old, new in zip(layers[1].parameters(), layers[2].parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_model_that_does_not_run_afterwards_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("granite")
    result = outputs(model, inputs)[0]
    forward = type(model).forward

    @functools.wraps(forward)
    def two_layers(self: nn.Module, *args: object, **kwargs: object) -> object:
        if len(self.layers) != 2:  # type: ignore[arg-type]
            raise RuntimeError("only two")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", two_layers)
    with pytest.raises(fl.BadInput, match=r"does not run with another number .*only two"):
        fl.grow(model, init="random")
    assert torch.equal(outputs(model, inputs)[0], result)


def test_a_layer_of_another_kind_than_its_neighbour_is_refused() -> None:
    model, inputs = build("deepseek_v3")  # its first layer has no experts
    before = outputs(model, inputs)[0]
    with pytest.raises(
        fl.BadInput, match="layer 1 would be of another kind than the layer next to"
    ):
        fl.grow(model, at=1)
    assert model.config.num_hidden_layers == 2  # type: ignore[union-attr]
    assert torch.equal(outputs(model, inputs)[0], before)


@pytest.mark.parametrize("name", ["swin", "mbart", "fused-chunk"])
def test_other_probed_models_are_refused_in_one_line(name: str) -> None:
    model = LABELLED[name].build()
    with pytest.raises(fl.BadInput, match=r"grow: .*; supported: ") as error:
        fl.grow(model)
    assert "\n" not in str(error.value)

"""Model sections: presets of the Conformer, and settings that contradict each other."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from frostlab.models.build import build_conformer
from frostlab.models.conformer import ConformerConfig
from frostlab.recipe.model import PRESETS, ConformerModel, EnvelopeLoss


def settings(**given: Any) -> ConformerModel:
    return ConformerModel.model_validate({"kind": "conformer"} | given)


@pytest.mark.parametrize(
    ("preset", "residual", "head", "scale"),
    [
        ("v1", "none", "linear", 1.0),
        ("full", "gated", "mlp", 2.0),
        ("conservative", "plain", "mlp", 1.5),
        ("aggressive", "gated", "mlp", 3.0),
    ],
)
def test_a_preset_is_a_shorthand(preset: str, residual: str, head: str, scale: float) -> None:
    spelled = settings(residual=residual, head=head, gradient_scale=scale)
    found = settings(preset=preset)
    assert found == spelled
    assert found.model_dump() == spelled.model_dump()
    assert "preset" not in found.model_dump()
    assert settings(**found.model_dump()) == found
    assert settings(preset=preset, gradient_scale=1.25).gradient_scale == 1.25
    assert settings(preset=preset, gradient_scale=1.25).head == head


def test_the_default_is_the_published_v2() -> None:
    assert settings() == settings(preset="full")
    assert set(PRESETS) == {"v1", "full", "conservative", "aggressive"}
    with torch.device("meta"):
        assert build_conformer(settings(), 64, 71, seed=0).config == ConformerConfig()


def test_every_setting_reaches_the_model() -> None:
    given = {
        "width": 16, "layers": 1, "heads": 2, "hidden": 24, "kernel": 3, "dropout": 0.1,
        "residual": "gated", "gate_bias": -1.0, "gradient_scale": 1.25, "head": "linear",
        "norm": "group", "attention": "relative", "unseen": "none", "variant": "frostlab",
    }  # fmt: skip
    assert set(given) == set(ConformerModel.model_fields) - {"kind", "preset"}
    model = build_conformer(settings(**given), channels=4, subjects=2, seed=3)
    assert vars(model.config) == given | {"channels": 4, "subjects": 2}
    again = build_conformer(settings(**given), channels=4, subjects=2, seed=3).state_dict()
    other = build_conformer(settings(**given), channels=4, subjects=2, seed=4).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, again[name]), name
    assert not torch.equal(other["cnn.0.conv.weight"], again["cnn.0.conv.weight"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"heads": 3}, "width 256 is not a multiple of heads 3"),
        ({"width": 25, "heads": 5}, "width 25 is odd; try 26"),
        ({"kernel": 30}, "kernel 30 is even; try 31"),
        ({"residual": "plain", "gate_bias": 1.0}, "gate_bias 1.0 is given, but residual is plain"),
        ({"preset": "conservativ"}, "preset"),
        ({"gradient_scale": 0.0}, "gradient_scale"),
        ({"gates": True}, "gates"),
    ],
)
def test_impossible_models_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        settings(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "pearson", "weight": 0.5}, "weight 0.5 is given, but pearson has one term"),
        ({"kind": "pearson-l1", "scales": (1, 2)}, "scales are given, but kind is pearson-l1"),
        ({"kind": "multiscale", "scales": (2, 2)}, "scales has 2 twice"),
        ({"kind": "multiscale", "scales": ()}, "scales"),
    ],
)
def test_impossible_losses_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EnvelopeLoss.model_validate(given)

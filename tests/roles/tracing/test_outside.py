"""Models of other packages, where `make outside` has put them: read as they are labelled."""

import pytest
from torch import nn

import frostlab as fl
from labelled import OUTSIDE, VISION, Labelled, disagreements, expected
from labelled.vision import TORCHVISION
from outside import outside


def is_read(case: Labelled) -> None:
    """As the truth says, or refused where the truth allows that."""
    model = case.build()
    try:
        anatomy = fl.anatomy(model)
    except fl.UnknownArchitecture:
        assert case.refused or case.may_refuse
        return
    assert not case.refused
    assert anatomy.evidence.method == "probe"
    assert disagreements(expected(case, model), anatomy.parts, model) == []


@pytest.mark.parametrize("name", VISION)
def test_vision(name: str) -> None:
    outside("torchvision" if name in TORCHVISION else "timm")
    is_read(VISION[name])


def full_size(name: str) -> nn.Module:
    if name in TORCHVISION:
        return getattr(outside("torchvision.models"), name)().eval()
    return outside("timm").create_model(name).eval()


# The widths of the layers; queries and keys are two weights and biases of each.
WIDTHS = {
    "vit_base_patch16_224": [768] * 12,
    "vit_b_16": [768] * 12,
    "swin_tiny_patch4_window7_224": [96] * 2 + [192] * 2 + [384] * 6 + [768] * 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDTHS)
def test_at_full_size(name: str) -> None:
    """As much is frozen as the widths say."""
    model = full_size(name)
    every = sum(p.numel() for p in model.parameters())
    fl.freeze(model, "query", "key")
    learns = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert every - learns == sum(2 * width * (width + 1) for width in WIDTHS[name])


def test_x_transformers() -> None:
    outside("x_transformers")
    for case in OUTSIDE.values():
        is_read(case)

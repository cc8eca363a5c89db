"""Dead and saturated units, and the entropy of attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import frostlab as fl
from flowing import adamw, batch, tiny_gpt, watched
from frostlab.flow.activity import (
    _down_projections,
    attention_probabilities,
    dead_fraction,
    entropy,
    saturated_fraction,
)
from labelled import LABELLED


def test_dead_and_saturated_units() -> None:
    made = torch.randn(4, 3, 8).relu() + 0.1
    made[..., :2] = 0.0
    assert float(dead_fraction(made)) == float(dead_fraction(made[0, 0])) == 0.25
    assert float(saturated_fraction(torch.tensor([0.001, 0.5, 0.999, 0.2]), 0.0, 1.0)) == 0.5
    model = tiny_gpt()
    with torch.no_grad():
        model.blocks[1].up.bias[:8] = -100.0
    flow = watched(model, adamw(model), steps=3, dead_units=True)
    for report in flow.reports:
        assert report.dead["blocks.1.down"] == 0.25
        assert report.dead["blocks.0.down"] == 0.0


def test_entropy_of_heads() -> None:
    even = torch.full((2, 1, 4, 5), 0.2)
    sharp = F.one_hot(torch.zeros(2, 1, 4, dtype=torch.long), 5).float()
    found = entropy(torch.cat([even, sharp], 1))
    assert found.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("hidden", ["nothing", "causal", "padding", "added"])
@pytest.mark.parametrize("kv", [4, 2])
def test_attention_probabilities_are_those_of_torch(hidden: str, kv: int) -> None:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, kv, 5, 8), torch.randn(2, kv, 5, 8)
    given: dict[str, Any] = {"enable_gqa": kv != 4, "is_causal": hidden == "causal"}
    if hidden == "padding":
        given["attn_mask"] = (torch.arange(5) < 3).expand(2, 1, 5, 5)
    if hidden == "added":
        given["attn_mask"] = torch.randn(2, 1, 5, 5)
    expected = F.scaled_dot_product_attention(query, key, value, **given)
    found = attention_probabilities(query, key, value, **given) @ value.repeat_interleave(
        4 // kv, 1
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_attention_is_seen_however_it_is_computed(way: str) -> None:
    import transformers

    from zoo import SIZES

    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, attn_implementation=way)
    model = transformers.BertForSequenceClassification(config).train()
    with torch.no_grad():  # the second head of the first layer looks at one token only
        own = model.bert.encoder.layer[0].attention.self
        own.query.bias[8:16], own.key.weight[8:16] = 1000.0, own.key.weight[8:16] * 1000.0

    def loss(step: int) -> Tensor:
        ids, classes = batch(step)
        return model(input_ids=ids, labels=classes).loss

    flow = watched(model, adamw(model, lr=0.0), loss, steps=3, attention_entropy=True)
    for report in flow.reports:
        assert set(report.entropy) == {"attention[0]", "attention[1]"}
        assert report.entropy["attention[0]"][1] < 0.3
        rest = [*report.entropy["attention[0]"][2:], *report.entropy["attention[1]"]]
        assert min(rest) > 0.9


def test_raw_parameters_have_no_module_whose_inputs_are_theirs() -> None:
    model = LABELLED["raw-parameters"].build()
    fl.anatomy(model).select("down")  # it has them, but a hook on their module sees other inputs
    assert list(_down_projections(model)) == []
    linear = LABELLED["einsum"].build()
    assert [name for name, _ in _down_projections(linear)] == ["layers.0.w2", "layers.1.w2"]

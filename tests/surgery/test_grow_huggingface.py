"""A grown Hugging Face model is one that its library could have made."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

import frostlab as fl
from frostlab.models.stack import take_apart
from growing import CAUSAL, HUGGING, LAYERS, OWN, answers, build, distance

INITS = ("identity", "random", "copy")


@pytest.mark.parametrize(
    ("name", "init"),
    [
        pytest.param(name, init, marks=() if init == "copy" or name == "bert" else pytest.mark.slow)
        for name in HUGGING
        for init in INITS
    ],
)
def test_grown_models_save_and_load(name: str, init: Any, tmp_path: Path) -> None:
    model = build(name)
    growth = fl.grow(model, 2, "bottom", init)
    assert model.config.num_hidden_layers == LAYERS + 2
    expected = answers(model)
    for folder, save in (("saved", model.save_pretrained), ("exported", None)):
        if save is None:
            fl.freeze(model, "query", "key")
            fl.export(model, tmp_path / folder)
        else:
            save(tmp_path / folder)
        loaded = type(model).from_pretrained(tmp_path / folder).eval()
        assert loaded.config.num_hidden_layers == LAYERS + 2
        assert torch.equal(answers(loaded), expected)
        assert loaded.state_dict().keys() == model.state_dict().keys()
    for prefix in growth.names:
        assert any(key.startswith(f"{prefix}.") for key in loaded.state_dict())


def generated(model: Any, cached: bool) -> tuple[Tensor, Tensor]:
    """Twelve tokens, all different, and the logits they were chosen by."""
    ids = torch.randint(3, 99, (2, 5), generator=torch.Generator().manual_seed(2))
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12,
        do_sample=False, use_cache=cached, no_repeat_ngram_size=1, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return made.sequences, torch.stack(made.logits)


@pytest.mark.parametrize("name", CAUSAL)
def test_grown_models_generate_the_same_with_and_without_cache(name: str, tmp_path: Path) -> None:
    model = build(name)
    with torch.no_grad():
        for part in fl.anatomy(model).select("layers[0:3]"):  # so that attention matters
            parameter = model.get_parameter(part.name)
            parameter.add_(torch.randn_like(parameter) * 0.2)
    fl.grow(model, 1, "bottom", "copy")
    model.save_pretrained(tmp_path)
    tokens, logits = generated(model, cached=False)
    for other in (model, type(model).from_pretrained(tmp_path)):
        same, close = generated(other, cached=True)
        assert torch.equal(same, tokens)
        assert distance(logits, close) < 1e-4


@pytest.mark.parametrize("name", HUGGING)
def test_every_module_has_its_index(name: str) -> None:
    model = build(name)
    fl.grow(model, 2, 1, "copy")
    fresh = type(model)(copy.deepcopy(model.config))
    seen = 0
    for (path, ours), theirs in zip(model.named_modules(), fresh.modules(), strict=True):
        assert type(ours) is type(theirs)
        for key, value in theirs.__dict__.items():
            if isinstance(value, int | float | str) and key != "training":
                assert ours.__dict__[key] == pytest.approx(value), (path, key)
                seen += key == "layer_idx"
    assert seen == LAYERS + 2


def test_frozen_split_queries_keep_what_they_compute_where_scale_depends_on_place() -> None:
    model = build("gpt2-scaled")
    fl.freeze(model, "query", "key")
    before, proof = answers(model), fl.audit(model)
    growth = fl.grow(model, 1, "bottom")
    assert distance(before, answers(model)) < 1e-6
    assert len(growth.changed) == 2 * LAYERS  # weights and biases
    proof.renewed(model, growth).verify(model)


@pytest.mark.parametrize("init", ["random", "copy"])
def test_layers_whose_scale_depends_on_their_place_keep_what_they_compute(init: Any) -> None:
    model = build("gpt2-scaled")
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight.mul_(20)  # so that scores matter
    x = torch.randn(2, 7, 32)
    before = [layer(x).detach() for layer in model.transformer.h]
    growth = fl.grow(model, 1, 2, init)
    now = [layer(x).detach() for layer in model.transformer.h]
    assert {key.partition(".attn")[0] for key in growth.changed} == {"transformer.h.3"}
    for i, j in ((0, 0), (1, 1), (2, 3), *([(1, 2)] if init == "copy" else [])):
        assert distance(before[i], now[j]) < 1e-6
    assert distance(before[1], now[2]) < 1e-6 or init == "random"


def test_configs_that_list_the_kinds_of_layers_stay_whole(tmp_path: Path) -> None:
    config = build("llama").config
    config.layer_types = ["full_attention"] * LAYERS
    model = hf.LlamaForCausalLM(config).eval()
    fl.grow(model, 2, 0, "copy")
    assert model.config.layer_types == ["full_attention"] * (LAYERS + 2)
    assert torch.equal(generated(model, True)[0], generated(model, False)[0])
    model.save_pretrained(tmp_path)
    assert torch.equal(answers(hf.LlamaForCausalLM.from_pretrained(tmp_path)), answers(model))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_hidden_states_of_new_layers_are_recorded_too(name: str) -> None:
    model = build(name)
    ids = torch.randint(3, 99, (1, 4))
    assert len(model(ids, output_hidden_states=True).hidden_states) == LAYERS + 1
    fl.grow(model, 2, 1, "copy")
    seen = model(ids, output_hidden_states=True).hidden_states
    assert len(seen) == LAYERS + 3
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))


@pytest.mark.parametrize("name", ["bert-classifier", "gpt2", "llama"])
def test_new_layers_recompute_where_the_others_do(name: str) -> None:
    model = build(name)
    model.gradient_checkpointing_enable()
    fl.grow(model, 2, "bottom", "copy")
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert [m.gradient_checkpointing for m in layers] == [True] * (LAYERS + 2)
    model.train()(torch.randint(3, 99, (2, 6))).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", [*OWN, *HUGGING])
def test_the_stack_of_a_grown_model_equals_the_model(name: str) -> None:
    model = build(name)
    fl.grow(model, 2, 1, "copy")
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "layers[0:2]", "layers[4].query")
    found = fl.anatomy(model)
    assert len(found.layers) == LAYERS + 2
    fl.audit(model).verify(model)
    stack = take_apart(model)
    if stack is None:  # a bare model has no head
        assert name == "bert"
        return
    assert len(stack.layers) == LAYERS + 2
    ids = torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = stack.head(stack.read(stack.run(stack.embed(ids, None, None), None), ids, None))
    torch.testing.assert_close(logits, answers(model), rtol=1e-4, atol=1e-5)


def test_a_body_inside_a_users_module_grows() -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = build("bert")

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.body(ids).pooler_output
            return out

    model = Mine()
    before = answers(model)
    assert fl.grow(model).names == ("body.encoder.layer.3",)
    assert distance(before, answers(model)) < 1e-6
    assert model.body.config.num_hidden_layers == LAYERS + 1


def test_cross_attention_adds_nothing_at_first() -> None:
    sizes = build("bert").config.to_dict() | {"is_decoder": True, "add_cross_attention": True}
    model = hf.BertLMHeadModel(hf.BertConfig(**sizes)).eval()
    ids, seen = torch.randint(3, 99, (2, 6)), torch.randn(2, 4, 32)
    with torch.no_grad():
        before = model(ids, encoder_hidden_states=seen).logits
        fl.grow(model, 2, 1)
        assert distance(before, model(ids, encoder_hidden_states=seen).logits) < 1e-6

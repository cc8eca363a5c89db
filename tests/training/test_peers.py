"""Peers of frozen query and key: each trains, and exactly what it is known for learns."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

import frostlab as fl
from frostlab.models import GPT, Decoder, DecoderConfig, GPTConfig
from frostlab.recipe.loading import recipe_from
from frostlab.training.treating import treat
from tiny import tiny
from zoo import GPT_SIZES, GROUPED, SIZES


def build(name: str) -> nn.Module:
    small = {"vocabulary": 20, "width": 16, "layers": 2, "heads": 2, "hidden": 32}
    if name == "gpt":
        return GPT(GPTConfig(**small, positions=12, classes=4))
    if name == "gpt-language":
        return GPT(GPTConfig(**small, positions=12))
    if name == "gpt-plain":
        return GPT(GPTConfig(**small, positions=12, classes=4, bias=False))
    if name == "decoder":
        return Decoder(DecoderConfig(**small))
    if name == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT_SIZES))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


MODELS = ("gpt", "gpt-language", "gpt-plain", "decoder", "bert", "gpt2", "llama")
TIED = ("gpt-language", "gpt2")
NO_BIASES = ("gpt-plain", "decoder", "llama")
HEADS = ("head", "lm_head", "classifier", "pooler")
EMBEDDINGS = ("tokens", "wte", "word_embeddings", "token_type_embeddings", "embed_tokens")


def treated(name: str, treatment: Any) -> nn.Module:
    model = build(name)
    treat(model, recipe_from({"treatment": treatment}))
    return model


def learning(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def named(model: nn.Module, words: tuple[str, ...]) -> set[str]:
    """The parameters with one of these words in their path; the tests' own way of finding them."""
    return {n for n, _ in model.named_parameters() if any(w in n.split(".") for w in words)}


def norms(model: nn.Module) -> set[str]:
    owners = {path for path, m in model.named_modules() if "Norm" in type(m).__name__}
    return {n for n, _ in model.named_parameters() if n.rpartition(".")[0] in owners}


@pytest.mark.parametrize("name", MODELS)
def test_exactly_what_a_peer_is_known_for_learns(name: str) -> None:
    plain = build(name)
    everything = {n for n, _ in plain.named_parameters()}
    head = named(plain, HEADS)
    assert bool(head) == (name not in TIED)
    assert learning(treated(name, "baseline")) == everything
    assert learning(treated(name, "norms")) == norms(plain) | head
    frozen = everything - learning(treated(name, "frozen-embedding"))
    assert frozen == named(plain, EMBEDDINGS)
    if name not in NO_BIASES:
        biases = {n for n in everything if n.endswith("bias")}
        assert learning(treated(name, "bitfit")) == biases | head
    if name not in TIED:
        assert learning(treated(name, "head")) == head


@pytest.mark.parametrize("name", NO_BIASES)
def test_bitfit_needs_biases(name: str) -> None:
    kind = type(build(name)).__name__
    with pytest.raises(fl.BadInput, match=f"treatment bitfit: .* nothing in {kind}: it has no bia"):
        treated(name, "bitfit")


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_cannot_learn_alone(name: str) -> None:
    with pytest.raises(fl.BadInput, match="treatment head: `!head`: .* is tied to .* `embedding`"):
        treated(name, "head")


def test_layers_can_be_frozen() -> None:
    model = treated("bert", {"freeze": ["layers[0:1]", "embedding"]})
    assert not {n for n in learning(model) if "layer.0." in n}
    assert {n for n in learning(model) if "layer.1." in n}


def losses(record: fl.RunRecord) -> list[float]:
    return [x for e in record.events() if e["kind"] == "step" for x in e["loss"]]


def longer(treatment: Any, **changes: Any) -> dict[str, Any]:
    return tiny(treatment=treatment, train__epochs=6, optim__lr=1e-2, **changes)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> fl.RunRecord:
    return fl.run(longer("baseline"), runs=tmp_path_factory.mktemp("baseline"))


def test_a_baseline_is_called_so_and_equals_none(tmp_path: Path, baseline: fl.RunRecord) -> None:
    none = fl.run(longer("none"), runs=tmp_path)
    assert baseline.folder.name == "run-baseline-s0"
    assert baseline.result["treatment"] == "baseline"
    for key in ("recipe_digest", "weights_digest", "order_digest", "report", "parameters"):
        assert none.result[key] == baseline.result[key]
    assert none.digests == baseline.digests
    assert losses(none) == losses(baseline)


@pytest.mark.parametrize("name", ["frozen-embedding", "head", "norms", "bitfit"])
def test_a_peer_trains(name: str, tmp_path: Path, baseline: fl.RunRecord) -> None:
    record = fl.run(longer(name), runs=tmp_path)
    found = losses(record)
    assert sum(found[-8:]) < 0.98 * sum(found[:8])
    assert record.digests["weights"] == baseline.digests["weights"]
    assert record.digests["touched"] == []
    frozen = record.digests["frozen"]
    assert frozen
    assert all(e["frozen_verified"] == len(frozen) for e in record.events()
               if e["kind"] == "evaluation")  # fmt: skip
    assert record.result["parameters"]["total"] == baseline.result["parameters"]["total"]

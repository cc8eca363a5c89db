"""Peers of frozen query and key: each trains, and exactly what it is known for learns."""

from pathlib import Path

import pytest
from torch import nn

import frostlab as fl
from frostlab.records.schema import EvaluationEvent
from peers import HEADS, MODELS, TIED, build, learning, longer, losses, named, trained, treated

NO_BIASES = ("gpt-plain", "decoder", "llama")
EMBEDDINGS = ("tokens", "wte", "word_embeddings", "token_type_embeddings", "embed_tokens")


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


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> fl.RunRecord:
    return fl.run(longer("baseline"), runs=tmp_path_factory.mktemp("baseline"))


def test_a_baseline_is_called_so_and_equals_none(tmp_path: Path, baseline: fl.RunRecord) -> None:
    none = fl.run(longer("none"), runs=tmp_path)
    assert baseline.folder.name == "run-baseline-s0"
    assert baseline.result.treatment == "baseline"
    for key in ("recipe_digest", "weights_digest", "order_digest", "report", "parameters"):
        assert getattr(none.result, key) == getattr(baseline.result, key)
    assert none.digests == baseline.digests
    assert losses(none) == losses(baseline)


@pytest.mark.parametrize("name", ["frozen-embedding", "head", "norms", "bitfit"])
def test_a_peer_trains(name: str, tmp_path: Path, baseline: fl.RunRecord) -> None:
    record = fl.run(longer(name), runs=tmp_path)
    assert trained(record)
    assert record.digests.weights == baseline.digests.weights
    assert record.digests.touched == []
    frozen = record.digests.frozen
    assert frozen
    assert all(e.frozen_verified == len(frozen) for e in record.events(EvaluationEvent))
    assert record.result.parameters.total == baseline.result.parameters.total

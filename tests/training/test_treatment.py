"""Peers of frozen query and key: each trains, and exactly what it is known for learns."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

import frostlab as fl
from cases import slow_unless
from frostlab.models.build import build_model
from frostlab.recipe.load import recipe_from
from frostlab.records.schema import EvaluationEvent
from frostlab.roles.read import survey
from frostlab.training.treatment import treat
from peers import HEADS, MODELS, TIED, build, learning, longer, losses, named, trained, treated
from tiny import tiny
from zoo import GPT_SIZES, SIZES

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


FRESH = {  # architecture → settings: fused query, key and value; separate; fewer key heads
    "gpt2": GPT_SIZES,
    "bert": SIZES,
    "llama": SIZES | {"num_key_value_heads": 2},
    "t5": {"d_model": 32, "d_kv": 48, "d_ff": 64, "num_layers": 1, "num_heads": 2},  # wide heads
}


def heads_with(kind: str, treatment: str) -> dict[str, Tensor]:
    """The query and key weights of a fresh treated model, each as (heads, size, in)."""
    torch.manual_seed(1)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **FRESH[kind]))
    treat(model, recipe_from(tiny(treatment=treatment, seed=3)))
    structure, slots = survey(model)
    found = {}
    for part in structure.select("query.weight", "key.weight"):
        assert part.heads is not None
        assert part.state == ("trainable" if treatment == "none" else "frozen")
        value = slots[part.name].read(part.rows).detach().double()
        value = value.t() if part.axis else value
        found[part.key] = value.unflatten(0, (part.heads.of(part.role), part.heads.size))
    return found


@pytest.mark.parametrize("kind", FRESH)
def test_matched_random_heads_differ_from_oelm_only_in_orthogonality(kind: str) -> None:
    oelm, matched = heads_with(kind, "oelm"), heads_with(kind, "oelm-random-matched")
    random, fresh = heads_with(kind, "oelm-random"), heads_with(kind, "none")
    assert len(oelm) == len(matched) == len(random) == len(fresh) > 0
    for own, other, drawn, old in zip(
        oelm.values(), matched.values(), random.values(), fresh.values(), strict=True
    ):
        norms = other.norm(dim=(1, 2))  # of each head
        torch.testing.assert_close(norms, own.norm(dim=(1, 2)), rtol=1e-6, atol=0)
        assert (norms / old.norm(dim=(1, 2)) - 1).abs().min() > 0.01
        # the direction is the draw of oelm-random, and no rows are orthonormal
        directions = drawn / drawn.norm(dim=(1, 2), keepdim=True)
        torch.testing.assert_close(other / norms[:, None, None], directions, rtol=0, atol=1e-6)
        shorter = other if other.shape[1] <= other.shape[2] else other.mT
        gram = shorter @ shorter.mT
        assert (gram - torch.eye(gram.shape[-1]).double()).abs().amax((1, 2)).min() > 0.05


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> fl.RunRecord:
    return fl.run(longer("baseline"), runs=tmp_path_factory.mktemp("baseline"))


@torch.no_grad()
def test_the_identity_is_a_method_of_treatments() -> None:
    init = [{"method": "identity", "select": ["query", "key"]}]
    recipe = recipe_from(tiny(treatment={"init": init, "freeze": ["query", "key"]}))
    assert recipe.surgery.description == (
        "query and key of every head: rows of the identity, frozen; the rest trains"
    )
    model = build_model(recipe, 10, 2, 0)
    before = model.blocks[1].qkv.weight.clone().chunk(3)[2]
    touched = treat(model, recipe)
    assert touched == {
        f"blocks.{n}.qkv.weight[{role}]" for n in (0, 1) for role in ("query", "key")
    }
    _, slots = survey(model)
    query, key, value = slots["blocks.1.qkv.weight"].read().chunk(3)
    assert torch.equal(query, torch.eye(16))
    assert torch.equal(key, torch.eye(16))
    assert torch.equal(value, before)
    whole = {"method": "identity", "select": ["up"]}
    with pytest.raises(fl.BadInput, match='has no heads; use scope="matrix"'):
        treat(model, recipe_from(tiny(treatment={"init": [whole]})))
    treat(model, recipe_from(tiny(treatment={"init": [whole | {"scope": "matrix"}]})))
    assert torch.equal(model.blocks[0].up.weight, torch.eye(64, 16))


def test_a_baseline_is_called_so_and_equals_none(tmp_path: Path, baseline: fl.RunRecord) -> None:
    none = fl.run(longer("none"), runs=tmp_path)
    assert baseline.folder.name == "run-baseline-s0"
    assert baseline.result.treatment == "baseline"
    for key in ("recipe_digest", "weights_digest", "order_digest", "report", "parameters"):
        assert getattr(none.result, key) == getattr(baseline.result, key)
    assert none.digests == baseline.digests
    assert losses(none) == losses(baseline)


@pytest.mark.parametrize(
    "name", slow_unless(["head", "bitfit"], ["frozen-embedding", "head", "norms", "bitfit"])
)
def test_a_peer_trains(name: str, tmp_path: Path, baseline: fl.RunRecord) -> None:
    record = fl.run(longer(name), runs=tmp_path)
    assert trained(record)
    assert record.digests.weights == baseline.digests.weights
    assert record.digests.touched == []
    frozen = record.digests.frozen
    assert frozen
    assert all(e.frozen_verified == len(frozen) for e in record.events(EvaluationEvent))
    assert record.result.parameters.total == baseline.result.parameters.total

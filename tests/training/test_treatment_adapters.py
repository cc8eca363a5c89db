"""PEFT's adapters as treatments: what learns, what stays, what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import frostlab as fl
from cases import slow_unless
from forked import attempt, outcome
from frostlab.records.schema import EvaluationEvent, ResumeEvent, StageEvent
from frostlab.training.step import eager as steps
from frostlab.training.step.objective import logits_of
from frostlab.training.treatment import weight_digests
from peers import HEADS, TIED, build, learning, longer, losses, named, trained, treated
from tiny import tiny
from zoo import SIZES

FUSED = ["query", "key", "value"]
# What each model calls its query, value and down projections; fused ones are one.
PROJECTIONS = {
    "gpt": (["qkv"], "down"),
    "gpt-language": (["qkv"], "down"),
    "decoder": (["query", "value"], "down"),
    "bert": (["query", "value"], "output.dense"),
    "gpt2": (["c_attn"], "mlp.c_proj"),
    "llama": (["q_proj", "v_proj"], "down_proj"),
}
ADAPTERS = {
    "lora": ("lora_A.default.weight", "lora_B.default.weight"),
    "dora": ("lora_A.default.weight", "lora_B.default.weight",
             "lora_magnitude_vector.default.weight"),
    "ia3": ("ia3_l.default",),
}  # fmt: skip


def spelled(method: str, select: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {"peft": {"method": method, **({"select": select} if select else {}), **more}}


def for_model(name: str, method: str) -> dict[str, Any]:
    attention = FUSED if name in ("gpt", "gpt-language", "gpt2") else ["query", "value"]
    return spelled(method, [*attention, "down"] if method == "ia3" else attention)


def targets(name: str, method: str) -> set[str]:
    """The paths of the projections that are to be adapted."""
    attention, down = PROJECTIONS[name]
    wanted = [*attention, down] if method == "ia3" else attention
    paths = [path for path, _ in build(name).named_modules() if "attention.output" not in path]
    found = {path for path in paths if any(path.endswith(f".{word}") for word in wanted)}
    assert len(found) == 2 * len(wanted), "two layers"
    return found


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_adapters_and_the_head_learn_and_nothing_else(name: str, method: str) -> None:
    torch.manual_seed(0)
    plain = build(name)
    torch.manual_seed(0)
    model = treated(name, for_model(name, method))
    around = targets(name, method)
    wanted = {f"{path}.{adapter}" for path in around for adapter in ADAPTERS[method]}
    head = named(plain, HEADS)
    assert bool(head) == (name not in TIED)
    assert learning(model) == wanted | head
    before, after = weight_digests(plain), weight_digests(model)
    assert {key: after[key] for key in before} == before
    assert after.keys() - before.keys() == wanted
    ids = {"input_ids": torch.randint(3, 20, (2, 6))}
    one, other = (logits_of(m.eval(), ids) for m in (plain, model))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ADAPTERS)
def test_every_adapter_gets_a_gradient(method: str) -> None:
    model = treated("gpt2", for_model("gpt2", method))
    logits_of(model, {"input_ids": torch.randint(3, 20, (2, 6))}).square().sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == learning(model)


def test_ia3_scales_what_goes_into_the_down_projection() -> None:
    model = treated("bert", spelled("ia3"))
    sizes = {n.split(".layer.0.")[1]: tuple(p.shape) for n, p in model.named_parameters()
             if "ia3_l" in n and ".layer.0." in n}  # fmt: skip
    assert sizes == {
        "attention.self.key.ia3_l.default": (32, 1),
        "attention.self.value.ia3_l.default": (32, 1),
        "output.dense.ia3_l.default": (1, 64),
    }


def test_a_rank_and_a_scale_are_passed_on() -> None:
    model = treated("decoder", spelled("lora", r=3, alpha=12, dropout=0.25))
    query: Any = model.get_submodule("blocks.0.query")
    assert query.lora_A["default"].weight.shape == (3, 16)
    assert query.scaling == {"default": 4.0}
    assert query.lora_dropout["default"].p == 0.25


def test_the_draw_is_the_seeds_own() -> None:
    def adapters(seed: int, noise: int) -> dict[str, str]:
        torch.manual_seed(noise)
        found = weight_digests(treated("decoder", spelled("lora"), seed))
        return {key: value for key, value in found.items() if "lora_A" in key}

    assert adapters(0, noise=1) == adapters(0, noise=2)
    assert not set(adapters(0, noise=1).values()) & set(adapters(1, noise=1).values())
    model = build("decoder")
    before = torch.get_rng_state()
    from frostlab.recipe.treatment import LowRank
    from frostlab.training.treatment import adapt

    adapt(model, LowRank(method="lora"), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> fl.RunRecord:
    return fl.run(longer("baseline"), runs=tmp_path_factory.mktemp("baseline"))


@pytest.mark.parametrize("method", slow_unless(["dora"], ADAPTERS))
def test_a_run_pairs_with_its_baseline(method: str, tmp_path: Path, baseline: fl.RunRecord) -> None:
    record = fl.run(longer(for_model("gpt", method)), runs=tmp_path)
    assert record.folder.name == f"run-{method}-s0"
    assert record.result.treatment == method
    assert trained(record)
    plain, mine = baseline.digests, record.digests
    assert {key: mine.weights[key] for key in plain.weights} == plain.weights
    added = mine.weights.keys() - plain.weights.keys()
    assert added == set(mine.touched)
    assert added
    assert mine.frozen.keys() == plain.weights.keys() - {"head.weight"}
    assert all(e.frozen_verified == len(mine.frozen) for e in record.events(EvaluationEvent))
    assert record.result.order_digest == baseline.result.order_digest
    assert losses(record)[0] == pytest.approx(losses(baseline)[0], rel=1e-6), "the same dropout"
    counts, before = record.result.parameters, baseline.result.parameters.total
    assert counts.frozen == before - 4 * 16
    assert counts.total - counts.frozen == counts.trainable > 4 * 16
    (stage,) = record.events(StageEvent)
    assert stage.freeze == ["all", "embedding", "!adapter", "!head"]


@pytest.mark.parametrize(
    "treatment", slow_unless(["bitfit"], ["frozen-embedding", "bitfit", spelled("lora", FUSED)])
)
def test_a_language_model_whose_head_is_frozen_trains(treatment: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("\n".join("one two one three one two one four" for _ in range(400)))
    data = {"name": "own", "path": str(own), "task": "language", "length": 8}
    recipe = longer(treatment, data=data, tokenizer={"kind": "words"})
    record = fl.run(recipe, runs=tmp_path / "runs")
    assert trained(record)
    assert "tokens.weight" in record.digests.frozen


@pytest.mark.parametrize("batching", slow_unless(["packed"], ["bucketed", "packed"]))
def test_a_hugging_face_model(batching: str, tmp_path: Path) -> None:
    sizes = {key: SIZES[key] for key in SIZES if key != "vocab_size"}
    model = {"kind": "pretrained", "name": "bert", "weights": False, "config": sizes}
    recipe = longer(spelled("lora"), model=model, train__batching=batching)
    record = fl.run(recipe, runs=tmp_path)
    assert trained(record)
    assert len(record.digests.touched) == 2 * 2 * 2


def test_query_and_value_rows_of_a_fused_projection(tmp_path: Path) -> None:
    record = fl.run(longer(spelled("lora", r=4)), runs=tmp_path)
    assert trained(record)
    # the tiny GPT is 16 wide and has two layers and a head for four classes
    assert record.result.parameters.trainable == 2 * 2 * 4 * (16 + 16) + 4 * 16
    names = {key.split(".", 2)[2] for key in record.digests.touched}
    assert names == {f"qkv.lora_{name}" for name in
                     ("A.default.weight", "B.default.query", "B.default.value")}  # fmt: skip
    assert "blocks.0.qkv.weight[query]" in record.digests.frozen
    exported = fl.load_run(record.folder).export(tmp_path / "exported")
    assert not [key for key in load_file(exported / "model.safetensors") if "lora" in key]


@pytest.mark.parametrize("method", slow_unless(["dora", "rows"], [*ADAPTERS, "rows"]))
def test_a_run_that_broke_off_is_gone_on_with_bit_for_bit(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    treatment = spelled("lora") if method == "rows" else for_model("gpt", method)
    recipe = tiny(treatment=treatment, train__checkpoint=3)
    whole = fl.run(recipe, out=tmp_path / "whole")
    taken, measured = [0], steps.EagerStep._measure

    def breaks(*args: Any, **kwargs: Any) -> Any:
        taken[0] += 1
        if taken[0] == 11:
            raise RuntimeError("broken on purpose")
        return measured(*args, **kwargs)

    monkeypatch.setattr(steps.EagerStep, "_measure", breaks)
    with pytest.raises(RuntimeError, match="on purpose"):
        fl.run(recipe, out=tmp_path / "broken")
    resumed = fl.run(recipe, out=tmp_path / "broken", resume=True)
    assert [e.step for e in resumed.events(ResumeEvent)] == [9]
    assert outcome(resumed.folder) == outcome(whole.folder)


@pytest.mark.slow
def test_killed_and_gone_on_with(tmp_path: Path) -> None:
    recipe = tiny(treatment=for_model("gpt", "lora"), train__checkpoint=3)
    assert attempt(recipe, tmp_path / "run", "rename", 9) == -9
    assert attempt(recipe, tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == outcome(fl.run(recipe, runs=tmp_path).folder)


def test_a_base_weight_that_moves_is_noticed() -> None:
    model = treated("gpt", for_model("gpt", "lora"))
    proof = fl.audit(model)
    proof.verify(model)
    base: Any = model.get_submodule("blocks.0.qkv.base_layer")
    with torch.no_grad():
        base.weight[16, 0] += 1
    with pytest.raises(fl.FrozenWeightsMoved) as caught:
        proof.verify(model)
    assert caught.value.names == ("blocks.0.qkv.weight[key]",)


APART = "weight holds query, key, value together; select all of them or none"
REFUSED_ON_ROWS = [
    ("gpt", "dora", ["query", "value"], f"blocks.0.qkv.{APART} .dora cannot .*, lora can"),
    ("gpt2", "ia3", ["query", "key"], f"c_attn.{APART} .ia3 cannot"),
]
REFUSED = [
    ("llama", ["head"], "lm_head.weight belongs to the head, which learns without"),
    ("bert", ["embedding"], r"word_embeddings.weight .embedding. is not the weight of a linear"),
    ("bert", ["norm"], r"LayerNorm.weight .norm. is not the weight of a linear module, or is tied"),
    ("bert", ["query.bias"], "only biases are selected"),
    ("bert", ["querry"], "did you mean `query`"),
    ("bert", ["gate"], "`gate` matches nothing in BertForSequenceClassification"),
]


@pytest.mark.parametrize(
    ("name", "method", "select", "problem"),
    [*REFUSED_ON_ROWS, *((name, "lora", select, problem) for name, select, problem in REFUSED)],
)
def test_what_cannot_be_adapted(name: str, method: str, select: list[str], problem: str) -> None:
    with pytest.raises(fl.BadInput, match=f"^treatment.peft.select: .*{problem}") as caught:
        treated(name, spelled(method, select))
    assert "\n" not in str(caught.value)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(fl.BadInput, match=r"pip install 'frostlab\[peft\]'"):
        fl.run(tiny(treatment=for_model("gpt", "lora")), runs=tmp_path)
    assert not list(tmp_path.iterdir())


def test_surgery_on_an_adapted_model(tmp_path: Path) -> None:
    model = treated("gpt2", for_model("gpt2", "lora"))
    with pytest.raises(
        fl.BadInput, match="c_attn.weight holds query, key and value and has adapters"
    ):
        fl.freeze(model, "all", "embedding", "!layers[1].value")
    before = learning(model)
    fl.freeze(model, "query")  # in addition: it was frozen already
    assert learning(model) == before
    with pytest.raises(fl.BadInput, match=r"adapters; call fl\.merge_adapters\(model\) first"):
        fl.export(model, tmp_path / "plain")
    fl.freeze(model, "all", "embedding", "!layers[1].adapter")
    assert learning(model) == {n for n in named(model, ("lora_A", "lora_B")) if ".h.1." in n}
    assert {part.layer for part in fl.anatomy(model).select("adapter")} == {0, 1}


def test_what_learned_is_saved_and_loaded(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return treated("decoder", spelled("lora"))

    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    fl.save_trainable(model, tmp_path / "delta")
    other = make()
    assert weight_digests(other) != weight_digests(model)
    fl.load_trainable(other, tmp_path / "delta")
    assert weight_digests(other) == weight_digests(model)

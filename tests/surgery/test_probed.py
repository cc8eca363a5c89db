"""Surgery on models that no table describes: the same words and guarantees as on others."""

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import frostlab as fl
from cases import slow_unless
from freezing import DRAWN, check_training, trained, values_of, working_call
from frostlab.roles import read
from frostlab.roles.parts import Heads, Split
from frostlab.roles.snapshot import Anatomy
from frostlab.roles.tracing.passes.facts import Call
from labelled import LABELLED, expected
from odd_places import REFUSED, SPLIT, around
from small_types import small_model
from zoo import GPT_SIZES, SIZES, SPECIAL

RECORD = Path(__file__).parents[2] / "docs" / "records" / "anatomy-freezing.jsonl"
IDS = torch.arange(12).view(2, 6) * 7 + 3


def outline(anatomy: Anatomy) -> list[tuple[Any, ...]]:
    """Return all that an anatomy says but the states."""
    return [
        (p.key, p.place, p.kind, p.shape, p.rows, p.axis, p.heads, p.layout, p.matmul, p.ties)
        for p in anatomy.parts
    ]


def read_afresh(model: nn.Module) -> Anatomy:
    """Return the anatomy without what is remembered of other models."""
    read._FOUND.clear()
    read._FOUND_BY_CONFIG.clear()
    return fl.anatomy(model)


@pytest.mark.parametrize("name", SPLIT)
def test_a_fused_weight_in_an_odd_place_is_split_exactly(name: str) -> None:
    mix, selections, local, axis = SPLIT[name]
    model = around(mix)
    before, outputs = fl.anatomy(model), model(IDS)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    names = [key for key, _ in model.named_parameters()]
    parts = [p for p in before.parts if p.name == f"blocks.0.mix.{local}"]
    assert len(parts) > 1
    assert {p.axis for p in parts} == {axis}
    if not name.startswith(("axis", "experts")):  # there, heads do not lie along this axis
        assert {p.heads for p in parts} == {Heads(4, 4, 8)}
    else:
        assert {p.heads for p in parts} == {None}
    fl.freeze(model, *selections)
    assert torch.equal(model(IDS), outputs)
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in state.items()
    }
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert outline(read_afresh(copy.deepcopy(model))) == outline(before)

    check_training(model, Call((IDS,)), *selections)
    assert not torch.equal(model(IDS), outputs)
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        assert torch.equal(model(IDS), outputs)
    assert fl.anatomy(model).count("frozen") == sum(
        p.parameters for p in before.select(*selections)
    )
    with pytest.raises(RuntimeError, match=f"size mismatch for blocks.0.mix.{local}"):
        model.load_state_dict(state | {f"blocks.0.mix.{local}": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(state | {"blocks.0.mix.frozen_w": torch.zeros(3)})
    same = pickle.loads(pickle.dumps(model))
    assert torch.equal(same(IDS), outputs)
    assert fl.anatomy(same).count("frozen") == fl.anatomy(model).count("frozen")
    fl.freeze(model, *selections, "value")  # split otherwise, or whole
    assert torch.equal(model(IDS), outputs)
    fl.thaw(model)
    assert not any(isinstance(module, Split) for module in model.modules())
    assert [key for key, _ in model.named_parameters()] == names
    assert torch.equal(model(IDS), outputs)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_in_one_line(name: str) -> None:
    mix, local = REFUSED[name]
    model = around(mix)
    before = {key: id(p) for key, p in model.named_parameters()}
    with pytest.raises(fl.BadInput) as error:
        fl.freeze(model, "query", "key")
    said = str(error.value)
    assert said.startswith(f"freeze: blocks.0.mix.{local} holds query, key and value and is ")
    assert "; freeze query, key and value together, or " in said
    assert "\n" not in said
    assert {key: id(p) for key, p in model.named_parameters()} == before
    assert all(p.requires_grad for p in model.parameters())
    fl.freeze(model, "query", "key", "value")
    audit = fl.audit(model)
    trained(model, Call((IDS,)))
    audit.verify(model)


@pytest.mark.parametrize(
    "kind", slow_unless({"ernie4_5", "deepseek_v32", "qwen3_vl_vision", "siglip"}, DRAWN)
)
def test_query_and_key_of_a_drawn_type_stay_and_the_rest_moves(kind: str) -> None:
    model = small_model(kind)
    assert fl.anatomy(model).evidence.method == "probe"
    outcome = check_training(model, working_call(model), "query", "key")
    recorded = {line["type"]: line for line in map(json.loads, RECORD.read_text().splitlines())}
    assert asdict(outcome).items() <= recorded[kind].items(), "benchmarks/anatomy_probe.py freeze"


FUSED = ("codegen", "persimmon", "qwen3_next", "fused-view-split", "value-key-query")
OTHERS = ("granite", "deepseek_v3", "squeezebert", "dbrx", "mbart", "swin", "raw-parameters")


def built(name: str) -> tuple[nn.Module, Call]:
    return LABELLED[name].build(), Call((), LABELLED[name].inputs())


def result_of(model: nn.Module, call: Call) -> Tensor:
    with torch.no_grad():
        output = model(*call.args, **call.kwargs)
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize("name", FUSED)
def test_a_split_model_is_read_as_before_by_those_who_know_nothing_of_it(name: str) -> None:
    model, call = built(name)
    before = outline(read_afresh(model))
    now = fl.freeze(model, "query")
    assert any(isinstance(module, Split) for module in model.modules())
    assert outline(now) == before
    assert read_afresh(copy.deepcopy(model)) == now
    assert read_afresh(torch.compile(copy.deepcopy(model))) == now
    assert read_afresh(nn.DataParallel(copy.deepcopy(model))) == now
    state = {key: value * 1.5 for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert read_afresh(model) == now
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert read_afresh(model) == now
    again = fl.freeze(copy.deepcopy(model), "key")  # of another split
    assert {part.role for part in again.parts if part.state == "frozen"} == {"key"}
    check_training(model, call, "query", "key")


@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_a_delta_and_an_export_hold_what_was_learned(name: str, tmp_path: Path) -> None:
    model, call = built(name)
    base = copy.deepcopy(model)
    before = outline(fl.anatomy(model))
    fl.freeze(model, "query", "key")
    trained(model, call)
    fl.save_trainable(model, tmp_path / "delta")
    fl.load_trainable(base, tmp_path / "delta")
    assert torch.equal(result_of(base, call), result_of(model, call))
    assert outline(read_afresh(base)) == before
    if not hasattr(model, "save_pretrained"):
        with pytest.raises(fl.BadInput, match="is not a Hugging Face model"):
            fl.export(model, tmp_path / "export")
        return
    fl.export(model, tmp_path / "export")
    loaded = type(model).from_pretrained(tmp_path / "export").eval()
    torch.testing.assert_close(result_of(loaded, call), result_of(model, call))
    assert outline(read_afresh(loaded)) == before


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("granite", "query"), ("codegen", "query"), ("codegen", "key"), ("deepseek_v3", "key"),
        ("squeezebert", "query"), ("persimmon", "key"), ("raw-parameters", "key"),
        ("qwen3_next", "query"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("split", [False, True])
def test_the_rows_of_each_head_become_orthonormal(name: str, role: str, split: bool) -> None:
    model, _ = built(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if split:
        fl.freeze(model, role)
    fl.orthogonalize(model, role)
    now, checked = model.state_dict(), 0
    for label in expected(LABELLED[name]):  # the truth is not the probe's
        kept = torch.ones(now[label.name].shape[label.axis] if label.by_head else 1).bool()
        if label.role != role or label.kind != "weight" or not label.by_head:
            continue
        weight = now[label.name].movedim(label.axis, 0).flatten(1)
        for head in label.by_head:
            rows = weight[list(head)]
            gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
            torch.testing.assert_close(gram, torch.eye(len(gram)))
            kept[list(head)] = False
            checked += 1
        others = before[label.name].movedim(label.axis, 0).flatten(1)
        assert torch.equal(weight[kept], others[kept])
    assert checked > 3


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        ("strided-heads", "query", "blocks.0.mix.query.weight (query) has no heads whose rows lie"),
        ("deepseek_v3", "query", "q_a_proj.weight (query) has no heads whose rows lie together"),
        ("axis-of-heads", "query", "layers.0.q (query) is not a matrix"),
    ],
)
def test_heads_whose_rows_do_not_lie_together_are_refused(name: str, role: str, said: str) -> None:
    model, _ = built(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(fl.BadInput, match=re.escape(said)) as error:
        fl.orthogonalize(model, role)
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["codegen", "fused-view-split", "granite", "deepseek_v3"])
def test_adapters_of_some_rows_change_nothing_until_they_learn(name: str) -> None:
    model, call = built(name)
    before, outputs = fl.anatomy(model), result_of(model, call)
    now = fl.add_lora(model, "query", "value", r=2)
    assert {part.role for part in now.parts if part.state == "trainable"} == {"adapter"}
    base = [part for part in now.parts if part.role != "adapter"]
    assert outline(replace(now, parts=tuple(base))) == outline(before)
    assert read_afresh(copy.deepcopy(model)) == now
    torch.testing.assert_close(result_of(model, call), outputs)
    weights = {part.key: values_of(model)[part.key] for part in base}
    trained(model, call)
    learned = result_of(model, call)
    assert not torch.allclose(learned, outputs)
    fl.merge_adapters(model)
    torch.testing.assert_close(result_of(model, call), learned, atol=1e-4, rtol=1e-3)
    moved = {
        part.role for part in base
        if not torch.equal(values_of(model)[part.key], weights[part.key])
    }  # fmt: skip
    assert moved == {"query", "value"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("raw-parameters", "RawBlock"), ("squeezebert", "Conv1d"), ("axis-of-heads", "PerHeadBlock")],
)
def test_parameters_that_peft_cannot_adapt_are_refused_in_one_line(name: str, kind: str) -> None:
    model, _ = built(name)
    said = rf"add_lora: \S+ \(query\) is a parameter of a {kind}, not the weight of a linear"
    with pytest.raises(fl.BadInput, match=said):
        fl.add_lora(model, "query", "value")
    assert not fl.anatomy(model).has_adapters


def classifier(kind: str, **sizes: Any) -> Any:
    """Return a classifier with LoRA as `get_peft_model` makes it: the head is copied."""
    config = transformers.AutoConfig.for_model(
        kind, **SIZES | SPECIAL | {"mask_token_id": 3} | sizes
    )
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    settings = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])
    return peft.get_peft_model(model, settings)


def copied_projections(kind: str, name: str, **sizes: Any) -> Any:
    """Return a GPT whose fused projections of q, k and v PEFT has copied, to train them whole."""
    config = transformers.AutoConfig.for_model(kind, **GPT_SIZES | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    settings = peft.LoraConfig(target_modules=["fc_in", "c_fc"], modules_to_save=[name])
    return peft.get_peft_model(model, settings)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(
    "make",
    [
        lambda: classifier("camembert"),
        lambda: classifier("esm", position_embedding_type="rotary"),
        lambda: copied_projections("codegen", "qkv_proj", rotary_dim=4),
        lambda: copied_projections("gpt2", "c_attn"),
    ],
    ids=["camembert", "esm", "codegen", "gpt2, from a table"],
)
def test_what_peft_put_out_of_use_is_not_woken(make: Callable[[], Any]) -> None:
    model = make()
    dead = {name: p for name, p in model.named_parameters() if "original_module" in name}
    assert dead
    before = fl.anatomy(model)
    assert {part.name for part in before.parts if part.state == "fixed"} >= set(dead)
    copied = {f"!{part.role}" for part in before.parts if part.name in dead}
    now = fl.freeze(model, "all", "!adapter", *copied)
    assert not any(p.requires_grad for p in dead.values())
    assert {part.role for part in now.parts if part.state == "trainable"} >= {"adapter"}
    audit = fl.audit(model)
    assert set(dead) <= {key.partition("[")[0] for key in audit.digests}
    trained(model, Call((), {"input_ids": IDS}))
    audit.verify(model, moved=True)
    fl.thaw(model)
    assert not any(p.requires_grad for p in dead.values())
    assert all(p.requires_grad for name, p in model.named_parameters() if name not in dead)
    fl.freeze(model, "query")
    assert not any(p.requires_grad for p in dead.values())

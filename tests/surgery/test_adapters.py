"""PEFT's adapters: what freezing leaves asleep, layers of both kinds, rows of fused projections."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import AdamW

import frostlab as fl
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.load import recipe_from
from frostlab.roles.parts import Rows
from frostlab.surgery.adapters import RoleRows
from frostlab.training.treatment import treat
from zoo import GPT_SIZES, GROUPED, SIZES, SPECIAL

R = 4
HEAD = 2 * 32 + 2  # a classifier of two classes
POOLER = 32 * 32 + 32
LORA = 2 * 2 * (8 * 32 + 32 * 8)  # two layers, query and value, PEFT's rank
IDS = torch.arange(3, 15).view(2, 6)


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def learning(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def bert(layers: int = 2) -> transformers.BertForSequenceClassification:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES | {"num_hidden_layers": layers})
    return transformers.BertForSequenceClassification(config)


def adapted(**settings: Any) -> Any:
    """BERT as `get_peft_model` makes it for classification."""
    config = peft.LoraConfig(task_type="SEQ_CLS", **settings)
    return peft.get_peft_model(bert(), config)


def train(model: nn.Module, steps: int = 20) -> None:
    """Take AdamW steps with weight decay on all parameters that learn."""
    model.train()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, weight_decay=0.1)
    for step in range(steps):
        logits = model(input_ids=(IDS + step) % 90 + 3).logits
        (logits.square().mean() + logits.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


# What PEFT froze, or put out of use, is not woken


def test_the_unused_original_of_the_head_never_learns() -> None:
    model = adapted()
    before = fl.anatomy(model)
    original = {name: p for name, p in model.named_parameters() if "original_module" in name}
    assert [p.name for p in before.fixed] == list(original)
    assert {p.role for p in before.fixed} == {"head"}
    assert not any(p.matmul for p in before.fixed), "no step multiplies with it"
    after = fl.freeze(model, "all", "!adapter", "!head")
    assert trainable(model) == after.count("trainable") == LORA + HEAD + POOLER
    assert after.count("fixed") == HEAD
    assert after.count() == sum(p.numel() for p in model.parameters())
    assert not any(p.requires_grad for p in original.values())
    proof = fl.audit(model)
    assert set(original) <= set(proof.digests)
    train(model)
    proof.verify(model, moved=True)
    fl.thaw(model)
    assert trainable(model) == fl.anatomy(model).count() - HEAD
    assert not any(p.requires_grad for p in original.values())


def test_the_copy_that_learns_has_the_name_of_the_original() -> None:
    heads = fl.anatomy(adapted()).select("head")
    names = {part.name: part.state for part in heads if "classifier" in part.name}
    prefix = "base_model.model.classifier."
    assert names == {
        f"{prefix}original_module.weight": "fixed",
        f"{prefix}original_module.bias": "fixed",
        f"{prefix}weight": "trainable",
        f"{prefix}bias": "trainable",
    }


@pytest.mark.parametrize(
    "selections",
    [("query", "key"), ("layers[0].norm",), ("all.bias", "!head"), ("query", "!layers[0]")],
)
def test_a_selection_freezes_in_addition(selections: tuple[str, ...]) -> None:
    model = adapted()
    before = learning(model)
    assert trainable(model) == LORA + HEAD
    planned = fl.anatomy(model).with_frozen(*selections)
    after = fl.freeze(model, *selections)
    assert learning(model) == before
    assert trainable(model) == after.count("trainable") == planned.count("trainable")


def test_adapters_and_heads_freeze_in_addition_too() -> None:
    model = adapted()
    fl.freeze(model, "layers[0].adapter")
    assert trainable(model) == LORA // 2 + HEAD
    fl.freeze(model, "head")
    assert trainable(model) == LORA // 2
    assert {part.layer for part in fl.anatomy(model).parts if part.state == "trainable"} == {1}
    fl.freeze(model, "!adapter")
    assert trainable(model) == LORA, "only exceptions: they say exactly what learns"


def test_without_adapters_a_call_still_says_everything() -> None:
    model = bert()
    fl.freeze(model, "query")
    assert fl.freeze(model, "key").select("query")[0].state == "trainable"


def test_an_inactive_adapter_is_not_woken() -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(task_type="SEQ_CLS", r=2))
    fl.freeze(model, "all", "!adapter", "!head")
    assert trainable(model) == LORA + HEAD + POOLER
    assert not [name for name in learning(model) if "second" in name]
    model.set_adapter("second")
    after = fl.freeze(model, "all", "!adapter", "!head")
    assert trainable(model) == after.count("trainable") == LORA // 4 + HEAD + POOLER
    assert not [name for name in learning(model) if "default" in name]
    with model.disable_adapter():
        states = {part.name: part.state for part in fl.anatomy(model).parts}
    assert states["base_model.model.classifier.weight"] == "frozen", "the original is in use"
    assert {state for name, state in states.items() if "lora" in name} == {"fixed"}


def test_a_trained_copy_has_the_role_of_its_original() -> None:
    model = adapted(target_modules=["value"], modules_to_save=["query", "word_embeddings"])
    assert {p.role for p in fl.anatomy(model).fixed} == {"query", "embedding", "head"}
    fl.freeze(model, "layers[0].query", "embedding")
    words = [n for n in learning(model) if "query" in n]
    assert len(words) == 2
    assert all("layer.1" in name for name in words)
    assert not [name for name in learning(model) if "embeddings" in name]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_a_head_that_was_tied_learns_as_a_copy() -> None:
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT_SIZES))
    config = peft.LoraConfig(target_modules=["c_proj"], modules_to_save=["lm_head"])
    model: Any = peft.get_peft_model(base, config)
    fl.freeze(model, "all", "!adapter", "!head")
    assert {name for name in learning(model) if "lora" not in name} == {
        "base_model.model.lm_head.modules_to_save.default.weight"
    }
    assert not fl.anatomy(model).select("embedding")[0].ties


def test_new_tokens_are_adapters() -> None:
    model = adapted(trainable_token_indices={"word_embeddings": [5, 7]})
    delta = [p for p in fl.anatomy(model).select("adapter") if "trainable_tokens" in p.name]
    assert sum(part.parameters for part in delta if part.state == "trainable") == 2 * 32
    assert fl.anatomy(model).count() == sum(p.numel() for p in model.parameters())


# Frozen layers and adapters in one model


def only_below(model: nn.Module) -> nn.Module:
    fl.add_lora(model, "layers[2:4].query", "layers[2:4].value", r=R)
    return model


def only_below_with_peft(model: nn.Module) -> Any:
    config = peft.LoraConfig(r=R, target_modules=["query", "value"], layers_to_transform=[2, 3])
    return peft.get_peft_model(model, config)  # type: ignore[arg-type]


def top_whole(model: nn.Module) -> nn.Module:
    fl.add_lora(model, "layers[0:2].query", "layers[0:2].value", r=R)
    fl.freeze(model, "all", "!adapter", "!layers[2:4]", "!head")
    return model


def top_but_its_keys(model: nn.Module) -> nn.Module:
    top_whole(model)
    fl.freeze(model, "key", "layers[0].adapter")
    return model


ADAPTERS = 2 * 2 * R * (32 + 32)  # two layers, query and value
LAYER = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 2 * 2 * 32
MIXED: dict[Callable[[nn.Module], Any], int] = {
    only_below: ADAPTERS,
    only_below_with_peft: ADAPTERS,
    top_whole: ADAPTERS + 2 * LAYER + HEAD + POOLER,
    top_but_its_keys: ADAPTERS // 2 + 2 * (LAYER - 32 * 32 - 32) + HEAD + POOLER,
}


@pytest.mark.parametrize("make", MIXED, ids=lambda make: make.__name__)
def test_frozen_layers_and_adapters_in_one_model(make: Callable[[nn.Module], Any]) -> None:
    model = make(bert(layers=4))
    assert trainable(model) == fl.anatomy(model).count("trainable") == MIXED[make]
    proof = fl.audit(model)
    names = {part.key for part in fl.anatomy(model).parts}
    assert set(proof.digests) | set(proof.trainable or ()) == names
    state = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    train(model)
    proof.verify(model, moved=True)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in state.items())
    with torch.no_grad():
        now[next(name for name in state if "layer.0.output.dense.weight" in name)][0, 0] += 1e-3
    with pytest.raises(fl.FrozenWeightsMoved, match=r"layer\.0\.output\.dense\.weight"):
        proof.verify(model)


def test_split_projections_and_adapters_in_one_model() -> None:
    model = built(gpt2)
    fl.add_lora(model, "layers[0].query", "layers[0].value", r=R)
    fl.freeze(model, "all", "embedding", "!adapter", "!layers[1]")
    fl.freeze(model, "key")
    below = 2 * R * (32 + 32)
    block = 12 * 32 * 32 + 13 * 32  # GPT-2's, with a hidden size of four times the width
    assert trainable(model) == below + block - (32 * 32 + 32)
    assert type(projections(model, "c_attn")[1]).__name__ == "SplitProjection"
    proof = fl.audit(model)
    train(model)
    proof.verify(model, moved=True)
    split_keys = [key for key in proof.digests if key.endswith("h.1.attn.c_attn.weight[key]")]
    assert len(split_keys) == 1


def test_a_recipe_freezes_layers_and_adapts_others(tmp_path: Path) -> None:
    treatment = {
        "peft": {"method": "lora", "r": 2, "select": ["layers[0].query", "layers[0].value"]},
        "freeze": ["all", "!adapter", "!head", "!layers[1]"],
    }
    model = small_gpt()
    treat(model, recipe_from({"treatment": treatment}))
    layers = {part.layer for part in fl.anatomy(model).select("adapter")}
    assert layers == {0}
    whole = {name for name, _ in model.named_parameters() if ".1." in name or "head" in name}
    assert learning(model) == whole | {n for n, _ in model.named_parameters() if "lora" in n}
    from tiny import tiny

    record = fl.run(tiny(treatment=treatment, train__steps=4, train__epochs=None), runs=tmp_path)
    assert record.result.parameters.trainable < record.result.parameters.total
    assert record.digests.frozen
    assert all("blocks.1" not in key for key in record.digests.frozen)


# Rows of fused projections


def small_gpt() -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocabulary": 99, "width": 32, "layers": 2, "heads": 4, "hidden": 64}
    return GPT(GPTConfig(**sizes, positions=12, classes=3))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT_SIZES))


def phi3() -> Any:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED | SPECIAL))


def gpt_neox() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES | SPECIAL))


def falcon() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    grouped = {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, **grouped, **SPECIAL))


def each(*ranges: range) -> list[int]:
    return [i for rows in ranges for i in rows]


# The projection's name, and the rows of its query, key and value, counted by hand.
FUSED: dict[Callable[[], Any], tuple[str, list[int], list[int], list[int]]] = {
    gpt2: ("c_attn", each(range(32)), each(range(32, 64)), each(range(64, 96))),
    phi3: ("qkv_proj", each(range(32)), each(range(32, 48)), each(range(48, 64))),
    gpt_neox: (
        "query_key_value",
        each(*(range(24 * h, 24 * h + 8) for h in range(4))),
        each(*(range(24 * h + 8, 24 * h + 16) for h in range(4))),
        each(*(range(24 * h + 16, 24 * h + 24) for h in range(4))),
    ),
    falcon: (
        "query_key_value",
        each(*(range(32 * g, 32 * g + 16) for g in range(2))),
        each(*(range(32 * g + 16, 32 * g + 24) for g in range(2))),
        each(*(range(32 * g + 24, 32 * g + 32) for g in range(2))),
    ),
}
fused = pytest.mark.parametrize("make", FUSED, ids=lambda make: make.__name__)


def built(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return make().to(dtype).eval()


def projections(model: nn.Module, name: str) -> list[Any]:
    return [module for path, module in model.named_modules() if path.endswith(f".{name}")]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@fused
def test_the_update_is_on_the_selected_rows_only(make: Callable[[], Any]) -> None:
    name, query, key, value = FUSED[make]
    plain, model = built(make), built(make)
    after = fl.add_lora(model, "query", "value", r=R)
    assert torch.equal(logits(model), logits(plain)), "nothing changes before the first step"
    exact = 2 * (R * (32 + len(query)) + R * (32 + len(value)))
    assert trainable(model) == after.count("trainable") == exact
    assert {p.role for p in after.parts if p.state == "trainable"} == {"adapter"}
    assert all(part.matmul for part in after.select("adapter")), "they count as work"
    proof = fl.audit(model)
    train(model)
    proof.verify(model, moved=True)
    layers = projections(model, name)
    assert len(layers) == 2
    x = torch.randn(3, 32)
    for layer, before in zip(layers, projections(plain, name), strict=True):
        with torch.no_grad():
            outputs, old = layer(x), before(x)
        update = layer.get_delta_weight("default").detach()
        update = update if update.shape[1] == 32 else update.T  # Conv1D: (in, out)
        assert not update[key].any(), "exactly zero"
        assert torch.equal(outputs[:, key], old[:, key]), "bit by bit"
        for rows in (query, value):
            assert (update[rows] != 0).all()
            assert (outputs[:, rows] != old[:, rows]).all()
            assert torch.linalg.matrix_rank(update[rows]) == R
        both = update[query + value]
        assert torch.linalg.matrix_rank(both) > R, "each role has a pair of its own"


@fused
def test_merged_is_the_same_function(make: Callable[[], Any], tmp_path: Path) -> None:
    name, _, key, _ = FUSED[make]
    plain, model = built(make, torch.float64), built(make, torch.float64)
    fl.add_lora(model, "query", "value", r=R)
    train(model, steps=5)
    apart = logits(model)
    assert (apart - logits(plain)).abs().max() > 1e-3
    with pytest.raises(fl.BadInput, match=r"has adapters; call fl\.merge_adapters\(model\) first"):
        fl.export(model, tmp_path / "model")
    fl.merge_adapters(model)
    torch.testing.assert_close(logits(model), apart, rtol=1e-10, atol=1e-10)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for layer, before in zip(projections(model, name), projections(plain, name), strict=True):
        axis = int(layer.weight.shape[0] == 32)
        rows = torch.tensor(key)
        assert torch.equal(
            layer.weight.index_select(axis, rows), before.weight.index_select(axis, rows)
        )
    fl.export(model, tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model", dtype=torch.float64)
    torch.testing.assert_close(logits(again), apart, rtol=1e-10, atol=1e-10)
    fl.merge_adapters(model)  # nothing is left to merge


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
def test_adapters_in_torchs_encoder_act_in_eval_mode(padded: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double()
    inputs = torch.randn(3, 5, 16, dtype=torch.float64)
    mask = torch.arange(5) >= torch.tensor([[5], [3], [4]]) if padded else None

    def outputs() -> Tensor:
        rows = model(inputs, src_key_padding_mask=mask)
        return cast(Tensor, rows if mask is None else rows[~mask])

    model.eval()
    with torch.no_grad():
        before = outputs()
    fl.add_lora(model, "up", "down", r=2)
    torch.testing.assert_close(outputs(), before)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    model.train()
    in_training = outputs().detach()
    model.eval()
    torch.testing.assert_close(outputs().detach(), in_training)
    with torch.no_grad():
        torch.testing.assert_close(outputs(), in_training)
    assert not torch.allclose(in_training, before)
    fl.merge_adapters(model)
    assert model.use_nested_tensor
    assert model.layers[0].activation_relu_or_gelu == 1
    with torch.no_grad():
        torch.testing.assert_close(outputs(), in_training)


def test_roles_of_a_fused_projection_learn_as_if_they_were_apart() -> None:
    """Three plain projections with PEFT's own LoRA on two of them are the reference."""
    torch.manual_seed(0)
    rows = {role: Rows(6, 2, ((2 * i, 2 * i + 2),)) for i, role in enumerate(("q", "k", "v"))}
    weight = torch.randn(12, 5, dtype=torch.float64)
    apart = nn.ModuleDict({role: nn.Linear(5, 4, bias=False) for role in rows}).double()
    whole = nn.ModuleDict({"qkv": nn.Linear(5, 12, bias=False)}).double()
    with torch.no_grad():
        whole["qkv"].weight.copy_(weight)
        for role, own in rows.items():
            apart[role].weight.copy_(own.take(weight))
    config = {"r": 3, "lora_alpha": 6}
    peft.inject_adapter_in_model(peft.LoraConfig(**config, target_modules=["q", "v"]), apart)
    twice = {key: 2 * value for key, value in config.items()}
    peft.inject_adapter_in_model(peft.LoraConfig(**twice, target_modules=["qkv"]), whole)
    layer: Any = whole["qkv"]
    two = {role: rows[role] for role in ("q", "v")}
    layer.lora_B["default"] = RoleRows(two, layer.lora_B["default"].weight)
    pairs: list[Any] = [apart["q"], apart["v"]]
    with torch.no_grad():
        joined = torch.cat([one.lora_A["default"].weight for one in pairs])
        layer.lora_A["default"].weight.copy_(joined)
    optimizers = [AdamW([p for p in m.parameters() if p.requires_grad], 1e-2)
                  for m in (apart, whole)]  # fmt: skip
    for _ in range(10):
        x = torch.randn(7, 5, dtype=torch.float64)
        reference = torch.zeros(7, 12, dtype=torch.float64)
        for role, own in rows.items():
            own.put(reference, apart[role](x), 1)
        outputs = whole["qkv"](x)
        torch.testing.assert_close(outputs, reference, rtol=1e-12, atol=1e-12)
        for y, optimizer in zip((reference, outputs), optimizers, strict=True):
            (y.square().mean() + y.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (pairs[0].get_delta_weight("default") != 0).all()


@fused
def test_what_learned_is_saved_and_loaded(make: Callable[[], Any], tmp_path: Path) -> None:
    def fresh(seed: int) -> Any:
        model = built(make)
        fl.add_lora(model, "query", "value", r=R, seed=seed)
        return model

    model = fresh(seed=0)
    train(model, steps=3)
    fl.save_trainable(model, tmp_path / "delta")
    by_delta, by_state = fresh(seed=1), fresh(seed=2)
    fl.load_trainable(by_delta, tmp_path / "delta")
    assert torch.equal(logits(by_delta), logits(model))
    by_state.load_state_dict(model.state_dict())
    assert torch.equal(logits(by_state), logits(model))
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


@fused
def test_peft_alone_loads_the_adapters(make: Callable[[], Any], tmp_path: Path) -> None:
    model = built(make)
    fl.add_lora(model, "query", "value", r=R)
    train(model, steps=3)
    state = peft.get_peft_model_state_dict(model)
    alone = built(make)
    peft.inject_adapter_in_model(model.peft_config["default"], alone)
    found: Any = peft.set_peft_model_state_dict(alone, state)
    assert not found.unexpected_keys
    assert type(projections(alone, FUSED[make][0])[0].lora_B["default"]) is nn.Linear
    torch.testing.assert_close(logits(alone), logits(model), rtol=1e-5, atol=1e-6)
    other = built(make)
    fl.add_lora(other, "query", "value", r=R, seed=1)
    peft.set_peft_model_state_dict(other, state)
    assert torch.equal(logits(other), logits(model)), "and back"


def test_a_state_that_does_not_fit_is_refused() -> None:
    model = built(gpt2)
    fl.add_lora(model, "query", "value", r=R)
    state = model.state_dict()
    name = "transformer.h.0.attn.c_attn.lora_B.default.weight"
    assert state[name].shape == (96, 2 * R)
    state[name][40, 0] = 1.0
    with pytest.raises(RuntimeError, match="values outside the rows of query, value"):
        model.load_state_dict(state)
    state[name] = state[name][:, :R]
    with pytest.raises(RuntimeError, match="size mismatch for .*lora_B"):
        model.load_state_dict(state)
    del state[name]
    with pytest.raises(RuntimeError, match="Missing key.*lora_B"):
        model.load_state_dict(state)


def test_all_roles_have_one_adapter_and_one_role_has_its_own() -> None:
    model = built(gpt2)
    fl.add_lora(model, "query", "key", "value", r=R)
    assert trainable(model) == 2 * R * (32 + 96), "as PEFT does it"
    model = built(phi3)
    fl.add_lora(model, "up", "layers[0].output", r=R)
    assert trainable(model) == 2 * R * (32 + 64) + R * (32 + 32)
    before = {part.key for part in fl.anatomy(built(phi3)).parts}
    assert {part.key for part in fl.anatomy(model).parts if part.role != "adapter"} == before
    train(model)
    (layer, _) = projections(model, "gate_up_proj")
    update = layer.get_delta_weight("default")
    assert not update[:64].any()
    assert (update[64:] != 0).all()


def test_the_factor_and_the_dropout_are_those_asked_for() -> None:
    model = built(gpt2)
    fl.add_lora(model, "query", "value", r=R, alpha=12, dropout=0.5)
    (layer, _) = projections(model, "c_attn")
    assert layer.scaling == {"default": 3.0}
    assert layer.lora_dropout["default"].p == 0.5
    fl.merge_adapters(model)
    fl.add_lora(model, "layers[1].key", r=1)
    assert trainable(model) == 32 + 32


def test_the_draw_is_the_seeds_own() -> None:
    def first(seed: int) -> Tensor:
        model = built(gpt2)
        before = torch.get_rng_state()
        fl.add_lora(model, "query", "value", seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return projections(model, "c_attn")[0].lora_A["default"].weight.detach()

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


def test_an_optimizer_of_merged_adapters_is_stale() -> None:
    model = built(gpt2)
    fl.add_lora(model, "query", "value")
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
    fl.merge_adapters(model)
    with pytest.raises(fl.StaleOptimizer):
        optimizer.step()


def split() -> Any:
    model = built(gpt2)
    fl.freeze(model, "key")
    return model


def with_adapters() -> Any:
    model = built(gpt2)
    fl.add_lora(model, "value")
    return model


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


REFUSED: list[tuple[Callable[[], Any], tuple[Any, ...], dict[str, Any], str]] = [
    (gpt2, (), {}, r'selections are strings; try add_lora\(model, "query", "value"\)'),
    (gpt2, (0,), {}, "selections are strings"),
    (gpt2, ("querry",), {}, "did you mean `query`"),
    (gpt2, ("query",), {"r": 0}, "r=0 should be a whole number of at least 1"),
    (gpt2, ("query",), {"r": 2.5}, "r=2.5 should be a whole number"),
    (gpt2, ("query",), {"alpha": 0}, "alpha=0 should be above 0"),
    (gpt2, ("query",), {"dropout": 1.0}, "dropout=1.0 from 0 to below 1"),
    (gpt2, ("query.bias",), {}, "only biases are selected"),
    (gpt2, ("norm",), {}, "is not the weight of a linear module"),
    (phi3, ("head",), {}, "belongs to the head"),
    (encoder, ("query",), {}, r"in_proj_weight \(query\) is a parameter of a MultiheadAttention"),
    (encoder, ("output",), {}, r"out_proj\.weight \(output\) .* so PEFT cannot adapt it"),
    (split, ("query",), {}, r"c_attn\.weight is split, .*; call fl\.thaw first"),
    (with_adapters, ("query",), {}, "the model already has adapters"),
    (adapted, ("query",), {}, "the model already has adapters"),
]


@pytest.mark.parametrize(("make", "selections", "settings", "problem"), REFUSED)
def test_what_cannot_have_lora(
    make: Callable[[], Any], selections: tuple[Any, ...], settings: dict[str, Any], problem: str
) -> None:
    model = make()
    before = learning(model)
    with pytest.raises(fl.BadInput, match=f"^add_lora: .*{problem}") as caught:
        fl.add_lora(model, *selections, **settings)
    assert "\n" not in str(caught.value)
    assert learning(model) == before, "nothing was changed"


def test_pefts_own_model_merges_itself(tmp_path: Path) -> None:
    model = adapted()
    with pytest.raises(fl.BadInput, match=r"^merge_adapters: .*model\.merge_and_unload\(\)"):
        fl.merge_adapters(model)
    with pytest.raises(fl.BadInput, match=r"^export: .*call model\.merge_and_unload\(\) first"):
        fl.export(model, tmp_path / "model")


def test_a_base_with_adapters_is_not_split() -> None:
    model = with_adapters()
    with pytest.raises(
        fl.BadInput, match=r"c_attn\.weight holds query, key and value and has adapters"
    ):
        fl.freeze(model, "all", "!adapter", "!layers[0].value")
    assert {part.role for part in fl.anatomy(model).parts if part.state == "trainable"} == {
        "adapter"
    }

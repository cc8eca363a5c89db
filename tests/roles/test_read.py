"""Every parameter gets exactly one place, in every architecture and with every task head."""

import inspect as source
import time
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

import frostlab as fl
from frostlab.roles.read import survey
from zoo import ALL, CASES, EVERY, GPT_SIZES, SIZES, build

INNER = ("Encoder", "Decoder", "Stack", "Wrapper")  # half models, not meant to be used alone


def task_classes(case: object) -> list[type[PreTrainedModel]]:
    """Every model class transformers defines for an architecture."""
    config = case.make_config()  # type: ignore[attr-defined]
    module = import_module(type(config).__module__.replace("configuration", "modeling"))
    return [
        cls
        for name, cls in source.getmembers(module, source.isclass)
        if issubclass(cls, PreTrainedModel)
        and cls.__module__ == module.__name__
        and cls.config_class is type(config)
        and "pretrained" not in name.lower()
        and not name.endswith(INNER)
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_task_head_is_placed(name: str) -> None:
    classes = task_classes(CASES[name])
    assert len(classes) >= 1
    config = CASES[name].make_config()
    for cls in classes:
        with torch.device("meta"):
            model = cls(config)
        anatomy = fl.anatomy(model)
        assert anatomy.count() == sum(p.numel() for p in model.parameters()), cls.__name__
        assert {p.role for p in anatomy.parts} >= {"query", "key", "value", "output"}


@pytest.mark.parametrize("name", EVERY)
def test_parts_cover_every_parameter_once(name: str) -> None:
    model, _ = build(name)
    anatomy, slots = survey(model)
    keys = [part.key for part in anatomy.parts]
    assert len(keys) == len(set(keys))
    assert anatomy.count() == sum(p.numel() for p in model.parameters())
    for name_, parameter in model.named_parameters():
        rows = [r for p in anatomy.parts if p.name == name_ and p.rows for r in p.rows.ranges()]
        if rows:
            axis = slots[name_].axis
            covered = sorted(i for start, stop in rows for i in range(start, stop))
            assert covered == list(range(parameter.shape[axis]))


def test_fused_rows_are_the_ones_found_by_gradient() -> None:
    """Where q, k and v lie, as measured once by gradient for models of 4 heads of 8."""
    expected = {
        "gpt2": ([(0, 32)], [(32, 64)], [(64, 96)]),
        "gpt_bigcode": ([(0, 32)], [(32, 40)], [(40, 48)]),
        "phi3": ([(0, 32)], [(32, 48)], [(48, 64)]),
        "falcon": ([(0, 16), (32, 48)], [(16, 24), (48, 56)], [(24, 32), (56, 64)]),
        "gpt_neox": tuple(
            [(start + i * 24, start + i * 24 + 8) for i in range(4)] for start in (0, 8, 16)
        ),
    }
    for name, ranges in expected.items():
        parts = fl.anatomy(build(name)[0]).select("query.weight", "key.weight", "value.weight")
        found = {p.role: p.rows.ranges() for p in parts if p.layer == 0 and p.rows}
        assert (found["query"], found["key"], found["value"]) == ranges, name


def test_stacks_and_cross_attention() -> None:
    for name, stacks in {
        "t5": {"encoder", "decoder"},
        "bart": {"encoder", "decoder"},
        "whisper": {"encoder", "decoder"},
        "clip": {"text", "vision"},
    }.items():
        anatomy = fl.anatomy(build(name)[0])
        assert {layer.stack for layer in anatomy.layers} == stacks
        if "encoder" in stacks:
            assert [layer.stack for layer in anatomy.layers] == ["encoder"] * 2 + ["decoder"] * 2
        if "decoder" in stacks:
            crossed = anatomy.select("cross.query")
            assert {p.stack for p in crossed} == {"decoder"}
            own = anatomy.select("decoder.self.query")
            both = anatomy.select("decoder.query")
            assert {p.key for p in both} == {p.key for p in (*own, *crossed)}


def test_gpt2_cross_attention_has_its_own_fused_keys_and_values() -> None:
    config = transformers.GPT2Config(**GPT_SIZES, add_cross_attention=True)
    model = transformers.GPT2LMHeadModel(config)
    parts = fl.anatomy(model).select("cross.key.weight")
    assert [p.rows.ranges() for p in parts if p.rows] == [[(0, 32)], [(0, 32)]]
    bert = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    assert len(fl.anatomy(transformers.BertLMHeadModel(bert)).select("cross.query")) == 4


@pytest.mark.parametrize("name", ["gpt2", "xlm-roberta", "t5", "bert"])
def test_a_tied_tensor_has_one_role(name: str) -> None:
    config = CASES[name].make_config()
    if name == "t5":
        model = transformers.T5ForConditionalGeneration(config)
    elif name == "gpt2":
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForMaskedLM.from_config(config)
    tied = [p for p in fl.anatomy(model).parts if p.ties and p.kind == "weight"]
    assert [p.role for p in tied] == ["embedding"]
    assert any(tie.place.role == "head" for tie in tied[0].ties)


def test_albert_layers_share_their_parts() -> None:
    anatomy = fl.anatomy(build("albert-two-groups")[0])
    queries = anatomy.select("query.weight")
    assert [p.layers for p in queries] == [(0, 1), (2, 3)]
    assert [p.layer for p in queries] == [None, None]
    assert len(anatomy.layers) == 4


def test_fixed_parts_are_listed() -> None:
    assert [p.role for p in fl.anatomy(build("whisper")[0]).fixed] == ["position"]
    assert [p.role for p in fl.anatomy(build("distilbert-sinusoidal")[0]).fixed] == ["position"]
    assert fl.anatomy(build("distilbert")[0]).fixed == ()


def test_low_rank_attention_has_its_parts() -> None:
    config = transformers.AutoConfig.for_model(
        "deepseek_v3", num_hidden_layers=3, hidden_size=64, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=96, moe_intermediate_size=32, vocab_size=99,
        n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=24,
        kv_lora_rank=16,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    anatomy = fl.anatomy(model)
    assert anatomy.evidence.copied
    parts = {part.key.removeprefix("layers.2.self_attn."): part for part in anatomy.parts}
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    assert parts["kv_a_proj_with_mqa.weight[latent]"].rows.ranges() == [(0, rank)]
    assert parts["kv_a_proj_with_mqa.weight[key]"].rows.ranges() == [(rank, rank + rope)]
    assert parts["kv_b_proj.weight[value]"].heads.kv == config.num_attention_heads
    assert {parts[f"q_{x}_proj.weight"].role for x in "ab"} == {"query"}


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(3, 3))


def quantised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.ao.nn.quantized.dynamic.Linear(4, 4))


def test_a_model_without_attention_is_refused() -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=99)
    with pytest.raises(fl.UnknownArchitecture) as e:
        fl.anatomy(transformers.MambaModel(config))
    message = str(e.value)
    assert message.startswith("MambaModel: its forward pass has no attention (a product of two")
    assert "register_architecture" not in message  # a table needs attention, too


def test_what_cannot_be_probed_can_be_described() -> None:
    class Needs(transformers.BertModel):
        def forward(self, graph: object) -> object:
            return super().forward(graph.ids)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.extra = Needs(transformers.BertConfig(**SIZES)), nn.Linear(3, 3)

        def forward(self, graph: object) -> object:
            return self.inner(graph)

    with pytest.raises(fl.UnknownArchitecture) as e:
        fl.anatomy(Odd())
    message = str(e.value)
    assert message.startswith("Odd: cannot guess `graph` of Odd.forward (")
    assert "\n" not in message
    described = "fl.register_architecture(Odd, {path: role}, heads=…) can describe it, with a role"
    assert f"{described} for `extra` (docs/architectures.md)" in message


@pytest.mark.filterwarnings("ignore:.*deprecated")  # both are, and people still have such models
@pytest.mark.parametrize("make", [scripted, quantised])
def test_unseen_code_and_quantised_weights_are_refused(
    make: Callable[[], nn.Module],
) -> None:
    with pytest.raises(fl.UnknownArchitecture, match="compiled by TorchScript|is quantised") as e:
        fl.anatomy(make())
    assert "register_architecture" not in str(e.value)


def test_a_partly_described_model_is_read_by_a_probe() -> None:
    class Odd(transformers.BertModel):
        def __init__(self, config: transformers.BertConfig) -> None:
            super().__init__(config)
            self.encoder.layer[0].attention.self.query_norm = nn.Linear(8, 8)

    anatomy = fl.anatomy(Odd(transformers.BertConfig(**SIZES)))
    extra = "encoder.layer.0.attention.self.query_norm"
    assert anatomy.evidence.unreached == (f"{extra}.weight", f"{extra}.bias")
    roles = {part.key: part.role for part in anatomy.parts}
    assert roles[f"{extra}.weight"] == "other"
    assert roles["encoder.layer.0.attention.self.query.weight"] == "query"


def test_a_known_module_outside_the_base_is_not_taken_for_a_head() -> None:
    class Extended(transformers.BertPreTrainedModel):
        def __init__(self, config: transformers.BertConfig) -> None:
            super().__init__(config)
            self.bert = transformers.BertModel(config)
            self.extra = nn.TransformerEncoderLayer(32, 4, 64)
            self.out = nn.Linear(32, 3)

    anatomy = fl.anatomy(Extended(transformers.BertConfig(**SIZES)))
    roles = {p.key: p.role for p in anatomy.parts}
    assert roles["extra.self_attn.in_proj_weight[query]"] == "query"
    assert roles["out.weight"] == "head"


def test_models_inside_wrappers_are_read() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("bert")[0]
            self.config = self.model.config

    class Adapter(nn.Module):
        """Forwards everything it does not have, as PEFT does."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.BertForMaskedLM(CASES["bert"].make_config())

        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    for model in (Wrapper(), Adapter()):
        assert len(fl.anatomy(model).select("query.weight")) == 2


@pytest.mark.parametrize("thing", ["gpt2", None, 3])
def test_other_objects_than_models_are_refused(thing: object) -> None:
    with pytest.raises(fl.BadInput, match="is not a model"):
        fl.anatomy(thing)  # type: ignore[arg-type]


def test_missing_projections_are_an_error() -> None:
    model = build("bert")[0]
    model.encoder.layer[0].attention.self.key = nn.Identity()
    with pytest.raises(fl.UnknownArchitecture, match="layer 0 has no key"):
        fl.anatomy(model)


def test_a_thousand_tensors_are_read_quickly() -> None:
    """A sanity bound, ten times the benchmark's limit; benchmarks/anatomy.py measures."""
    config = transformers.BertConfig(**(SIZES | {"num_hidden_layers": 62}))
    with torch.device("meta"):
        model = transformers.BertModel(config)
    assert len(list(model.parameters())) >= 990
    started = time.perf_counter()
    fl.anatomy(model)
    assert time.perf_counter() - started < 1.0


def test_meta_models_are_accepted() -> None:
    with torch.device("meta"):
        model = transformers.BertModel(CASES["bert"].make_config())
    real, _ = ALL["bert"].build(), None
    assert fl.anatomy(model).to_dict() == fl.anatomy(real).to_dict()

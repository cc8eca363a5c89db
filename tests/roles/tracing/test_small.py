"""A small copy has every kind of layer of the original and the same attention."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from cases import slow_unless
from frostlab.roles.tracing.inputs import candidate_inputs
from frostlab.roles.tracing.small import LARGEST, Small, small_copy

FAST = ("bert", "clip", "gpt2", "gemma2", "t5", "vit")
SAMPLE = (
    *FAST, "albert", "bart", "bloom", "camembert", "codegen", "deepseek_v3", "dinov2", "distilbert",
    "electra", "falcon", "gemma3_text", "gpt_neo", "gpt_neox", "gpt_oss", "granite", "jamba",
    "kimi_linear", "llama", "llama4_text", "marian", "mbart", "mistral", "mixtral", "mllama",
    "modernbert", "olmo2", "opt", "persimmon", "phi3", "qwen2", "qwen3_moe", "qwen3_next",
    "roberta", "siglip", "starcoder2", "wav2vec2", "whisper", "xlm-roberta", "zamba2",
)  # fmt: skip


def on_meta(kind: str, **changes: object) -> nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.for_model(kind, **changes))


def made(model: nn.Module) -> Small:
    small = small_copy(model)
    assert small is not None
    return small


def is_attention(name: str) -> bool:
    return any(word in name for word in ("q_proj", "k_proj", "v_proj", "query", "c_attn", "qkv"))


@pytest.mark.parametrize("kind", slow_unless(FAST, SAMPLE))
@pytest.mark.filterwarnings("ignore")
def test_every_parameter_has_a_stand_in_and_the_copy_runs(kind: str) -> None:
    model = on_meta(kind)
    state = torch.get_rng_state()
    small = made(model)
    assert torch.equal(state, torch.get_rng_state())
    sizes = {
        name: item.shape for name, item in small.model.named_parameters(remove_duplicate=False)
    }
    big = dict(model.named_parameters(remove_duplicate=False))
    assert set(small.names) == set(big)
    assert set(small.names.values()) == set(sizes)
    assert sum(item.numel() for item in small.model.parameters()) < LARGEST
    for name, item in big.items():
        stand = small.names[name]
        assert stand.rpartition(".")[2] == name.rpartition(".")[2]
        if is_attention(name):
            assert sizes[stand] == item.shape
    assert {item.device.type for item in small.model.parameters()} == {"cpu"}
    for call in candidate_inputs(small.model):
        try:
            with torch.no_grad():
                small.model(*call.args, **call.kwargs)
        except Exception:  # not this one
            continue
        return
    raise AssertionError("no guess ran")


def test_a_large_model_on_meta_becomes_one_of_well_below_two_gigabytes() -> None:
    small = made(on_meta("llama"))
    assert sum(4 * item.numel() for item in small.model.parameters()) < 1e9
    assert small.names["layers.31.self_attn.q_proj.weight"] == "layers.0.self_attn.q_proj.weight"


def test_layers_of_two_kinds_stand_for_their_own_kind() -> None:
    model = on_meta("jamba", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    small = made(model)
    for name, part in model.named_modules():
        if name.startswith("layers.") and name.count(".") == 1:
            parameter = f"{name}.{next(key for key, _ in part.named_parameters())}"
            stand = small.names[parameter]
            layer = small.model.get_submodule(".".join(stand.split(".")[:2]))
            assert type(layer) is type(part)
            assert type(layer.feed_forward) is type(part.feed_forward)


def test_the_config_of_the_original_stays() -> None:
    model = on_meta("gpt2")
    before = model.config.to_dict()
    made(model)
    assert model.config.to_dict() == before


def test_a_model_without_a_config_has_no_copy() -> None:
    assert small_copy(nn.Linear(2, 2)) is None

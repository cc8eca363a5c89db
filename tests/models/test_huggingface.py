"""frostlab's GPT and Decoder as GPT-2, Llama and MegatronBERT: equal logits for every setting."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

import frostlab as fl
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig, mean_over_tokens
from frostlab.models.huggingface import as_huggingface
from trained import needs_causal_megatron


def disturbed(model: nn.Module) -> Any:
    """The model in float64, with biases that are not zero and gains that are not one."""
    with torch.no_grad():
        for parameter in model.double().eval().parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def gpt(**changes: Any) -> GPT:
    sizes = {"vocabulary": 99, "positions": 16, "width": 32, "layers": 2, "heads": 4, "hidden": 48}
    return disturbed(GPT(GPTConfig(**(sizes | changes))))


def decoder(**changes: Any) -> Decoder:
    sizes = {"vocabulary": 99, "width": 32, "layers": 2, "heads": 4, "hidden": 48}
    settings = sizes | {"norm": "before", "final_norm": True} | changes
    return disturbed(Decoder(DecoderConfig(**settings)))


def ids_and_mask() -> tuple[Tensor, Tensor]:
    """Two rows of tokens; the second has three tokens of padding at its end."""
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return torch.randint(3, 99, (2, 10)), mask


LANGUAGE = {
    "gpt": lambda: gpt(),
    "gpt without biases": lambda: gpt(bias=False),
    "gpt without biases in attention": lambda: gpt(bias="feed-forward"),
    "gpt with one head and many hidden units": lambda: gpt(heads=1, hidden=160),
    "gpt with a frozen, split QKV": lambda: frozen(gpt()),
    "gpt with a new layer": lambda: grown(gpt()),
    "decoder": lambda: decoder(),
    "decoder with another base": lambda: decoder(rotary_base=500.0),
    "decoder with another epsilon": lambda: decoder(eps=0.1),
    "decoder with a new layer": lambda: grown(decoder()),
    "decoder with normalised queries and keys": lambda: decoder(qk_norm=True, eps=0.1),
}


def frozen(model: Any) -> Any:
    fl.freeze(model, "query", "key")
    return model


def grown(model: Any) -> Any:
    fl.grow(model, 1)
    return disturbed(model)


@torch.no_grad()
@pytest.mark.parametrize("name", LANGUAGE)
def test_a_language_model_loads_with_equal_logits(name: str, tmp_path: Path) -> None:
    model = LANGUAGE[name]()
    ids, mask = ids_and_mask()
    fl.export(model, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    kind = (
        "GPT2LMHead" if "gpt" in name else "Qwen3ForCausal" if "norm" in name else "LlamaForCausal"
    )
    assert type(theirs).__name__.startswith(kind)
    assert theirs.dtype == torch.float64
    # Llama computes its norms in float32
    tolerance = 1e-12 if "gpt" in name else 1e-5
    theirs.eval()
    logits = theirs(ids, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(model(ids)[real], logits[real], rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"causal": True}, marks=needs_causal_megatron),
        {"bias": False},
        {"dropout": 0.3},
    ],
)
def test_a_classifier_becomes_a_body_and_a_head(changes: Any, tmp_path: Path) -> None:
    model = gpt(**{"classes": 3, "causal": False} | changes)
    ids, mask = ids_and_mask()
    fl.export(model, tmp_path)
    body = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    assert body.config.num_labels == 3
    head = load_file(tmp_path / "head.safetensors")["weight"]
    types = torch.zeros_like(ids)
    types[:, 4:] = 1  # ignored, as in frostlab's model
    states = body(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
    logits = mean_over_tokens(states, mask) @ head.T
    torch.testing.assert_close(logits, model(ids, mask), rtol=1e-12, atol=1e-12)


def test_a_causal_classifier_is_not_exported_as_one_that_looks_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.9 to 5.17 would read it."""
    module = "transformers.models.megatron_bert.modeling_megatron_bert"
    both = importlib.import_module(module).create_bidirectional_mask
    monkeypatch.setattr(f"{module}.create_causal_mask", both, raising=False)
    with pytest.raises(fl.BadInput, match="attends in both directions although this model is caus"):
        fl.export(gpt(classes=3), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    fl.export(gpt(classes=3, causal=False), tmp_path / "out")


def test_training_settings_are_kept() -> None:
    made = as_huggingface(gpt(dropout=0.25), pad=0, end=1).model
    assert made.config.resid_pdrop == made.config.embd_pdrop == made.config.attn_pdrop == 0.25
    assert (made.config.pad_token_id, made.config.eos_token_id) == (0, 1)
    assert made.generation_config.eos_token_id == 1
    assert made.lm_head.weight is made.transformer.wte.weight
    assert as_huggingface(decoder(), length=77).model.config.max_position_embeddings == 77


def test_a_conversion_draws_no_random_numbers() -> None:
    model = gpt()
    state = torch.get_rng_state()
    as_huggingface(model)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decoder(norm="after"), "Llama cannot express model.norm after, only before"),
        (lambda: decoder(final_norm=False), "cannot express model.final_norm false, only true"),
        (lambda: gpt(causal=False), "GPT-2 is causal, but model.causal is false"),
        (
            lambda: gpt(qk_norm=True),
            "neither GPT-2 nor MegatronBERT can express model.qk_norm",
        ),
        (lambda: gpt(qk_norm=True, classes=2), "can express model.qk_norm true"),
        (lambda: decoder(norm="after", qk_norm=True), "Qwen3 cannot express model.norm after"),
    ],
)
def test_settings_without_an_equal_are_named(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match=message):
        fl.export(make(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_older_head_is_removed(tmp_path: Path) -> None:
    fl.export(gpt(classes=3, causal=False), tmp_path)
    fl.export(gpt(), tmp_path)
    assert not (tmp_path / "head.safetensors").exists()

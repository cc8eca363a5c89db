"""frostlab's models: exact parameter counts, and equal to Hugging Face's with the same weights."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import frostlab as fl
from frostlab.models import GPT, Decoder, DecoderConfig, GPTConfig


def test_the_progressive_decoder_has_its_published_counts() -> None:
    with torch.device("meta"):
        four, three = Decoder(DecoderConfig()), Decoder(DecoderConfig(layers=3))
    anatomy = fl.anatomy(four).with_frozen("embedding", "layers[0:3]")
    assert anatomy.count() == 9_200_896
    assert anatomy.count("trainable") == 4_534_784
    assert fl.anatomy(four).count() - fl.anatomy(three).count() == 65_664


def test_gpt_medium_512_counts() -> None:
    with torch.device("meta"):
        anatomy = fl.anatomy(GPT(GPTConfig()))
    weights = anatomy.select("query.weight", "key.weight")
    assert sum(part.parameters for part in weights) == 3_145_728
    assert anatomy.count() == pytest.approx(44.9e6, rel=2e-3)


@torch.no_grad()
def test_gpt_equals_gpt2_with_the_same_weights() -> None:
    theirs = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16, bos_token_id=1,
                   eos_token_id=2)
    ).eval()  # fmt: skip
    ours = GPT(GPTConfig(99, 16, 32, 2, 4, 128)).eval()
    body = theirs.transformer
    ours.tokens.weight.copy_(body.wte.weight)
    ours.positions.weight.copy_(body.wpe.weight)
    pairs = [(ours.norm, body.ln_f, False)]
    for mine, other in zip(ours.blocks, body.h, strict=True):
        pairs += [
            (mine.norm1, other.ln_1, False),
            (mine.qkv, other.attn.c_attn, True),
            (mine.out, other.attn.c_proj, True),
            (mine.norm2, other.ln_2, False),
            (mine.up, other.mlp.c_fc, True),
            (mine.down, other.mlp.c_proj, True),
        ]
    for mine, other, transposed in pairs:
        mine.weight.copy_(other.weight.t() if transposed else other.weight)
        mine.bias.copy_(other.bias + 0.1)
        other.bias.add_(0.1)
    ids = torch.randint(0, 99, (2, 10))
    mask = torch.ones_like(ids)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    mask[1, 7:] = 0
    padded = theirs(ids, attention_mask=mask).logits
    torch.testing.assert_close(ours(ids, mask)[1, :7], padded[1, :7], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_decoder_with_the_norm_before_equals_llama() -> None:
    theirs = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=99,
                    intermediate_size=64, max_position_embeddings=32, rms_norm_eps=1e-6)
    ).eval()  # fmt: skip
    ours = Decoder(DecoderConfig(99, 32, 2, 4, 64, norm="before", final_norm=True)).eval()
    ours.tokens.weight.copy_(theirs.model.embed_tokens.weight)
    ours.head.weight.copy_(theirs.lm_head.weight)
    for mine, other in zip(ours.blocks, theirs.model.layers, strict=True):
        for name, module in {
            "query": other.self_attn.q_proj,
            "key": other.self_attn.k_proj,
            "value": other.self_attn.v_proj,
            "out": other.self_attn.o_proj,
            "gate": other.mlp.gate_proj,
            "up": other.mlp.up_proj,
            "down": other.mlp.down_proj,
            "norm1": other.input_layernorm,
            "norm2": other.post_attention_layernorm,
        }.items():
            getattr(mine, name).weight.copy_(module.weight)
    ids = torch.randint(0, 99, (2, 10))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_bidirectional_classifier_sees_the_end_and_ignores_padding() -> None:
    model = GPT(GPTConfig(99, 16, 32, 2, 4, 64, causal=False, classes=3)).eval()
    ids = torch.randint(0, 99, (1, 8))
    mask = torch.tensor([[1] * 5 + [0] * 3])
    short = model(ids[:, :5])
    torch.testing.assert_close(model(ids, mask), short, rtol=1e-4, atol=1e-5)
    changed = ids.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 99
    assert not torch.allclose(model(changed, mask), short)


def test_a_causal_model_does_not_see_ahead() -> None:
    for model in (GPT(GPTConfig(99, 16, 32, 2, 4, 64)), Decoder(DecoderConfig(99, 32, 2, 4, 64))):
        model.eval()
        ids = torch.randint(0, 99, (1, 8))
        changed = ids.clone()
        changed[0, 6] = (changed[0, 6] + 1) % 99
        same = torch.isclose(model(ids), model(changed), atol=1e-6).all(-1)[0]
        assert same[:6].all()
        assert not same[6]


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of 5 heads"):
        GPTConfig(width=32, heads=5)
    with pytest.raises(ValueError, match="heads of even size"):
        DecoderConfig(width=12, heads=4)

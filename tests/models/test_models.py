"""frostlab's models: exact parameter counts, and equal to Hugging Face's with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import frostlab as fl
from frostlab import BadInput
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from mapping import decoder_from_llama, gpt_from_gpt2


def test_the_progressive_decoder_has_its_published_counts() -> None:
    with torch.device("meta"):
        four, three = Decoder(DecoderConfig()), Decoder(DecoderConfig(layers=3))
    anatomy = fl.anatomy(four).with_frozen("embedding", "layers[0:3]")
    assert anatomy.count() == 9_200_896
    assert anatomy.count("trainable") == 4_534_784
    assert fl.anatomy(four).count() - fl.anatomy(three).count() == 65_664


def test_gpt_medium_512_has_the_counts_of_the_sources() -> None:
    """Theirs has no biases in attention."""
    with torch.device("meta"):
        anatomy = fl.anatomy(GPT(GPTConfig(bias="feed-forward"))).with_frozen("query", "key")
    assert anatomy.count() == 44_896_768
    assert anatomy.count("frozen") == 3_145_728


def test_gpt_medium_512_counts() -> None:
    with torch.device("meta"):
        anatomy = fl.anatomy(GPT(GPTConfig()))
    weights = anatomy.select("query.weight", "key.weight")
    assert sum(part.parameters for part in weights) == 3_145_728
    assert anatomy.count() == pytest.approx(44.9e6, rel=2e-3)


@torch.no_grad()
def test_a_classifier_reads_the_mean_or_the_last_token() -> None:
    sizes = {"vocabulary": 9, "positions": 8, "width": 8, "layers": 1, "heads": 2, "hidden": 8}
    models = {
        pooling: GPT(GPTConfig(**sizes, causal=False, classes=3, pooling=pooling)).eval()  # type: ignore[arg-type]
        for pooling in ("mean", "last")
    }
    models["last"].load_state_dict(models["mean"].state_dict())
    states: list[torch.Tensor] = []
    models["mean"].norm.register_forward_hook(lambda module, inputs, out: states.append(out))
    ids, mask = torch.randint(0, 9, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    mean, last = (model(ids, mask) for model in models.values())
    head = models["mean"].head.weight
    for row, length in enumerate((6, 4)):
        torch.testing.assert_close(mean[row], states[0][row, :length].mean(0) @ head.T)
        torch.testing.assert_close(last[row], states[0][row, length - 1] @ head.T)


@torch.no_grad()
def test_gpt_equals_gpt2_with_the_same_weights() -> None:
    theirs = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16, bos_token_id=1,
                   eos_token_id=2)
    ).double().eval()  # fmt: skip
    for parameter in theirs.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))  # biases are no longer zero
    ours = GPT(GPTConfig(99, 16, 32, 2, 4, 128)).double().eval()
    ours.load_state_dict(gpt_from_gpt2(theirs.state_dict()))
    ids = torch.randint(0, 99, (2, 10))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    tokens = ids[:, 1:].flatten()
    mine = F.cross_entropy(ours(ids)[:, :-1].flatten(0, 1), tokens)
    assert float(mine) == pytest.approx(float(theirs(ids, labels=ids).loss), rel=1e-5)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    padded = theirs(ids, attention_mask=mask).logits
    torch.testing.assert_close(ours(ids, mask)[1, :7], padded[1, :7], rtol=1e-5, atol=1e-5)


def test_gpt_starts_as_gpt2_does() -> None:
    """The same deviations, tensor by tensor: 0.02, and less for outputs to the residual stream."""
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=999))
    ours = GPT(GPTConfig(999, 1024, 256, 4, 4, 1024)).state_dict()
    for name, value in gpt_from_gpt2(theirs.state_dict()).items():
        assert float(ours[name].std()) == pytest.approx(float(value.std()), rel=0.05), name
        assert float(ours[name].mean()) == pytest.approx(float(value.mean()), abs=2e-3), name


@torch.no_grad()
@pytest.mark.parametrize("final_norm", [True, False])
def test_decoder_with_the_norm_before_equals_llama(final_norm: bool) -> None:
    theirs = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=99,
                    intermediate_size=64, max_position_embeddings=32, rms_norm_eps=1e-6)
    ).double().eval()  # fmt: skip
    for parameter in theirs.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))  # gains are no longer one
    if not final_norm:
        theirs.model.norm = torch.nn.Identity()
    ours = Decoder(DecoderConfig(99, 32, 2, 4, 64, norm="before", final_norm=final_norm))
    ours = ours.double().eval()
    ours.load_state_dict(decoder_from_llama(theirs.state_dict()))
    ids = torch.randint(0, 99, (2, 10))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_weights_without_a_place_are_refused() -> None:
    with pytest.raises(BadInput, match="rotary.inv_freq has no place"):
        gpt_from_gpt2({"rotary.inv_freq": torch.zeros(2)})


def test_a_bidirectional_classifier_sees_the_end_and_ignores_padding() -> None:
    model = GPT(GPTConfig(99, 16, 32, 2, 4, 64, causal=False, classes=3)).double().eval()
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

"""The ceiling on a speed-up: exactly torch's own count, and what is said of a gain beyond it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import frostlab as fl
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.timing.flops import Limits, flag, limits
from frostlab.timing.interleave import Ratio

LENGTH, BATCH = 16, 4
TOKENS = LENGTH * BATCH
IDS = torch.randint(3, 99, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def bert() -> nn.Module:
    """Three classes: two would be as many as BERT's kinds of segments, which savings.py takes
    for a vocabulary."""
    config = BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=64, vocab_size=99, num_labels=3)  # fmt: skip
    return BertForSequenceClassification._from_config(config, attn_implementation="eager")


def gpt2() -> nn.Module:
    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=LENGTH,
                        tie_word_embeddings=False)  # fmt: skip
    return GPT2LMHeadModel._from_config(config, attn_implementation="eager")


def counted(model: nn.Module) -> int:
    """What torch counts in a step: eager attention's products whole, as matmuls."""
    targets: Tensor = IDS if isinstance(model, GPT2LMHeadModel) else IDS[:, 0] % 3
    with FlopCounterMode(display=False) as counter:
        model(IDS, labels=targets).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize(
    "freeze",
    [
        (),
        ("query", "key"),
        ("layers[0]",),
        ("all", "!head"),
        ("embedding", "position", "layers[0]", "norm"),
    ],
    ids=lambda freeze: ",".join(freeze) or "nothing",
)
def test_matmul_work_is_what_torch_counts(
    make: Callable[[], nn.Module], freeze: tuple[str, ...]
) -> None:
    model = make()
    everything = counted(model)
    if freeze:
        fl.freeze(model, *freeze)
    found, now = limits(model, LENGTH, TOKENS), counted(model)
    if make is bert and freeze == ("all", "!head"):
        now -= 2 * BATCH * 32 * 3  # its classifier's input gradient, for the pooler: not modelled
    assert found.flops == pytest.approx(now, rel=1e-6)
    assert found.flops_all == pytest.approx(everything, rel=1e-6)
    assert found.speed_up == pytest.approx(everything / now, rel=1e-6)
    assert (found.flop_share > 0) == bool(freeze)


@pytest.mark.parametrize("freeze", [(), ("query", "key")])
def test_attention_that_looks_back_counts_half(freeze: tuple[str, ...]) -> None:
    """The counter sees whole products; half of attention's share is what is left out."""
    config = GPTConfig(99, LENGTH, 32, 2, 4, 64, 0.0)
    model = GPT(config)
    if freeze:
        fl.freeze(model, *freeze)
    whole, half = (limits(model, LENGTH, TOKENS, causal=c) for c in (False, True))
    products = 3 * 2 * (2 * LENGTH * config.width) * config.layers  # forward and twice backward
    assert whole.flops - half.flops == pytest.approx(products / 2 * TOKENS)
    assert limits(model, LENGTH, TOKENS) == half
    assert limits(Decoder(DecoderConfig(99, 32, 2, 2)), 8, 8).flops < limits(
        Decoder(DecoderConfig(99, 32, 2, 2)), 8, 8, causal=False
    ).flops  # fmt: skip
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(IDS).float().logsumexp(-1).sum().backward()
    assert whole.flops == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_half_of_attention_where_a_head_reads_one_token() -> None:
    model = GPT(GPTConfig(99, LENGTH, 32, 2, 4, 64, 0.0, classes=5, causal=True))
    whole, half = (limits(model, LENGTH, TOKENS, causal=c) for c in (False, True))
    assert whole.flops - half.flops == pytest.approx(6 * LENGTH * 32 * 2 * TOKENS)


def test_traffic_is_28_bytes_a_parameter_that_learns() -> None:
    model = bert()
    total = sum(p.numel() for p in model.parameters())
    fl.freeze(model, "query", "key")
    learn = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = limits(model, LENGTH, TOKENS)
    assert (found.traffic_all, found.traffic) == (28 * total, 28 * learn)
    assert (found.bytes_all, found.bytes) == (12 * total, 12 * learn)
    assert found.speed_up_with_traffic < found.traffic_all / found.traffic
    assert set(found.to_dict()) >= {"flops", "matmul_flop_share", "speed_up_with_traffic"}


def known(tokens: float = 1e5, traffic: int = 900) -> Limits:
    """Matmuls allow 1.25×; their time is that of 1,000 bytes."""
    return Limits(128, 3e5, 2.4e5, 0, 0, tokens, 1000, traffic)


def test_a_gain_within_the_ceiling_is_not_flagged() -> None:
    assert flag(Ratio(0.82, 0.81, 0.83), known(), proven=True) is None
    assert flag(Ratio(0.70, 0.59, 0.81), known(), proven=True) is None  # perhaps within it
    assert flag(Ratio(1.1, 1.09, 1.11), known(), proven=False) is None


@pytest.mark.parametrize(
    ("found", "proven", "words"),
    [
        (known(), False, "not proven (other processes on the GPU: 1)"),
        (known(traffic=100), True, "likely optimizer traffic"),
        (known(tokens=512), True, "likely launch-bound, with 512 tokens a step"),
        (known(), True, "look for a second difference"),
    ],
)
def test_a_gain_beyond_it_is_flagged_with_the_likely_reason(
    found: Limits, proven: bool, words: str
) -> None:
    said = flag(Ratio(0.70, 0.69, 0.71), found, proven, ("other processes on the GPU: 1",))
    assert said is not None
    assert words in said
    assert "1.408× as fast at least, and matmuls explain 1.250×" in said


def test_nothing_frozen_can_gain_nothing() -> None:
    found = limits(gpt2(), LENGTH, TOKENS)
    assert (found.speed_up, found.speed_up_with_traffic, found.flop_share) == (1.0, 1.0, 0.0)
    assert flag(Ratio(0.98, 0.97, 0.99), found, proven=True) is not None

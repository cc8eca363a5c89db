"""FLOPs of a step against torch's counter and published figures, savings, and device ceilings."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import frostlab as fl
from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.settings import OPTIMIZERS
from frostlab.timing.flops import (
    Ceilings,
    StepSavings,
    StepWork,
    forward_flops,
    measure_ceilings,
    savings,
    step_savings,
    step_work,
    unexplained_gain,
)
from frostlab.timing.interleave import Ratio
from labelled import LABELLED
from odd_places import Convolution, Raw, around

LENGTH, BATCH = 16, 4
TOKENS = LENGTH * BATCH
IDS = torch.randint(3, 99, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def bert() -> nn.Module:
    """Three classes: with two, the head would be taken for one over BERT's two token types."""
    config = BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=64, vocab_size=99, num_labels=3)  # fmt: skip
    return BertForSequenceClassification._from_config(config, attn_implementation="eager")


def gpt2() -> nn.Module:
    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=LENGTH,
                        tie_word_embeddings=False)  # fmt: skip
    return GPT2LMHeadModel._from_config(config, attn_implementation="eager")


def counted(model: nn.Module) -> int:
    """Return torch's count of a step's FLOPs; eager attention's products count in full."""
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
        ("layers[1]",),
        ("all", "!head"),
        ("embedding", "position", "norm"),
        ("embedding", "position", "layers[0]", "norm"),
        ("embedding", "position", "layers[0:2]", "norm"),
    ],
    ids=lambda freeze: ",".join(freeze) or "nothing",
)
def test_matmul_flops_equal_torchs_count(
    make: Callable[[], nn.Module], freeze: tuple[str, ...]
) -> None:
    model = make()
    everything = counted(model)
    if freeze:
        fl.freeze(model, *freeze)
    saved, frozen = step_savings(model, LENGTH, TOKENS), counted(model)
    if make is bert and freeze == ("all", "!head"):
        frozen -= 2 * BATCH * 32 * 3  # the classifier's input gradient for the pooler: not modelled
    assert saved.flops == pytest.approx(frozen, rel=1e-6)
    assert saved.flops_all == pytest.approx(everything, rel=1e-6)
    assert saved.speed_up == pytest.approx(everything / frozen, rel=1e-6)
    assert saved.flop_share == pytest.approx(1 - frozen / everything, abs=1e-6)
    assert (saved.flop_share > 0) == bool(freeze)


@pytest.mark.parametrize("classes", [0, 3])
def test_the_work_of_a_step_equals_torchs_count(classes: int) -> None:
    config = GPTConfig(400, 16, 32, 2, 2, 64, 0.0, causal=False, classes=classes)
    model, ids = GPT(config), torch.randint(0, 400, (2, 16))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert step_work(model, 16, 32).flops == pytest.approx(counter.get_total_flops())
    assert step_work(model, 16, 32).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("freeze", [(), ("all", "!head")])
def test_causal_attention_needs_half_the_work(freeze: tuple[str, ...]) -> None:
    """Forward and backward where something learns, forward alone where nothing does."""
    sizes, ids = (400, 16, 32, 2, 2, 64, 0.0), torch.randint(0, 400, (2, 16))
    models = [GPT(GPTConfig(*sizes, causal=causal, classes=3)) for causal in (True, False)]
    for model in models:
        if freeze:
            fl.freeze(model, *freeze)
    causal, full = (step_work(model, 16, 32).flops for model in models)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        models[1](ids).sum().backward()
    assert full == pytest.approx(counter.get_total_flops())
    products = 2 * 2 * 16 * 32 * 2 * (1 if freeze else 3)  # per token
    assert full - causal == pytest.approx(products / 2 * 32)


@pytest.mark.parametrize("freeze", [(), ("query", "key")])
def test_causal_attention_counts_half(freeze: tuple[str, ...]) -> None:
    """torch counts the full products; half of attention's share is left out."""
    config = GPTConfig(99, LENGTH, 32, 2, 4, 64, 0.0)
    model = GPT(config)
    if freeze:
        fl.freeze(model, *freeze)
    parts = fl.anatomy(model)
    full, half = (TOKENS * savings(parts, LENGTH, causal=c).flops for c in (False, True))
    products = 3 * 2 * (2 * LENGTH * config.width) * config.layers  # forward and twice backward
    assert full - half == pytest.approx(products / 2 * TOKENS)
    assert step_savings(model, LENGTH, TOKENS).flops == half
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(IDS).float().logsumexp(-1).sum().backward()
    assert full == pytest.approx(counter.get_total_flops(), rel=1e-6)


@pytest.mark.parametrize(
    "freeze",
    [(), ("query", "key", "value"), ("position",), ("query", "position")],
    ids=lambda freeze: ",".join(freeze) or "nothing",
)
def test_scores_of_learned_relative_positions_equal_torchs_count(freeze: tuple[str, ...]) -> None:
    """Without the depthwise convolution, which is no matmul."""
    model = Conformer(
        ConformerConfig(
            channels=3, subjects=2, width=16, layers=2, heads=2, hidden=32, kernel=3,
            dropout=0.0, variant="published",
        )
    )  # fmt: skip
    if freeze:
        fl.freeze(model, *freeze)
    x = torch.randn(BATCH, LENGTH, 16, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.blocks[1](model.blocks[0](x)).sum().backward()
    products = counter.get_flop_counts()["Global"].items()
    counted = sum(flops for operator, flops in products if "conv" not in str(operator))
    parts = fl.anatomy(model)
    _, outside = forward_flops(parts, LENGTH)  # trained: three times as much in a step
    per_token = savings(parts, LENGTH).flops - 3 * outside
    assert TOKENS * per_token == pytest.approx(counted)


def test_a_norm_of_queries_that_learns_needs_the_backward_pass_of_scores() -> None:
    config = GPTConfig(99, LENGTH, 32, 1, 4, 64, 0.0, causal=False, classes=3)
    plain, normed = (
        fl.anatomy(GPT(replace(config, qk_norm=normed))).with_frozen("all", "!layers[0].norm")
        for normed in (False, True)
    )
    forward = 2 * 2 * LENGTH * 32  # scores and mixing
    more = savings(normed, LENGTH).flops - savings(plain, LENGTH).flops
    assert more == pytest.approx(2 * forward), "the backward pass costs twice the forward pass"


def test_a_decoder_is_causal() -> None:
    decoder = Decoder(DecoderConfig(99, 32, 2, 2))
    full = savings(fl.anatomy(decoder), 8, causal=False)
    assert step_savings(decoder, 8, 8).flops < 8 * full.flops


def test_causal_attention_counts_half_where_a_head_reads_one_token() -> None:
    model = GPT(GPTConfig(99, LENGTH, 32, 2, 4, 64, 0.0, classes=5, causal=True))
    parts = fl.anatomy(model)
    full, half = (TOKENS * savings(parts, LENGTH, causal=c).flops for c in (False, True))
    assert full - half == pytest.approx(6 * LENGTH * 32 * 2 * TOKENS)
    assert step_savings(model, LENGTH, TOKENS).flops == half


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def bert_base() -> nn.Module:
    return BertForSequenceClassification(BertConfig(num_labels=3))


@pytest.mark.parametrize(
    ("make", "length", "selection", "share", "speed_up"),
    [
        (bert_base, 128, ("query", "key"), 0.0541, 1.057),
        (bert_base, 512, ("query", "key"), 0.0500, 1.053),
        (lambda: GPT2LMHeadModel(GPT2Config()), 1024, ("query", "key"), 0.0331, 1.034),
        (lambda: GPT(GPTConfig()), 512, ("query", "key"), 0.0220, 1.023),
        (lambda: Decoder(DecoderConfig(layers=3)), 32, ("query", "key"), 0.0018, 1.002),
        (bert_base, 128, ("query", "key", "up", "down"), 0.270, 1.37),
    ],
)
def test_savings_equal_published_figures(
    make: Callable[[], nn.Module],
    length: int,
    selection: tuple[str, ...],
    share: float,
    speed_up: float,
) -> None:
    saved = savings(fl.anatomy(on_meta(make)).with_frozen(*selection), length)
    assert saved.flop_share == pytest.approx(share, abs=1e-4 if share < 0.2 else 1e-3)
    assert saved.speed_up == pytest.approx(speed_up, abs=2e-3)


def test_memory_of_bert_base() -> None:
    saved = savings(fl.anatomy(on_meta(bert_base)).with_frozen("query", "key"), 128)
    mib = 2**20
    assert round((saved.bytes_all - saved.bytes) / mib) == 162
    assert round(saved.bytes_all / mib) == 1253  # gradient and two moments in float32


def test_traffic_is_28_bytes_per_trainable_parameter() -> None:
    model = bert()
    total = sum(p.numel() for p in model.parameters())
    fl.freeze(model, "query", "key")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    saved = step_savings(model, LENGTH, TOKENS)
    assert (saved.traffic_all, saved.traffic) == (28 * total, 28 * trainable)
    assert (saved.bytes_all, saved.bytes) == (12 * total, 12 * trainable)
    assert saved.speed_up_with_traffic < saved.traffic_all / saved.traffic
    saved = step_savings(model, LENGTH, TOKENS, OPTIMIZERS["SGD"])  # keeps no moments
    assert (saved.traffic, saved.bytes) == (12 * trainable, 4 * trainable)
    assert set(saved.to_dict()) >= {"flops", "matmul_flop_share", "speed_up_with_traffic"}


def test_nothing_frozen_saves_nothing() -> None:
    saved = savings(fl.anatomy(on_meta(bert_base)), 128)
    assert (saved.flop_share, saved.speed_up) == (0.0, 1.0)
    saved = step_savings(gpt2(), LENGTH, TOKENS)
    assert (saved.speed_up, saved.speed_up_with_traffic, saved.flop_share) == (1.0, 1.0, 0.0)
    assert unexplained_gain(Ratio(0.98, 0.97, 0.99), saved, proven=True) is not None


def example(tokens: float = 1e5, traffic: int = 900) -> StepSavings:
    """Matmuls allow 1.25×; their time is that of 1,000 bytes."""
    return StepSavings(128, 3e5, 2.4e5, 0, 0, tokens, 1000, traffic)


def test_a_gain_within_the_bound_is_explained() -> None:
    assert unexplained_gain(Ratio(0.82, 0.81, 0.83), example(), proven=True) is None
    assert unexplained_gain(Ratio(0.70, 0.59, 0.81), example(), proven=True) is None  # perhaps
    assert unexplained_gain(Ratio(1.1, 1.09, 1.11), example(), proven=False) is None


@pytest.mark.parametrize(
    ("saved", "proven", "words"),
    [
        (example(), False, "not proven (other processes on the GPU: 1)"),
        (example(traffic=100), True, "likely optimizer traffic"),
        (example(tokens=512), True, "likely launch-bound, with 512 tokens a step"),
        (example(), True, "look for another difference"),
    ],
)
def test_a_gain_beyond_the_bound_gets_its_likely_cause(
    saved: StepSavings, proven: bool, words: str
) -> None:
    reasons = ("other processes on the GPU: 1",)
    cause = unexplained_gain(Ratio(0.70, 0.69, 0.71), saved, proven, reasons)
    assert cause is not None
    assert words in cause
    assert "at least 1.408× as fast, but saved matmuls explain only 1.250×" in cause


def test_ceilings_are_measured_and_the_longer_part_decides() -> None:
    measured = measure_ceilings(torch.device("cpu"), small=True)
    assert measured.matmul_flops > 1e8
    assert measured.copy_bytes > 1e7
    ceilings = Ceilings(1e12, 1e11, "assumed", None)
    assert ceilings.lower_bounds(StepWork(1e12, 1000))["ceiling_ms"] == 1e3
    assert ceilings.lower_bounds(StepWork(1.0, 10**9))["ceiling_ms"] == pytest.approx(280)


def test_a_token_uses_one_expert_at_least() -> None:
    model = LABELLED["attention-and-experts"].build()
    structure = fl.anatomy(model)
    experts = [part for part in structure.parts if part.place.expert is not None]
    assert {part.place.expert for part in experts} == {0, 1}
    weights = sum(p.parameters for p in structure.parts if p.matmul and p.kind == "weight")
    used = weights - sum(p.parameters for p in experts if p.matmul and p.kind == "weight") / 2
    layers, rest = forward_flops(structure, LENGTH)
    assert sum(layers) + rest == 2 * used + 2 * 2 * 2 * LENGTH * 32


def test_a_projection_is_counted_wherever_its_weight_is() -> None:
    raw, convolution = (fl.anatomy(around(mix)) for mix in (Raw, Convolution))
    assert forward_flops(raw, LENGTH) == forward_flops(convolution, LENGTH)


def test_a_latent_counts_like_the_keys_that_are_computed_from_it() -> None:
    structure = fl.anatomy(LABELLED["deepseek_v3"].build())
    for learning in ("!layers[0].latent", "!layers[1].latent", "!layers[0].up"):
        frozen = structure.with_frozen("all", learning)
        renamed = tuple(
            replace(p, place=replace(p.place, role="key")) if p.role == "latent" else p
            for p in frozen.parts
        )
        assert (
            savings(frozen, LENGTH).flops == savings(replace(frozen, parts=renamed), LENGTH).flops
        )

"""Normalised queries and keys equal a naive loop, and change nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from frostlab.models.build import build_model
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.load import recipe_from

SIZES = {"vocabulary": 40, "width": 12, "layers": 2, "heads": 3, "hidden": 20}
GPT_CONFIG = GPTConfig(**SIZES, positions=16, dropout=0.0, qk_norm=True)
DECODER_CONFIG = DecoderConfig(**SIZES, qk_norm=True)
MAKE = {
    "gpt": lambda: GPT(GPT_CONFIG),
    "classifier": lambda: GPT(replace(GPT_CONFIG, classes=3, causal=False)),
    "decoder": lambda: Decoder(replace(DECODER_CONFIG, width=12, heads=2)),
    "decoder before": lambda: Decoder(
        replace(DECODER_CONFIG, heads=2, norm="before", final_norm=True)
    ),
}


def root_mean_square(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / ((x * x).mean() + 1e-6).sqrt()


def turned(x: Tensor, place: int) -> Tensor:
    """Rotate a head's vector by its position, one pair after the other."""
    size, half = len(x), len(x) // 2
    angles = [torch.tensor(place * 10000.0 ** (-2 * n / size)) for n in range(half)]
    first = [x[n] * a.cos() - x[n + half] * a.sin() for n, a in enumerate(angles)]
    second = [x[n + half] * a.cos() + x[n] * a.sin() for n, a in enumerate(angles)]
    return torch.stack([*first, *second])


def naive(block: Any, config: Any, x: Tensor) -> Tensor:
    """Return the attention's output before its projection, with a loop over every vector."""
    batch, length, width = x.shape
    size = width // config.heads
    if isinstance(config, GPTConfig):
        query, key, value = block.qkv(x).chunk(3, -1)
    else:
        query, key, value = block.query(x), block.key(x), block.value(x)
    rows = []
    for b in range(batch):
        for i in range(length):
            heads = []
            for h in range(config.heads):
                own = slice(h * size, (h + 1) * size)
                seen = length if not getattr(config, "causal", True) else i + 1
                q = root_mean_square(query[b, i, own], block.qk_norm.query.weight)
                scores = []
                for j in range(seen):
                    k = root_mean_square(key[b, j, own], block.qk_norm.key.weight)
                    if isinstance(config, DecoderConfig):
                        scores.append(turned(q, i) @ turned(k, j) / size**0.5)
                    else:
                        scores.append(q @ k / size**0.5)
                heads.append(torch.stack(scores).softmax(0) @ value[b, :seen, own])
            rows.append(torch.cat(heads))
    return torch.stack(rows).view(batch, length, width)


@pytest.mark.parametrize("name", MAKE)
def test_attention_equals_a_naive_loop_forward_and_backward(name: str) -> None:
    torch.manual_seed(0)
    model = MAKE[name]().double()
    block = model.blocks[1]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    caught: list[Tensor] = []
    block.out.register_forward_pre_hook(lambda _, x: caught.append(x[0]))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    if name.startswith("decoder"):
        block.attend(x, model.angles(torch.arange(5)), None, None, None)
    else:
        caught.append(block.attend(x, None, None, None))
    wanted = naive(block, model.config, x)
    # rotary angles are float32 in both
    torch.testing.assert_close(caught[0], wanted, rtol=1e-6, atol=1e-6)
    pull = torch.randn_like(wanted)
    learning = [p for n, p in block.named_parameters() if "qk" in n or "query" in n or "key" in n]
    ours = torch.autograd.grad(caught[0], learning, pull)
    theirs = torch.autograd.grad(wanted, learning, pull)
    for found, expected in zip(ours, theirs, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt", "decoder"])
def test_only_the_gains_are_new(name: str) -> None:
    settings = {"kind": name, "width": 16, "layers": 2, "heads": 2}

    def built(**more: Any) -> nn.Module:
        data = {"name": "induction", "length": 8}
        return build_model(recipe_from({"data": data, "model": settings | more}), 20, 0, 0)

    plain, normed = built(), built(qk_norm=True)
    extra = {name for name, _ in normed.named_parameters()} - set(dict(plain.named_parameters()))
    assert extra == {f"blocks.{n}.qk_norm.{w}.weight" for n in (0, 1) for w in ("query", "key")}
    for key, value in plain.state_dict().items():
        assert torch.equal(value, normed.state_dict()[key]), "the draws are the same"
    assert all(bool((normed.state_dict()[key] == 1).all()) for key in extra)
    assert fl.anatomy(normed).count() == fl.anatomy(plain).count() + 2 * 2 * 8
    parts = {p.name: p for p in fl.anatomy(normed).parts}
    assert {(parts[key].role, parts[key].layer) for key in extra} == {("norm", 0), ("norm", 1)}


def test_the_scale_of_queries_no_longer_matters() -> None:
    torch.manual_seed(0)
    for name in ("gpt", "decoder"):
        model, ids = MAKE[name]().double().eval(), torch.randint(0, 40, (2, 6))
        logits = []
        for _ in range(2):
            with torch.no_grad():
                for block in model.blocks:
                    weight = block.qkv.weight[:12] if name == "gpt" else block.query.weight
                    weight *= 1e4
                logits.append(model(ids))
        torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt", "decoder"])
def test_bfloat16_stays_close(name: str) -> None:
    torch.manual_seed(0)
    model, ids = MAKE[name]().train(), torch.randint(0, 40, (2, 6))
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(ids)
        rough.float().square().sum().backward()
    assert 0 < (rough - exact).abs().max() < 0.1 * exact.abs().max()
    gains = [p.grad for n, p in model.named_parameters() if "qk_norm" in n]
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in gains)


def test_frozen_queries_and_keys_leave_the_gains_to_learn() -> None:
    model = MAKE["gpt"]()
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key")
    model(torch.randint(0, 40, (2, 6))).square().sum().backward()
    assert model.blocks[0].qk_norm.query.weight.grad is not None
    fl.grow(model, layers=1)
    assert model.blocks[2].qk_norm is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "decoder"])
def test_it_compiles_in_one_graph(name: str) -> None:
    model, ids = MAKE[name]().eval(), torch.randint(0, 40, (2, 6))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-5)

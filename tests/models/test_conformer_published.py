"""The published variant of the Conformer equals a naive model, written from its description."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import frostlab as fl
from frostlab.data.eeg.recordings import UNSEEN, Recording, windows
from frostlab.models.build import recipe_blueprint
from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.recipe.load import load_recipe, recipe_from
from frostlab.training.stages import stages_of
from hearing import hearing
from zoo import CONFORMER, widen

PUBLISHED = replace(CONFORMER, variant="published")
SIZE = PUBLISHED.width // PUBLISHED.heads
V1 = {"residual": "none", "head": "linear", "gradient_scale": 1.0}
PRESETS = {
    "v1": V1,
    "conservative": {"residual": "plain", "head": "mlp", "gradient_scale": 1.5},
    "full": {"residual": "gated", "head": "mlp", "gradient_scale": 2.0},
}
Weights = Mapping[str, Tensor]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Multiply by a matrix, row by row, and add the bias if there is one."""
    columns = [(x * row).sum(-1) for row in weights[f"{name}.weight"]]
    return torch.stack(columns, -1) + weights.get(f"{name}.bias", torch.zeros(1))


def layer_norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def swish(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def leaky(x: Tensor) -> Tensor:
    return torch.maximum(x, 0.01 * x)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, depthwise: bool) -> Tensor:
    """Convolve (B, T, channels) along time, one tap after the other, with zeros at the edges."""
    taps = weight.shape[-1]
    length, pad = x.shape[1], taps // 2
    edge = x.new_zeros(x.shape[0], pad, x.shape[2])
    padded = torch.cat([edge, x, edge], 1)
    total = bias
    for tap in range(taps):
        shifted = padded[:, tap : tap + length]
        total = total + (
            shifted * weight[:, 0, tap] if depthwise else shifted @ weight[:, :, tap].T
        )
    return total


def feed_forward(weights: Weights, name: str, x: Tensor) -> Tensor:
    hidden = swish(linear(weights, f"{name}.up", layer_norm(weights, f"{name}.norm", x)))
    return x + linear(weights, f"{name}.down", hidden) / 2


def attention(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Attend with a loop over windows, heads, queries and keys."""
    batch, length, width = x.shape
    qkv = linear(weights, f"{name}.qkv", layer_norm(weights, f"{name}.norm", x))
    query, key, value = qkv[..., :width], qkv[..., width : 2 * width], qkv[..., 2 * width :]
    table = weights[f"{name}.relative_positions"]
    assert table.shape == (1999, SIZE)
    rows = []
    for b in range(batch):
        for i in range(length):
            heads = []
            for h in range(PUBLISHED.heads):
                own = slice(h * SIZE, (h + 1) * SIZE)
                q = query[b, i, own]
                scores = [
                    (q @ key[b, j, own] + q @ table[i - j + 999]) / math.sqrt(SIZE)
                    for j in range(length)
                ]
                heads.append(torch.stack(scores).softmax(0) @ value[b, :, own])
            rows.append(torch.cat(heads))
    mixed = torch.stack(rows).view(batch, length, width)
    return x + linear(weights, f"{name}.out", mixed)


def convolution(weights: Weights, name: str, x: Tensor) -> Tensor:
    entered = linear(weights, f"{name}.enter", layer_norm(weights, f"{name}.norm", x))
    inner = 2 * PUBLISHED.width
    assert entered.shape[-1] == 2 * inner
    passed = entered[..., :inner] * torch.sigmoid(entered[..., inner:])
    depthwise = f"{name}.depthwise"
    mixed = convolve(passed, weights[f"{depthwise}.weight"], weights[f"{depthwise}.bias"], True)
    mean = mixed.mean((0, 1))
    spread = ((mixed - mean).square().mean((0, 1)) + 1e-5).sqrt()
    norm = (mixed - mean) / spread * weights[f"{name}.middle.weight"]
    return x + linear(weights, f"{name}.leave", swish(norm + weights[f"{name}.middle.bias"]))


def layer(weights: Weights, name: str, x: Tensor) -> Tensor:
    x = feed_forward(weights, f"{name}.feed1", x)
    x = attention(weights, f"{name}.attention", x)
    x = convolution(weights, f"{name}.convolution", x)
    x = feed_forward(weights, f"{name}.feed2", x)
    return layer_norm(weights, f"{name}.norm", x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.scale * gradient, None


def naive(weights: Weights, eeg: Tensor, subjects: list[int], preset: Mapping[str, Any]) -> Tensor:
    """The whole model in training, without dropout: BatchNorm uses the batch's statistics."""
    x = eeg
    for n in range(3):
        conv = f"cnn.{n}.conv"
        x = convolve(x, weights[f"{conv}.weight"], weights[f"{conv}.bias"], False)
        x = leaky(layer_norm(weights, f"cnn.{n}.norm", x))
    squeezed = leaky(linear(weights, "channels.squeeze", x.mean(1)))
    x = x * torch.sigmoid(linear(weights, "channels.excite", squeezed))[:, None]
    codes = torch.stack([torch.eye(PUBLISHED.subjects, dtype=eeg.dtype)[n] for n in subjects])
    x = x + linear(weights, "subjects", codes)[:, None]
    width = x.shape[-1]
    for t in range(x.shape[1]):
        for i in range(0, width, 2):
            angle = torch.tensor(t / 10000 ** (i / width))
            wave = torch.zeros_like(x)
            wave[:, t, i], wave[:, t, i + 1] = angle.sin(), angle.cos()
            x = x + wave
    into = x
    for n in range(PUBLISHED.layers):
        x = layer(weights, f"blocks.{n}", x)
    x = Scaled.apply(x, preset["gradient_scale"])
    if preset["residual"] == "plain":
        x = x + into
    if preset["residual"] == "gated":
        down = linear(weights, "gate.down", x.mean(1)).clamp(min=0)
        gate = torch.sigmoid(linear(weights, "gate.up", down))[:, None]
        x = gate * x + (1 - gate) * into
    if preset["head"] == "linear":
        return linear(weights, "head", x)[..., 0]
    hidden = linear(weights, "head.1", layer_norm(weights, "head.0", x))
    return linear(weights, "head.4", hidden * (1 + torch.erf(hidden / 2**0.5)) / 2)[..., 0]


@pytest.mark.parametrize("preset", PRESETS)
def test_it_equals_a_naive_model_forward_and_backward(preset: str) -> None:
    torch.manual_seed(0)
    model = Conformer(replace(PUBLISHED, **PRESETS[preset]))
    widen(model)
    model = model.double().train()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    eeg = torch.randn(2, 7, PUBLISHED.channels, dtype=torch.float64)
    found = model(eeg, torch.tensor([2, 0]))
    wanted = naive(weights, eeg, [2, 0], PRESETS[preset])
    # the sinusoids are float32 in both
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    pull = torch.randn_like(found)
    found.backward(pull)
    wanted.backward(pull)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-5, atol=1e-6 * max(1.0, largest)
        )
    table = model.blocks[0].attention.relative_positions.grad
    used = table.abs().sum(1).nonzero()[:, 0]
    assert used.tolist() == list(range(999 - 6, 999 + 7)), "seven samples have 13 distances"


def test_a_layer_equals_a_naive_layer_in_float64() -> None:
    torch.manual_seed(1)
    model = Conformer(PUBLISHED)
    widen(model)
    block = model.double().train().blocks[0]
    weights = {f"l.{n}": p.detach().clone().requires_grad_() for n, p in block.named_parameters()}
    x = torch.randn(2, 9, PUBLISHED.width, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    found, wanted = block(x), layer(weights, "l", y)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    pull = torch.randn_like(found)
    found.backward(pull)
    wanted.backward(pull)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-9)
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[f"l.{name}"].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("recipe", "count", "scale"),
    [
        ("eeg-conformer-v1-published", 15_521_793, 1.0),
        ("eeg-conformer-conservative-published", 15_555_073, 1.5),
        ("eeg-conformer-v2-published", 15_588_161, 2.0),
        ("eeg-conformer-aggressive-published", 15_588_161, 3.0),
    ],
)
def test_the_published_recipes_have_the_published_counts(
    recipe: str, count: int, scale: float
) -> None:
    loaded = load_recipe(recipe)
    model, _ = recipe_blueprint(loaded)
    assert model.config.gradient_scale == scale
    assert fl.anatomy(model).count() == sum(p.numel() for p in model.parameters()) == count
    assert (loaded.model.layers, loaded.model.width, loaded.model.variant) == (8, 256, "published")


def test_an_epoch_of_the_published_recipes_has_79_steps(tmp_path: Any) -> None:
    """The challenge's 508 recordings, 10 windows of each, in full batches of 64."""
    recipe = load_recipe("eeg-conformer-v1-published", {"data.path": str(tmp_path)})
    assert (recipe.data.name, recipe.data.length) == ("eeg-challenge", 640)
    signal = torch.zeros(1000, 1).numpy()
    recordings = [Recording(str(n), "a", signal, signal[:, 0]) for n in range(508)]
    drawn = windows(recordings, 640, None, 0, 0, recipe.data.windows)
    assert len(drawn) == 5080
    (stage,) = stages_of(recipe, len(drawn))
    assert (stage.per_epoch, stage.steps) == (79, 79_000)


@torch.no_grad()
def test_weights_start_as_in_the_published_code() -> None:
    torch.manual_seed(0)
    model = Conformer(ConformerConfig(layers=1, variant="published", subjects=71))
    attention = model.blocks[0].attention
    assert float(attention.relative_positions.std()) == pytest.approx(64**-0.5, rel=0.02)
    xavier = math.sqrt(6 / 512)
    for weight in (*attention.qkv.weight.chunk(3), attention.out.weight):
        assert 0.99 * xavier < float(weight.abs().max()) <= xavier
    feed = model.blocks[0].feed1
    for weight in (feed.up.weight, feed.down.weight):
        assert float(weight.abs().max()) == pytest.approx(math.sqrt(6 / 1280), rel=0.01)
    for weight in model.subjects.parameters():
        assert float(weight.abs().max()) == pytest.approx(71**-0.5, rel=0.02)


def test_nothing_is_dropped_after_the_positions() -> None:
    model = Conformer(replace(PUBLISHED, dropout=0.5)).train()
    into = model.embed(torch.randn(2, 12, 5), torch.tensor([0, 1]))
    assert float((into == 0).float().mean()) < 0.01


@torch.no_grad()
def test_unseen_subjects_have_a_defined_code() -> None:
    model = Conformer(PUBLISHED).eval()
    weight, bias = model.subjects.weight, model.subjects.bias
    unseen = torch.tensor([UNSEEN])
    torch.testing.assert_close(model.rows(unseen)[0, 0], weight.mean(1) + bias)
    torch.testing.assert_close(model.rows(None), weight.mean(1) + bias)
    torch.testing.assert_close(model.rows(torch.tensor([1]))[0, 0], weight[:, 1] + bias)
    silent = Conformer(replace(PUBLISHED, unseen="none")).eval()
    assert torch.equal(silent.rows(unseen)[0, 0], silent.subjects.bias)


def test_its_parts_have_roles_and_freeze() -> None:
    model = Conformer(PUBLISHED)
    (first, second) = fl.anatomy(model).select("position")
    assert first.name == "blocks.0.attention.relative_positions"
    assert (first.role, first.layer, second.layer) == ("position", 0, 1)
    assert {p.name for p in fl.anatomy(model).select("embedding")} == {
        "subjects.weight", "subjects.bias",
    }  # fmt: skip
    fl.freeze(model, "layers[0].position")
    proof = fl.audit(model)
    model(torch.randn(2, 12, 5)).square().sum().backward()
    assert model.blocks[0].attention.relative_positions.grad is None
    assert model.blocks[1].attention.relative_positions.grad is not None
    proof.verify(model)


def test_the_entropy_of_attention_counts_relative_positions() -> None:
    model, eeg = Conformer(PUBLISHED), torch.randn(2, 12, 5)

    def entropies() -> dict[str, tuple[float, ...]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        flow = fl.watch(model, optimizer, every_n_steps=1, attention_entropy=True)
        with flow:
            model(eeg).square().sum().backward()
            optimizer.step()
        return flow.reports[-1].entropy

    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.zero_()
            block.attention.qkv.bias.fill_(1.0)  # every query and key is ones
            block.attention.relative_positions.zero_()
    uniform = entropies()
    with torch.no_grad():
        model.blocks[1].attention.relative_positions[999] = 50.0  # only the query's own place
    sharp = entropies()
    assert min(uniform["attention[0]"]) > 0.999
    assert min(sharp["attention[0]"]) > 0.999
    assert max(sharp["attention[1]"]) < 1e-3


def test_nothing_waits_for_a_value() -> None:
    with FakeTensorMode():
        found = Conformer(PUBLISHED)(torch.randn(2, 12, 5), torch.zeros(2, dtype=torch.long))
        found.square().sum().backward()
    assert found.shape == (2, 12)


@pytest.mark.slow
def test_it_compiles_in_one_graph() -> None:
    torch.manual_seed(0)
    model = Conformer(PUBLISHED).eval()
    eeg, subject = torch.randn(2, 12, 5), torch.tensor([1, -1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(eeg, subject), model(eeg, subject), rtol=1e-4, atol=1e-5)


def test_windows_are_at_most_as_long_as_the_table() -> None:
    model = Conformer(replace(PUBLISHED, layers=1, heads=1, width=2, hidden=2)).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 1000, 5)).shape == (1, 1000)
    with pytest.raises(fl.BadInput, match="the EEG has 1001 samples; .* at most 1000"):
        model(torch.randn(1, 1001, 5))
    line = "data.length 1001 is longer than 1000 samples, the longest window of model.variant publ"
    with pytest.raises(fl.BadInput, match=line):
        load_recipe("eeg-conformer-v2-published", {"data.length": 1001})
    load_recipe("eeg-conformer-v2", {"data.length": 1001})


def test_the_published_attention_has_no_other_kind() -> None:
    with pytest.raises(fl.BadInput, match="attention relative is given, but variant published has"):
        load_recipe("eeg-conformer-v2-published", {"model.attention": "relative"})
    with pytest.raises(
        ValueError, match="attention is relative; the published variant has only plain"
    ):
        replace(PUBLISHED, attention="relative")


def test_a_run_with_its_checkpoint_decodes_as_trained(tmp_path: Any) -> None:
    changes = {"model__variant": "published", "data__windows": 5, "train__drop_last": True}
    record = fl.run(recipe_from(hearing(**changes, treatment="oelm")), out=tmp_path / "run")
    assert record.recipe.model.variant == "published"
    assert record.result.steps == 2 * (2 * 1 * 5 // 8), "2 epochs, 2 subjects, one recording each"
    assert set(record.metrics) >= {"pearson", "loss"}

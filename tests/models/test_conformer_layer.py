"""A Conformer layer equals one built from torch's own modules, and attends as a loop would."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import Wav2Vec2ConformerConfig
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerRelPositionalEmbedding,
    Wav2Vec2ConformerSelfAttention,
)

from frostlab.models.conformer import (
    Attention,
    ConformerLayer,
    Depthwise,
    by_distance,
    distances,
    sinusoids,
)
from zoo import CONFORMER, widen

WIDTH, HEADS, LENGTH = CONFORMER.width, CONFORMER.heads, 9


class Reference(nn.Module):
    """The layer in torch's own words: nothing here is frostlab's."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        width, hidden, kernel = CONFORMER.width, CONFORMER.hidden, CONFORMER.kernel
        self.feeds = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width)
            )
            for _ in range(2)
        )
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.before_convolution = nn.LayerNorm(width)
        self.widen = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding="same", groups=width)
        self.middle = norm
        self.narrow = nn.Conv1d(width, width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.feeds[0](x) / 2
        y = self.before_attention(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = nn.functional.glu(self.widen(self.before_convolution(x).mT), dim=1)
        y = self.depthwise(y)
        y = self.middle(y.mT).mT if isinstance(self.middle, nn.LayerNorm) else self.middle(y)
        x = x + self.narrow(nn.functional.silu(y)).mT
        return self.norm(x + self.feeds[1](x) / 2)


def copied(layer: ConformerLayer, norm: nn.Module) -> Reference:
    """A reference with the layer's weights."""
    reference = Reference(norm)
    names = {
        "feeds.0.0": "feed1.norm", "feeds.0.1": "feed1.up", "feeds.0.3": "feed1.down",
        "feeds.1.0": "feed2.norm", "feeds.1.1": "feed2.up", "feeds.1.3": "feed2.down",
        "before_attention": "attention.norm", "attention.out_proj": "attention.out",
        "before_convolution": "convolution.norm", "widen": "convolution.enter",
        "depthwise": "convolution.depthwise", "middle": "convolution.middle",
        "narrow": "convolution.leave", "norm": "norm",
    }  # fmt: skip
    there, ours = reference.state_dict(), layer.state_dict()
    for name, value in there.items():
        module, _, kind = name.rpartition(".")
        source = (
            f"attention.qkv.{kind.removeprefix('in_proj_')}"
            if kind.startswith("in_proj")
            else f"{names[module]}.{kind}"
        )
        value.copy_(ours[source].reshape(value.shape))
    return reference


EXACT = {"rtol": 1e-10, "atol": 1e-10}
NORMS = {
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "layer": lambda: nn.LayerNorm(WIDTH),
    "group": lambda: nn.GroupNorm(8, WIDTH),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_a_layer_equals_torchs_own_modules(norm: str, training: bool) -> None:
    layer = ConformerLayer(replace(CONFORMER, norm=norm))
    widen(layer)
    if norm == "batch":
        layer.convolution.middle.running_mean.normal_()
        layer.convolution.middle.running_var.uniform_(0.5, 2.0)
    reference = copied(layer, NORMS[norm]()).train(training)
    reference, layer = reference.double(), layer.double().train(training)
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    found, wanted = layer(x), reference(y)
    torch.testing.assert_close(found, wanted, **EXACT)
    pull = torch.randn_like(found)
    found.backward(pull)
    wanted.backward(pull)
    torch.testing.assert_close(x.grad, y.grad, **EXACT)
    ours, theirs = layer.convolution.depthwise, reference.depthwise
    for name in ("weight", "bias"):
        found, wanted = (module.get_parameter(name).grad for module in (ours, theirs))
        torch.testing.assert_close(found, wanted, **EXACT)
    for name, buffer in reference.middle.named_buffers():
        found = layer.convolution.middle.get_buffer(name)
        torch.testing.assert_close(found, buffer, **EXACT)


@pytest.mark.parametrize("length", [1, LENGTH])
def test_the_convolution_leaves_its_input_as_it_lies(length: int) -> None:
    made = Depthwise(WIDTH, 5)(torch.randn(3, length, WIDTH))
    assert made.shape == (3, length, WIDTH)
    assert made.is_contiguous(), "no copy is made for the norm that follows"


def relative() -> Attention:
    attention = Attention(replace(CONFORMER, attention="relative"))
    widen(attention)
    return attention.eval()


@torch.no_grad()
def test_relative_attention_equals_a_naive_loop() -> None:
    attention, size = relative(), WIDTH // HEADS
    x = torch.randn(2, LENGTH, WIDTH)
    found = attention(x, sinusoids(distances(LENGTH, x.device), WIDTH))
    query, key, value = attention.qkv(attention.norm(x)).chunk(3, -1)
    mixed = torch.zeros_like(x)
    for b in range(2):
        for h in range(HEADS):
            own = slice(h * size, (h + 1) * size)
            u, v = attention.content_bias[h], attention.place_bias[h]
            for i in range(LENGTH):
                scores = torch.zeros(LENGTH)
                for j in range(LENGTH):
                    place = attention.position(sinusoids(torch.tensor([i - j]), WIDTH))[0, own]
                    q = query[b, i, own]
                    scores[j] = ((q + u) @ key[b, j, own] + (q + v) @ place) / size**0.5
                mixed[b, i, own] = scores.softmax(0) @ value[b, :, own]
    torch.testing.assert_close(found, attention.out(mixed), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_relative_attention_equals_hugging_faces() -> None:
    config = Wav2Vec2ConformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_dropout=0.0,
        max_source_positions=64, position_embeddings_type="relative",
    )  # fmt: skip
    theirs, ours = Wav2Vec2ConformerSelfAttention(config).eval(), relative()
    query, key, value = ours.qkv.weight.chunk(3)
    biases = ours.qkv.bias.chunk(3)
    for linear, weight, bias in zip(
        (theirs.linear_q, theirs.linear_k, theirs.linear_v), (query, key, value), biases,
        strict=True,
    ):  # fmt: skip
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    theirs.linear_out.load_state_dict(ours.out.state_dict())
    theirs.linear_pos.weight.copy_(ours.position.weight)
    theirs.pos_bias_u.copy_(ours.content_bias)
    theirs.pos_bias_v.copy_(ours.place_bias)
    x = torch.randn(2, LENGTH, WIDTH)
    places = Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    wanted = theirs(ours.norm(x), relative_position_embeddings=places)[0]
    found = ours(x, sinusoids(distances(LENGTH, x.device), WIDTH))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_scores_are_put_where_their_distance_is() -> None:
    length = 5
    scores = distances(length, torch.device("cpu")).expand(2, length, -1)
    places = torch.arange(length)
    assert torch.equal(by_distance(scores)[1], places[:, None] - places)


def test_a_layer_sees_both_sides_as_far_as_it_attends() -> None:
    layer = ConformerLayer(CONFORMER).eval()
    x = torch.randn(1, 20, WIDTH, requires_grad=True)
    layer(x)[0, 10].square().sum().backward()
    assert x.grad is not None
    assert x.grad[0].abs().sum(-1).min() > 0

"""Attentions and their surroundings in further styles: read, or refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import frostlab as fl
from blocks import HEADS, IDS, WIDE, WIDTH, Block, Mix, Model, Network, apart, attend, roles

SIZE = WIDTH // HEADS
Sides = tuple[Tensor, Tensor, Tensor]


class Style(Mix):
    """An attention that a function of its queries, keys and values computes."""

    def __init__(self, function: Callable[[Any, Tensor, Sides], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.extra = nn.Parameter(torch.rand(HEADS))

    def mixed(self, x: Tensor) -> Tensor:
        sides = apart(self.q(x)), apart(self.k(x)), apart(self.v(x))
        return self.function(self.extra.view(HEADS, 1, 1), x, sides).transpose(1, 2).flatten(2)


def distances(x: Tensor) -> Tensor:
    tokens = torch.arange(x.shape[1])
    return -(tokens[:, None] - tokens).abs()


def slopes(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    return (q @ k.mT + distances(x) * extra).softmax(-1) @ v


def cosine(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * extra.exp()).softmax(-1) @ v


def sink(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    scores = q @ k.mT
    joined = torch.cat([scores, extra.expand(*scores.shape[:3], 1)], -1)
    return joined.softmax(-1)[..., :-1] @ v


def keys_first(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    return (k @ q.mT * extra).softmax(-2).mT @ v


def largest(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    scores = q @ k.mT * extra
    return scores.masked_fill(scores < scores.topk(3).values[..., -1:], -1e9).softmax(-1) @ v


READ = {slopes: "position", cosine: "other", sink: "other", keys_first: "other", largest: "other"}


@pytest.mark.parametrize("style", READ, ids=lambda style: style.__name__)
def test_an_attention_in_another_style_is_read(style: Any) -> None:
    model = Model(lambda: Block(Style(style)))
    said = roles(model)
    mix = {name: said[f"blocks.1.mix.{name}"] for name in ("q", "k", "v", "o", "extra")}
    assert mix == {"q": "query", "k": "key", "v": "value", "o": "output", "extra": READ[style]}
    (query,) = fl.anatomy(model, IDS).select("layers[1].query.weight")
    assert query.heads == fl.Heads(HEADS, HEADS, SIZE)


def sigmoid(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    return (q @ k.mT * extra).sigmoid() @ v


def linear(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = F.elu(sides[0]) + 1, F.elu(sides[1]) + 1, sides[2]
    return q @ (k.mT @ v) * extra


def exponentials(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    weights = (q @ k.mT * extra).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def difference(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    (q, other_q), (k, other_k), v = sides[0].chunk(2, -1), sides[1].chunk(2, -1), sides[2]
    return ((q @ k.mT).softmax(-1) - extra * (other_q @ other_k.mT).softmax(-1)) @ v


def sums(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    return (q[..., :, None, :] + k[..., None, :, :]).tanh().sum(-1).softmax(-1) @ v * extra


@pytest.mark.parametrize(
    "style", [sigmoid, linear, exponentials, difference, sums], ids=lambda style: style.__name__
)
def test_what_is_no_softmax_of_one_product_is_refused(style: Any) -> None:
    with pytest.raises(fl.UnknownArchitecture) as error:
        roles(Model(lambda: Block(Style(style))))
    assert "attention" in str(error.value)
    assert "\n" not in str(error.value)


class Recomputed(Model):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_are_named(reentrant: bool) -> None:
    with pytest.raises(fl.UnknownArchitecture, match=r"recomputed, .*turn torch.utils.ch"):
        fl.anatomy(Recomputed(reentrant), IDS)


class Joined(nn.Module):
    """One weight with a bias projects the attention's result and the network's together."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH + WIDE)
        self.out = nn.Linear(WIDTH + WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, up = self.into(x).split([WIDTH, WIDTH, WIDTH, WIDE], -1)
        mixed = attend(apart(q), apart(k), apart(v))
        return x + self.out(torch.cat([mixed, F.gelu(up)], -1))


def test_the_bias_of_a_joined_output_is_the_outputs() -> None:
    assert roles(Model(Joined))["blocks.0.out.bias"] == "output"


# ---- after the last attention ----


class Modulated(nn.Module):
    """A diffusion transformer: the time shifts and scales activations, also those of the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.time = nn.Embedding(50, WIDTH), nn.Linear(8, WIDTH)
        self.mix, self.network = Mix(), Network()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        waves = torch.arange(1, 9) * torch.tensor([[0.3], [0.7]])
        time = F.silu(self.time(waves.sin()))[:, None]
        shift, scale = self.first(time).chunk(2, -1)
        x = x + self.mix(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)
        x = x + self.network(x)
        shift, scale = self.last(time).chunk(2, -1)
        return self.head(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)


def test_a_condition_after_the_last_attention_is_no_head() -> None:
    said = roles(Modulated())
    assert (said["last"], said["head"]) == ("other", "head")


POOLED: dict[str, Callable[["Pooled", Tensor], Tensor]] = {
    "sum": lambda model, x: (model.score(x).softmax(1) * x).sum(1),
    "product": lambda model, x: (model.score(x).softmax(1).mT @ x)[:, 0],
    "network": lambda model, x: (model.score(model.hidden(x).tanh()).softmax(1) * x).sum(1),
    "vector": lambda model, x: ((x @ model.score.weight[0]).softmax(1)[..., None] * x).sum(1),
}


class Pooled(Model):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.score, self.hidden = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(POOLED[self.form](self, x))


@pytest.mark.parametrize("form", POOLED)
def test_the_scores_of_a_pooling_are_no_head_and_no_gate(form: str) -> None:
    said = roles(Pooled(form))
    assert (said["score"], said["hidden"], said["head"]) == ("other", "other", "head")


class Probabilities(Model):
    def forward(self, ids: Tensor) -> Any:
        chances = super().forward(ids).softmax(-1)
        return chances, -(chances * chances.log()).sum(-1), chances * torch.arange(5.0)


def test_a_head_of_probabilities_is_still_the_head() -> None:
    assert roles(Probabilities())["head"] == "head"


class Scaled(Model):
    """The logits are multiplied by a mask, or divided by a temperature, that is given."""

    def forward(self, ids: Tensor, mask: Tensor, temperature: Tensor) -> Any:
        return super().forward(ids) * mask[..., None] / temperature


def test_a_head_whose_logits_are_scaled_by_inputs_is_still_the_head() -> None:
    batch = (IDS, torch.ones(IDS.shape), torch.tensor(2.0))
    assert roles(Scaled(), batch)["head"] == "head"


class Residual(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, WIDTH, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + F.silu(self.conv(x))


class UNet(nn.Module):
    """Residual blocks before and after an attention; the last one takes results of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.down, self.up = Residual(3), Residual(WIDTH), Residual(2 * WIDTH)
        self.mix, self.last = Mix(), nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        early = self.down(self.first(x))
        late = early + self.mix(early.flatten(2).mT).mT.view_as(early)
        return self.last(self.up(torch.cat([late, early], 1)))


def test_the_shortcut_of_the_last_block_is_a_convolution_as_in_the_others() -> None:
    said = roles(UNet(), torch.randn(2, 3, 4, 4))
    names = [f"{block}.{name}" for block in ("down", "up") for name in ("conv", "shortcut")]
    assert {said[name] for name in names} == {"conv"}


# ---- attentions that use something of an earlier one ----


class Kept(Block):
    """A block that adds something of the first block, such as its values or its scores."""

    def forward(self, x: Tensor, earlier: Any = None) -> Any:
        y = self.n1(x)
        mixed, kept = self.attended(
            [apart(p(y)) for p in (self.mix.q, self.mix.k, self.mix.v)], earlier
        )
        x = x + self.mix.o(mixed.transpose(1, 2).flatten(2))
        return x + self.network(self.n2(x)), kept

    def attended(self, sides: list[Tensor], earlier: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class WithValues(Kept):
    def attended(self, sides: list[Tensor], earlier: Any) -> tuple[Tensor, Tensor]:
        q, k, v = sides
        v = v if earlier is None else (v + earlier) / 2
        return F.scaled_dot_product_attention(q, k, v), v


class WithScores(Kept):
    def attended(self, sides: list[Tensor], earlier: Any) -> tuple[Tensor, Tensor]:
        q, k, v = sides
        scores = q @ k.mT if earlier is None else q @ k.mT + earlier
        return scores.softmax(-1) @ v, scores


class WithTurnedScores(Kept):
    def attended(self, sides: list[Tensor], earlier: Any) -> tuple[Tensor, Tensor]:
        q, k, v = sides
        scores = q @ k.mT if earlier is None else q @ k.mT + earlier.mT
        return scores.softmax(-1) @ v, scores


class Keeping(Model):
    def __init__(self, kind: type[Kept]) -> None:
        super().__init__(kind)
        self.blocks.append(kind())

    def forward(self, ids: Tensor) -> Any:
        x, kept = self.embed(ids), None
        for block in self.blocks:
            x, kept = block(x, kept)
        return self.head(x)


@pytest.mark.parametrize("kind", [WithValues, WithScores])
def test_values_or_scores_of_an_earlier_layer_may_be_added(kind: type[Kept]) -> None:
    parts = {part.name: part for part in fl.anatomy(Keeping(kind), IDS).parts}
    for i in range(len(Keeping(kind).blocks)):
        for name, role in zip("qkvo", ("query", "key", "value", "output"), strict=True):
            part = parts[f"blocks.{i}.mix.{name}.weight"]
            assert (part.role, part.layers) == (role, (i,))
            assert name == "o" or part.heads == fl.Heads(HEADS, HEADS, SIZE)


def test_turned_scores_of_an_earlier_layer_are_refused() -> None:
    with pytest.raises(fl.UnknownArchitecture, match="is query and key at once"):
        fl.anatomy(Keeping(WithTurnedScores), IDS)


class Pooling(nn.Module):
    """An attention of a Set Transformer: its queries are added to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.last = Mix(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.mix.q(x)
        x = q + attend(apart(q), apart(self.mix.k(y)), apart(self.mix.v(y)))
        return self.norm(x + self.last(x).relu())


class Induced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.points, self.first, self.second = (
            nn.Parameter(torch.rand(3, WIDTH)),
            Pooling(),
            Pooling(),
        )
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.second(x, self.first(self.points.expand(len(x), -1, -1), x)))


def test_queries_that_are_added_to_the_result() -> None:
    said = roles(Induced(), torch.randn(2, 9, 5))
    for part in ("first", "second"):
        assert [said[f"{part}.mix.{name}"] for name in "qkv"] == ["query", "key", "value"]


class ByExperts(Mix):
    """An attention whose output is computed by an expert for each token; one gets no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.mixed(x), self.router(x).softmax(-1)
        chosen, result = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.o):
            at = torch.where(chosen == number)
            result[at] = expert(mixed[at]) * weights[(*at, torch.tensor(min(number, 1)))][:, None]
        return result


def test_an_output_expert_that_gets_no_tokens() -> None:
    said = roles(Model(lambda: Block(ByExperts())))
    assert {said[f"blocks.{i}.mix.o.{e}"] for i in range(2) for e in range(3)} == {"output"}
    assert said["blocks.0.mix.q"] == "query"


class MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        shares = scores.softmax(-1)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        kept: Tensor = shares * grads[0]
        return kept - shares * kept.sum(-1, keepdim=True)


def own_softmax(extra: Tensor, x: Tensor, sides: Sides) -> Tensor:
    q, k, v = sides
    return MaskedSoftmax.apply(q @ k.mT) @ v


def test_a_function_that_may_hide_the_softmax_is_named() -> None:
    with pytest.raises(fl.UnknownArchitecture, match="MaskedSoftmax, a custom autograd"):
        roles(Model(lambda: Block(Style(own_softmax))))

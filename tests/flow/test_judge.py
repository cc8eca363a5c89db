"""Verdicts: planted faults get the right word and cause, healthy models no alarm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

import frostlab as fl
from cases import slow_unless
from flowing import SYMBOLS, adamw, batch, loss_at, tiny_gpt, watched
from frostlab.flow.judge import (
    EXPLODING,
    FROZEN,
    LEARNING,
    MOVED,
    SCALED,
    SLOW,
    STILL,
    UNDRIVEN,
    UNKNOWN,
)
from frostlab.models.decoder import Decoder, DecoderConfig
from zoo import CASES


def layer(flow: fl.Flow, index: int) -> set[str]:
    return {part.name for part in flow.parts if part.layer == index}


def test_a_detached_layer() -> None:
    model = tiny_gpt()
    forward = model.blocks[1].forward

    def detached(*args: Any) -> Tensor:
        with torch.no_grad():
            made = forward(*args)
        return args[0] + (made - args[0]).detach()

    model.blocks[1].forward = detached  # type: ignore[method-assign]
    flow = watched(model, adamw(model, weight_decay=0.1))
    found = flow.frozen_by_accident()
    assert set(found) == layer(flow, 1)
    assert all("detached from the loss" in verdict.why for verdict in found.values())
    assert "layers[1].norm and 6 more: not learning: no gradient arrives" in flow.table()


def test_a_group_with_learning_rate_zero() -> None:
    model = tiny_gpt()
    still = list(model.blocks[2].parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in still)]
    groups = [{"params": rest}, {"params": still, "lr": 0.0}]
    flow = watched(model, torch.optim.AdamW(groups, lr=1e-3))
    found = flow.frozen_by_accident()
    assert set(found) == layer(flow, 2)
    assert {verdict.why for verdict in found.values()} == {"its learning rate is 0"}


def test_a_part_missing_from_the_optimizer() -> None:
    model = tiny_gpt()
    lost = model.blocks[0].down.bias
    kept = [p for p in model.parameters() if p is not lost and p is not model.head.weight]
    flow = watched(model, torch.optim.AdamW(kept, lr=1e-3))
    found = flow.frozen_by_accident()
    assert set(found) == {"layers[0].down", "head"}
    assert found["head"].why == "it is missing from the optimizer"
    assert found["layers[0].down"].why == "blocks.0.down.bias is missing from the optimizer"


class Deep(nn.Module):
    """Forty sigmoid layers without a residual path; no anatomy knows it."""

    def __init__(self, layers: int = 40, width: int = 16, activation: type[nn.Module] = nn.Sigmoid):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), activation()) for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        return self.head(x)


def deep_loss(model: nn.Module) -> Callable[[int], Tensor]:
    def loss(step: int) -> Tensor:
        made = torch.Generator().manual_seed(step)
        x = torch.randn(16, 16, generator=made)
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    return loss


def decayed(kind: type[torch.optim.Optimizer], **more: Any) -> Any:
    """Optimizers that add decay to the gradient: it alone moves all of a vanished stack."""
    return lambda model: kind(model.parameters(), **more)


VANISHING: dict[str, Any] = {
    "adamw": adamw,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": decayed(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "adam": decayed(torch.optim.Adam, lr=1e-3, weight_decay=1e-2),
    "rmsprop": decayed(torch.optim.RMSprop, lr=1e-3, weight_decay=1e-2),
    "decoupled": decayed(torch.optim.NAdam, lr=1e-3, weight_decay=1e-2,
                         decoupled_weight_decay=True),
}  # fmt: skip


@pytest.mark.parametrize("name", VANISHING)
def test_a_stack_of_forty_layers_whose_gradients_vanish(name: str) -> None:
    build = VANISHING[name]
    torch.manual_seed(0)
    model = Deep()
    flow = watched(model, build(model), deep_loss(model))
    found = flow.frozen_by_accident()
    assert {f"layers.{i}.0" for i in range(20)} <= set(found)
    assert not {"layers.39.0", "layers.38.0", "head"} & set(found)
    assert "its gradient vanishes" in found["layers.0.0"].why
    ends = flow.depth_ratios()
    assert ends.front_ratio < 1e-6
    assert ends.word == "very small"
    assert ends.weight_change < 1e-3 or name in ("adam", "rmsprop")  # whose decay is normalised


def test_a_saturated_sigmoid() -> None:
    torch.manual_seed(0)
    model = Deep(layers=3)
    with torch.no_grad():
        model.layers[1][0].weight.mul_(3000.0)
        model.layers[1][0].bias.mul_(3000.0)
    flow = watched(
        model, torch.optim.SGD(model.parameters(), lr=0.1), deep_loss(model), dead_units=True
    )
    found = flow.frozen_by_accident()
    assert "layers.1.0" in found
    assert "of the output of `layers.1.1` is saturated" in found["layers.1.0"].why
    assert flow.reports[-1].saturated["layers.1.1"] > 0.9
    assert flow.reports[-1].saturated["layers.2.1"] < 0.1
    assert not {"layers.2.0", "head"} & set(found)


def test_weight_decay_moves_masked_rows() -> None:
    model = tiny_gpt()
    qkv = model.blocks[1].qkv
    for parameter in (qkv.weight, qkv.bias):
        mask = torch.ones_like(parameter)
        mask[:16] = 0.0
        parameter.register_hook(lambda g, mask=mask: g * mask)
    flow = watched(model, adamw(model, weight_decay=0.1))
    found = flow.frozen_by_accident()
    assert set(found) == {"layers[1].query"}
    assert found["layers[1].query"].word == UNDRIVEN
    assert "fl.freeze" in found["layers[1].query"].hint
    undecayed = tiny_gpt()
    undecayed.blocks[1].qkv.weight.register_hook(lambda g: g * mask[:, None])
    undecayed.blocks[1].qkv.bias.register_hook(lambda g: g * mask)
    (only,) = watched(undecayed, adamw(undecayed, weight_decay=0.0)).frozen_by_accident().values()
    assert only.word == STILL
    assert "exactly zero" in only.why


def test_frozen_on_purpose_is_no_accident_and_is_proven() -> None:
    model = tiny_gpt()
    fl.freeze(model, "query", "layers[0]")
    flow = watched(model, adamw(model, weight_decay=0.1))
    words = {name: verdict.word for name, verdict in flow.verdicts().items()}
    assert {name for name, word in words.items() if word == FROZEN} == layer(flow, 0) | {
        "layers[1].query", "layers[2].query",
    }  # fmt: skip
    assert not flow.frozen_by_accident()
    assert "its bits did not change" in flow.verdicts()["layers[1].query"].why
    with fl.watch(model, adamw(model)) as flow:
        loss_at(model, 0).backward()
        model.blocks[0].norm1.weight.data[0] += 1
    assert flow.moved == ("layers[0].norm",)
    assert flow.verdicts()["layers[0].norm"].word == MOVED


@pytest.mark.parametrize("last", [1.0, 1e-3])
def test_a_slow_layer_is_told_from_its_peers(last: float) -> None:
    """Also at the end of a schedule, where everything moves by less than 1e-6."""
    model = tiny_gpt(layers=4)
    slow = list(model.blocks[1].parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in slow)]
    groups = [{"params": rest}, {"params": slow, "lr": 3e-6}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0 if s < 2 else last)
    flow = watched(model, optimizer, steps=14, schedule=schedule)
    words = {name: v.word for name, v in flow.verdicts().items()}
    assert {name for name, word in words.items() if word == SLOW} == layer(flow, 1)
    assert set(words.values()) == {SLOW, LEARNING}
    assert f"its learning rate is {3e-6 * last:.1e}" in flow.verdicts()["layers[1].value"].why


def altered(
    flow: fl.Flow, quantity: str, parts: list[int], factor: Callable[[int], float]
) -> fl.Flow:
    """The same flow, with one quantity of some parts multiplied."""
    made = fl.Flow(flow.model, flow.optimizer)
    made.parts, made.groups = flow.parts, flow.groups
    for report in flow.reports:
        own = tuple(
            x * factor(report.step) if i in parts else x
            for i, x in enumerate(report.values[quantity])
        )
        made.reports.append(replace(report, values=report.values | {quantity: own}))
    return made


def test_a_gradient_that_grows_and_a_step_that_leaps() -> None:
    model = tiny_gpt()
    flow = watched(model, adamw(model), steps=14)
    everything = list(range(len(flow.parts)))
    grown = altered(flow, "gradient", everything, lambda step: 1e5 if step > 2 else 1.0)
    assert {v.word for v in grown.verdicts().values()} == {EXPLODING}
    assert "its gradient grew from" in grown.verdicts()["head"].why
    alone = altered(flow, "gradient", everything[3:4], lambda step: 1e4 if step > 2 else 1.0)
    assert {v.word for v in alone.verdicts().values()} == {LEARNING}
    (head,) = (i for i, part in enumerate(flow.parts) if part.name == "head")
    far = 3.0 / flow.reports[-1].ratio(head)
    leaps = altered(flow, "update", [head], lambda step: far).verdicts()
    assert [n for n, v in leaps.items() if v.word == EXPLODING] == ["head"]
    assert "a step moves it by" in leaps["head"].why


def test_a_gradient_scale_that_adam_undoes() -> None:
    model = tiny_gpt(layers=5)
    for parameter in model.blocks[2].parameters():
        parameter.register_hook(lambda g: g * 300.0)
    flow = watched(model, adamw(model, lr=1e-4), lambda _: loss_at(model, 0))
    words = {name: v.word for name, v in flow.verdicts().items()}
    scaled = {name for name, word in words.items() if word == SCALED}
    assert scaled
    assert scaled <= layer(flow, 2)
    assert {"layers[2].value", "layers[2].output", "layers[2].up", "layers[2].down"} <= scaled
    own = [i for i, part in enumerate(flow.parts) if part.layer == 2]
    for spoilt in (
        altered(flow, "gradient", own, lambda step: 0.2 if step > 5 else 1.0),  # not steady
        altered(flow, "update", own, lambda step: 10.0),  # its updates have the factor too
    ):
        assert SCALED not in {v.word for v in spoilt.verdicts().values()}
    sgd = watched(model, torch.optim.SGD(model.parameters(), lr=1e-4), lambda _: loss_at(model, 0))
    assert SCALED not in {v.word for v in sgd.verdicts().values()}


def test_an_exploding_model_and_the_first_nan() -> None:
    torch.manual_seed(0)
    model = Deep(layers=4, activation=nn.Identity)
    flow = watched(
        model,
        torch.optim.SGD(model.parameters(), lr=30.0),
        deep_loss(model),
        steps=12,
        every_n_steps=1,
    )
    assert EXPLODING in {v.word for v in flow.verdicts().values()}
    spoilt = tiny_gpt()

    def loss(step: int) -> Tensor:
        made = loss_at(spoilt, step)
        return made + (spoilt.blocks[1].up.weight.sum() * (torch.nan if step == 4 else 0.0))

    flow = watched(spoilt, torch.optim.SGD(spoilt.parameters(), lr=0.1), loss)
    assert flow.first_broken() == (5, "layers[1].up")
    assert flow.verdicts()["layers[1].up"].why == "NaN or infinity, first seen at step 5"


def test_updates_lost_in_half_precision() -> None:
    model = tiny_gpt().bfloat16()
    flow = watched(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    found = [v.why for v in flow.verdicts().values() if "rounding" in v.why]
    assert found


def test_what_begins_at_zero_is_no_measure_for_others() -> None:
    """Biases that learn alone move by more than they are; the head beside them is not slow."""
    model = tiny_gpt()
    fl.freeze(model, "all", "!all.bias", "!head")
    flow = watched(model, adamw(model, weight_decay=0.01), every_n_steps=1, steps=4)
    reports = list(flow.reports)
    assert reports[1].ratio(2) > 0.3
    for count in range(1, 5):
        flow._reports = reports[:count]
        assert not [n for n, v in flow.verdicts().items() if v.alarming], count


def test_layers_that_begin_as_identity_are_given_time() -> None:
    """Behind a projection of zeros gradients are zero in the first step, and in no other."""
    model = tiny_gpt()
    fl.grow(model, layers=1, init="identity")
    flow = watched(model, adamw(model, weight_decay=0.1), every_n_steps=1, steps=4)
    reports = list(flow.reports)
    assert flow.series("layers[3].value", "gradient")[1] == 0.0
    for count in range(1, 5):
        flow._reports = reports[:count]
        assert not [n for n, v in flow.verdicts().items() if v.alarming], count


def test_a_part_of_zeros_that_stays_zero() -> None:
    model = tiny_gpt()
    with torch.no_grad():
        model.blocks[1].up.weight.zero_()
        model.blocks[1].up.bias.zero_()
    model.blocks[1].up.weight.register_hook(lambda g: g * 0.0)
    model.blocks[1].up.bias.register_hook(lambda g: g * 0.0)
    found = watched(model, adamw(model)).frozen_by_accident()
    assert found["layers[1].up"].word == STILL
    assert "exactly zero" in found["layers[1].up"].why


def decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(vocabulary=SYMBOLS, width=16, layers=3, heads=2, hidden=32))


def hugging(name: str) -> Callable[[int], nn.Module]:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = CASES[name].make_config()
        config.pad_token_id = 0
        return AutoModelForSequenceClassification.from_config(config)

    return build


def healthy_loss(model: nn.Module, step: int) -> Tensor:
    ids, classes = batch(step)
    made = model(ids)
    logits = made if isinstance(made, Tensor) else made.logits
    if logits.ndim == 3:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return F.cross_entropy(logits, classes)


HEALTHY = {
    "gpt": tiny_gpt,
    "gpt, language": lambda seed: tiny_gpt(seed, classes=0),
    "decoder": decoder,
    "bert": hugging("bert"),
    "gpt2": hugging("gpt2"),
    "llama": hugging("llama"),
    "residual": lambda seed: (torch.manual_seed(seed), Residual())[1],
}


class Residual(nn.Module):
    """A healthy model that no anatomy knows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6))
        self.head = nn.Linear(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).mean(1)
        for each in self.layers:
            x = x + each(x)
        return self.head(x)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda m: adamw(m, weight_decay=0.01),
    "fast": lambda m: adamw(m, lr=1e-2, weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "coupled": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, weight_decay=1e-2),
}


PAIRS = [(name, way) for name in HEALTHY for way in ("adamw", "fast", "coupled")]
PAIRS += [("residual", "sgd")]
# by default every model, and every optimizer of one model
USUAL = [pair for pair in PAIRS if pair[1] == "fast" or pair[0] == "gpt" or pair[1] == "sgd"]


@pytest.mark.parametrize(("name", "optimizer"), slow_unless(USUAL, PAIRS))
def test_healthy_models_raise_no_alarm(name: str, optimizer: str) -> None:
    """At any time of a schedule from zero to zero."""
    for seed in (0, 1) if optimizer == "adamw" else (2,):
        model = HEALTHY[name](seed).train()
        made = OPTIMIZERS[optimizer](model)
        ends = torch.optim.lr_scheduler.LambdaLR(made, lambda s: s / 5 if s < 5 else (40 - s) / 35)
        with fl.watch(model, made, every_n_steps=3) as flow:
            for step in range(40):
                healthy_loss(model, step).backward()
                made.step()
                made.zero_grad()
                ends.step()
                if step in (0, 3, 10, 20, 39):
                    word = LEARNING if step else UNKNOWN  # at first the learning rate is 0
                    found = {n: v for n, v in flow.verdicts().items() if v.word != word}
                    assert found == {}, (seed, step)

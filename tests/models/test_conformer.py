"""The Conformer's options work, its counts are exact, unseen subjects have an embedding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import frostlab as fl
from frostlab.data.eeg.recordings import UNSEEN
from frostlab.models.conformer import (
    Conformer,
    ConformerConfig,
    Gate,
    electrode_importance,
    scale_gradient,
)
from frostlab.training.step.envelope_loss import envelope_loss, pearson
from zoo import CONFORMER, recordings, widen

V1 = {"residual": "none", "head": "linear", "gradient_scale": 1.0}


def made(**changes: Any) -> Conformer:
    """A small Conformer; the same weights wherever two have the same tensors."""
    torch.manual_seed(0)
    whole = Conformer(replace(CONFORMER, residual="gated", attention="relative"))
    widen(whole)
    model = Conformer(replace(CONFORMER, **changes))
    known = whole.state_dict()
    for name, value in model.state_dict().items():
        if name in known and known[name].shape == value.shape:
            value.copy_(known[name])
    return model.eval()


def gradients(model: Conformer, loss: Tensor | None = None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    inputs = recordings()
    model.zero_grad()
    (model(**inputs).square().sum() if loss is None else loss).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (V1, 12_851_729),
        ({"residual": "plain", "gradient_scale": 1.5}, 12_885_009),
        ({}, 12_918_097),
        ({"attention": "relative"}, 13_446_481),
    ],
)
def test_published_settings_have_these_counts(settings: dict[str, Any], count: int) -> None:
    """All trainable tensors, for 64 channels and 71 subjects; sinusoids and statistics are not."""
    with torch.device("meta"):
        model = Conformer(ConformerConfig(**settings))
    assert fl.anatomy(model).count() == sum(p.numel() for p in model.parameters()) == count
    assert count < 12_851_729 * 1.015 or settings.get("attention")  # what v2 adds is little


def test_the_count_of_v1_equals_a_formula() -> None:
    d, hidden, kernel = 256, 1024, 31
    norm, linear = 2 * d, d * d + d
    feed = norm + d * hidden + hidden + hidden * d + d
    convolution = norm + 2 * linear + (kernel * d + d) + norm + linear
    layer = 2 * feed + (norm + 4 * linear) + convolution + norm
    cnn = (7 * 64 + 5 * d + 3 * d) * d + 3 * (d + norm)
    attention = d * 16 + 16 + 16 * d + d
    assert cnn + attention + 71 * d + 8 * layer + d + 1 == 12_851_729


@torch.no_grad()
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"residual": "none"}, {"residual": "plain"}),
        ({"residual": "plain"}, {"residual": "gated"}),
        ({"head": "linear"}, {"head": "mlp"}),
        ({"norm": "batch"}, {"norm": "layer"}),
        ({"norm": "layer"}, {"norm": "group"}),
        ({"attention": "plain"}, {"attention": "relative"}),
        ({"unseen": "mean"}, {"unseen": "none"}),
    ],
)
def test_a_switch_changes_the_output(one: dict[str, Any], other: dict[str, Any]) -> None:
    inputs = recordings()
    first, second = made(**one)(**inputs), made(**other)(**inputs)
    assert first.shape == second.shape == (2, 12)
    assert torch.equal(first, made(**one)(**inputs))
    assert not torch.allclose(first, second, atol=1e-3)


@torch.no_grad()
def test_residuals_combine_output_and_input() -> None:
    inputs = recordings()
    caught: dict[str, Tensor] = {}
    for residual in ("none", "plain", "gated"):
        model = made(residual=residual, head="linear")
        model.head.register_forward_pre_hook(lambda _, x, r=residual: caught.update({r: x[0]}))
        into = model.embed(**inputs)
        model(**inputs)
    out, gate = caught["none"], made().gate
    torch.testing.assert_close(caught["plain"], out + into)
    share = torch.sigmoid(gate.up(torch.relu(gate.down(out.mean(1)))))[:, None]
    torch.testing.assert_close(caught["gated"], share * out + (1 - share) * into)
    assert 0.05 < float((share > 0.5).float().mean()) < 0.95


@torch.no_grad()
@pytest.mark.parametrize("bias", [-4.0, 0.0, 4.0])
def test_the_gate_starts_at_its_bias(bias: float) -> None:
    torch.manual_seed(0)
    model = Conformer(replace(CONFORMER, gate_bias=bias))
    assert torch.equal(model.gate.up.bias, torch.full((32,), bias))
    share = model.gate.opening(torch.randn(4, 12, 32))
    wanted = torch.sigmoid(torch.tensor(bias))
    torch.testing.assert_close(share.mean(), wanted, rtol=0, atol=0.05)
    out, into = torch.ones(1, 12, 32), torch.zeros(1, 12, 32)
    torch.testing.assert_close(Gate(32, bias)(out, into).mean(), wanted, rtol=0, atol=0.1)


def test_gradients_are_scaled_in_the_stack_and_nowhere_else() -> None:
    """Exactly: a power of two rounds nothing, and forward is the identity."""
    for residual in ("none", "plain", "gated"):
        once = gradients(made(residual=residual, gradient_scale=1.0))
        twice = gradients(made(residual=residual, gradient_scale=2.0))
        for name, gradient in once.items():
            if name.startswith("blocks."):
                assert torch.equal(twice[name], 2 * gradient), name
            elif name.startswith(("head.", "gate.")):
                assert torch.equal(twice[name], gradient), name
            elif residual == "none":
                assert torch.equal(twice[name], 2 * gradient), name
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(scale_gradient(x, 3.0), x)


@pytest.mark.parametrize("residual", ["plain", "gated"])
def test_the_skip_path_keeps_its_gradient(residual: str) -> None:
    """The front gets the skip's gradient plus the stack's times the scale."""
    found = {s: gradients(made(residual=residual, gradient_scale=s)) for s in (1.0, 3.0)}
    model = made(residual=residual, gradient_scale=3.0)
    torch.manual_seed(1)
    inputs = recordings()
    into = model.embed(**inputs)
    out = into.detach()
    for block in model.blocks:
        out = block(out)
    skip = gradients(model, model.head(model.join(out, into)).squeeze(-1).square().sum())
    for name in ("cnn.0.conv.weight", "channels.excite.weight", "subjects.weight"):
        through = found[1.0][name] - skip[name]
        assert through.abs().max() > 1e-3 * skip[name].abs().max() > 0
        wanted = skip[name] + 3 * through
        torch.testing.assert_close(found[3.0][name], wanted, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_unseen_subjects_have_a_defined_embedding() -> None:
    eeg = torch.randn(1, 12, 5).expand(4, -1, -1)
    model = made(unseen="mean")
    found = model(eeg, torch.tensor([0, 1, 2, UNSEEN]))
    assert len({tuple(row.tolist()) for row in found}) == 4  # subjects make a difference
    torch.testing.assert_close(model(eeg)[0], found[3])
    table = model.subjects.weight
    torch.testing.assert_close(model.rows(torch.tensor([UNSEEN]))[0, 0], table.sum(0) / 3)
    table[1] = table.mean(0)  # the mean of the new three is another, so ask for it anew
    assert torch.equal(model.rows(torch.tensor([UNSEEN]))[0, 0], table.mean(0))
    silent = made(unseen="none")
    assert not silent.rows(torch.tensor([UNSEEN])).any()
    assert silent.rows(torch.tensor([1])).any()


@torch.no_grad()
def test_subjects_do_not_touch_each_other() -> None:
    model, eeg = made(), torch.randn(3, 12, 5)
    alone = model(eeg[1:2], torch.tensor([2]))
    torch.testing.assert_close(
        model(eeg, torch.tensor([0, 2, UNSEEN]))[1:2], alone, rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_places_are_distinguished() -> None:
    """Without positions, a constant signal would come out constant away from the edges."""
    eeg = torch.ones(1, 40, 5)
    for attention in ("plain", "relative"):
        inside = made(attention=attention, kernel=1)(eeg)[0, 8:-8]
        assert inside.std() > 1e-3, attention


@pytest.mark.parametrize("attention", ["plain", "relative"])
@pytest.mark.parametrize("norm", ["batch", "layer", "group"])
def test_bfloat16_stays_close_and_answers_in_float32(norm: str, attention: str) -> None:
    model, inputs = made(norm=norm, attention=attention).train(), recordings()
    exact = model(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(**inputs)
    assert exact.dtype == rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.1 * exact.abs().max()
    assert not torch.equal(rough, rough.bfloat16().float())  # the head was not rounded
    rough.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.double()(inputs["eeg"].double(), inputs["subject"]).dtype == torch.float64


@pytest.mark.parametrize("attention", ["plain", "relative"])
def test_nothing_waits_for_a_value(attention: str) -> None:
    """Tensors without values go through: no `.item()`, no shape that depends on the data."""
    with FakeTensorMode():
        model = Conformer(replace(CONFORMER, attention=attention, dropout=0.1))
        found = model(torch.randn(2, 12, 5), torch.zeros(2, dtype=torch.long))
        found.square().sum().backward()
    assert found.shape == (2, 12)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["plain", "relative"])
def test_it_compiles_in_one_graph(attention: str) -> None:
    model, inputs = made(attention=attention), recordings()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs), model(**inputs), rtol=1e-4, atol=1e-5)
    compiled(**inputs).square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(**inputs).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_dropout_is_everywhere_it_should_be_and_off_in_evaluation() -> None:
    model, inputs = Conformer(replace(CONFORMER, dropout=0.5)), recordings()
    reads = [f"blocks.{i}.{feed}.down" for i in range(2) for feed in ("feed1", "feed2")]
    says = [f"blocks.{i}.{part}" for i in range(2)
            for part in ("feed1", "attention", "convolution", "feed2")]  # fmt: skip
    caught: dict[str, Tensor] = {}
    for name in (*reads, "cnn.1", "cnn.2", "channels", "blocks.0.feed1.norm", "head.4"):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, x, n=name: caught.update({f"into {n}": x[0]}))
    for name in says:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, __, x, n=name: caught.update({n: x}))
    assert not torch.equal(model(**inputs), model(**inputs))
    for name, found in caught.items():
        assert 0.3 < float((found == 0).float().mean()) < 0.7, name
    assert len(caught) == 4 + 5 + 8
    attention = model.blocks[0].attention
    mixed: list[Tensor] = []  # weights of attention are dropped too, before `out`
    attention.out.register_forward_pre_hook(lambda _, x: mixed.append(x[0]))
    for _ in range(2):
        attention(torch.ones(1, 12, 32), None)
    assert not torch.equal(*mixed)
    model.eval()
    assert torch.equal(model(**inputs), model(**inputs))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["plain", "relative"])
def test_the_stack_is_given_what_torchs_own_modules_give(attention: str) -> None:
    model, inputs = made(attention=attention), recordings()
    x = inputs["eeg"]
    for block, kernel in zip(model.cnn, (7, 5, 3), strict=True):
        conv = nn.Conv1d(x.shape[-1], 32, kernel, padding="same")
        conv.load_state_dict(block.conv.state_dict())
        norm = nn.LayerNorm(32)
        norm.load_state_dict(block.norm.state_dict())
        x = nn.LeakyReLU()(norm(conv(x.mT).mT))
    squeeze, excite = model.channels.squeeze, model.channels.excite
    assert squeeze.weight.shape == (2, 32)
    x = x * nn.Sequential(squeeze, nn.ReLU(), excite, nn.Sigmoid())(x.mean(1))[:, None]
    table = model.subjects.weight
    x = x + torch.stack([table[1], table.mean(0)])[:, None]
    if attention == "plain":
        for t in range(12):
            for i in range(0, 32, 2):
                angle = torch.tensor(t / 10000 ** (i / 32))
                x[:, t, i] += angle.sin()
                x[:, t, i + 1] += angle.cos()
    torch.testing.assert_close(model.embed(**inputs), x, rtol=1e-4, atol=1e-5)


def lagged(generator: torch.Generator, batch: int = 16, length: int = 64) -> list[Tensor]:
    """EEG whose channels repeat the envelope later and later, in noise; subjects; envelopes."""
    envelope = torch.randn(batch, 1, length + 12, generator=generator)
    envelope = nn.functional.avg_pool1d(envelope, 5, 1)[:, 0]  # (batch, length + 8)
    eeg = torch.randn(batch, length, 5, generator=generator)
    for channel in range(5):
        eeg[..., channel] += 3 * envelope[:, 8 - channel : 8 - channel + length]
    return [eeg, torch.randint(0, 3, (batch,), generator=generator), envelope[:, 8:]]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [V1, {}, {"attention": "relative", "norm": "layer"}])
def test_it_learns_to_undo_a_delay(changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    model = Conformer(replace(CONFORMER, dropout=0.1, **changes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        eeg, subject, envelope = lagged(generator)
        optimizer.zero_grad()
        envelope_loss("mse-pearson", model(eeg, subject), envelope).div(16).backward()
        optimizer.step()
    eeg, subject, envelope = lagged(generator, batch=64)
    with torch.no_grad():
        found = [pearson(model.eval()(eeg, who), envelope).mean() for who in (subject, None)]
    assert min(found) > 0.8


@pytest.mark.slow
def test_electrodes_that_the_model_reads_are_important() -> None:
    model, eeg = made(dropout=0.5).train(), torch.randn(4, 12, 5)
    with torch.no_grad():
        model.cnn[0].conv.weight[:, 0] = 0.0
        model.cnn[0].conv.weight[:, [2, 4]] *= 0.01
    found = electrode_importance(model, eeg)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(found[0]) == 0
    quiet = electrode_importance(model, eeg * torch.tensor([1.0, 1.0, 1.0, 1e-6, 1.0]))
    assert float(quiet[3]) < 1e-4  # what hardly moves hardly matters
    assert 0 < float(found[[2, 4]].max()) < 0.03 < 0.2 < float(found[[1, 3]].min())
    assert model.training
    assert torch.equal(electrode_importance(model, eeg), found)  # dropout is off
    assert all(p.grad is None for p in model.parameters())
    jacobian = torch.autograd.functional.jacobian(lambda x: model.eval()(x).flatten(), eeg)
    exact = jacobian.square().sum((0, 1, 2)).sqrt() * eeg.std((0, 1))
    torch.testing.assert_close(
        electrode_importance(model.train(), eeg, probes=60),
        exact / exact.sum(),
        rtol=0.1,
        atol=1e-3,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "width 32 is not a multiple of 5 heads"),
        ({"width": 33, "heads": 3}, "width 33 is odd"),
        ({"kernel": 4}, "kernel 4 is even"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFORMER, **changes)


def test_another_number_of_channels_is_refused() -> None:
    with pytest.raises(fl.BadInput, match="the EEG has 7 channels; the model reads 5"):
        made()(torch.randn(1, 12, 7))
    with pytest.raises(fl.BadInput, match=r"the EEG is \(12, 5\), not \(B, T, channels\)"):
        made()(torch.randn(12, 5))

"""Real CUDA graphs: the numbers of eager steps, dropout, thawing, falling back, going on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import frostlab as fl
from frostlab.models.attention import attend
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.records.schema import StepEvent
from frostlab.training import run as running
from frostlab.training.batches.packing import pack, shapes_for
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.eager import EagerStep, seed_step
from frostlab.training.step.objective import Objective
from packed import PAD, build, classifies, tokens
from stepping import epochs, train
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler's own
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
CUDA = torch.device("cuda", 0)
HALF, FULL = torch.bfloat16, torch.float32
NAMES = ["gpt classifier", "gpt", "decoder", "bert classifier", "gpt2", "llama"]
# Of the loss, or of 1 where it is less, over 300 steps: bf16 keeps 8 bits, and a compiled layer
# rounds elsewhere.
ROUNDING = {HALF: 3e-2, FULL: 2e-3}


def assert_same(found: list[float], wanted: list[float], precision: torch.dtype = HALF) -> None:
    off = np.abs(np.subtract(found, wanted)) / np.maximum(1.0, wanted)
    assert off.max() < ROUNDING[precision], (int(off.argmax()), float(off.max()))


def make(
    model: nn.Module,
    kind: StepKind,
    precision: torch.dtype = HALF,
    steps: int = 10,
    rate: float = 1e-3,
) -> EagerStep:
    """With so few steps, what is captured is not compiled."""
    return build_step(Objective(model.to(CUDA)), Optim(lr=rate), Train(step=kind),
                      Compute(CUDA, precision), steps=steps)  # fmt: skip


@pytest.mark.parametrize("precision", [HALF, FULL], ids=["bf16", "float32"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_300_captured_steps_equal_eager_ones(
    name: str, packed: bool, precision: torch.dtype
) -> None:
    steps = epochs(name, 300, packed)
    eager, graphs = build(name).eval(), build(name).eval()  # no dropout
    for model in (eager, graphs):
        fl.freeze(model, "query", "key")
    frozen = {n: p.clone() for n, p in graphs.named_parameters() if not p.requires_grad}
    wanted = train(make(eager, "eager", precision), steps)
    step = make(graphs, "captured", precision)
    found = train(step, steps)
    assert isinstance(step, CapturedStep)
    assert step.kind == "captured", step.reason
    assert_same(found, wanted, precision)
    assert np.mean(wanted[-8:]) < np.mean(wanted[:8]) - 0.05, "it learns"
    for n, before in frozen.items():
        assert torch.equal(graphs.get_parameter(n).cpu(), before.cpu()), n


@pytest.mark.parametrize(
    ("precision", "count"), [(HALF, 100), (FULL, 300)], ids=["bf16", "float32"]
)
@pytest.mark.parametrize("freeze", ["", "key"])
@pytest.mark.parametrize("name", ["gpt classifier", "decoder", "bert classifier", "gpt2"])
def test_compiled_and_captured_steps_equal_eager_ones(
    name: str, freeze: str, precision: torch.dtype, count: int
) -> None:
    """Over 300 steps in bf16, roundings that differ grow beyond any fixed limit."""
    steps = epochs(name, count, packed=True)
    eager, graphs = build(name).eval(), build(name).eval()
    for model in (eager, graphs):
        if freeze:
            fl.freeze(model, freeze)
    wanted = train(make(eager, "eager", precision), steps)
    step = make(graphs, "captured", precision, steps=10**5)
    found = train(step, steps)
    assert (step.kind, step.reason) == ("captured", "asked for")
    assert_same(found, wanted, precision)


def test_a_captured_run_ends_as_an_eager_one(tmp_path: Path) -> None:
    accuracies = []
    for kind in ("eager", "captured"):
        recipe = tiny(model__dropout=0.0, train__steps=300, train__epochs=None, train__step=kind)
        record = fl.run(recipe, runs=tmp_path)
        accuracies.append(record.metrics["accuracy"])
        assert record.result.stepping[-1].how == kind
    assert accuracies[0] == pytest.approx(accuracies[1], abs=2 / 256)


@pytest.mark.parametrize("name", ["gpt classifier", "bert classifier"])
@pytest.mark.parametrize("steps", [10, 10**5], ids=["captured", "compiled and captured"])
def test_every_replay_draws_the_dropout_of_its_seed(name: str, steps: int) -> None:
    step, parts = (
        make(build(name).train(), "captured", steps=steps),
        epochs(name, 1, packed=True)[0],
    )
    losses = []
    for number in (1, 1, 1, 2, 2, 3):
        seed_step(0, number, 0, CUDA)
        losses.append(float(step(parts, parts[0].scored, 0.0).loss))
    assert (step.kind, step.compiles) == ("captured", steps == 10**5), step.reason
    assert losses[2:3] * 2 == losses[1:3], "a replay repeats what its seed says"
    assert losses[3] == losses[4]
    assert len({losses[2], losses[3], losses[5]}) == 3, "and another seed says something else"


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["gpt classifier", "bert classifier", "gpt2"])
def test_dropout_is_the_one_of_eager_steps(name: str, packed: bool) -> None:
    """The same masks from the same seed; another seed moves the losses further than rounding."""
    batches = epochs(name, 40, packed)
    wanted, others = (
        np.array(train(make(build(name).train(), "eager"), batches, seed)) for seed in (0, 1)
    )
    step = make(build(name).train(), "captured", steps=10)
    found = train(step, batches)
    assert (step.kind, step.compiles) == ("captured", False), step.reason
    assert np.abs(found - wanted).mean() < np.abs(others - wanted).mean() / 4


@pytest.mark.parametrize("steps", [10, 10**5], ids=["captured", "compiled and captured"])
def test_a_thawed_layer_trains(steps: int) -> None:
    model: Any = build("gpt classifier").eval()
    step, parts = make(model, "captured", steps=steps), epochs("gpt classifier", 1, packed=True)[0]
    late = model.blocks[1]
    late.requires_grad_(False)
    before = late.up.weight.detach().clone()
    for _ in range(4):
        step(parts, parts[0].scored, 1e-2)
    assert torch.equal(late.up.weight, before)
    late.requires_grad_(True)
    for _ in range(4):
        last = late.up.weight.detach().clone()
        step(parts, parts[0].scored, 1e-2)
        assert not torch.equal(late.up.weight, last)
    assert (step.kind, step.compiles) == ("captured", steps == 10**5), step.reason


class _Looks(nn.Module):
    """A model that looks at its numbers while it computes, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.drop = nn.Embedding(90, 8), nn.Linear(8, 3), nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        x = self.drop(self.embed(input_ids)).mean(1)
        return self.head(x if float(x.detach().sum()) > -1e9 else -x)


def test_what_cannot_be_captured_falls_back_with_a_reason() -> None:
    torch.manual_seed(0)
    step, steps = make(_Looks(), "captured"), epochs("gpt classifier", 30, packed=False)
    torch.manual_seed(0)
    wanted = train(make(_Looks(), "eager"), steps)
    found = train(step, steps)
    assert step.kind == "eager"
    assert step.reason.startswith("capturing failed: ")
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


def test_a_captured_run_goes_on_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(train__epochs=6, train__checkpoint=10, train__step="captured")
    whole = fl.run(recipe, out=tmp_path / "whole")
    asked = iter([False] * 25 + [True] * 100)

    @contextmanager
    def interrupted() -> Iterator[Callable[[], bool]]:
        yield lambda: next(asked)

    with monkeypatch.context() as patch:
        patch.setattr(running, "interruptions", interrupted)
        with pytest.raises(fl.RunFailed):
            fl.run(recipe, out=tmp_path / "part")
    stopped = fl.RunRecord(tmp_path / "part").result.steps
    assert 0 < stopped < 48
    resumed = fl.run(recipe, out=tmp_path / "part", resume=True)
    losses = [[x for e in r.events(StepEvent) for x in e.loss]
              for r in (whole, resumed)]  # fmt: skip
    assert losses[1] == pytest.approx(losses[0], abs=5e-3), "dropout is on, and drawn again"


@pytest.mark.parametrize("name", NAMES)
def test_the_packed_kernel_agrees_with_float32(name: str) -> None:
    model, data = build(name).to(CUDA).eval(), tokens(labels=classifies(name))
    rows = np.arange(20)
    batch = pack(data, rows, PAD, shapes=shapes_for(data, [rows])).to(CUDA)

    def gradients(precision: torch.dtype) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == HALF):
            loss = Objective(model)(batch)
        loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **found}

    exact, half = gradients(FULL), gradients(HALF)
    for n, value in exact.items():
        error = (half[n] - value).norm() / value.norm().clamp(min=1e-3)
        assert float(error) < 3e-2, (n, float(error))


def test_the_packed_kernel_drops_out() -> None:
    data = tokens(labels=True)
    batch = pack(data, np.arange(9), PAD).to(CUDA)
    query, key, value = torch.randn(3, 1, 4, batch.tokens, 16, device=CUDA, dtype=HALF)
    made = []
    for seed, dropout in ((1, 0.5), (1, 0.5), (2, 0.5), (1, 0.0)):
        torch.cuda.manual_seed(seed)
        made.append(attend(query, key, value, packing=batch.packing, dropout=dropout))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert not torch.equal(made[0], made[3])


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_captured_run_with_its_prefix_cached(where: str, tmp_path: Path) -> None:
    usual = tiny(
        train__step="captured",
        model__dropout=0.0,
        treatment={"freeze": ["embedding", "position", "layers[0]"]},
    )
    records = [
        fl.run({**usual, "train": {**usual["train"], "cache_prefix": kept}}, runs=tmp_path)
        for kept in (None, where)
    ]
    losses = [[x for e in r.events(StepEvent) for x in e.loss] for r in records]
    assert losses[1] == pytest.approx(losses[0], abs=ROUNDING[HALF])

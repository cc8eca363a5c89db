"""Captured and compiled steps give the numbers of eager ones.

A CUDA graph cannot exist here: its stand-in runs the recorded work again, which shows everything
but the recording itself. tests/gpu/test_captured.py shows that.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from cases import slow_unless
from frostlab.errors import StaleOptimizer
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.training.batches.batch import Batch, collate, epoch_order
from frostlab.training.batches.packing import pack, shapes_for
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step, captured
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.compiled import CompiledStep
from frostlab.training.step.eager import EagerStep, seed_step
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import build_optimizer
from packed import PAD, build, classifies, exactly, tokens

CPU = torch.device("cpu")
NAMES = ("gpt classifier", "decoder", "bert classifier", "gpt2", "llama")
# Models are in float64; losses and the learning rates of graphs are still rounded to float32.
ROUNDED = {"rtol": 1e-6, "atol": 1e-7}
Work = Callable[[], None]


def make(
    kind: type[EagerStep], model: nn.Module, shares: dict[str, float] | None = None, **more: Any
) -> EagerStep:
    optimizer = build_optimizer(model, Optim(decay=0.1), fused=True, lr_scales=shares)
    return kind(Objective(model), optimizer, Compute(CPU, torch.float32), 0.5, **more)


def stand_in(model: nn.Module, record: Callable[[Work], Work] | None = None) -> CapturedStep:
    """A step whose graphs do their work anew, and fail if a graph would not have noticed that
    other weights learn than when it was recorded."""

    def again(work: Work) -> Work:
        def learning() -> list[bool]:
            return [p.requires_grad for p in model.parameters()]

        then = learning()

        def replay() -> None:
            assert learning() == then
            work()

        return replay

    step = make(CapturedStep, model, compiles=False, record=record or again)
    assert isinstance(step, CapturedStep)
    return step


def batches(name: str, packed: bool, parts: int = 1) -> list[list[Batch]]:
    """Two epochs of steps of different shapes, the last of each with fewer examples."""
    data = tokens(labels=classifies(name))
    made = []
    for epoch in (0, 1):
        order = epoch_order(data.lengths, 8, 0, epoch, bucket=True)
        shapes = shapes_for(data, order)
        for rows in order:
            shares = np.array_split(rows, parts)
            if packed:
                made.append([pack(data, part, PAD, shapes=shapes) for part in shares])
            else:
                made.append([collate(data, part, PAD, limit=32) for part in shares])
    return made


def train(step: EagerStep, steps: list[list[Batch]]) -> list[list[float]]:
    """Losses, norms and broken gradients of some steps, under a warm-up."""
    outcomes = []
    for i, parts in enumerate(steps):
        seed_step(0, i, 0, CPU)
        scored = sum(part.scored for part in parts)
        outcomes.append(step(parts, scored, 1e-3 * (i + 1) / len(steps)))
    return [outcome.values.tolist() for outcome in outcomes]  # read late, as the step log does


def same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_gradients_can_be_read_between_captured_steps() -> None:
    """They are those of an eager step, and reading them changes no later step."""
    models = {kind: exactly("gpt classifier").train() for kind in ("eager", "read", "alone")}
    fl.freeze(models["read"], "query")
    fl.freeze(models["eager"], "query")
    fl.freeze(models["alone"], "query")
    steps = batches("gpt classifier", packed=False)
    half = len(steps) // 2 + 1
    eager, read, alone = (
        make(EagerStep, models["eager"]),
        *map(stand_in, (models["read"], models["alone"])),
    )
    for step in (eager, read, alone):
        train(step, steps[:half])
    assert read._graphs
    parts, scored = steps[half], sum(part.scored for part in steps[half])
    gradients = []
    for step, model in ((eager, models["eager"]), (read, models["read"])):
        seed_step(0, 99, 0, CPU)
        with step.gradients_now(parts, scored) as gradient:
            named = {name: gradient(p) for name, p in model.named_parameters()}
            gradients.append({n: g.clone() for n, g in named.items() if g is not None})
        assert all(p.grad is None for p in model.parameters())
    assert gradients[0].keys() == gradients[1].keys()
    assert not any("query" in name for name in gradients[0])
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, **ROUNDED, msg=name)
    assert train(read, steps[half:]) == train(alone, steps[half:])
    same(models["read"], models["alone"])


@pytest.mark.parametrize(
    ("name", "packed", "parts"),
    slow_unless(
        [("gpt classifier", False, 1), ("decoder", True, 1), ("bert classifier", False, 1),
         ("llama", True, 1), ("gpt classifier", False, 2), ("gpt2", True, 2)],
        [
            *((name, packed, 1) for name in NAMES for packed in (False, True)),
            ("gpt classifier", False, 2), ("gpt2", True, 2),
        ],
    ),
)  # fmt: skip
def test_captured_steps_give_the_numbers_of_eager_ones(name: str, packed: bool, parts: int) -> None:
    """Dropout is on: a replay must draw what the seed says."""
    eager, replayed = exactly(name).train(), exactly(name).train()
    for model in (eager, replayed):
        fl.freeze(model, "query", "key")
    frozen = {n: p.clone() for n, p in replayed.named_parameters() if not p.requires_grad}
    steps = batches(name, packed, parts)
    step = stand_in(replayed)
    wanted, found = train(make(EagerStep, eager), steps), train(step, steps)
    np.testing.assert_allclose(found, wanted, **ROUNDED)
    assert step.kind == "captured"
    assert 0 < len(step._graphs) <= len(steps) // 2, "most steps were replays"
    for (n, a), b in zip(replayed.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, **ROUNDED, msg=n)
    for n, before in frozen.items():
        assert torch.equal(replayed.get_parameter(n), before)


def test_each_group_has_its_share_of_the_rate() -> None:
    """Eager or captured, as torch's AdamW does with one learning rate a group."""
    models = [exactly("decoder").train() for _ in range(3)]
    shares = {n: 0.1 for n, _ in models[0].named_parameters() if "blocks.0" in n}
    steps, results = batches("decoder", packed=True), []
    for kind, model in zip((EagerStep, CapturedStep), models, strict=False):
        more = {} if kind is EagerStep else {"compiles": False, "record": lambda work: work}
        results.append(train(make(kind, model, shares, **more), steps))
    np.testing.assert_allclose(results[1], results[0], **ROUNDED)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, **ROUNDED, msg=name)
    plain = make(EagerStep, models[2])
    assert train(plain, steps)[-1] != results[0][-1]
    step = make(EagerStep, models[2], shares)
    step(steps[0], steps[0][0].scored, 1e-2)
    rates = {id(p): g["lr"] for g in step.optimizer.param_groups for p in g["params"]}
    for name, p in models[2].named_parameters():
        assert rates[id(p)] == pytest.approx(1e-2 * shares.get(name, 1.0))


def test_dropout_differs_from_replay_to_replay() -> None:
    step, parts = stand_in(build("gpt classifier").train()), batches("gpt classifier", True)[0]
    losses = []
    for number in (1, 1, 1, 2, 2):  # the first two are no replays
        seed_step(0, number, 0, CPU)
        losses.append(float(step(parts, parts[0].scored, 0.0).loss))
    assert losses[0] == losses[1] == losses[2] != losses[3] == losses[4]


def test_an_unfrozen_layer_trains_in_the_next_step() -> None:
    model: Any = build("gpt classifier")
    step, parts = stand_in(model), batches("gpt classifier", True)[0]
    late = model.blocks[1]

    def take(count: int) -> Tensor:
        for _ in range(count):
            step(parts, parts[0].scored, 1e-2)
        return late.up.weight.detach().clone()

    late.requires_grad_(False)
    frozen = [take(1), take(3)]
    assert torch.equal(*frozen)
    late.requires_grad_(True)
    assert not torch.equal(take(1), frozen[0]), "at once"
    before = take(1)
    assert not torch.equal(take(1), before), "and in replays"
    late.requires_grad_(False)
    assert torch.equal(take(1), take(3))


def test_an_optimizer_left_behind_is_found_though_it_never_steps() -> None:
    model = build("gpt classifier")
    step, parts = stand_in(model), batches("gpt classifier", True)[0]
    for _ in range(3):
        step(parts, parts[0].scored, 1e-3)
    fl.freeze(model, "query")  # splits a projection: the optimizer holds what was replaced
    with pytest.raises(StaleOptimizer):
        step(parts, parts[0].scored, 1e-3)


def test_what_cannot_be_captured_goes_on_without_and_says_why() -> None:
    plain, model = exactly("gpt2").eval(), exactly("gpt2").eval()

    def refuse(work: Work) -> Work:
        for parameter in model.parameters():  # a recording that fails half way leaves these
            parameter.grad = torch.full_like(parameter, 7.0)
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    step, steps = stand_in(model, refuse), batches("gpt2", False)
    wanted, found = train(make(EagerStep, plain), steps), train(step, steps)
    np.testing.assert_allclose(found, wanted, **ROUNDED)
    assert step.kind == "eager"
    assert step.reason == ("capturing failed: operation not permitted when stream is capturing")


def test_only_so_many_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "_MAX_GRAPHS", 2)
    plain, model = exactly("gpt2").eval(), exactly("gpt2").eval()
    step, steps = stand_in(model), batches("gpt2", False)
    wanted = train(make(EagerStep, plain), steps)
    np.testing.assert_allclose(train(step, steps), wanted, **ROUNDED)
    assert len(step._graphs) == 2
    assert step.reason == "more than 2 batch shapes: the others run without a graph"


def test_a_broken_gradient_moves_nothing_and_is_named() -> None:
    model = build("gpt classifier")
    step, parts = stand_in(model), batches("gpt classifier", True)[0]
    for _ in range(3):
        step(parts, parts[0].scored, 1e-3)
    before = copy.deepcopy(model)
    hook = model.get_parameter("blocks.1.up.weight").register_hook(lambda g: g * torch.inf)
    broken = step(parts, parts[0].scored, 1e-3).broken
    assert step.name_of(int(broken)) == "blocks.1.up.weight"
    same(model, before)
    hook.remove()


def test_a_compiler_that_fails_is_named_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no C compiler was found")

        self._compiled_call_impl = fail

    monkeypatch.setattr(nn.Module, "compile", compile_)
    plain, model = build("gpt classifier").train(), build("gpt classifier").train()
    steps = batches("gpt classifier", False)[:4]
    step = make(CompiledStep, model)
    assert train(step, steps) == train(make(EagerStep, plain), steps), "the same dropout"
    assert (step.kind, step.reason) == ("eager", "compiling failed: no C compiler was found")


def test_a_compiler_may_fail_at_a_later_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = batches("gpt classifier", False)[:6]
    last = steps[4][0].inputs["input_ids"].shape
    assert last != steps[0][0].inputs["input_ids"].shape

    def compile_(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        def fail(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.shape[:2] == last:
                raise RuntimeError("too many shapes")
            return self._call_impl(x, *args, **kwargs)

        self._compiled_call_impl = fail

    monkeypatch.setattr(nn.Module, "compile", compile_)
    plain, model = build("gpt classifier").train(), build("gpt classifier").train()
    step = make(CompiledStep, model)
    assert train(step, steps[:1])
    assert step.kind == "compiled"
    plain_step = make(EagerStep, plain)
    train(plain_step, steps[:1])
    assert train(step, steps) == train(plain_step, steps)
    assert (step.kind, step.reason) == ("eager", "compiling failed: too many shapes")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["decoder", "bert classifier"])
def test_compiled_steps_give_the_numbers_of_eager_ones(name: str) -> None:
    """Then a frozen layer is thawed: code compiled while it was frozen would leave it out."""
    plain, model = build(name).eval(), build(name).eval()
    steps, results = batches(name, packed=True), []
    kinds: tuple[StepKind, StepKind] = ("eager", "compiled")
    for kind, each in zip(kinds, (plain, model), strict=True):
        torch._dynamo.utils.counters.clear()
        step = build_step(Objective(each), Optim(lr=1e-3), Train(step=kind),
                          Compute(CPU, torch.float32), steps=9)  # fmt: skip
        late = [each.get_parameter(p.name) for p in fl.anatomy(each).select("layers[1]")]
        for parameter in late:
            parameter.requires_grad_(False)
        before = [p.clone() for p in late]
        made = train(step, steps[:4])
        assert all(torch.equal(a, b) for a, b in zip(before, late, strict=True))
        for parameter in late:
            parameter.requires_grad_(True)
        made += train(step, steps[4:8])
        assert not any(torch.equal(a, b) for a, b in zip(before, late, strict=True))
        assert step.kind == kind, step.reason
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert (graphs > 0) == (kind == "compiled")
        assert not torch._dynamo.utils.counters["graph_break"]
        results.append(made)
    np.testing.assert_allclose(results[1], results[0], rtol=2e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_graphs_inputs_have_the_strides_of_the_batch(name: str, packed: bool) -> None:
    """Compiled code is compiled anew for other strides, which no graph can hold."""
    for parts in batches(name, packed):
        views, _ = captured.StaticInputs(parts, CPU).views(parts)
        for part, view in zip(parts, views, strict=True):
            for given, static in zip(part.tensors(), view.tensors(), strict=True):
                assert static.stride() == given.stride()

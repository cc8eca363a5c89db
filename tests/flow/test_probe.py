"""The numbers of a flow are those of a plain loop over rows, and nothing waits for them."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import frostlab as fl
from flowing import adamw, batch, loss_at, tiny_gpt, watched
from frostlab.flow.probe import Probe
from frostlab.flow.tensors import read_layout, rows_within
from frostlab.models.gpt import GPT
from frostlab.roles.parts import Part, Rows
from frostlab.roles.read import survey
from zoo import build, loss_of

Numbers = dict[str, dict[str, float]]


def part_name(part: Part) -> str:
    layers = f"layers[{part.layer}]." if part.layer is not None else ""
    stack = f"{part.stack}." if part.stack else ""
    return f"{stack}{layers}{'cross.' if part.place.cross else ''}{part.role}"


def naive(model: nn.Module, tensors: dict[int, Tensor]) -> dict[str, float]:
    """The norm of every part, element by element: each fused weight is put together, then cut."""
    anatomy, slots = survey(model)
    squares: dict[str, float] = {}
    for part in anatomy.parts:
        if part.state != "trainable":
            continue
        slot = slots[part.name]
        whole = torch.zeros(slot.shape, dtype=torch.float64)
        for piece in slot.pieces:
            if (held := tensors.get(id(piece.parameter))) is not None:
                piece.rows.put(whole, held.double(), slot.axis)
        wanted = (
            part.rows.ranges() if part.rows else [(0, slot.shape[slot.axis] if slot.shape else 1)]
        )
        index = torch.tensor([i for a, b in wanted for i in range(a, b)])
        own = whole.index_select(slot.axis, index) if whole.ndim else whole
        squares[part_name(part)] = squares.get(part_name(part), 0.0) + float(own.square().sum())
    return {name: math.sqrt(value) for name, value in squares.items()}


def close(flow: Any, quantity: str, expected: dict[str, float], step: int) -> None:
    for name, value in expected.items():
        found = flow.series(name, quantity)[step]
        assert found == pytest.approx(value, rel=2e-5, abs=1e-9), (name, quantity)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        pytest.param(
            name,
            frozen,
            marks=() if frozen == ("query", "key") or name == "gpt2" else pytest.mark.slow,
        )
        for name in ("gpt2", "gpt_neox", "falcon", "bert", "llama", "t5")
        for frozen in ((), ("query", "key"), ("layers[0].value", "query.bias"))
    ],
)
def test_norms_are_those_of_a_plain_loop(name: str, frozen: tuple[str, ...]) -> None:
    model, inputs = build(name)
    if any("bias" in each for each in frozen) and name in ("falcon", "llama", "t5"):
        frozen = frozen[:1]
    if name == "t5" and frozen:
        frozen = tuple(f.replace("layers", "encoder.layers") for f in frozen)
    if frozen:
        fl.freeze(model, *frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with fl.watch(model, optimizer, every_n_steps=2, distance=True, gradient_cosine=True) as flow:
        start = {id(p): p.detach().clone() for p in model.parameters()}
        last: dict[int, Tensor] = {}
        for step in (1, 2, 3):
            loss_of(model, inputs).backward()
            before = {id(p): p.detach().clone() for p in model.parameters()}
            gradients = {id(p): p.grad.clone() for p in model.parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                continue
            now = {id(p): p.detach() for p in model.parameters()}
            moved = {key: now[key] - old for key, old in before.items()}
            far = naive(model, {key: now[key] - old for key, old in start.items()})
            norms = naive(model, start)
            close(flow, "gradient", naive(model, gradients), step)
            close(flow, "weight", naive(model, before), step)
            close(flow, "update", naive(model, moved), step)
            change = {n: far[n] / norms[n] for n in far if norms[n]}
            close(flow, "distance", change, step)
            lengths = naive(model, now)
            cosine = {
                n: (lengths[n] ** 2 + norms[n] ** 2 - far[n] ** 2) / (2 * lengths[n] * norms[n])
                for n in change
            }
            close(flow, "weight_cosine", cosine, step)
            if last:
                sums = naive(model, {k: gradients[k] + last[k] for k in gradients})
                own, old = naive(model, gradients), naive(model, last)
                angle = {
                    n: (sums[n] ** 2 - own[n] ** 2 - old[n] ** 2) / (2 * own[n] * old[n])
                    for n in sums
                    if own[n] > 1e-4 and old[n] > 1e-4
                }
                assert angle
                for part, value in angle.items():
                    assert flow.series(part, "gradient_cosine")[step] == pytest.approx(
                        value, abs=1e-3
                    )
            last = gradients
    learning = {part_name(p) for p in fl.anatomy(model).parts if p.state == "trainable"}
    shown = {part.name for part in flow.parts if part.state == "trainable"}
    assert shown == learning
    assert [report.step for report in flow.reports] == [1, 3]
    for part in flow.parts:
        if part.state != "trainable":
            assert math.isnan(flow.ratios()[part.name])


def tiny() -> GPT:
    return tiny_gpt(layers=2)


def plain_flow(clip: float | None = None, steps: int = 3) -> fl.Flow:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(steps):
            ids, classes = batch(step)
            F.cross_entropy(model(ids), classes).backward()
            if clip is not None:
                flow.before_clip()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return flow


def same(found: fl.Flow, expected: fl.Flow, rel: float = 1e-4) -> None:
    assert [r.step for r in found.reports] == [r.step for r in expected.reports]
    for mine, theirs in zip(found.reports, expected.reports, strict=True):
        for quantity in ("gradient", "weight", "update"):
            # Adam's first step is blind to size: where a gradient is rounding, so is its update
            assert mine.values[quantity] == pytest.approx(
                theirs.values[quantity], rel=rel, abs=1e-6, nan_ok=True
            ), (mine.step, quantity)


def test_accumulated_steps_count_once() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(3):
            ids, classes = batch(step)
            for half in (slice(0, 4), slice(4, 8)):
                (F.cross_entropy(model(ids[half]), classes[half]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    same(flow, plain_flow(), rel=1e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_are_unscaled_and_skipped_steps_left_out(fused: bool) -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(3):
            ids, classes = batch(step)
            scaler.scale(F.cross_entropy(model(ids), classes)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        same(flow, plain_flow(), rel=1e-2)
        scaler.scale(model(batch(3)[0]).sum() * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [report.step for report in flow.reports] == [1, 2, 3]
    assert flow.first_broken() is None


def test_clipping_is_seen_from_both_sides() -> None:
    free, clipped = plain_flow(), plain_flow(clip=1e-3)
    assert math.isnan(free.norms("before_clip")[1])
    assert clipped.norms()[1] == pytest.approx(1e-3, rel=1e-3)
    assert clipped.norms("before_clip")[1] == pytest.approx(free.norms()[1], rel=1e-5)
    for report in clipped.reports:
        share = report.of("gradient", 0) / report.of("before_clip", 0)
        for part in range(len(clipped.parts)):
            before = report.of("before_clip", part)
            assert report.of("gradient", part) == pytest.approx(share * before, rel=1e-3)


def test_a_loop_may_drive_it_without_hooks_and_clip_in_its_kernel() -> None:
    model, reference = tiny(), plain_flow(clip=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    flow = fl.watch(model, optimizer, every_n_steps=1)
    for step in range(3):
        ids, classes = batch(step)
        F.cross_entropy(model(ids), classes).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        share = torch.clamp(1e-3 / (norm + 1e-6), max=1.0)
        flow.before_step(share)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(share)
        optimizer.step()
        flow.after_step()
        optimizer.zero_grad()
    flow.stop()
    same(flow, reference)
    for mine, theirs in zip(flow.reports, reference.reports, strict=True):
        assert mine.values["before_clip"] == pytest.approx(theirs.values["before_clip"], rel=1e-3)
        assert mine.largest == pytest.approx(theirs.largest, rel=1e-3)


def test_a_graph_may_hold_the_probe() -> None:
    """As a captured step does: the probe runs inside, and is counted and sent for outside."""
    model, reference = tiny(), plain_flow(steps=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    flow = fl.watch(model, optimizer, every_n_steps=2)
    for step in range(5):
        ids, classes = batch(step)
        F.cross_entropy(model(ids), classes).backward()
        due = flow.is_due()
        if due:
            flow.probe.before_step(torch.ones(()))
        optimizer.step()
        if due:
            flow.probe.after_step()
        flow.count(due)
        optimizer.zero_grad()
    flow.stop()
    reference._reports = reference.reports[::2]
    same(flow, reference)


def test_gradients_may_lie_elsewhere() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halves: dict[int, Tensor] = {}
    with fl.watch(model, optimizer, every_n_steps=1, gradient=lambda p: halves.get(id(p))) as flow:
        F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        halves |= {id(p): p.grad.bfloat16() for p in model.parameters() if p.grad is not None}
        optimizer.step()
    expected = naive(model, halves)
    close(flow, "gradient", expected, 1)


class Odd(nn.Module):
    """Embeddings whose gradient is sparse, and a complex weight in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 4, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.complex64) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).mean(1).to(torch.complex64)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.abs())


def test_sparse_and_complex_tensors_are_measured() -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    modules = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    with fl.watch(model, optimizer, every_n_steps=1, distance=True, gradient_cosine=True) as flow:
        last: dict[str, Tensor] = {}
        for step in (1, 2):
            ids, classes = batch(step)
            F.cross_entropy(model(ids), classes).backward()
            made = {n: p.grad.to_dense().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            for name in modules:
                own = [g for n, g in made.items() if n.rpartition(".")[0] == name]
                size = math.sqrt(sum(float(g.abs().square().sum()) for g in own))
                assert flow.series(name, "gradient")[step] == pytest.approx(size, rel=1e-4)
                assert flow.series(name, "update")[step] == pytest.approx(0.5 * size, rel=1e-3)
                if step == 2:
                    old = [g for n, g in last.items() if n.rpartition(".")[0] == name]
                    product = sum(
                        float((a.conj() * b).sum().real) for a, b in zip(own, old, strict=True)
                    )
                    before = math.sqrt(sum(float(g.abs().square().sum()) for g in old))
                    found = flow.series(name, "gradient_cosine")[2]
                    assert found == pytest.approx(product / (size * before), abs=1e-4)
            last = made
    assert flow.depth_ratios().weight_change > 0


def test_a_closure_makes_the_gradients_inside_the_step() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(3):
            ids, classes = batch(step)

            def closure(ids: Tensor = ids, classes: Tensor = classes) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(ids), classes)
                loss.backward()
                return loss

            optimizer.step(closure)
    same(flow, plain_flow())


def test_several_optimizers_are_one_step() -> None:
    model = tiny()
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in head)]
    pair = [torch.optim.AdamW(rest, lr=1e-3), torch.optim.AdamW(head, lr=1e-3)]
    with fl.watch(model, pair, every_n_steps=1) as flow:
        for step in range(3):
            ids, classes = batch(step)
            F.cross_entropy(model(ids), classes).backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    same(flow, plain_flow())
    assert not flow.frozen_by_accident()


def test_the_ends_are_as_defined() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(4):
            ids, classes = batch(step)
            F.cross_entropy(model(ids), classes).backward()
            last = {n: p.detach().clone() for n, p in model.named_parameters()}
            sizes = {n: float(p.grad.abs().max()) for n, p in model.named_parameters()}  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    front = [n for n in sizes if n.startswith(("blocks.0.", "blocks.1."))]
    changes = []
    for name in front:
        was = float(first[name].max() - first[name].min())
        if was:
            now = float(last[name].max() - last[name].min())
            changes.append(abs(now - was) / was)
    ends = flow.depth_ratios()
    mean = sum(sizes[n] for n in front) / len(front)
    assert ends.front_ratio == pytest.approx(mean / sizes["head.weight"], rel=1e-5)
    assert ends.weight_change == pytest.approx(sum(changes) / len(changes), rel=1e-4)
    assert ends.word == "small" or ends.front_ratio >= 0.1


def test_one_report_tells_of_no_change() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        ids, classes = batch(0)
        F.cross_entropy(model(ids), classes).backward()
        optimizer.step()
    assert flow.depth_ratios().front_ratio > 0
    assert math.isnan(flow.depth_ratios().weight_change), "0 would say that the front stood still"


def test_rows_within_what_is_held() -> None:
    held = Rows(12, 2, ((0, 4), (8, 12)))  # query and value of an interleaved weight
    assert rows_within(held, Rows(12, 2, ((8, 12),))) == Rows(8, 2, ((4, 8),))
    assert rows_within(Rows.whole(24), Rows(12, 2, ((4, 8),))) == Rows(12, 2, ((4, 8),))


class MeasuringAdamW(torch.optim.AdamW):
    """Measures its steps as the fused kernel does: only what has a gradient, if it is to."""

    sums: Tensor | None = None
    measures = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in held]
        super().step()
        if not self.measures or self.sums is None:
            return
        self.sums.zero_()
        for row, p, was in zip(self.sums, held, before, strict=True):
            if p.grad is not None:
                row[0], row[1] = was.double().square().sum(), (p - was).double().square().sum()


def measured(model: nn.Module, loss: Any, kind: type[torch.optim.AdamW]) -> tuple[Probe, Any]:
    groups = [list(model.parameters())[::2], list(model.parameters())[1::2]]  # in another order
    optimizer = kind([{"params": group} for group in groups], lr=1e-2)
    probe = Probe(read_layout(model, [optimizer]), [optimizer])
    for _ in range(2):
        loss(model).backward()
        next(model.parameters()).grad = None  # copied, because the optimizer does not measure it
        probe.before_step()
        optimizer.step()
        probe.after_step()
        optimizer.zero_grad()
    return probe, optimizer


@pytest.mark.parametrize("name", ["gpt2", "bert"])  # rows of fused weights; whole ones
def test_what_it_says_is_what_copies_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name)
    twin, copied = copy.deepcopy(model), []
    plain, known = torch.empty_like, {p.data_ptr(): p for p in model.parameters()}

    def keep(tensor: Tensor) -> None:
        if tensor.data_ptr() in known:  # AdamW makes others
            copied.append(known[tensor.data_ptr()])

    def loss(which: nn.Module) -> Tensor:
        return loss_of(which, inputs)

    expected, _ = measured(twin, loss, torch.optim.AdamW)
    monkeypatch.setattr(torch, "empty_like", lambda t, **k: keep(t) or plain(t, **k))
    found, optimizer = measured(model, loss, MeasuringAdamW)
    for quantity in ("weight", "update"):
        assert float(expected.views[quantity].sum()) > 0
        torch.testing.assert_close(
            found.views[quantity], expected.views[quantity], rtol=1e-5, atol=0.0
        )
    assert not optimizer.measures  # other steps cost nothing
    first, *fused = {id(t): t for t in copied}.values()
    assert first.shape == next(model.parameters()).shape
    assert len(fused) == (
        4 if name == "gpt2" else 0
    )  # c_attn's weights and biases: three parts each


class Seen(TorchDispatchMode):
    """The operations that ran, and the bytes that were alive at most."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", [{}, {"distance": True, "gradient_cosine": True}])
def test_measuring_never_looks_at_a_value(asked: dict[str, bool]) -> None:
    """Whatever reads a value waits for the device, and cannot be captured in a graph."""
    model = tiny_gpt()
    fl.freeze(model, "layers[0].query")
    optimizer = adamw(model)
    loss_at(model, 0).backward()
    probe = Probe(read_layout(model, [optimizer]), [optimizer], **asked)
    with Seen() as seen:
        for _ in range(2):
            probe.before_clip()
            probe.before_step(torch.tensor(0.5))
            probe.after_step()
    assert "aten::_foreach_norm.Scalar" in seen.names
    waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")
    assert not [name for name in seen.names if name.split("::")[1].split(".")[0] in waits]
    assert probe.values.data_ptr() == probe.views["gradient"].data_ptr()


def test_a_tensor_as_learning_rate_is_read_on_the_device() -> None:
    model = tiny_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    flow = watched(model, optimizer, steps=1)
    assert flow.reports[0].rates == pytest.approx((1e-3,))

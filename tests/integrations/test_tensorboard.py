"""Event files, read back with TensorBoard's own reader."""

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from flowing import adamw, loss_at, tiny_gpt, watched
from frostlab.integrations.tensorboard import TensorBoard, export_run, tag_of
from frostlab.records.schema import EvaluationEvent, FlowEvent, StepEvent
from frostlab.training import loop
from frostlab.training.restore import best_model
from frostlab.training.state import Best
from frostlab.training.step.eager import EagerStep
from fuzz.targets_pages import small_flow
from hearing import hearing
from stages import progressive
from tiny import tiny


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def scalars(read: Any, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in read.Scalars(tag)}


def test_a_flow_is_written_while_it_is_watched(tmp_path: Path) -> None:
    model = tiny_gpt()
    fl.freeze(model, "layers[0].query")

    def loss(step: int) -> Tensor:
        return loss_at(model, step) + model.head.weight.sum() * (math.nan if step == 8 else 0.0)

    with TensorBoard(tmp_path) as board:
        flow = watched(model, adamw(model), loss, on_report=board.flow)
    read = events(tmp_path)
    tags = set(read.Tags()["scalars"])
    assert "Gradient/layers.0.query" not in tags  # frozen
    assert {"Gradient/norm", "Gradient/outside.norm", "Depth/front_over_output"} <= tags
    whole, part = scalars(read, "Gradient/norm"), scalars(read, "Update/layers.1.value")
    assert list(whole) == list(part) == [1, 3, 5, 7, 9]
    assert math.isnan(whole.pop(9))
    assert whole == pytest.approx({s: n for s, n in flow.norms().items() if s < 9})
    assert part == pytest.approx(flow.series("layers[1].value", "update"))
    ratio = scalars(read, "Ratio/layers.1.value")
    assert ratio == pytest.approx(flow.series("layers[1].value", "ratio"))
    assert math.isnan(scalars(read, "Gradient/head")[9])
    assert scalars(read, "Gradient/head")[7] == pytest.approx(flow.series("head", "gradient")[7])


class Stack(nn.Module):
    """Named as a Conformer's layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_stack = nn.ModuleList([nn.Linear(200, 150), nn.Linear(150, 2)])


def test_histograms_are_down_sampled_and_safe_with_nan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack()
    first, second = model.layer_stack[0], model.layer_stack[1]
    first.weight.grad = torch.randn_like(first.weight)
    with torch.no_grad():
        second.weight[0, :10], second.weight[1, :5] = math.nan, math.inf
        second.bias.fill_(math.nan)
    with TensorBoard(tmp_path) as board:
        board.histograms(3, model)
    read = events(tmp_path)
    assert set(read.Tags()["histograms"]) == {
        "Weight/layer_stack.0.weight", "Weight/layer_stack.0.bias", "Weight/layer_stack.1.weight",
        "Gradient/layer_stack.0.weight",
    }  # fmt: skip
    (made,) = read.Histograms("Gradient/layer_stack.0.weight")
    assert made.step == 3
    taken = first.weight.grad.flatten()[::3]
    assert made.histogram_value.num == len(taken) == 10_000
    assert sum(made.histogram_value.bucket) == 10_000
    assert len(made.histogram_value.bucket) <= 65
    assert made.histogram_value.sum_squares == pytest.approx(float(taken.square().sum()), rel=1e-4)
    (spoilt,) = read.Histograms("Weight/layer_stack.1.weight")
    assert spoilt.histogram_value.num == 285
    assert math.isfinite(spoilt.histogram_value.sum)


def test_gradients_may_lie_elsewhere(tmp_path: Path) -> None:
    model = Stack()
    model.norm = nn.Parameter(torch.ones(3))  # `Gradient/norm` is the whole gradient's
    with TensorBoard(tmp_path) as board:
        board.histograms(1, model, gradient=lambda p: torch.full_like(p, 7.0))
    assert "Gradient/outside.norm" in events(tmp_path).Tags()["histograms"]
    (made,) = events(tmp_path).Histograms("Gradient/layer_stack.1.bias")
    assert (made.histogram_value.min, made.histogram_value.num) == (7.0, 2)


def all_scalars(read: Any) -> dict[str, list[tuple[int, float]]]:
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def test_a_finished_run_is_written_at_the_times_it_happened(tmp_path: Path) -> None:
    record = fl.run(tiny(watch={"every_n_steps": 4}), runs=tmp_path)
    read = events(export_run(record.folder, tmp_path / "board"))
    looked = [e for e in record.events(EvaluationEvent) if e.checkpoint is None]
    assert looked
    for name in looked[0].metrics:
        found = read.Scalars(f"Validation/{name}")
        assert [e.step for e in found] == [e.step for e in looked]
        assert [e.value for e in found] == pytest.approx([e.metrics[name] for e in looked])
        assert [e.wall_time for e in found] == pytest.approx([e.at for e in looked], abs=1e-3)
    blocks = record.events(StepEvent)
    losses = [loss for block in blocks for loss in block.loss]
    assert scalars(read, "Training/loss") == pytest.approx(dict(enumerate(losses, 1)))
    times = [event.wall_time for event in read.Scalars("Training/loss")]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(blocks[-1].at, abs=1e-3)
    rates = {block.step: block.rate for block in blocks}
    assert scalars(read, "Training/learning_rate") == pytest.approx(rates)
    norms = [norm for block in blocks for norm in block.norm]
    assert scalars(read, "Gradient/norm") == pytest.approx(dict(enumerate(norms, 1)))
    measured = fl.load_flow(record).norms("before_clip")
    assert {s: norms[s - 1] for s in measured} == pytest.approx(measured, rel=1e-4)
    with pytest.raises(fl.BadInput, match="has no events"):
        export_run(tmp_path / "nothing", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("watch", [None, {"every_n_steps": 4}])
def test_a_run_is_written_while_it_runs(tmp_path: Path, watch: dict[str, int] | None) -> None:
    record = fl.run(tiny(watch=watch), runs=tmp_path, tensorboard=tmp_path / "live")
    live = all_scalars(events(tmp_path / "live"))
    assert {"Training/loss", "Training/learning_rate", "Validation/accuracy"} <= live.keys()
    assert [step for step, _ in live["Gradient/norm"]] == list(range(1, 17))
    assert ("Update/layers.0.value" in live) == (watch is not None)
    assert live == all_scalars(events(export_run(record.folder, tmp_path / "later")))


def histograms(read: Any, tag: str) -> dict[int, tuple[float, ...]]:
    return {
        event.step: (event.histogram_value.num, event.histogram_value.sum,
                     event.histogram_value.sum_squares)
        for event in read.Histograms(tag)
    }  # fmt: skip


def sums(values: Tensor) -> tuple[float, ...]:
    return len(values.flatten()), float(values.sum()), float(values.square().sum())


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write histograms at every evaluation."""
    monkeypatch.setattr(loop, "_HISTOGRAM_STEPS", 1)


@pytest.mark.parametrize("recipe", [
    tiny(treatment={"freeze": ["query", "key"]}, watch={"every_n_steps": 3}),
    pytest.param(
        hearing(model__norm="batch", train__epochs=1, evaluate__every=3), marks=pytest.mark.slow
    ),
], ids=["text", "EEG"])  # fmt: skip
def test_a_live_run_has_histograms_and_is_the_same_run(
    tmp_path: Path, recipe: dict[str, Any], often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch norm's statistics, the dropout and the measured flow are those of a run without."""
    kept: dict[int, dict[str, tuple[float, ...]]] = {}
    backward = EagerStep.dry_run

    def keep(step: EagerStep, parts: Any, scored: Any) -> None:
        backward(step, parts, scored)
        named = step.objective.model.named_parameters()
        gradients = {n: sums(p.grad) for n, p in named if p.grad is not None}
        kept[len(kept)] = gradients

    monkeypatch.setattr(EagerStep, "dry_run", keep)
    live = fl.run(recipe, out=tmp_path / "with", tensorboard=tmp_path / "live")
    looked = [e.step for e in live.events(EvaluationEvent) if e.checkpoint is None]
    assert len(kept) == len(looked) > 1
    assert live.status == "finished"
    plain = fl.run(recipe, out=tmp_path / "without")
    assert len(kept) == len(looked), "no more backward passes without --tensorboard"
    assert plain.result.weights_digest == live.result.weights_digest
    assert plain.result.report == live.result.report
    for one, other in zip(plain.events(FlowEvent), live.events(FlowEvent), strict=True):
        assert replace(one, at=0.0) == replace(other, at=0.0)
    read = events(tmp_path / "live")
    tags = set(read.Tags()["histograms"])
    model = best_model(live)
    names = {name for name, _ in model.named_parameters()}
    assert {tag for tag in tags if tag.startswith("Weight/")} == {f"Weight/{n}" for n in names}
    assert {tag for tag in tags if tag.startswith("Gradient/")} == {
        f"Gradient/{name}" for name in kept[0]
    }
    for name in kept[0]:
        wanted = {step: kept[i][name] for i, step in enumerate(looked)}
        found = histograms(read, f"Gradient/{name}")
        assert found.keys() == wanted.keys()
        for step, values in wanted.items():
            assert found[step] == pytest.approx(values, rel=1e-3, abs=1e-5)
    best = live.result.best.step
    assert best is not None
    for name, weight in model.named_parameters():
        found = histograms(read, f"Weight/{name}")[best]
        assert found == pytest.approx(sums(weight.detach()), rel=1e-3, abs=1e-5)


def test_histograms_are_a_hundred_steps_apart(tmp_path: Path) -> None:
    recipe = tiny(train={"batch": 8, "steps": 110, "threads": 1}, evaluate__every=10)
    fl.run(recipe, out=tmp_path / "run", tensorboard=tmp_path / "live")
    steps = histograms(events(tmp_path / "live"), "Weight/head.weight")
    assert list(steps) == [10, 110]


def test_a_resumed_run_keeps_its_histograms(
    tmp_path: Path, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It crashes after step 12, having written steps 4, 8 and 12, and continues after step 8."""
    seed_step = loop.seed_step

    def crash(seed: int, step: int, *more: Any) -> None:
        if step == 12:
            raise RuntimeError("planted")
        seed_step(seed, step, *more)

    recipe = tiny(evaluate__every=4, train__checkpoint=8)
    folders = {"out": tmp_path / "run", "tensorboard": tmp_path / "live"}
    with monkeypatch.context() as patched:
        patched.setattr(loop, "seed_step", crash)
        patched.setattr(Best, "see", lambda best, value, step: False)  # saves at step 8 alone
        with pytest.raises(RuntimeError, match="planted"):
            fl.run(recipe, **folders)
    (file,) = (tmp_path / "live").glob("events*")
    before = histograms(events(tmp_path / "live"), "Gradient/head.weight")
    assert list(before) == [4, 8, 12]
    file.write_bytes(file.read_bytes() + b"\x07\x00\x00")  # as if the disk had been full
    fl.run(recipe, resume=True, **folders)
    after = histograms(events(tmp_path / "live"), "Gradient/head.weight")
    assert list(after) == [4, 8, 12, 16]
    assert after == before | after
    assert len(list(events(tmp_path / "live").Histograms("Weight/head.weight"))) == 4


def test_what_has_been_trained_can_be_seen_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    evaluate = loop._select

    def look(*arguments: Any) -> bool:
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            read = events(tmp_path / "live")
            if "Training/loss" in read.Tags()["scalars"]:
                seen.extend(scalars(read, "Training/loss"))
        return evaluate(*arguments)

    monkeypatch.setattr(loop, "_select", look)
    fl.run(tiny(), runs=tmp_path, tensorboard=tmp_path / "live")
    assert seen == list(range(1, 9)), "the first epoch"


def test_a_run_that_crashed_and_was_resumed_has_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It crashes after step 12 and continues after step 8."""
    seed_step = loop.seed_step

    def crash(seed: int, step: int, *more: Any) -> None:
        if step == 12:
            raise RuntimeError("planted")
        seed_step(seed, step, *more)

    monkeypatch.setattr(loop, "seed_step", crash)
    folders = {"out": tmp_path / "run", "tensorboard": tmp_path / "live"}
    with pytest.raises(RuntimeError, match="planted"):
        fl.run(tiny(watch={"every_n_steps": 2}), **folders)
    before = scalars(events(tmp_path / "live"), "Training/loss")
    assert list(before) == list(range(1, 13)), "closed, with all steps that were taken"
    monkeypatch.setattr(loop, "seed_step", seed_step)
    elsewhere = fl.run(tiny(watch={"every_n_steps": 2}), out=tmp_path / "other")
    record = fl.run(tiny(watch={"every_n_steps": 2}), resume=True, **folders)
    live = all_scalars(events(tmp_path / "live"))
    assert [step for step, _ in live["Training/loss"]] == list(range(1, 17))
    assert live == all_scalars(events(export_run(record.folder, tmp_path / "later")))
    whole = all_scalars(events(export_run(elsewhere.folder, tmp_path / "whole")))
    assert live["Training/loss"] == whole["Training/loss"]


def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "_write", full)
    with pytest.warns(UserWarning, match="TensorBoard: .*: No space left on device; "):
        record = fl.run(tiny(), runs=tmp_path, tensorboard=tmp_path / "live")
    assert record.status == "finished"


def test_a_folder_for_the_events_of_one_run(tmp_path: Path) -> None:
    fl.run(tiny(), runs=tmp_path / "runs", tensorboard=tmp_path / "live")
    with pytest.raises(fl.BadInput, match=r"^--tensorboard .*live holds event files already; "):
        fl.run(tiny(), runs=tmp_path / "runs", tensorboard=tmp_path / "live")
    with pytest.raises(fl.BadInput, match=r"^--tensorboard .*board is in the run's folder; "):
        fl.run(tiny(), out=tmp_path / "mine", tensorboard=tmp_path / "mine" / "board")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run-none-s0"]
    assert not (tmp_path / "mine").exists()


def test_every_supervised_layer_has_its_metrics(tmp_path: Path) -> None:
    record = fl.run(progressive(supervise={"layers": "all"}), out=tmp_path / "run")
    read = events(export_run(record.folder, tmp_path / "board"))
    looked = [e for e in record.events(EvaluationEvent) if e.checkpoint is None]
    assert "2" in looked[-1].metrics["layers"], "a layer was added"
    for number in ("1", "2"):
        with_it = [e for e in looked if number in e.metrics["layers"]]
        wanted = {e.step: e.metrics["layers"][number]["perplexity"] for e in with_it}
        assert scalars(read, f"Validation/layer_{number}/perplexity") == pytest.approx(wanted)
    assert not [tag for tag in read.Tags()["scalars"] if tag.startswith("Validation/layers")]


def test_names_keep_to_the_alphabet() -> None:
    assert tag_of("encoder.layers[3].cross.query") == "encoder.layers.3.cross.query"
    assert tag_of("layers[0:12].up") == "layers.0-12.up"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fl.BadInput, match=r"TensorBoard: .*file: "):
        TensorBoard(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    for name in ("tensorboardX.event_file_writer", "tensorboardX.summary"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(fl.FrostlabError, match=r"pip install 'frostlab\[tensorboard\]'$"):
        TensorBoard(tmp_path)
    with pytest.raises(fl.FrostlabError, match=r"pip install 'frostlab\[tensorboard\]'$"):
        fl.run(tiny(), runs=tmp_path, tensorboard=tmp_path / "live")
    assert not (tmp_path / "run-none-s0").exists()


def test_hostile_names_become_tags(tmp_path: Path) -> None:
    flow = small_flow("\x1b[31m\ud800\n<script>" + "x" * 5000)
    with TensorBoard(tmp_path) as board:
        board.flow(1, flow.reports[0], flow.parts)
        board.metrics(1, {"a\ud800\x00": 0.5})
        with pytest.raises(fl.BadInput, match="^TensorBoard: Validation/a should be a number"):
            board.metrics(1, {"a": "<script>"})
    tags = events(tmp_path).Tags()["scalars"]
    assert all(tag.isprintable() and len(tag) <= 300 for tag in tags)
    assert any("ud800" in tag for tag in tags)

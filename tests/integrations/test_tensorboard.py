"""Event files, read back with TensorBoard's own reader."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from flowing import adamw, loss_at, tiny_gpt, watched
from frostlab.integrations.tensorboard import TensorBoard, export_run, tag_of
from frostlab.records.schema import EvaluationEvent
from fuzz.targets_pages import small_flow
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
    with TensorBoard(tmp_path) as board:
        board.histograms(1, model, gradient=lambda p: torch.full_like(p, 7.0))
    (made,) = events(tmp_path).Histograms("Gradient/layer_stack.1.bias")
    assert (made.histogram_value.min, made.histogram_value.num) == (7.0, 2)


def test_a_finished_run_is_written_at_the_times_it_happened(tmp_path: Path) -> None:
    record = fl.run(tiny(), runs=tmp_path)
    model = tiny_gpt()
    flow = watched(model, adamw(model), steps=3, every_n_steps=1)
    out = export_run(tmp_path / "run-none-s0", tmp_path / "board", [flow])
    read = events(out)
    looked = [e for e in record.events(EvaluationEvent) if e.checkpoint is None]
    assert looked
    for name in looked[0].metrics:
        found = read.Scalars(f"Validation/{name}")
        assert [e.step for e in found] == [e.step for e in looked]
        assert [e.value for e in found] == pytest.approx([e.metrics[name] for e in looked])
        assert [e.wall_time for e in found] == pytest.approx([e.at for e in looked], abs=1e-3)
    assert scalars(read, "Gradient/norm") == pytest.approx(flow.norms())
    with pytest.raises(fl.BadInput, match="has no events"):
        export_run(tmp_path / "nothing", tmp_path / "other")
    assert not (tmp_path / "other").exists()


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
    with pytest.raises(fl.FrostlabError, match=r"pip install 'frostlab\[tensorboard\]'$"):
        TensorBoard(tmp_path)


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

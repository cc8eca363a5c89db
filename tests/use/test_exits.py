"""Layers are measured in one pass, one layer's logits at a time; a run's exits are its report's."""

import json
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostlab as fl
from forked import frostlab_command
from frostlab.comparison.timed_arms import BuiltArm, TimedArm
from frostlab.data.prepare import prepare
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.recipe.load import recipe_from
from frostlab.records.schema import EvaluationEvent, StageEvent, StepEvent, Supervised
from frostlab.training import evaluate as exits
from frostlab.training.distributed import Compute
from frostlab.training.evaluate import TextTally, evaluate
from frostlab.training.setup import build_model
from frostlab.training.step.objective import Objective
from frostlab.training.tasks import TASKS
from frostlab.use.exits import measure_exits
from packed import VOCABULARY, build, prepared
from tiny import tiny

CPU = torch.device("cpu")
LANGUAGE: dict[str, Any] = {"name": "induction", "examples": 96, "length": 16, "symbols": 16}
DECODER: dict[str, Any] = {"kind": "decoder", "width": 16, "layers": 3, "heads": 2}


def recipe(**changes: Any) -> dict[str, Any]:
    return tiny(data=LANGUAGE, model=DECODER, train={"batch": 16, "steps": 6, "threads": 1},
                evaluate={"every": 3}, **changes)  # fmt: skip


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> fl.RunRecord:
    folder = tmp_path_factory.mktemp("deep")
    return fl.run(recipe(supervise={"layers": [1, 3], "weights": [0.5, 2.0]}), runs=folder)


def cut(model: Decoder, layers: int) -> Decoder:
    """The same model without its last layers."""
    made = Decoder(DecoderConfig(VOCABULARY, 32, layers, 4, 48))
    made.load_state_dict({k: v for k, v in model.state_dict().items() if k in made.state_dict()})
    return made


def measured(model: torch.nn.Module, precision: torch.dtype, **more: Any) -> dict[str, Any]:
    data = prepared(labels=False)
    return evaluate(
        TASKS["language"], Objective(model), data, data.splits["report"], 8,
        Compute(CPU, precision), **more,
    )  # fmt: skip


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_layers_metrics_are_those_of_a_model_that_ends_there(precision: torch.dtype) -> None:
    whole = Decoder(DecoderConfig(VOCABULARY, 32, 3, 4, 48))
    alone = {n: measured(cut(whole, n), precision) for n in (1, 2, 3)}
    assert len({each["loss"] for each in alone.values()}) == 3
    found = measured(whole, precision, layers=(1, 3))
    assert found == {**alone[3], "layers": {"1": alone[1], "3": alone[3]}}
    found = measured(whole, precision, layers=(2,))
    assert found == {**alone[3], "layers": {"2": alone[2]}}, "the last layer selects"


def test_only_one_layers_logits_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Any]] = []
    add = TextTally.add

    def watched(self: TextTally, logits: torch.Tensor, batch: Any) -> None:
        assert not any(ref() is not None for ref in seen[-2:]), "an earlier layer's are still there"
        seen.append(weakref.ref(logits))
        add(self, logits, batch)

    monkeypatch.setattr(TextTally, "add", watched)
    model, data = build("decoder"), prepared(labels=False)
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda *given: calls.append(1))  # type: ignore[union-attr, index]
    evaluate(TASKS["language"], Objective(model), data, data.splits["report"], 60,
             Compute(CPU, torch.float32), layers=(1, 2))  # fmt: skip
    assert (len(seen), len(calls)) == (2, 1), "one pass"


@pytest.mark.parametrize("name", ["gpt", "decoder", "gpt2", "llama"])
def test_what_an_exit_costs(name: str) -> None:
    """Counted by hand for one layer of each shape; the last exit is the whole model."""
    model, data = build(name), prepared(labels=False)
    first, last = measure_exits(model, data, 16, Compute(CPU, torch.float32))
    length = int(data.splits["report"].lengths.max()) - 1
    matrices = {
        "gpt": 4 * 32**2 + 2 * 32 * 48, "decoder": 4 * 32**2 + 3 * 32 * 48,
        "gpt2": 4 * 32**2 + 2 * 32 * 128, "llama": 3 * 32**2 + 3 * 32 * 48,
    }  # fmt: skip
    layer = 2 * matrices[name] + 2 * 2 * (length / 2) * 32  # scores and mixing, half of them seen
    head = 2 * 32 * VOCABULARY
    assert (first.flops, last.flops) == (head + layer, head + 2 * layer)
    assert (first.share, last.share) == (first.flops / last.flops, 1.0)
    assert last.parameters == sum(p.numel() for p in model.parameters())
    block = [p for n, p in model.named_parameters() if ".1." in n]
    assert last.parameters - first.parameters == sum(p.numel() for p in block) > 0
    assert (first.layer, last.layer) == (1, 2)


def test_a_run_records_its_supervised_layers(deep: fl.RunRecord) -> None:
    looks = deep.events(EvaluationEvent)
    assert len(looks) == 3
    for look in looks:
        assert next(iter(look.metrics)) == "perplexity", "the selecting one first"
        layers = look.metrics["layers"]
        assert list(layers) == ["1", "3"]
        assert all(set(m) == {"loss", "perplexity", "token_accuracy"} for m in layers.values())
        assert layers["3"]["loss"] == look.metrics["loss"] != layers["1"]["loss"]
    stage = deep.events(StageEvent)[0]
    assert stage.supervise == Supervised([1, 3], [0.5, 2.0], left_out=[])
    assert set(deep.metrics) == {"perplexity", "loss", "token_accuracy"}
    assert deep.layers == {int(n): m for n, m in looks[-1].metrics["layers"].items()}
    losses = [x for e in deep.events(StepEvent) for x in e.loss]
    start = np.log(16)  # of one layer, at least; weights add up to 2.5
    assert losses[0] > 2.4 * start, "the weighted sum, weights as given"


def test_every_key_changes_a_run(tmp_path: Path) -> None:
    frozen = {"freeze": ["embedding", "layers[0]"]}
    variants: list[dict[str, Any]] = [
        {}, {"layers": "all"}, {"layers": [2, 3]}, {"layers": "all", "frozen": True},
        {"layers": "all", "weights": [0.1, 0.2, 0.3]},
    ]  # fmt: skip
    runs = [fl.run(recipe(supervise=v, treatment=frozen), runs=tmp_path) for v in variants]
    seen = [[x for e in r.events(StepEvent) for x in e.loss] for r in runs]
    standard, every, above, also_frozen, weighted = seen
    assert every == above, "the frozen first layer's loss is left out"
    assert all(standard != other for other in (every, also_frozen, weighted))
    assert also_frozen != every != weighted
    assert [list(r.layers) for r in runs] == [[], [2, 3], [2, 3], [1, 2, 3], [2, 3]]


def test_an_arm_is_timed_with_the_loss_it_is_trained_with(deep: fl.RunRecord) -> None:
    whole = recipe_from(recipe(supervise={"layers": [1, 3], "weights": [0.5, 2.0]}))
    data = prepare(whole)
    side = TimedArm(BuiltArm(whole, build_model(whole, data), None), data, CPU)
    losses = [x for e in deep.events(StepEvent) for x in e.loss]
    assert float(side.take([0]).loss) == pytest.approx(losses[0])


@pytest.mark.parametrize("wanted", [{"layers": [4]}, {"layers": "all", "weights": [1, 1]}])
def test_what_a_model_does_not_have_is_refused_before_anything_is_written(
    wanted: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(fl.BadInput, match="supervise"):
        fl.run(recipe(supervise=wanted), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_unsupervised_run_is_as_it_was(tmp_path: Path) -> None:
    record = fl.run(recipe(), runs=tmp_path)
    assert all("layers" not in e.metrics for e in record.events(EvaluationEvent))
    assert record.layers == {}
    last = fl.run(recipe(supervise={"layers": [3]}), runs=tmp_path)
    assert last.metrics == record.metrics, "the last layer alone, by its number"
    exits = fl.early_exits(record)
    assert [e.layer for e in exits] == [1, 2, 3], "any language model has exits"


def test_the_exits_of_a_run_are_those_of_its_report(deep: fl.RunRecord) -> None:
    exits = {e.layer: e for e in fl.early_exits(deep)}
    for number, metrics in deep.layers.items():
        assert {name: getattr(exits[number], name) for name in metrics} == metrics
    written = json.loads((deep.folder / "exits.json").read_text())
    assert [e["loss"] for e in written["exits"]] == [e.loss for e in exits.values()]
    assert written["checkpoint"] == deep.result.checkpoint


def test_a_metric_that_exits_do_not_show_is_no_error(
    deep: fl.RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = exits.evaluate

    def with_more(*given: Any, **more: Any) -> dict[str, Any]:
        found = measure(*given, **more)
        layers = {n: metrics | {"bits": 1.0} for n, metrics in found["layers"].items()}
        return {**found, "layers": layers}

    monkeypatch.setattr(exits, "evaluate", with_more)
    assert [e.loss for e in fl.early_exits(deep)][2] == deep.metrics["loss"]


def test_the_command(deep: fl.RunRecord) -> None:
    runs = ["--runs", str(deep.folder.parent)]
    done = frostlab_command("exits", "run", *runs)
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["layer", "loss", "perplexity"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert f"{deep.metrics['loss']:.4f}" in rows[-1]
    shown = frostlab_command("show", "run", *runs).stdout
    assert "layer 1" in shown


def test_what_has_no_exits_is_refused(deep: fl.RunRecord, tmp_path: Path) -> None:
    classifier = fl.run(tiny(train={"batch": 64, "steps": 2, "threads": 1}), runs=tmp_path)
    with pytest.raises(fl.BadInput, match="classifies texts; early exits need"):
        fl.early_exits(classifier)
    result = asdict(deep.result) | {"status": "stopped"}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "result.json").write_text(json.dumps(result))
    with pytest.raises(fl.BadInput, match="is stopped; early exits need a finished run"):
        fl.early_exits(tmp_path / "half")

"""What a result claims is what was measured: splits, best weights, frozen weights, clocks."""

import json
import math
import time
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import frostlab as fl
from frostlab.data.prepare import prepare
from frostlab.models.build import build_model
from frostlab.recipe.load import recipe_from
from frostlab.records.checkpoint import checkpoints_in
from frostlab.records.schema import StepEvent
from frostlab.training import loop
from frostlab.training.batches.batch import Order, collate, epoch_order, order_digest
from frostlab.training.batches.feed import Feed
from frostlab.training.restore import load_weights
from frostlab.training.step.eager import EagerStep, seed_step
from frostlab.training.step.optimizer import build_optimizer
from frostlab.training.treatment import treat
from tiny import tiny


def rows(count: int, start: int, flipped: bool = False) -> str:
    """Texts whose label is their first word, or the opposite of it."""
    made = []
    for i in range(start, start + count):
        label = i % 2
        made.append({"text": f"{'yes' if label else 'no'} n{i}", "label": label ^ flipped})
    return "\n".join(json.dumps(row) for row in made)


@pytest.fixture
def opposite(tmp_path: Path) -> dict[str, Any]:
    """A task whose reporting split has every label turned round."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "train.jsonl").write_text(rows(160, 0))
    (folder / "tune.jsonl").write_text(rows(40, 1000))
    (folder / "report.jsonl").write_text(rows(40, 2000, flipped=True))
    data = {"name": "own", "path": str(folder), "tune": "tune", "report": "report", "length": 8}
    return tiny(data=data, tokenizer={"kind": "words"}, train__epochs=4, model__dropout=0.0)


def test_the_report_is_of_the_reporting_split(opposite: dict[str, Any], tmp_path: Path) -> None:
    record = fl.run(opposite, runs=tmp_path / "runs")
    assert record.result.best.value == 1.0
    assert record.metrics["accuracy"] == 0.0


def test_the_report_is_of_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation is made to look best; the report is an independent evaluation of it."""
    measured, scores = loop.measure, iter([0.99, 0.1, 0.1, 0.1])

    def doctored(setting: Any, split: str, step: int) -> dict[str, float]:
        metrics = measured(setting, split, step)
        return metrics | {"accuracy": next(scores)}

    monkeypatch.setattr(loop, "measure", doctored)
    recipe = tiny(train__epochs=4, optim__lr=1e-2)
    record = fl.run(recipe, runs=tmp_path)
    assert record.result.best.step == 8
    made, data = recipe_from(recipe), prepare(recipe_from(recipe))
    losses = []
    for checkpoint in checkpoints_in(record.folder):
        model = build_model(made, data.vocabulary, data.classes, data.pad)
        load_weights(model, checkpoint)
        model.eval()
        tokens = data.splits["report"]
        batch = collate(tokens, torch.arange(len(tokens)).numpy(), data.pad)
        with torch.no_grad():
            logits = model(**batch.inputs)
        losses.append(float(torch.nn.functional.cross_entropy(logits, batch.targets)))
    assert record.metrics["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3), "the last weights are others"


def test_a_frozen_weight_that_moves_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = EagerStep.__call__

    def nudge(self: EagerStep, *args: Any) -> Any:
        outcome = taken(self, *args)
        frozen = next(p for p in self.objective.parameters() if not p.requires_grad)
        with torch.no_grad():
            frozen.view(-1)[0] += 1e-3
        return outcome

    monkeypatch.setattr(EagerStep, "__call__", nudge)
    with pytest.raises(fl.RunFailed, match="frozen tensor"):
        fl.run(tiny(treatment="oelm"), runs=tmp_path)
    assert fl.RunRecord(tmp_path / "run-oelm-s0").status == "failed"


def test_matrices_decay_vectors_do_not_and_frozen_tensors_are_absent() -> None:
    recipe = recipe_from(tiny(treatment="oelm", optim={"decay": 0.3}))
    model = build_model(recipe, 6, 4, 5)
    treat(model, recipe)
    groups = build_optimizer(model, recipe.optim, fused=False).param_groups
    held = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = None if not parameter.requires_grad else 0.3 if parameter.ndim > 1 else 0.0
        assert held.get(id(parameter)) == expected, name
    assert sorted(set(held.values())) == [0.0, 0.3]


def test_dropout_follows_seed_step_and_process() -> None:
    def drawn(seed: int, step: int, rank: int) -> list[float]:
        seed_step(seed, step, rank, torch.device("cpu"))
        return torch.rand(3).tolist()

    assert drawn(1, 2, 0) == drawn(1, 2, 0)
    assert (
        len({tuple(drawn(*where)) for where in ((1, 2, 0), (1, 3, 0), (2, 2, 0), (1, 2, 1))}) == 4
    )


def test_validation_is_timed_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = loop.measure

    def slow(setting: Any, split: str, step: int) -> dict[str, float]:
        time.sleep(0.3)
        return measured(setting, split, step)

    monkeypatch.setattr(loop, "measure", slow)
    clocks = fl.run(tiny(), runs=tmp_path).result.clocks
    assert clocks.validation_seconds > 0.6
    assert clocks.total_seconds > clocks.train_seconds + 0.6


def test_language_clocks_count_what_the_model_was_given(tmp_path: Path) -> None:
    data = {"name": "induction", "examples": 64, "length": 16, "symbols": 16}
    record = fl.run(tiny(data=data, train__epochs=1), runs=tmp_path)
    tokens = prepare(recipe_from(tiny(data=data))).splits["train"]
    assert record.result.clocks.tokens == int((tokens.lengths - 1).sum())
    assert record.result.clocks.padding_share == 0.0


@pytest.mark.parametrize("lr", [1e18, 1e38])
def test_a_spoilt_model_is_never_reported(lr: float, tmp_path: Path) -> None:
    """The first step ruins the weights: accuracy still looks like a number, the loss does not."""
    recipe = tiny(optim={"lr": lr, "clip": None, "warmup": 0.0}, evaluate={"every": 1})
    with pytest.raises(fl.RunFailed, match="not finite"):
        fl.run(recipe, runs=tmp_path)
    record = fl.RunRecord(tmp_path / "run-none-s0")
    assert record.status == "diverged"
    assert record.result.report is None
    for checkpoint in checkpoints_in(record.folder):
        assert all(bool(t.isfinite().all()) for t in checkpoint.model().values())
    json.loads((record.folder / "result.json").read_text(), parse_constant=pytest.fail)


def test_two_runs_that_begin_together_both_find_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frostlab.training import run as running

    fl.run(tiny(train={"steps": 1, "threads": 1}), runs=tmp_path)
    monkeypatch.setattr(
        running, "own_folder", lambda runs, name, resume, digest: (runs / name, False)
    )
    second = fl.run(tiny(train={"steps": 1, "threads": 1}), runs=tmp_path)
    assert second.folder == tmp_path / "run-none-s0-2"
    with pytest.raises(fl.BadInput, match="holds a run already"):
        fl.run(tiny(), out=second.folder)


@pytest.mark.parametrize("steps", [3, 8, 11])
def test_the_order_digest_covers_every_step_that_was_taken(steps: int, tmp_path: Path) -> None:
    """An epoch has 8 steps: less than one, exactly one, and a part of the second."""
    recipe = tiny(train={"batch": 32, "steps": steps, "threads": 1})
    record = fl.run(recipe, out=tmp_path / "run")
    lengths = prepare(recipe_from(recipe)).splits["train"].lengths
    per_epoch = math.ceil(len(lengths) / 32)
    fed = [rows for epoch in range(2) for rows in epoch_order(lengths, 32, 0, epoch, True)]
    assert per_epoch == len(fed) / 2
    orders = {number: reduce(order_digest, fed[:number], "") for number in range(1, steps + 1)}
    assert record.result.order_digest == orders[steps]
    found = {event.step: event.order for event in record.events(StepEvent)}
    assert found == {step: orders[step] for step in found}
    assert steps in found


def test_the_order_digest_is_of_what_was_fed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two examples change places in the last of three steps, long before the epoch ends."""
    recipe = tiny(train={"batch": 32, "steps": 3, "threads": 1})
    usual = fl.run(recipe, out=tmp_path / "usual")
    real = Feed.order

    def swapped(self: Feed, epoch: int) -> Order:
        order = [rows.copy() for rows in real(self, epoch)]
        order[2][[0, 1]] = order[2][[1, 0]]
        return order

    monkeypatch.setattr(Feed, "order", swapped)
    other = fl.run(recipe, out=tmp_path / "other")
    assert other.result.order_digest != usual.result.order_digest


@pytest.mark.parametrize("clip", [1.0, 1e9, None])
def test_clipped_steps_are_counted(clip: float | None, tmp_path: Path) -> None:
    record = fl.run(tiny(optim={"lr": 3e-3, "clip": clip}), out=tmp_path / "run")
    norms = [norm for event in record.events(StepEvent) for norm in event.norm]
    if clip is None:
        assert record.result.clipped_steps is None
        return
    longer = sum(norm is not None and norm > clip for norm in norms)
    assert record.result.clipped_steps == longer
    assert 0 < longer < len(norms) if clip == 1.0 else longer == 0

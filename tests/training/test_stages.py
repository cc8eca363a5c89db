"""Stages: steps, exact patience, best weights handed on, growth, rates, and refusals."""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import frostlab as fl
from frostlab.data.prepare import prepare
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import Optim, Train
from frostlab.records.finding.show import show
from frostlab.records.schema import (
    Best,
    EpochEvent,
    EvaluationEvent,
    PrefixEvent,
    StageEvent,
    StepEvent,
)
from frostlab.training import loop
from frostlab.training.batches.batch import epoch_order, order_digest
from frostlab.training.stages import (
    Entered,
    Stage,
    most_steps,
    stage_at,
    stages_of,
    total_steps,
)
from stages import progressive
from tiny import tiny

Seen = dict[tuple[int, int], dict[str, Tensor]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_every_step_is_in_one_stage(lengths: list[int]) -> None:
    stages = [Stage(str(i), n) for i, n in enumerate(lengths)]
    naive = [(i, place) for i, n in enumerate(lengths) for place in range(n)]
    assert [stage_at(stages, step) for step in range(sum(lengths))] == naive
    for step in (-1, sum(lengths)):
        with pytest.raises(fl.BadInput):
            stage_at(stages, step)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6))
def test_stages_that_ended_early_move_the_later_ones(pairs: list[tuple[int, int]]) -> None:
    """The first half has ended, each after the lesser of the two numbers."""
    stages = [Stage(str(i), max(pair)) for i, pair in enumerate(pairs)]
    ended = [min(pair) for pair in pairs[: len(pairs) // 2]]
    lengths = ended + [stage.steps for stage in stages[len(ended) :]]
    naive = [(i, place) for i, n in enumerate(lengths) for place in range(n)]
    assert [stage_at(stages, step, ended) for step in range(len(naive))] == naive
    assert most_steps(stages, ended) == len(naive)
    with pytest.raises(fl.BadInput, match="past the end"):
        stage_at(stages, len(naive), ended)


def test_a_stage_takes_from_the_run_what_it_does_not_say() -> None:
    recipe = recipe_from({
        "data": {"name": "induction"}, "model": {"kind": "decoder"},
        "optim": {"lr": 0.5}, "train": {"batch": 10, "epochs": 4}, "evaluate": {"patience": 3},
        "stages": [{}, {"name": "b", "steps": 7, "lr": 0.1, "patience": 1},
                   {"epochs": 2, "lr": {"new": 0.2, "old": 0.05}}],
    })  # fmt: skip
    one, two, three = stages_of(recipe, 95)
    assert (one.name, one.steps, one.patience, one.optim(recipe.optim).lr) == ("1", 40, 3, 0.5)
    assert (two.name, two.steps, two.patience, two.optim(recipe.optim).lr) == ("b", 7, 1, 0.1)
    assert (three.name, three.steps, three.optim(recipe.optim).lr) == ("3", 20, 0.2)
    with pytest.raises(fl.BadInput, match="warmup 8 takes all 7 steps of stages.1"):
        stages_of(recipe.model_copy(update={"optim": Optim(warmup=8)}), 95)


def test_the_published_numbers_of_steps() -> None:
    """SST-2 and MNLI, whole training sets, batches of 32, 3 epochs."""
    train = Train(batch=32, epochs=3)
    assert total_steps(train, 67_349) == 6_315
    assert total_steps(train, 392_702) == 36_816
    assert total_steps(Train(steps=11), 5) == 11


def test_drop_last_leaves_out_an_incomplete_batch(tmp_path: Path) -> None:
    train = Train(batch=32, epochs=3, drop_last=True)
    assert total_steps(train, 64) == total_steps(train, 95) == 6
    with pytest.raises(fl.BadInput, match="drop_last leaves no step: 31 training examples do not"):
        total_steps(train, 31)
    changes = {"train__batch": 60, "train__drop_last": True, "train__epochs": 2}
    record = fl.run(tiny(**changes), out=tmp_path / "run")
    examples = record.data.splits["train"].examples
    assert examples % 60
    assert record.result.steps == 2 * (examples // 60)
    assert sum(event.examples for event in record.events(StepEvent)) == 60 * record.result.steps


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The weights of every checkpoint, also of those that are removed later."""
    seen: Seen = {}
    save = loop.save_checkpoint

    def watched(*arguments: Any) -> Any:
        checkpoint = save(*arguments)
        seen[checkpoint.place] = checkpoint.model()
        return checkpoint

    monkeypatch.setattr(loop, "save_checkpoint", watched)
    return seen


def script(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> Iterator[float]:
    """Let evaluations give these values, then 99 for ever."""
    left = iter([*values, *([99.0] * 100)])
    monkeypatch.setattr(loop, "measure", lambda setting, split, step: {"loss": next(left)})
    return left


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_is_exact_in_each_stage_and_the_best_is_handed_on(
    patience: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Seen
) -> None:
    """Stage 1 is best at its 2nd look and ends at 2 + p; stage 2 is never as good as stage 1, is
    best at its 1st and ends at 1 + p: its best does not look back."""
    script(monkeypatch, [3.0, 2.0, *[2.0] * patience, 8.0])
    recipe = progressive(
        evaluate={"every": 1, "metric": "loss", "patience": patience},
        stages=[{}, {"train": ["layers[1]", "head"], "add": {}, "lr": 1e-2}],
    )
    record = fl.run(recipe, runs=tmp_path)
    one, two = record.result.stages
    boundary = 2 + patience
    assert (one.steps, two.steps) == (2 + patience, 1 + patience)
    assert one.stopped_early
    assert two.stopped_early
    assert (one.best.step, one.best.value) == (2, 2.0)
    assert (two.best.step, two.best.value) == (boundary + 1, 8.0)
    assert one.metrics == {"loss": 2.0}
    assert record.result.best == Best("loss", 8.0, boundary + 1)
    assert record.result.steps == 3 + 2 * patience
    grown, best, last = kept[boundary, 1], kept[2, 0], kept[boundary, 0]
    assert best.keys() < grown.keys()
    assert all(torch.equal(grown[name], value) for name, value in best.items())
    assert not any(torch.equal(last[name], best[name]) for name in ("head.weight", "tokens.weight"))
    assert record.result.checkpoint == f"checkpoints/step-{boundary + 1:09d}-stage-2"
    names = {p.name for p in (record.folder / "checkpoints").glob("step-*")}
    last_step = 3 + 2 * patience
    steps = {boundary + 1, last_step - 1, last_step}
    assert names == {f"step-{step:09d}-stage-2" for step in steps}, "best, one before, newest"


def test_a_stage_that_improves_to_its_end_is_not_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [5.0, 6.0, 4.0, 5.0, 3.0, 9.0, 8.0])
    recipe = progressive(
        evaluate={"every": 1, "metric": "loss"},
        stages=[{"steps": 5, "patience": 2}, {"steps": 2, "patience": 1}],
    )
    one, two = fl.run(recipe, runs=tmp_path).result.stages
    assert (one.steps, one.stopped_early, one.best.step) == (5, False, 5)
    assert (two.steps, two.stopped_early, two.best.step) == (2, False, 7)


def test_three_stages_train_what_they_say(tmp_path: Path, kept: Seen) -> None:
    train = {"batch": 32, "epochs": 2, "threads": 1, "checkpoint_what": "all"}
    record = fl.run(progressive(train=train), runs=tmp_path)
    first, second, third = record.result.stages
    layer, head = 4 * 16 * 16 + 3 * 16 * 64 + 2 * 16, 17 * 16
    old = 17 * 16 + layer + head
    assert [s.trainable for s in (first, second, third)] == [old, layer + head, old + layer]
    assert [s.total for s in (first, second, third)] == [old, old + layer, old + layer]
    assert [s.epochs for s in (first, second, third)] == [2, 1, 1.25]
    start, end = kept[8, 1], kept[12, 1]
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {
        name for name in start if name.startswith("blocks.1.") or name == "head.weight"
    }
    start, end = kept[12, 2], kept[17, 2]
    assert not any(torch.equal(start[name], end[name]) for name in start)
    stages = record.events(StageEvent)
    assert [(e.step, e.name, e.added, e.trainable) for e in stages] == [
        (0, "1", [], old), (8, "grown", ["blocks.1"], layer + head), (12, "3", [], old + layer),
    ]  # fmt: skip
    assert [e.lr for e in stages] == [3e-3, 1e-3, {"new": 1e-3, "old": 1e-5}]
    assert stages[1].best_before == first.best
    checked = [e.frozen_verified for e in record.events(EvaluationEvent)]
    assert checked == [0, 0, 10, 0, 0, 0], "the embedding and 9 tensors of a layer, in stage 2"
    epochs = [(e.step, e.epoch) for e in record.events(EpochEvent)]
    assert epochs == [(4, 0), (8, 1), (12, 0), (16, 0)], "epochs are counted in each stage"
    lengths = prepare(recipe_from(progressive())).splits["train"].lengths
    fed = [rows for epoch in range(5) for rows in epoch_order(lengths, 32, 0, epoch, True)]
    digest = reduce(order_digest, fed[:17], "")  # as in a run of one stage
    assert record.result.order_digest == digest
    rates = [e.rate for e in record.events(StepEvent)]
    assert rates[-1] == 1e-3
    table = show(record.folder)
    assert "\nstages\n  stage  trainable     of  steps" in table
    assert f"  grown      {layer + head:,}  {old + layer:,}      4       1  epoch 1" in table
    assert "stages\n" not in show(fl.run(progressive(stages=[]), runs=tmp_path).folder)


def test_two_rates_move_weights_by_their_shares(tmp_path: Path, kept: Seen) -> None:
    """AdamW's first step moves every weight by its rate."""
    recipe = progressive(
        optim={"lr": 1e-3, "warmup": 0.0, "schedule": "constant", "decay": 0.0},
        stages=[{"steps": 1}, {"steps": 1, "add": {}, "keep_state": False,
                               "lr": {"new": 1e-3, "old": 1e-5, "head": 1e-4}}],
    )  # fmt: skip
    fl.run(recipe, runs=tmp_path)
    start, end = kept[1, 1], kept[2, 1]
    for name, rate in {"blocks.1.up.weight": 1e-3, "blocks.0.up.weight": 1e-5,
                       "head.weight": 1e-4, "blocks.1.norm1.weight": 1e-3}.items():  # fmt: skip
        step = (end[name] - start[name]).abs().max().item()
        assert step == pytest.approx(rate, rel=0.02), name


def test_new_layers_follow_seed_and_stage_alone(tmp_path: Path, kept: Seen) -> None:
    """How long the stage before took plays no part."""

    def new(**changes: Any) -> Tensor:
        kept.clear()
        stages = [{"steps": changes.pop("steps", 2)}, {"steps": 1, "add": {}}]
        fl.run(progressive(stages=stages, **changes), runs=tmp_path)
        return next(w for (_, stage), w in kept.items() if stage)["blocks.1.up.weight"]

    assert torch.equal(new(), new(steps=3))
    assert not torch.equal(new(), new(seed=1))


def test_evaluations_are_counted_in_each_stage(tmp_path: Path) -> None:
    stages = [{"steps": 4}, {"steps": 5}]
    record = fl.run(progressive(stages=stages, evaluate={"every": 3}), runs=tmp_path)
    looks = [e.step for e in record.events(EvaluationEvent)]
    assert looks == [3, 4, 7, 9, 9], "the last is the report's"


def test_cached_layers_are_those_of_the_stage(tmp_path: Path) -> None:
    """Stage 1 learns its embedding, stages 2 and 3 cache one layer and two."""
    stages: list[dict[str, Any]] = [
        {"steps": 3}, {"steps": 3, "add": {}, "train": ["layers[1]", "head"]},
        {"steps": 3, "add": {}, "train": ["layers[2]", "head"]},
    ]  # fmt: skip
    found = []
    for cache in (None, "memory"):
        train = {"batch": 32, "threads": 1, "batching": "packed", "cache_prefix": cache}
        record = fl.run(progressive(stages=stages, train=train), runs=tmp_path)
        found.append([x for e in record.events(StepEvent) for x in e.loss])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    depths = [(e.step, e.depth) for e in record.events(PrefixEvent)]
    assert depths == [(3, 1), (6, 2)]


def test_a_treatment_stays_in_every_stage(tmp_path: Path, kept: Seen) -> None:
    """GPT's fused projection is split and joined again between stages."""
    data = {"name": "majority", "examples": 128, "length": 12, "symbols": 4}
    recipe = progressive(
        data=data, model={"kind": "gpt", "width": 16, "layers": 1, "heads": 2, "dropout": 0.0},
        treatment="frozen-qk",
        train={"batch": 32, "steps": 2, "threads": 1, "checkpoint_what": "all"},
        stages=[{}, {"add": {}, "train": ["layers[1]", "head"]}, {}],
    )  # fmt: skip
    fl.run(recipe, runs=tmp_path)
    first, last = kept[2, 0], kept[6, 2]
    moved = (first["blocks.0.qkv.weight"] != last["blocks.0.qkv.weight"]).any(1).tolist()
    assert moved == [False] * 32 + [True] * 16
    moved = (kept[2, 1]["blocks.1.qkv.weight"] != last["blocks.1.qkv.weight"]).any(1).tolist()
    assert moved == [False] * 32 + [True] * 16, "of new layers too"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stages": [{"train": []}]}, r"stages.0.train = \[\] should be a list that is not empty"),
    ({"stages": [{"train": ["qeury"]}]}, "stages.0.train: `qeury` is not a role or .*`query`"),
    ({"stages": [{}, {"train": ["layers[4]"]}]}, r"stages.1.train: `layers\[4\]`: .* 0 to 0"),
    ({"treatment": "frozen-qk", "stages": [{"train": ["query"]}]},
     "stages.0.train trains nothing: the treatment freezes all parts that it selects, or the "
     "architecture fixes them"),
    ({"stages": [{"lr": {"new": 1e-3, "old": 1e-4}}]}, "stages.0.lr.new: no stage has added"),
    ({"stages": [{"lr": {"head": 1e-3}}]}, "stages.0.lr has no rate for tokens.weight.* add `old`"),
    ({"stages": [{}, {"train": ["head"], "lr": {"query": 1e-3, "old": 1e-4}}]},
     "stages.1.lr.query applies to no part that learns in this stage"),
    ({"stages": [{}, {"add": {}, "train": ["head"], "lr": {"new": 1e-3, "old": 1e-4}}]},
     "stages.1.lr.new applies to no part that learns"),
    ({"stages": [{"lr": {"hed": 1e-3, "old": 1e-4}}]}, "stages.0.lr.hed: `hed` is not a role"),
    ({"stages": [{"lr": {"query": 1e-3, "layers[0]": 1e-3, "old": 1e-4}}]},
     r"stages.0.lr: `query` and `layers\[0\]` both name blocks.0.query.weight"),
    ({"stages": [{"patience": 0}]}, "stages.0.patience = 0 should be greater than 0"),
    ({"stages": [{"patience": -2}]}, "stages.0.patience = -2 should be greater than 0"),
    ({"stages": [{"epochs": 1, "steps": 3}]},
     "stages.0: epochs 1 and steps 3 both set the duration"),
    ({"stages": [{}, {"name": "1"}]}, "stages.1.name 1 is the name of stages.0 too"),
    ({"stages": [{"keep_state": False}]}, "no state before the first stage"),
    ({"train": {"batch": 32, "steps": 2, "batching": "packed", "cache_prefix": "memory"}},
     "cache_prefix needs frozen layers"),
    ({"treatment": {"peft": {"method": "lora"}}}, "stages.1.add and treatment.peft exclude"),
    ({"model": {"kind": "pretrained", "name": "albert", "weights": False, "config": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "embedding_size": 16}},
      "data": {"name": "majority", "examples": 64, "length": 12, "symbols": 4}}, "stages.1.add: "),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_what_cannot_be_is_refused_before_anything_is_written(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(fl.BadInput, match=line) as caught:
        fl.run(progressive(**{"stages": [{}, {"add": {}}], **changes}), runs=tmp_path / "runs")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_what_is_new_is_told_by_whole_names() -> None:
    entered = Entered(("blocks.1",))
    assert entered.is_new("blocks.1.up.weight")
    assert not entered.is_new("blocks.10.up.weight")


def test_each_stage_has_its_own_losses(tmp_path: Path) -> None:
    """The run's by default, of the layers that are there then; a stage may give others."""
    stages = [{}, {"add": {}}, {"supervise": {"layers": "last"}, "epochs": 1}]
    recipe = progressive(stages=stages, supervise={"layers": "all"})
    record = fl.run(recipe, out=tmp_path / "run")
    told = [e.supervise for e in record.events(StageEvent)]
    assert [each and each.layers for each in told] == [[1], [1, 2], None]
    seen = [sorted(e.metrics.get("layers", {})) for e in record.events(EvaluationEvent)
            if e.split == "tune"]  # fmt: skip
    assert seen == [["1"], ["1"], ["1", "2"], ["1", "2"], []]


def test_losses_that_a_later_stage_cannot_have_are_refused(tmp_path: Path) -> None:
    recipe = progressive(stages=[{}, {"supervise": {"layers": [2]}}])
    with pytest.raises(fl.BadInput, match=r"stages.1: supervise.layers: there is no layer 2"):
        fl.run(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""Schedules, stages and patience are pure functions: tables of what they must give."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from frostlab import BadInput
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import Optim, StepDecay, Train
from frostlab.training.stages import Stage, most_steps, stage_at, stages_of, total_steps
from frostlab.training.state import Best, reaches
from frostlab.training.step.optimizer import rate_at, warmup_steps


@pytest.mark.parametrize("patience", [1, 2, 3, 5])
@pytest.mark.parametrize("good", [1, 2, 4])
def test_patience_stops_after_exactly_that_many_evaluations(patience: int, good: int) -> None:
    best = Best("perplexity")
    seen = 0
    for value in [100.0 - i for i in range(good)] + [200.0] * 50:
        best.see(value, step=seen + 1)
        seen += 1
        if best.exhausted(patience):
            break
    assert seen == good + patience
    assert best.step == good


@pytest.mark.parametrize(
    ("metric", "values", "best_step", "since"),
    [
        ("accuracy", [0.5, 0.7, 0.7, 0.6], 2, 2),  # a tie is no improvement
        ("loss", [2.0, 1.0, 1.5], 2, 1),
        ("accuracy", [math.nan, 0.1], 2, 0),  # NaN is never the best
        ("loss", [1.0, math.nan, math.nan], 1, 2),
        ("perplexity", [math.inf, 5.0], 2, 0),
        ("token_accuracy", [0.2], 1, 0),
        ("macro_f1", [0.2, 0.1, 0.3], 3, 0),
    ],
)
def test_the_best_evaluation(metric: str, values: list[float], best_step: int, since: int) -> None:
    best = Best(metric)  # type: ignore[arg-type]
    for step, value in enumerate(values, 1):
        best.see(value, step)
    assert (best.step, best.since) == (best_step, since)
    assert not best.exhausted(None)


def test_reaching_a_target() -> None:
    assert reaches("accuracy", 0.8, 0.8)
    assert not reaches("accuracy", 0.79, 0.8)
    assert reaches("perplexity", 10.0, 12.0)
    assert not reaches("perplexity", 12.1, 12.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (7, 0), (50, 49), (1, 0)])
def test_schedules_follow_transformers(schedule: str, steps: int, warmup: int) -> None:
    """Ours is theirs, one step ahead in the warm-up: no step has rate 0."""
    optim = Optim(lr=0.5, warmup=float(warmup), schedule=schedule)  # type: ignore[arg-type]
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = (
        get_linear_schedule_with_warmup if schedule == "linear" else get_cosine_schedule_with_warmup
    )(made, warmup, steps)
    for step in range(steps):
        expected = theirs.get_last_lr()[0]
        if step < warmup:
            expected += 0.5 / warmup
        assert rate_at(step, steps, optim) == pytest.approx(expected, abs=1e-12)
        made.step()
        theirs.step()


def test_constant_and_step_decay() -> None:
    constant = Optim(lr=1.0, warmup=2.0, schedule="constant")
    assert [rate_at(s, 5, constant) for s in range(5)] == [0.5, 1, 1, 1, 1]
    stepped = Optim(lr=1.0, warmup=0.0, schedule=StepDecay(every=2, factor=0.5))
    assert [rate_at(s, 6, stepped) for s in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_warm_up_is_a_share_or_steps() -> None:
    assert warmup_steps(1000, Optim(warmup=0.1)) == 100
    assert warmup_steps(1000, Optim(warmup=30)) == 30
    assert warmup_steps(1000, Optim(warmup=0.0)) == 0
    assert warmup_steps(1000, Optim(warmup=1)) == 1


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_every_step_is_in_one_stage(lengths: list[int]) -> None:
    stages = [Stage(str(i), n) for i, n in enumerate(lengths)]
    naive = [(i, place) for i, n in enumerate(lengths) for place in range(n)]
    assert [stage_at(stages, step) for step in range(sum(lengths))] == naive
    for step in (-1, sum(lengths)):
        with pytest.raises(BadInput):
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
    with pytest.raises(BadInput, match="past the end"):
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
    with pytest.raises(BadInput, match="warmup 8 takes all 7 steps of stages.1"):
        stages_of(recipe.model_copy(update={"optim": Optim(warmup=8)}), 95)


def test_the_published_numbers_of_steps() -> None:
    """SST-2 and MNLI, whole training sets, batches of 32, 3 epochs."""
    train = Train(batch=32, epochs=3)
    assert total_steps(train, 67_349) == 6_315
    assert total_steps(train, 392_702) == 36_816
    assert total_steps(Train(steps=11), 5) == 11

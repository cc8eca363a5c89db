"""Early stopping: patience, the best evaluation, and reaching a target."""

import math

import pytest

from frostlab.training.state import Best, reaches


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

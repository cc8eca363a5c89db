"""Metrics equal a library's, whatever the batches."""

import math

import pytest
import torch
import torch.nn.functional as F

from frostlab.training.batches.batch import IGNORED, Batch
from frostlab.training.distributed import World
from frostlab.training.evaluate import TextTally
from frostlab.training.step.objective import summed_loss

CPU = torch.device("cpu")


def batch_of(targets: torch.Tensor) -> Batch:
    return Batch({}, targets, len(targets), 0, int((targets != IGNORED).sum()))


@pytest.mark.parametrize("sizes", [[40], [1, 39], [13, 13, 14]])
def test_classification(sizes: list[int]) -> None:
    logits, targets = torch.randn(40, 4), torch.randint(0, 3, (40,))  # class 3 never occurs
    tally = TextTally("classification", 4, CPU)
    for one, other in zip(logits.split(sizes), targets.split(sizes), strict=True):
        tally.add(one, batch_of(other))
    metrics = tally.metrics(World())
    assert metrics["accuracy"] == pytest.approx(
        float((logits.argmax(-1) == targets).float().mean())
    )
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-6)
    from torchmetrics.functional.classification import multiclass_f1_score

    expected = multiclass_f1_score(logits.argmax(-1), targets, num_classes=4, average="macro")
    assert metrics["macro_f1"] == pytest.approx(float(expected), rel=1e-5)


def test_language_weighs_tokens_not_batches() -> None:
    logits, targets = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    targets[0, 2:] = IGNORED
    tally = TextTally("language", 0, CPU)
    for i in range(3):
        tally.add(logits[i : i + 1], batch_of(targets[i : i + 1]))
    metrics = tally.metrics(World())
    mean = float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED))
    assert metrics["loss"] == pytest.approx(mean, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
    real = targets != IGNORED
    right = (logits.argmax(-1) == targets)[real].float().mean()
    assert metrics["token_accuracy"] == pytest.approx(float(right))


def test_nothing_that_does_not_count_is_counted() -> None:
    tally = TextTally("classification", 2, CPU)
    tally.add(torch.randn(1, 2), batch_of(torch.tensor([IGNORED])))
    assert tally.metrics(World()) == {}
    assert float(summed_loss(torch.randn(1, 2), torch.tensor([IGNORED]))) == 0.0


def test_a_hopeless_perplexity_is_infinite() -> None:
    tally = TextTally("language", 0, CPU)
    tally.add(torch.tensor([[[0.0, 2000.0]]]), batch_of(torch.tensor([[0]])))
    assert tally.metrics(World())["perplexity"] == math.inf

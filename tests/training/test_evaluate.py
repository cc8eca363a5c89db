"""Metrics equal a library's, whatever the batches."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from frostlab.recipe.load import recipe_from
from frostlab.training.batches.batch import IGNORED, Batch
from frostlab.training.distributed import Compute, World
from frostlab.training.evaluate import TextTally, evaluate
from frostlab.training.state import evaluation_batch
from frostlab.training.step.objective import Objective, summed_loss
from frostlab.training.tasks import TASKS
from packed import build, classifies, exactly, prepared
from tiny import tiny

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


@pytest.mark.parametrize("name", ["gpt classifier", "gpt", "bert classifier"])
def test_metrics_do_not_depend_on_the_batches(name: str) -> None:
    """In float64; batches of one example are the reference, which need no padding at all."""
    data, model = prepared(labels=classifies(name)), exactly(name)
    task = TASKS["classification" if classifies(name) else "language"]
    examples = len(data.splits["train"])

    def measure(batch: int, limit: int | None = None) -> tuple[dict[str, float], list[int]]:
        classes = torch.zeros(examples, dtype=torch.long) if classifies(name) else None
        found = evaluate(
            replace(task, examples=lambda *given: replace(task.examples(*given), limit=limit)),
            Objective(model), data, data.splits["train"], batch,
            Compute(CPU, torch.float64), classes=classes,
        )  # fmt: skip
        return found, [] if classes is None else classes.tolist()

    metrics, predicted = measure(1)
    for batch, limit in ((2, None), (7, 30), (1000, None)):
        others, classes = measure(batch, limit)
        assert others == pytest.approx(metrics, rel=1e-10)
        assert classes == predicted
    assert len(set(predicted)) != 1, "a classifier predicts several classes"


def test_batches_that_do_not_fit_become_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = prepared(labels=True), exactly("gpt classifier")
    objective, sizes = Objective(model), []
    forward = Objective.forward

    def limited(self: Objective, batch: Batch, **more: Any) -> torch.Tensor:
        sizes.append(batch.examples)
        if batch.padded_tokens > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, batch, **more)

    def measure(
        batch: int, processes: int = 1, most: int | None = None
    ) -> tuple[dict[str, float], list[int]]:
        classes = torch.zeros(len(data.splits["train"]), dtype=torch.long)
        compute = Compute(CPU, torch.float64, World(size=processes))
        task, split = TASKS["classification"], data.splits["train"]
        return evaluate(
            task, objective, data, split, batch, compute, classes=classes, most=most
        ), classes.tolist()

    expected, predicted = measure(2)
    monkeypatch.setattr(Objective, "forward", limited)
    metrics, classes = measure(32)
    assert sizes[:3] == [32, 8, 2], "the longest are first"
    assert metrics == pytest.approx(expected, rel=1e-10)
    assert classes == predicted
    sizes.clear()
    measure(32, most=1)
    assert sizes[:2] == [32, 8]
    assert len(sizes[2:]) == 16, "as many of the longest examples: 16 batches of about 2"
    with pytest.raises(torch.OutOfMemoryError):
        measure(32, processes=2)
    monkeypatch.setattr(Batch, "padded_tokens", 101)
    with pytest.raises(torch.OutOfMemoryError):
        measure(32)


def test_evaluations_take_no_more_memory_than_steps() -> None:
    """A step keeps the activations of the layers that learn, an evaluation those of one layer."""
    model = build("gpt classifier")
    recipe = recipe_from(tiny(train={"batch": 8, "accumulate": 2, "epochs": 1}, evaluate={}))
    layers = len(model.blocks)
    assert evaluation_batch(recipe, model) == 4 * layers > 4
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    assert evaluation_batch(recipe, model) == 4 * (layers - 1)
    model.requires_grad_(False)
    assert evaluation_batch(recipe, model) == 4
    assert evaluation_batch(recipe_from(tiny(evaluate={"batch": 3})), model) == 3
    language = recipe_from(
        tiny(data={"name": "induction"}, train={"batch": 8, "epochs": 1}, evaluate={})
    )
    assert evaluation_batch(language, build("gpt")) == 8


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

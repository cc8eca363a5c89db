"""The check that both sides of a benchmark compute the same."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostlab.bench.catalogue import BENCHMARKS
from frostlab.bench.peers import (
    FrostlabLoop,
    LossesDiffer,
    PlainLoop,
    check_losses,
    enlarge_head,
    first_losses,
)
from frostlab.bench.workloads import BenchSettings, bert, first_batch_only, padded_feed
from frostlab.recipe.settings import Optim
from frostlab.timing.flops import Ceilings
from frostlab.training.batches.batch import Batch, collate
from frostlab.training.step.optimizer import build_optimizer
from uneven import uneven_tokens


@pytest.fixture
def settings() -> BenchSettings:
    ceilings = Ceilings(1e12, 1e11, "assumed", None)
    return BenchSettings(
        BENCHMARKS["bert-finetune"], torch.device("cpu"), True, 1, None, None, ceilings
    )


def test_sides_whose_losses_differ_are_refused(settings: BenchSettings) -> None:
    tokens = uneven_tokens()
    masked = collate(tokens, np.arange(8), 0)
    unmasked = Batch({"input_ids": masked.inputs["input_ids"]}, masked.targets, 8, masked.tokens, 8)

    def losses(batch: Batch) -> list[float]:
        model = enlarge_head(bert(settings, 0.0), "classifier")
        return first_losses(
            FrostlabLoop(model, first_batch_only(lambda _: batch), Optim(), settings).step
        )

    check = check_losses(losses(masked), torch.float32, theirs=losses(masked))
    assert check["ours_losses"] == check["theirs_losses"]
    with pytest.raises(LossesDiffer, match="nothing was timed"):
        check_losses(losses(unmasked), torch.float32, theirs=losses(masked))
    with pytest.raises(LossesDiffer, match="at step 2"):
        check_losses([1.0, 0.5], torch.bfloat16, theirs=[1.0, 0.9])
    with pytest.raises(LossesDiffer, match=r"0.9 \(loop\)"):
        check_losses([1.0, 0.5], torch.bfloat16, theirs=[1.0, 0.5], loop=[1.0, 0.9])
    with pytest.raises(LossesDiffer):
        check_losses([float("nan")], torch.bfloat16, theirs=[1.0])


def test_the_plain_loop_takes_torchs_steps(settings: BenchSettings) -> None:
    """Four steps of the loop are four steps written out, on masked batches of two widths."""
    tokens = uneven_tokens()
    by_length = np.argsort(tokens.lengths, kind="stable")
    order = [by_length[:4], by_length[4:]]
    feed, step_of_each_width = padded_feed(tokens, order, 0, settings.device)
    assert step_of_each_width == [0, 1]
    model = enlarge_head(bert(settings, 0.0), "classifier")
    loop = PlainLoop(copy.deepcopy(model), feed, Optim(lr=1e-2), settings, "reduce-overhead")
    optimizer = build_optimizer(model, Optim(lr=1e-2), fused=False)
    expected = []
    for number in range(4):
        batch = feed(number)
        assert set(batch.inputs) == {"input_ids", "attention_mask"}
        loss = F.cross_entropy(model(**batch.inputs).logits, batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert [float(loop.step()) for _ in range(4)] == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == 4

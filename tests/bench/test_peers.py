"""The check that both sides of a benchmark compute the same."""

import numpy as np
import pytest
import torch

from frostlab.bench.catalogue import BENCHMARKS
from frostlab.bench.peers import (
    FrostlabLoop,
    LossesDiffer,
    check_losses,
    enlarge_head,
    first_losses,
)
from frostlab.bench.workloads import BenchSettings, bert, first_batch_only
from frostlab.recipe.settings import Optim
from frostlab.timing.flops import Ceilings
from frostlab.training.batches.batch import Batch, collate
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

    check = check_losses(losses(masked), losses(masked), torch.float32)
    assert check["ours_losses"] == check["theirs_losses"]
    with pytest.raises(LossesDiffer, match="nothing was timed"):
        check_losses(losses(unmasked), losses(masked), torch.float32)
    with pytest.raises(LossesDiffer, match="at step 2"):
        check_losses([1.0, 0.5], [1.0, 0.9], torch.bfloat16)
    with pytest.raises(LossesDiffer):
        check_losses([float("nan")], [1.0], torch.bfloat16)

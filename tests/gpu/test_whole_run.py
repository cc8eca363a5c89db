"""The parts of a whole run on CUDA that are not steps: evaluations, widths, checkpoints, clocks."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import frostlab as fl
from forked import attempt, outcome
from frostlab.bench.catalogue import chosen
from frostlab.bench.runner import run_benchmarks
from frostlab.data.tokens import Prepared, Tokens
from frostlab.devices import peak_bytes, reset_peak
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import Optim, Train
from frostlab.training.batches.batch import Batch, token_examples
from frostlab.training.distributed import Compute
from frostlab.training.evaluate import TextTally, evaluate
from frostlab.training.state import evaluation_batch
from frostlab.training.step import build_step
from frostlab.training.step.objective import Objective
from frostlab.training.tasks import TASKS
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
LENGTH, VOCABULARY = 512, 4000


def reviews(count: int, longest: int = LENGTH) -> Prepared:
    """Texts of many lengths, a third of them cut at the longest."""
    draw = np.random.default_rng(0)
    sizes = np.minimum(draw.integers(20, longest * 3 // 2, count), longest)
    stops = np.cumsum(sizes)
    ids = draw.integers(1, VOCABULARY, int(stops[-1])).astype(np.uint16)
    data = Tokens(ids, stops - sizes, stops, draw.integers(0, 2, count), None, None, "made")
    splits = {"train": data, "report": data}
    return Prepared("classification", 2, VOCABULARY, 0, splits, {}, None, {}, "made", None)


def classifier(layers: int = 6, width: int = 512) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(VOCABULARY, LENGTH, width, layers, 8, 4 * width, causal=False, classes=2)
    return GPT(config)


def test_an_evaluation_takes_no_more_memory_than_a_step() -> None:
    data, model = reviews(2000), classifier().cuda()
    recipe = recipe_from(tiny(train={"batch": 16, "epochs": 1}, evaluate={}))
    compute, objective, task = (
        Compute(CUDA, torch.bfloat16),
        Objective(model),
        TASKS["classification"],
    )
    examples = token_examples(data, data.splits["train"], CUDA)
    step = build_step(objective, Optim(), Train(step="eager", batch=16), compute, steps=10)
    longest = examples.evaluation_order(16)[0]
    step([examples.collate(longest)], 16, 1e-4)  # creates the optimizer's state
    reset_peak(CUDA)
    step([examples.collate(longest)], 16, 1e-4)
    training = peak_bytes(CUDA)
    batch = evaluation_batch(recipe, model)
    assert batch == 6 * 16
    reset_peak(CUDA)
    evaluate(task, objective, data, data.splits["report"], batch, compute)
    evaluating = peak_bytes(CUDA)
    print(f"step {training / 2**20:.0f} MiB, evaluation {evaluating / 2**20:.0f} MiB")
    assert evaluating <= training


def test_metrics_do_not_depend_on_the_batches() -> None:
    data, model = reviews(300, 128), classifier(2, 64).cuda()
    compute, task = Compute(CUDA, torch.float32), TASKS["classification"]
    found = []
    for batch in (1, 7, 96):
        classes = torch.zeros(300, dtype=torch.long, device=CUDA)
        metrics = evaluate(task, Objective(model.double()), data, data.splits["report"], batch,
                           compute, classes=classes)  # fmt: skip
        found.append((metrics, classes.tolist()))
    for metrics, classes in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-9)
        assert classes == found[0][1]


def test_counting_predictions_does_not_wait(no_waiting: Any) -> None:
    tally = TextTally("classification", 3, CUDA)
    logits, targets = torch.randn(50, 3, device=CUDA), torch.randint(0, 3, (50,), device=CUDA)
    batch = Batch({}, targets, 50, 50, 50)
    tally.add(logits, batch)  # loads kernels
    with no_waiting():
        tally.add(logits, batch)
    confusion = torch.bincount(targets * 3 + logits.argmax(-1), minlength=9)
    assert tally.sums[2:].tolist() == (2 * confusion).tolist()


def test_captured_runs_use_few_widths_and_say_where_the_time_went(tmp_path: Path) -> None:
    recipe = tiny(
        data={"name": "docstrings", "length": 96, "per_package": 300},
        tokenizer={"kind": "bpe", "size": 500}, train={"batch": 8, "steps": 300},
    )  # fmt: skip
    wall = fl.run(recipe, runs=tmp_path).result.clocks.wall
    assert wall is not None
    seconds = asdict(wall)
    total = seconds.pop("total")
    assert total == pytest.approx(sum(seconds.values()), abs=1e-3)
    assert min(seconds.values()) > -0.01
    assert wall.new_shapes > 0, "the second step of a width captures it"
    assert wall.steps > 0
    print(seconds)


@pytest.mark.filterwarnings("ignore")  # theirs
def test_whole_runs_are_measured_against_the_trainer() -> None:
    (result,) = run_benchmarks(chosen(["whole-run"]), scale="small", rounds=1)
    assert result["status"] == "measured", result["reason"]
    assert set(result["seconds"]) == {"ours", "Trainer", "compiled Trainer"}


@pytest.mark.parametrize("moment", ["rename", "half a file", "clean-up"])
def test_a_run_killed_while_a_checkpoint_is_written_goes_on(tmp_path: Path, moment: str) -> None:
    recipe = tiny(train={"batch": 32, "epochs": 3, "checkpoint": 3})
    assert attempt(recipe, tmp_path / "whole") == 0
    assert attempt(recipe, tmp_path / "killed", moment, 3) == -9
    assert attempt(recipe, tmp_path / "killed") == 0
    one, other = (outcome(tmp_path / name) for name in ("whole", "killed"))
    assert one["order_digest"] == other["order_digest"]
    assert one["steps"] == other["steps"]


def test_a_captured_run_imports_no_compiler(tmp_path: Path) -> None:
    """Importing torch's compiler takes seconds."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny(train={"batch": 32, "epochs": 2, "step": "captured"})))
    command = [sys.executable, "-X", "importtime", "-m", "frostlab", "run", str(recipe), "--json",
               "--runs", str(tmp_path / "runs")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["stepping"][-1]["how"] == "captured"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "frostlab.training.run" in imported
    assert not imported & {"torch._dynamo", "torch._inductor"}


def test_evaluations_plan_no_attention_and_put_the_setting_back() -> None:
    data, model = reviews(50), classifier(layers=1, width=64).cuda()
    seen: list[bool] = []
    model.norm.register_forward_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    compute, task = Compute(CUDA, torch.bfloat16), TASKS["classification"]
    evaluate(task, Objective(model), data, data.splits["report"], 16, compute)
    assert seen
    assert not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled

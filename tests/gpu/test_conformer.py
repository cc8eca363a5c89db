"""The Conformer on CUDA: captured steps and their BatchNorm statistics, runs, precision, DDP."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import frostlab as fl
from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.recipe.model import EnvelopeLoss
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.records.schema import StepEvent
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.envelope_loss import EnvelopeObjective
from hearing import hearing
from stepping import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler's own
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
CUDA = torch.device("cuda", 0)
HALF, FULL = torch.bfloat16, torch.float32


def batches(count: int) -> list[list[Batch]]:
    """Windows whose envelope is a moving mean of two channels."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        eeg = torch.randn(8, 64, 6, generator=draw)
        heard = torch.nn.functional.avg_pool1d(eeg[..., :2].sum(-1)[:, None], 5, 1, 2)[:, 0]
        subject = torch.randint(-1, 3, (8,), generator=draw)
        made.append([Batch({"eeg": eeg, "subject": subject}, heard, 8, 8 * 64, 8)])
    return made


def stepping(
    kind: StepKind, precision: torch.dtype, steps: int, **changes: object
) -> tuple[EagerStep, Conformer]:
    torch.manual_seed(0)
    small = {"channels": 6, "subjects": 3, "width": 16, "layers": 2, "heads": 2, "hidden": 32,
             "kernel": 5, "dropout": 0.0}  # fmt: skip
    model = Conformer(ConformerConfig(**{**small, **changes}))
    fl.freeze(model, "layers[1]")  # its BatchNorm keeps its statistics
    objective = EnvelopeObjective(model, EnvelopeLoss()).to(CUDA).train()
    optim = Optim(lr=1e-3, decay=0.0)
    step = build_step(objective, optim, Train(step=kind), Compute(CUDA, precision), steps=steps)
    return step, model


@pytest.mark.parametrize("precision", [HALF, FULL], ids=["bf16", "float32"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "relative", "norm": "layer"},
        {"norm": "group", "residual": "plain"},
        {"variant": "published"},
    ],
    ids=["batch", "relative", "group", "published"],
)
def test_100_captured_steps_equal_eager_ones(
    changes: dict[str, object], precision: torch.dtype
) -> None:
    steps = batches(100)
    eager, model = stepping("eager", precision, 10, **changes)
    graphs, captured = stepping("captured", precision, 10, **changes)
    wanted, found = train(eager, steps), train(graphs, steps)
    assert graphs.kind == "captured", graphs.reason
    assert np.abs(np.subtract(found, wanted)).max() < (3e-2 if precision == HALF else 2e-3)
    assert np.mean(wanted[-8:]) < np.mean(wanted[:8]) - 0.05, "it learns"
    for name, buffer in model.named_buffers():
        apart = (captured.get_buffer(name).float() - buffer.float()).abs().max()
        assert apart < 1e-2, name


def test_statistics_are_counted_once_a_step() -> None:
    graphs, model = stepping("captured", FULL, 10)
    train(graphs, batches(12))
    counted = [int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counted == [12, 0], "the second layer is frozen"


@pytest.mark.parametrize("variant", ["frostlab", "published"])
def test_compiled_and_captured_steps_equal_eager_ones(variant: str) -> None:
    steps = batches(60)
    eager, _ = stepping("eager", HALF, 10, variant=variant)
    graphs, model = stepping("captured", HALF, 10**5, variant=variant)
    assert np.abs(np.subtract(train(graphs, steps), train(eager, steps))).max() < 3e-2
    assert (graphs.kind, graphs.reason) == ("captured", "asked for")
    counted = [int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
    assert counted == [60, 0]


def test_a_captured_run_ends_as_an_eager_one(tmp_path: Path) -> None:
    found = {}
    for kind in ("eager", "captured"):
        for precision in ("bf16", "float32"):
            changes = {"train__step": kind, "train__precision": precision, "model__norm": "batch"}
            recipe = hearing(**changes, model__dropout=0.0, data__snr=10.0, train__epochs=8)
            record = fl.run(recipe, out=tmp_path / f"{kind}-{precision}")
            found[kind, precision] = record.metrics["pearson"]
    assert found["eager", "float32"] > 0.1, "it learns"
    for way, r in found.items():
        assert r == pytest.approx(found["eager", "float32"], abs=0.05), way


def losses(record: fl.RunRecord) -> list[float]:
    return [x for e in record.events(StepEvent) for x in e.loss]


def test_two_processes_share_the_statistics_of_batch_norm(tmp_path: Path, free_port: int) -> None:
    recipe = hearing(model__norm="batch", model__dropout=0.0, train__precision="float32")
    alone = fl.run(recipe, out=tmp_path / "alone")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
            "--master_addr=127.0.0.1", f"--master_port={free_port}",
            "-m", "frostlab", "run", str(path), "--out", str(tmp_path / "run"),
        ],
        capture_output=True, text=True, timeout=240, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    together = fl.RunRecord(tmp_path / "run")
    assert losses(together) == pytest.approx(losses(alone), rel=5e-3, abs=1e-3)
    assert together.metrics["pearson"] == pytest.approx(alone.metrics["pearson"], abs=0.02)

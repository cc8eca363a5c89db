"""Two processes: the same losses as one, one writer, checkpoints that load in one, BatchNorm."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import frostlab as fl
from forked import Program, run_command
from frostlab.flow.measurements import Flow, load_flow
from frostlab.models.conformer import Conformer
from frostlab.records.checkpoint import Checkpoint, checkpoints_in
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent, ResumeEvent, StartEvent, StepEvent
from frostlab.training.distributed import sync_batch_norms
from frostlab.training.run import run
from hearing import hearing
from stages import progressive
from zoo import CONFORMER, recordings

RECIPE: dict[str, Any] = {
    "data": {"name": "majority", "examples": 210, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2, "dropout": 0.0},
    "treatment": "oelm",
    "optim": {"lr": 3e-3},
    "train": {"batch": 32, "accumulate": 2, "epochs": 3, "threads": 1},
    "watch": {"every_n_steps": 5, "distance": True, "gradient_cosine": True},
}
SHARDED = pytest.param("fsdp", marks=pytest.mark.slow)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def launch(recipe: dict[str, Any], folder: Path, port: int) -> list[str]:
    path = folder.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return torchrun(port, "-m", "frostlab", "run", str(path), "--out", str(folder))


def torchrun(port: int, *program: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--master_addr=127.0.0.1", f"--master_port={port}", *program,
    ]  # fmt: skip


def in_two(recipe: dict[str, Any], folder: Path, port: int) -> Any:
    given = ("--out", str(folder))
    return run_command(folder.parent, recipe, *given, processes=2, port=port).wait()


def by_torchrun(recipe: dict[str, Any], folder: Path, port: int) -> Any:
    return subprocess.run(
        launch(recipe, folder, port), capture_output=True, text=True, timeout=400, env=ENVIRONMENT
    )


def losses(folder: Path) -> list[float]:
    return [x for e in RunRecord(folder).events(StepEvent) for x in e.loss]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(RECIPE, out=tmp_path_factory.mktemp("alone") / "run").folder


@pytest.mark.parametrize(
    ("way", "start"),
    [
        ("ddp", in_two),
        pytest.param("ddp", by_torchrun, marks=pytest.mark.slow),
        pytest.param("fsdp", by_torchrun, marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(
    way: str, start: Any, alone: Path, tmp_path: Path, free_port: int
) -> None:
    recipe = {**RECIPE, "train": {**RECIPE["train"], "parallel": way, "processes": 2}}
    done = start(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = RunRecord(alone), RunRecord(tmp_path / "run")
    assert len(losses(alone)) == 21, "the last batch of an epoch has 18 examples, not 32"
    assert losses(two.folder) == pytest.approx(losses(alone), rel=1e-4, abs=1e-5)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-3, abs=1e-4)
    assert [e.processes for e in two.events(StartEvent)] == [2]
    assert two.result.parameters == one.result.parameters
    assert two.digests == one.digests, "the same weights, data and frozen tensors"
    assert two.result.order_digest == one.result.order_digest
    assert two.result.clocks.tokens == one.result.clocks.tokens
    checked = [e.frozen_verified for e in two.events(EvaluationEvent)]
    assert checked == [8, 8, 8, 8], "at every evaluation, and before the report"
    measured_alike(load_flow(two.folder), load_flow(alone))
    (frozen,) = {path.name for path in two.folder.glob("checkpoints/frozen-*")}
    assert (alone / "checkpoints" / frozen).is_dir(), "the same frozen weights, gathered"
    assert shapes(checkpoints_in(two.folder)[-1]) == shapes(checkpoints_in(alone)[-1])


def shapes(checkpoint: Checkpoint) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in checkpoint.model().items()}


def measured_alike(found: Flow, wanted: Flow) -> None:
    """Gradients are the reduced ones, and norms those of whole tensors."""
    assert found.parts == wanted.parts
    assert [r.step for r in found.reports] == [1, 6, 11, 16, 21]
    assert found.verified
    for mine, theirs in zip(found.reports, wanted.reports, strict=True):
        for name, values in theirs.values.items():
            loose = name == "gradient_cosine"  # between gradients that are nearly nothing
            assert mine.values[name] == pytest.approx(
                values, rel=5e-3, abs=0.02 if loose else 1e-5, nan_ok=True
            ), (mine.step, name)
        assert mine.largest == pytest.approx(theirs.largest, rel=5e-3)
        assert mine.ranges == pytest.approx(theirs.ranges, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_compiled_steps_of_two_processes_are_those_of_one(free_port: int) -> None:
    """In float64, with shapes that the processes compile at different steps."""
    program = Path(__file__).parent / "compiled_program.py"
    places = [str(program.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        torchrun(free_port, str(program)), capture_output=True, text=True, timeout=400,
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("fine") == 2


@pytest.mark.slow
def test_a_compiled_run_of_two_processes(alone: Path, tmp_path: Path, free_port: int) -> None:
    recipe = {**RECIPE, "train": {**RECIPE["train"], "step": "compiled", "processes": 2}}
    done = by_torchrun(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "run")
    assert [(e.how, e.reason) for e in two.result.stepping] == [("compiled", "asked for")]
    assert losses(two.folder) == pytest.approx(losses(alone), rel=1e-4, abs=1e-5)
    assert two.result.order_digest == RunRecord(alone).result.order_digest


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_run_of_two_stops_and_goes_on_in_one(way: str, tmp_path: Path, free_port: int) -> None:
    """Ctrl-C reaches both; what two processes saved, one loads and finishes."""
    train = {**RECIPE["train"], "parallel": way, "epochs": 60, "accumulate": 1}
    recipe = {**RECIPE, "optim": {"lr": 1e-4}, "train": train}  # steps that do not amplify rounding
    folder = tmp_path / "run"
    process = subprocess.Popen(
        launch(recipe, folder, free_port), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    for _ in range(1000):
        time.sleep(0.05)
        if (folder / "checkpoints").exists():
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert "frostlab: stopped; `--resume` continues the run" in errors
    stopped = RunRecord(folder)
    assert stopped.status == "stopped"
    step = stopped.result.steps
    assert 0 < step < 420
    assert run(recipe, out=folder, resume=True).status == "finished"
    resumed = RunRecord(folder)
    assert resumed.start.processes == 2
    assert [e.processes for e in resumed.events(ResumeEvent)] == [1]
    whole = run(recipe, out=tmp_path / "whole").folder
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.slow
def test_packed_and_cached_in_two_processes(tmp_path: Path, free_port: int) -> None:
    """Texts of different lengths: the processes' rows are not equally wide."""
    for split, word in (("train", "word"), ("test", "other")):
        rows = [f"{f'{word}{i} ' * (1 + i % 9)}end,{'ab'[i % 2]}" for i in range(70)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *rows]))
    train = {**RECIPE["train"], "batching": "packed", "cache_prefix": "disk", "epochs": 2}
    recipe = {
        **RECIPE, "train": train, "data": {"name": "own", "path": str(tmp_path), "length": 24},
        "tokenizer": {"kind": "words", "size": 50},
        "treatment": {"freeze": ["embedding", "position", "layers[0]"]},
    }  # fmt: skip
    alone = run(recipe, out=tmp_path / "alone")
    done = in_two(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "run")
    assert losses(two.folder) == pytest.approx(losses(alone.folder), rel=1e-4, abs=1e-5)
    assert two.result.clocks.padding_share == alone.result.clocks.padding_share == 0.0


@pytest.mark.slow
def test_epochs_that_end_without_an_evaluation(tmp_path: Path, free_port: int) -> None:
    """A language model, evaluated by steps: every process reads its losses at the same moments."""
    recipe = {
        **RECIPE,
        "data": {"name": "induction", "examples": 70, "length": 16, "symbols": 16},
        "train": {"batch": 16, "accumulate": 2, "epochs": 3, "threads": 1},
        "evaluate": {"every": 4},
    }
    alone = run(recipe, out=tmp_path / "alone")
    done = in_two(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(losses(alone.folder), rel=1e-4, abs=1e-5)
    assert RunRecord(tmp_path / "run").metrics == pytest.approx(alone.metrics, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_supervised_layers_in_two_processes(way: str, tmp_path: Path, free_port: int) -> None:
    """With DDP the first layer and what is below it are frozen: its loss is left out."""
    frozen = ["embedding", "layers[0]"] if way == "ddp" else ["query"]
    recipe = {
        **RECIPE,
        "data": {"name": "induction", "examples": 70, "length": 16, "symbols": 16},
        "model": {"kind": "decoder", "width": 16, "layers": 3, "heads": 2},
        "treatment": {"freeze": frozen},
        "supervise": {"layers": "all", "weights": [9.0, 0.5, 2.0]},
        "train": {"batch": 16, "accumulate": 2, "steps": 6, "threads": 1, "parallel": way},
    }
    alone = run(recipe, out=tmp_path / "alone")
    done = in_two(recipe, tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "run")
    assert losses(two.folder) == pytest.approx(losses(alone.folder), rel=1e-4, abs=1e-5)
    assert list(two.layers) == ([2, 3] if way == "ddp" else [1, 2, 3])
    for number, metrics in alone.layers.items():
        assert two.layers[number] == pytest.approx(metrics, rel=1e-3)


@pytest.mark.parametrize("way", ["ddp", SHARDED])
def test_two_processes_go_through_stages_as_one(way: str, tmp_path: Path, free_port: int) -> None:
    """Layers are added, frozen and thawed: the model is shared anew at each boundary."""
    alone = run(progressive(), out=tmp_path / "alone")
    train = {**progressive()["train"], "parallel": way, "processes": 2}
    done = in_two(progressive(train=train), tmp_path / "run", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "run")
    assert losses(two.folder) == pytest.approx(losses(alone.folder), rel=1e-4)
    for one, other in zip(alone.result.stages, two.result.stages, strict=True):
        for key in ("name", "steps", "trainable", "total"):
            assert getattr(one, key) == getattr(other, key)


OTHER_ORDER = """
import os, sys
from frostlab.training.batches.feed import Feed
from frostlab.training.run import run
real = Feed.order
if os.environ["RANK"] == "1":
    Feed.order = lambda self, epoch: [rows[::-1] for rows in real(self, epoch)]
run(sys.argv[1], {"train.epochs": None, "train.steps": 3}, out=sys.argv[2])
"""


def test_a_process_with_another_order_is_found(tmp_path: Path, free_port: int) -> None:
    """Within an epoch too: rank 0 alone cannot know what the others were fed."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "program.py").write_text(OTHER_ORDER)
    given = [str(tmp_path / name) for name in ("program.py", "recipe.yaml", "run")]
    done = Program(*given, processes=2, port=free_port).wait()
    assert done.returncode != 0
    assert "step 3: the processes have different batches" in done.stderr
    assert RunRecord(tmp_path / "run").result.status == "failed"


def test_another_number_of_processes_is_refused(tmp_path: Path, free_port: int) -> None:
    recipe = {**RECIPE, "train": {**RECIPE["train"], "processes": 4, "batch": 64}}
    done = in_two(recipe, tmp_path / "run", free_port)
    assert done.returncode != 0
    assert "train.processes asks for 4, but 2 started" in done.stderr
    assert not (tmp_path / "run").exists()


def test_two_processes_train_and_report_as_one(tmp_path: Path, free_port: int) -> None:
    recipe = hearing(data__seconds=17, model__dropout=0.0, train__epochs=2, train__accumulate=2)
    one = run(recipe, out=tmp_path / "one")
    assert one.result.clocks.tokens % (2 * 8 * 64), "an epoch's last batch is not whole"
    done = in_two(recipe, tmp_path / "two", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "two")
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=1e-4, abs=1e-5)
    assert two.digests == one.digests
    assert two.result.order_digest == one.result.order_digest
    assert two.metrics == pytest.approx(one.metrics, rel=1e-2, abs=2e-3)
    assert set(two.envelope_scores[0]) == {"report", "unseen"}


@pytest.mark.slow
def test_batch_norm_of_two_processes_is_refused_on_a_cpu(tmp_path: Path, free_port: int) -> None:
    done = in_two(hearing(model__norm="batch"), tmp_path / "run", free_port)
    assert done.returncode != 0
    assert (
        "model.norm batch cannot be synchronised over 2 processes on cpu, only on GPUs"
        in done.stderr
    )
    assert not (tmp_path / "run").exists()


def middles(model: Conformer) -> list[type]:
    return [type(block.convolution.middle) for block in model.blocks]


def test_one_process_keeps_its_batch_norms() -> None:
    model = Conformer(CONFORMER)
    sync_batch_norms(model, 1, CPU)
    assert middles(model) == [nn.BatchNorm1d] * 2


def test_batch_norm_over_several_cpus_is_refused_in_one_line() -> None:
    problem = "2 processes on cpu, only on GPUs; set model.norm to layer or group"
    with pytest.raises(fl.BadInput, match=problem):
        sync_batch_norms(Conformer(CONFORMER), 2, CPU)


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_other_norms_are_not_converted(norm: str) -> None:
    model = Conformer(replace(CONFORMER, norm=norm))
    before = middles(model)
    sync_batch_norms(model, 2, CPU)
    assert middles(model) == before


def test_on_gpus_norms_that_learn_are_shared_with_the_weights_they_had() -> None:
    model = Conformer(CONFORMER)
    fl.freeze(model, "layers[0]")
    names = set(model.state_dict())
    held = {id(p) for p in model.parameters()}
    sync_batch_norms(model, 2, CUDA)
    sync_batch_norms(model, 2, CUDA)  # twice is once
    assert middles(model) == [nn.BatchNorm1d, nn.SyncBatchNorm]
    assert set(model.state_dict()) == names
    assert {id(p) for p in model.parameters()} == held
    sync_batch_norms(model, 2, CUDA)
    assert fl.anatomy(model).select("layers[1].norm")


def test_a_shared_norm_that_is_frozen_keeps_its_statistics() -> None:
    model = Conformer(CONFORMER)
    sync_batch_norms(model, 2, CUDA)
    fl.freeze(model, "norm")
    proof = fl.audit(model)
    model.train()
    model(**recordings())
    proof.verify(model)
    assert "blocks.1.convolution.middle.running_var" in proof.digests
    fl.thaw(model)
    model(**recordings())
    with pytest.raises(fl.FrozenWeightsMoved, match="middle.running_mean"):
        proof.verify(model)


def test_frozen_batch_norms_may_run_anywhere() -> None:
    model = Conformer(CONFORMER)
    fl.freeze(model, "norm")
    sync_batch_norms(model, 2, CPU)
    assert middles(model) == [nn.BatchNorm1d] * 2

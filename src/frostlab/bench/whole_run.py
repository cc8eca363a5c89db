"""Whole runs, from the start of the process to its end: `frostlab run` against the Trainer.

Both sides train the same model on the same tokens for the same number of epochs, evaluate it every
epoch, keep the best checkpoint, and evaluate its weights on the `report` (test) split. Each does so
in a process of its own, one after another. Before that, the data are prepared and cached for both.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from frostlab.bench.cases import assemble_result
from frostlab.bench.catalogue import Result
from frostlab.bench.peers import (
    CHECKED_STEPS,
    FeedDataset,
    FrostlabLoop,
    TrainerLoop,
    check_losses,
    enlarge_head,
    first_losses,
    group_by_length,
)
from frostlab.bench.trainer_run import Classifier
from frostlab.bench.workloads import BenchSettings, first_batch_only
from frostlab.data.prepare import as_token_data, prepare
from frostlab.data.tokens import Prepared
from frostlab.errors import FrostlabError
from frostlab.models.build import build_for
from frostlab.models.gpt import GPT
from frostlab.recipe.load import load_recipe, recipe_from
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.settings import Optim
from frostlab.records.folder import RunRecord
from frostlab.timing.flops import StepWork, step_work
from frostlab.timing.interleave import PairTimes, SideTimes
from frostlab.training.batches.batch import collate
from frostlab.training.stages import steps_per_epoch
from frostlab.training.state import evaluation_batch
from frostlab.training.step.optimizer import warmup_steps

ROUNDS = 3
_SMALL: dict[str, Any] = {
    "data": {"name": "majority", "examples": 256, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2},
    "train": {"batch": 32, "epochs": 2},
}
_CHECKED = Optim(lr=2e-6)  # a low rate, as in cases.py, so that rounding errors do not grow


@dataclass
class Side:
    """One side: its command, and the seconds and outcomes of its processes."""

    command: Callable[[Path], list[str]]  # returns the command, given an empty folder to write to
    # returns the outcome, given the folder and the time of the start
    read: Callable[[Path, float], dict[str, Any]]
    seconds: list[float] = field(default_factory=list)
    outcomes: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Run the command once, from the start of its process to its end."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            command, at = self.command(folder), time.time()
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True)
            self.seconds.append(time.perf_counter() - began)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise FrostlabError(f"{' '.join(command[1:4])} failed: {last}")
            self.outcomes.append(self.read(folder, at))


def whole_run(settings: BenchSettings) -> Iterator[Result]:
    """Time whole runs in turn; theirs is the faster of the Trainer with and without compiling."""
    recipe = recipe_from(_SMALL) if settings.small else load_recipe("imdb-gpt")
    prepared = as_token_data(prepare(recipe, settings.data_dir))
    model = build_for(recipe, prepared)
    assert isinstance(model, GPT)
    check = _check_losses(settings, recipe, prepared)
    steps = (recipe.train.epochs or 1) * steps_per_epoch(
        len(prepared.splits["train"]), recipe.train
    )
    sides = {"ours": _ours(recipe, settings.data_dir)}
    for compiles in (False, True) if settings.on_gpu else (False,):
        job = _job(settings, recipe, prepared, model, steps, compiles)
        sides["compiled Trainer" if compiles else "Trainer"] = _trainer(job, prepared)
    _take_turns(settings, sides)
    ours = sides.pop("ours")
    name, theirs = min(sides.items(), key=lambda side: np.median(side[1].seconds))
    _check_outcomes(ours, theirs, steps)
    mean = float(prepared.splits["train"].lengths.mean())
    work = step_work(model, round(mean), recipe.train.batch * mean)
    yield assemble_result(
        settings,
        PairTimes(
            SideTimes(ours.seconds, _median(ours, "prepare_s")),
            SideTimes(theirs.seconds, _median(theirs, "prepare_s")),
        ).to_dict(),
        StepWork(steps * work.flops, steps * work.parameters),
        steps * recipe.train.batch,
        case=f"{steps:,} steps",
        check=check,
        step=(ours.outcomes[-1]["how"], ours.outcomes[-1]["reason"]),
        notes=(
            f"whole processes in seconds, ours {_listed(ours)}",
            *(f"{name} {_listed(side)}" for name, side in sides.items()),
            f"theirs is the {name}",
        ),
        extra={
            "steps": steps,
            "trainable": work.parameters,
            "ours_accuracy": [outcome["accuracy"] for outcome in ours.outcomes],
            "theirs_accuracy": [outcome["accuracy"] for outcome in theirs.outcomes],
            "ours_wall": ours.outcomes[-1]["wall"],
            "theirs_is": name,
            "seconds": {name: side.seconds for name, side in [("ours", ours), *sides.items()]},
        },
    )


def _listed(side: Side) -> str:
    return ", ".join(f"{seconds:.1f}" for seconds in side.seconds)


def _median(side: Side, key: str) -> float:
    return float(np.median([outcome[key] for outcome in side.outcomes]))


def _take_turns(settings: BenchSettings, sides: dict[str, Side]) -> None:
    """Run all sides in every round; each round begins with another side."""
    began, names = time.perf_counter(), list(sides)
    for number in range(settings.rounds or ROUNDS):
        limit = settings.seconds
        if limit is not None and number >= ROUNDS and time.perf_counter() - began > limit:
            return
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            sides[name].run()


def _check_outcomes(ours: Side, theirs: Side, steps: int) -> None:
    """Refuse sides that have not done the same job."""
    for key in ("steps", "evaluations", "examples"):
        values = {outcome[key] for side in (ours, theirs) for outcome in side.outcomes}
        if len(values) > 1 or (key == "steps" and values != {steps}):
            raise FrostlabError(f"the sides did not do the same job: {key} {sorted(values)}")


def _ours(recipe: Recipe, data_dir: Path | None) -> Side:
    def command(folder: Path) -> list[str]:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
        data = [] if data_dir is None else ["--data-dir", str(data_dir)]
        return [sys.executable, "-m", "frostlab", "run", str(folder / "recipe.yaml"), "--json",
                "--runs", str(folder / "runs"), *data]  # fmt: skip

    def read(folder: Path, at: float) -> dict[str, Any]:
        (path,) = folder.glob("runs/*/predictions.json")
        record = RunRecord(path.parent)
        clocks, stepping = record.result.clocks, record.result.stepping[-1]
        wall, predictions = clocks.wall, record.predictions
        assert predictions is not None, "the file exists"
        return {
            "steps": record.result.steps,
            "accuracy": record.metrics["accuracy"],
            "examples": len(predictions.classes),
            "evaluations": len(clocks.evaluation_seconds),
            "prepare_s": wall.starting + wall.data + wall.building + wall.setup,
            "wall": asdict(wall),
            "how": stepping.how,
            "reason": stepping.reason,
        }

    return Side(command, read)


def _job(
    settings: BenchSettings,
    recipe: Recipe,
    prepared: Prepared,
    model: GPT,
    steps: int,
    compiles: bool,
) -> dict[str, Any]:
    """Return the Trainer's job; the Trainer evaluates in batches as large as ours."""
    train, optim = recipe.train, recipe.optim
    return {
        "model": asdict(model.config),
        "seed": recipe.seed,
        "pad": prepared.pad,
        "arguments": {
            "num_train_epochs": train.epochs,
            "per_device_train_batch_size": train.batch,
            "per_device_eval_batch_size": evaluation_batch(recipe, model),
            "learning_rate": optim.lr,
            "weight_decay": optim.decay,
            "adam_beta1": optim.betas[0],
            "adam_beta2": optim.betas[1],
            "adam_epsilon": optim.eps,
            "max_grad_norm": optim.clip or 0,
            "warmup_steps": warmup_steps(steps, optim),
            "bf16": settings.on_gpu,
            "use_cpu": not settings.on_gpu,
            "dataloader_pin_memory": settings.on_gpu,
            "torch_compile": compiles,
            **group_by_length(),
        },
    }


def _trainer(job: dict[str, Any], prepared: Prepared) -> Side:
    def command(folder: Path) -> list[str]:
        (folder / "job.json").write_text(json.dumps(job))
        for role, tokens in prepared.splits.items():
            np.savez(folder / f"{role}.npz", ids=tokens.ids, starts=tokens.starts,
                     stops=tokens.stops, labels=np.asarray(tokens.labels))  # fmt: skip
        return [sys.executable, "-m", "frostlab.bench.trainer_run", str(folder)]

    def read(folder: Path, at: float) -> dict[str, Any]:
        outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
        if not outcome.pop("best"):
            raise FrostlabError("the Trainer kept no best checkpoint")
        return {**outcome, "prepare_s": outcome["began"] - at}

    return Side(command, read)


def _check_losses(settings: BenchSettings, recipe: Recipe, prepared: Prepared) -> dict[str, Any]:
    """Compare both sides' losses on one batch without dropout, as in the other benchmarks."""
    changed = recipe.model.model_copy(update={"dropout": 0.0})
    without_dropout, tokens = recipe.model_copy(update={"model": changed}), prepared.splits["train"]
    rows = np.arange(min(recipe.train.batch, len(tokens)))
    feed = first_batch_only(lambda _: collate(tokens, rows, prepared.pad))

    def model() -> Any:
        return enlarge_head(build_for(without_dropout, prepared), "head")

    our_losses = first_losses(FrostlabLoop(model(), feed, _CHECKED, settings).step)
    trainer = TrainerLoop(Classifier(model()), FeedDataset(feed), _CHECKED, settings)
    return check_losses(our_losses, settings.precision, theirs=trainer.first_losses(CHECKED_STEPS))

"""Time the training step of every stage of the catalogue's experiments, each alone on the GPU.

Equal steps are timed once. Every step is as in a run, with full batches of random inputs without
padding, random weights and no prefix cache. A process per step builds it, compiles and captures it
and takes six steps, `--workers` of them at once; when all are prepared, one after another takes its
turn: warm-up steps, then rounds of several steps. `peak_bytes` covers building and all steps.

    python benchmarks/catalogue.py [--out steps.jsonl] [--workers 8] [--ids gpt-01 sst2-oelm]
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import device_name, timed
from frostlab.errors import first_line
from frostlab.experiments.steps import (
    Models,
    Step,
    allocate,
    planned_stages,
    precision_of,
    step_of,
    training_examples,
    with_vocabulary,
)
from frostlab.models.build import recipe_blueprint
from frostlab.models.conformer import Conformer
from frostlab.recipe.groups import group_names, load_group
from frostlab.recipe.recipe import Recipe
from frostlab.roles.read import anatomy
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute
from frostlab.training.setup import BuiltModel, default_modes, place_model
from frostlab.training.stages import Entered, enter_stage, lr_scales, stages_of
from frostlab.training.step import Batches, build_step
from frostlab.training.step.eager import EagerStep
from frostlab.training.tasks import TASKS
from frostlab.training.treatment import treat

ORDER = ("BertForSequenceClassification", "GPT", "Conformer", "Decoder")  # models, in turn
FIRST_STEPS = 6  # enough to compile and capture
WARM_UP = (5, 0.3)  # at least so many steps and seconds
ROUND = (5, 0.05)  # at least so many steps and about so many seconds


@dataclass
class Case:
    """A distinct step: the first experiment and stage that have it, and all that have it."""

    step: Step
    group: str
    experiment: str
    stage: int
    ids: list[str] = field(default_factory=list)


def distinct_steps(wanted: list[str] | None) -> list[Case]:
    """Return the distinct steps of the catalogue, or of the wanted experiments."""
    models: Models = {}
    cases: dict[Step, Case] = {}
    for name in group_names():
        group = load_group(name)
        for experiment in group.experiments:
            if wanted is not None and experiment not in wanted:
                continue
            recipe = group.recipe(experiment)
            for index, planned in enumerate(planned_stages(recipe, models)):
                case = cases.setdefault(planned.step, Case(planned.step, name, experiment, index))
                case.ids.append(f"{experiment}: {planned.stage.name}")
    return sorted(cases.values(), key=lambda case: ORDER.index(case.step.model))


# In the process of a step


def prepare(case: Case, device: torch.device) -> tuple[EagerStep, list[Batch]]:
    """Build a case's step and take its first steps."""
    recipe = with_vocabulary(load_group(case.group).recipe(case.experiment))
    precision = {"bfloat16": torch.bfloat16, "float32": torch.float32}[precision_of(recipe)]
    compute = Compute(device, precision)
    model, _ = recipe_blueprint(recipe)
    vocabulary = max(
        (m.num_embeddings for m in model.modules() if type(m) is nn.Embedding), default=0
    )
    allocate(model)
    treat(model, recipe, init=False)
    entered, stages = Entered(), stages_of(recipe, training_examples(recipe) or 1)
    for index, stage in enumerate(stages[: case.stage + 1]):
        entered = enter_stage(model, recipe, stage, index, entered)
    stage, built = stages[case.stage], BuiltModel(model, frozenset(), entered)
    current = place_model(built, recipe, stage, case.stage, TASKS[recipe.data.task], compute)
    actual = step_of(recipe, model, anatomy(model), current.objective.supervision)
    if actual != case.step:
        raise ValueError(f"the step is {actual}, not the catalogue's {case.step}")
    fill(model)
    current.objective.train()
    step = build_step(
        current.objective,
        stage.optim(recipe.optim),
        recipe.train,
        compute,
        steps=stage.steps,
        batches=Batches(tokens=recipe.train.batch * recipe.data.length),
        lr_scales=lr_scales(model, stage, case.stage, entered),
    )
    batches = [draw(recipe, model, vocabulary) for _ in range(recipe.train.accumulate)]
    take(step, batches, FIRST_STEPS)
    return step, batches


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give a model random weights, and its buffers the values of a new model."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.02)
        else:
            weight.fill_(float(name.endswith("weight")))
    for name, values in model.named_buffers():
        values.zero_()
        if name.endswith("position_ids"):
            values.copy_(torch.arange(values.shape[-1]))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()


def draw(recipe: Recipe, model: nn.Module, vocabulary: int) -> Batch:
    """Draw a micro-batch of full length."""
    rows, length = recipe.train.batch // recipe.train.accumulate, recipe.data.length
    if isinstance(model, Conformer):
        eeg = torch.randn(rows, length, model.config.channels)
        inputs = {"eeg": eeg, "subject": torch.randint(model.config.subjects, (rows,))}
        return Batch(inputs, torch.randn(rows, length), rows, rows * length, rows)
    language = recipe.data.task == "language"
    ids = torch.randint(vocabulary, (rows, length + language))
    targets = ids[:, 1:].contiguous() if language else torch.randint(2, (rows,))
    inputs = {"input_ids": ids[:, :length].contiguous()}
    return Batch(inputs, targets, rows, rows * length, targets.numel())


def take(step: EagerStep, batches: list[Batch], times: int) -> None:
    scored = sum(batch.scored for batch in batches)
    for _ in range(times):
        step(batches, scored, 1e-5)


def measure(
    step: EagerStep, batches: list[Batch], device: torch.device, rounds: int
) -> dict[str, Any]:
    """Warm up and time rounds of several steps."""
    seconds, steps = 0.0, 0
    while steps < WARM_UP[0] or seconds < WARM_UP[1]:
        seconds += timed(functools.partial(take, step, batches, WARM_UP[0]), device)
        steps += WARM_UP[0]
    count = max(ROUND[0], math.ceil(ROUND[1] * steps / seconds))
    work = functools.partial(take, step, batches, count)
    times = [1000 / count * timed(work, device) for _ in range(rounds)]
    how = step.kind
    if how == "captured" and getattr(step, "compiles", False):
        how = "compiled and captured"
    return {
        "how": how,
        "reason": step.reason,
        "ms": round(statistics.median(times), 4),
        "low": round(min(times), 4),
        "high": round(max(times), 4),
        "rounds": rounds,
        "steps_per_round": count,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def work_on(case: Case, device: torch.device, rounds: int, parent: Connection) -> None:
    """Prepare a step, say so, and measure it when the parent says so."""
    torch.manual_seed(0)
    torch.set_num_threads(1 if device.type == "cuda" else torch.get_num_threads())
    try:
        with default_modes(device):
            started = time.perf_counter()
            prepared_step = prepare(case, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            prepared = time.perf_counter() - started
            parent.send({})
            parent.recv()
            facts = measure(*prepared_step, device, rounds)
        facts |= {"prepare_s": round(prepared, 1)}
        parent.send(facts | {"device": device_name(device), "torch": torch.__version__})
    except EOFError:  # the parent has ended
        return
    except Exception as error:  # compilers and drivers raise errors of many types
        parent.send({"error": f"{type(error).__name__}: {first_line(error)}"})


# In the parent


@dataclass
class Worker:
    """The process of a step and the connection to it."""

    case: Case
    process: BaseProcess
    connection: Connection

    def answer(self) -> dict[str, Any]:
        """Wait for the next message; an error if the process ended without one."""
        try:
            message: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return {"error": f"its process ended with code {self.process.exitcode}"}
        return message


def start(case: Case, options: argparse.Namespace) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    arguments = (case, device, options.rounds, theirs)
    process = context.Process(target=work_on, args=arguments, daemon=True)
    process.start()
    theirs.close()
    return Worker(case, process, ours)


def prepare_all(cases: list[Case], options: argparse.Namespace, began: float) -> list[Worker]:
    """Prepare steps in several processes at once; return the workers that are ready, in order."""
    waiting, preparing, ready = list(cases), list[Worker](), list[Worker]()
    while waiting or preparing:
        left = options.limit_seconds - (time.perf_counter() - began)
        if left <= 0:
            break
        while waiting and len(preparing) < options.workers:
            preparing.append(start(waiting.pop(0), options))
        answered = wait([worker.connection for worker in preparing], timeout=left)
        for worker in [worker for worker in preparing if worker.connection in answered]:
            preparing.remove(worker)
            message = worker.answer()
            if "error" in message:
                report(worker.case, message, options.out)
            else:
                ready.append(worker)
    for worker in preparing:
        worker.process.kill()
        worker.process.join()
    for case in [worker.case for worker in preparing] + waiting:
        report(case, {"error": f"not prepared after {options.limit_seconds:g} s"}, options.out)
    return sorted(ready, key=lambda worker: cases.index(worker.case))


def report(case: Case, facts: dict[str, Any], out: Path | None) -> None:
    """Print a line, and add it to the file unless it is an error."""
    values = {"benchmark": "catalogue", **case.step._asdict(), **facts, "ids": case.ids}
    line = json.dumps(values, ensure_ascii=False)
    print(line, flush=True)
    if out is not None and "error" not in facts:
        with out.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ids", nargs="+", help="experiments; default: all")
    parser.add_argument("--workers", type=int, default=8, help="steps prepared at once")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="file to append the lines to")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=3600.0,
        help="leave out the steps that are not prepared after so many seconds",
    )
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        for worker in prepare_all(distinct_steps(options.ids), options, began):
            worker.connection.send("measure")
            report(worker.case, worker.answer(), options.out)
            worker.process.join()


if __name__ == "__main__":
    main()

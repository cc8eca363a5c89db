"""`fl.run`: what a record holds, what treatments share, and that every field does something."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import frostlab as fl
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.load import recipe_from
from frostlab.recipe.treatment import SAME, TREATMENTS
from frostlab.records.schema import Best, EvaluationEvent, ResumeEvent, StepEvent
from frostlab.training.step.eager import EagerStep
from tiny import tiny


def test_a_run_leaves_a_complete_record(tmp_path: Path) -> None:
    record = fl.run(tiny(treatment="oelm"), runs=tmp_path)
    assert record.folder == tmp_path / "run-oelm-s0"
    assert fl.Run(str(record.folder)) == record  # type: ignore[arg-type]
    modes = {p.stat().st_mode & 0o777 for p in record.folder.rglob("*") if p.is_file()}
    mask = os.umask(0o077)
    os.umask(mask)
    assert modes == {0o666 & ~mask}
    assert {p.name for p in record.folder.iterdir()} == {
        "recipe.yaml", "environment.json", "digests.json", "data.json", "events.jsonl",
        "result.json", "run.lock", "checkpoints", "model", "predictions.json", "manifest.json",
    }  # fmt: skip
    stored = yaml.safe_load((record.folder / "recipe.yaml").read_text())
    assert recipe_from(stored).digest == record.result.recipe_digest
    assert record.status == "finished"
    assert record.metrics.keys() == {"accuracy", "loss", "macro_f1"}
    assert record.result.steps == 16
    kinds = [event.kind for event in record.events()]
    assert kinds == ["start", "stage", "stepping", "step", "epoch", "evaluation", "checkpoint",
                     "step", "epoch", "evaluation", "checkpoint", "evaluation", "end"]  # fmt: skip
    assert all(e.frozen_verified == 8 for e in record.events(EvaluationEvent))
    assert record.result.parameters.frozen == 2 * 2 * (16 * 16 + 16)


@contextmanager
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def usual_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights of a run that is called in no special mode of torch."""
    digest = fl.run(tiny(), runs=tmp_path_factory.mktemp("usual")).result.weights_digest
    assert digest is not None
    return digest


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        _double,
    ],
    ids=["no_grad", "inference_mode", "autocast", "default_dtype"],
)
def test_modes_of_the_caller_do_not_change_a_run(
    mode: Callable[[], AbstractContextManager[None]], usual_digest: str, tmp_path: Path
) -> None:
    with mode():
        record = fl.run(tiny(), runs=tmp_path)
    assert record.result.weights_digest == usual_digest


def test_other_models_in_the_process_do_not_change_a_run(usual_digest: str, tmp_path: Path) -> None:
    """What surgery, measuring and training leave behind belongs to their own models."""
    model = GPT(GPTConfig(vocabulary=50, positions=12, width=16, layers=2, heads=2, classes=2))
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key")
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with fl.watch(model, optimizer, every_n_steps=1):
        for _ in range(2):
            model(torch.randint(50, (2, 12))).sum().backward()
            optimizer.step()
    fl.thaw(model)
    fl.grow(model)
    fl.run(tiny(treatment="oelm", model__layers=1, train__epochs=1), runs=tmp_path)
    assert fl.run(tiny(), runs=tmp_path).result.weights_digest == usual_digest


def test_compiled_code_of_an_earlier_run_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch compiles a second length differently, so the order of runs would change numbers."""
    import torch._dynamo

    forgotten: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append("all"))
    fl.run(tiny(train__epochs=1), runs=tmp_path)
    assert forgotten == ["all"]


def test_autocast_of_the_caller_does_not_keep_old_weights(tmp_path: Path) -> None:
    """Autocast empties its cache of cast weights only when it is left altogether."""
    recipe = tiny(train__precision="bf16")
    usual = fl.run(recipe, runs=tmp_path).result.weights_digest
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert fl.run(recipe, runs=tmp_path).result.weights_digest == usual
        assert not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 3  # as deep as before
        torch.autocast_decrement_nesting()


def test_steps_and_seconds_to_a_target(tmp_path: Path) -> None:
    record = fl.run(tiny(evaluate={"every": 2, "target": 0.0}), runs=tmp_path)
    target = record.result.target
    assert (target.step, target.epoch) == (2, 0.25)
    assert 0 < target.seconds < record.result.clocks.total_seconds
    first = record.events(EvaluationEvent)[0]
    assert (first.step, first.epoch, first.total_seconds) == (2, 0.25, target.seconds)
    never = fl.run(tiny(evaluate={"target": 1.1}), runs=tmp_path)
    assert never.result.target is None


@pytest.mark.parametrize("patience", [1, 3])
def test_early_stopping_in_a_run_is_exact(
    patience: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations improve twice and then never again."""
    from frostlab.training import loop

    values = iter([3.0, 2.0] + [5.0] * 50)
    monkeypatch.setattr(loop, "measure", lambda setting, split, step: {"loss": next(values)})
    recipe = tiny(evaluate={"every": 1, "patience": patience, "metric": "loss"})
    record = fl.run(recipe, runs=tmp_path)
    assert record.result.steps == 2 + patience
    assert record.result.stopped_early
    assert record.result.best == Best("loss", 2.0, 2)
    folders = sorted((record.folder / "checkpoints").iterdir())
    newest = {2 + patience, 1 + patience}  # the one before is for a damaged newest one
    assert [p.name for p in folders] == [f"step-{step:09d}" for step in sorted({2, *newest})]
    whole = [p for p in folders if (p / "optimizer.safetensors").exists()]
    assert len(whole) == 2, "an older best keeps its weights only"


FOR_GPT = [name for name in TREATMENTS if name != "frozen-up-gate"]  # GPT has no gate


SHORT = tiny(data__examples=64, train__epochs=1)


@pytest.fixture(scope="module")
def treated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fl.RunRecord]:
    runs = tmp_path_factory.mktemp("treated")
    return {name: fl.run(SHORT | {"treatment": name}, runs=runs) for name in FOR_GPT}


def test_a_treatment_of_the_gate_needs_a_gate(tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match="`gate` matches nothing in GPT; it has embedding"):
        fl.run(tiny(treatment="frozen-up-gate"), runs=tmp_path)
    model = {"kind": "decoder", "width": 16, "layers": 1, "heads": 2}
    data = {"name": "induction", "examples": 64, "length": 16, "symbols": 16}
    recipe = tiny(treatment="frozen-up-gate", model=model, data=data, train__epochs=1)
    assert fl.run(recipe, runs=tmp_path).result.parameters.frozen == 2 * 16 * 64


@pytest.mark.parametrize("name", FOR_GPT)
def test_treatments_leave_everything_else_as_it_was(
    name: str, treated: dict[str, fl.RunRecord]
) -> None:
    plain, this = treated["none"], treated[name]
    weights, touched = this.digests.weights, set(this.digests.touched)
    before = plain.digests.weights
    assert weights.keys() == before.keys()
    assert {key for key in weights if weights[key] != before[key]} == touched
    assert this.result.order_digest == plain.result.order_digest
    surgery = TREATMENTS[name]
    assert bool(touched) == bool(surgery.init)
    if set(surgery.freeze) <= {"query", "key"}:  # test_treatment.py has the others
        size = 16 * 16 + 16
        assert this.result.parameters.frozen == 2 * size * len(surgery.freeze)


def test_treatments_differ(treated: dict[str, fl.RunRecord]) -> None:
    final = {name: record.result.weights_digest for name, record in treated.items()}
    assert final["baseline"] == final["none"]
    assert len(set(final.values())) == len(FOR_GPT) - len(SAME)


def test_an_explicit_treatment_equals_the_named_one(
    tmp_path: Path, treated: dict[str, fl.RunRecord]
) -> None:
    spelled = {
        "init": [{"method": "orthogonalize", "select": ["query", "key"]}],
        "freeze": ["query", "key"],
    }
    record = fl.run(SHORT | {"treatment": spelled}, runs=tmp_path)
    assert record.result.weights_digest == treated["oelm"].result.weights_digest
    assert record.folder.name == "run-explicit-s0"


def test_the_same_recipe_gives_the_same_bits_and_another_folder(tmp_path: Path) -> None:
    one, two = (fl.run(tiny(), runs=tmp_path) for _ in range(2))
    assert (one.folder.name, two.folder.name) == ("run-none-s0", "run-none-s0-2")
    assert one.result.weights_digest == two.result.weights_digest
    assert one.metrics == two.metrics


def test_published_splits_report_the_best_evaluation_and_say_so(tmp_path: Path) -> None:
    rows = [{"text": f"w{i % 7} n{i}", "label": int(i % 7 > 3)} for i in range(120)]
    for split, part in {"train": rows[:80], "validation": rows[80:]}.items():
        path = tmp_path / "sst2" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        lines = (json.dumps({"sentence": r["text"], "label": r["label"]}) for r in part)
        path.write_text("\n".join(lines))
    recipe = tiny(
        data={"name": "sst2", "splits": "published", "length": 8}, tokenizer={"kind": "words"}
    )
    record = fl.run(recipe, runs=tmp_path / "runs", data_dir=tmp_path)
    assert record.result.caution == "checkpoint selected on the reporting split"
    evaluations = record.events(EvaluationEvent)
    assert {e.split for e in evaluations} == {"report"}
    looks = [e.metrics["accuracy"] for e in evaluations if e.checkpoint is None]
    assert record.metrics["accuracy"] == max(looks) == record.result.best.value
    assert record.result.steps == 2 * math.ceil(80 / 32), "nothing was carved from train"
    honest = fl.run(recipe_from({**recipe, "data": {"name": "sst2", "length": 8}}),
                    runs=tmp_path / "runs", data_dir=tmp_path)  # fmt: skip
    assert honest.result.caution is None
    assert [e.split for e in honest.events(EvaluationEvent)] == [
        "tune", "tune", "report",
    ]  # fmt: skip


def test_accumulated_parts_make_the_same_step(tmp_path: Path) -> None:
    losses = []
    for parts in (1, 4):
        recipe = tiny(train__accumulate=parts, model__dropout=0.0)
        record = fl.run(recipe, runs=tmp_path)
        losses.append([x for e in record.events(StepEvent) for x in e.loss])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_threads_are_those_of_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    asked = before + 1
    recipe = tiny(train__threads=asked, train__epochs=None, train__steps=2)
    record = fl.run(recipe, runs=tmp_path)
    assert record.start.threads == asked
    assert torch.get_num_threads() == before
    monkeypatch.setattr(EagerStep, "gradients", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fl.run(recipe, runs=tmp_path)
    assert torch.get_num_threads() == before


def test_threads_are_recorded_and_restored(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        recipe = tiny(train={"batch": 32, "steps": 2})
        record = fl.run(recipe, runs=tmp_path)
        (record.folder / "result.json").unlink()
        torch.set_num_threads(1)
        again = fl.run(recipe, out=record.folder, resume=True)
        assert [e.threads for e in (again.start, *again.events(ResumeEvent))] == [2, 2]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "problem"),
    [("cuda:7", "no CUDA device is available"), ("mps", "mps is not available"),
     ("gpu", "is not a device"), ("meta", "is not supported")],
)  # fmt: skip
def test_devices_that_are_not_there(device: str, problem: str, tmp_path: Path) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(fl.BadInput, match=problem):
        fl.run(tiny(train__device=device), runs=tmp_path)
    assert not list(tmp_path.iterdir())


def test_predictions_are_kept_and_give_the_reported_accuracy(tmp_path: Path) -> None:
    record = fl.run(tiny(), runs=tmp_path)
    kept = json.loads((record.folder / "predictions.json").read_text())
    right = [label == taken for label, taken in zip(kept["labels"], kept["classes"], strict=True)]
    assert sum(right) / len(right) == pytest.approx(record.metrics["accuracy"])
    assert min(kept["classes"]) >= 0

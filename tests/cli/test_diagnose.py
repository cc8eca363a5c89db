"""`frostlab diagnose`: a watched run, a recipe that is trained and judged, and bad input."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from cases import TYPICAL, slow_unless
from forked import Command
from frostlab.cli import diagnose as diagnose_command
from frostlab.flow.diagnosis import (
    FLOW_TARGETS,
    Diagnosis,
    Target,
    diagnose,
    sentence_of,
    targets_of,
    targets_table,
)
from frostlab.flow.judge import STILL
from frostlab.flow.measurements import Flow
from frostlab.recipe.load import load_recipe, shipped_recipes, short_run_settings
from frostlab.training import loop as flowing
from frostlab.training.stages import stages_of, steps_per_epoch
from hearing import hearing
from stages import progressive
from tiny import tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A watched run, one that nobody watched, and one in stages."""
    folder = tmp_path_factory.mktemp("diagnose")
    watched = tiny(watch={"every_n_steps": 2}, treatment={"freeze": ["query"]})
    fl.run(watched, runs=folder, name="watched")
    fl.run(tiny(), runs=folder, name="unseen")
    fl.run(progressive(watch={"every_n_steps": 2}), runs=folder, name="grown")
    return folder


def test_a_healthy_run(runs: Path, in_this_process: Command) -> None:
    done = in_this_process("diagnose", "watched", "--wide", "--runs", str(runs))
    assert done.returncode == 0, done.stderr
    first, second, *rest = done.stdout.splitlines()
    assert first == "all 16 parts that should learn do; 2 are frozen on purpose"
    assert second.startswith(f"{runs / 'watched-explicit-s0'}, finished, step 16: validation acc")
    text = "\n".join(rest)
    assert "layers[0].query" in text
    assert "front/output gradient" in text
    assert "wanted" not in text, "nothing is amiss"
    assert (runs / "watched-explicit-s0" / "flow" / "flow.html").is_file()


@pytest.mark.slow
def test_event_files_for_tensorboard(runs: Path, tmp_path: Path, in_this_process: Command) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("watched", "grown"):
        where = str(tmp_path / name)
        done = in_this_process("diagnose", name, "--runs", str(runs), "--tensorboard", where)
        assert done.returncode == 0, done.stderr
    read = EventAccumulator(str(tmp_path / "watched")).Reload()
    flow = fl.load_flow(runs / "watched-explicit-s0")
    norms = {event.step: event.value for event in read.Scalars("Gradient/norm")}
    clipped = {step: min(norms[step], 1.0) for step in flow.norms()}  # a flow's norms are clipped
    assert clipped == pytest.approx(flow.norms(), rel=1e-4)
    assert len(norms) > len(flow.norms()), "every step, also those that were not measured"
    assert read.Scalars("Validation/accuracy")
    grown = EventAccumulator(str(tmp_path / "grown")).Reload()
    stages = fl.load_flow(runs / "grown-none-s0").reports
    assert len(grown.Scalars("Gradient/norm")) > len(stages) > 0  # those before it too


def test_everything_as_json_without_torch(runs: Path) -> None:
    program = (
        "import sys\n"
        "sys.argv = ['frostlab', 'diagnose', 'watched', '--json', '--runs', sys.argv[1]]\n"
        "from frostlab.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules"
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, str(runs)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["healthy"], found["status"], found["metric"]) == (True, "finished", "accuracy")
    assert found["wanted"] == {}, "the recipe sets no target"
    (stage,) = found["stages"].values()
    assert stage["verdicts"]["layers[1].query"]["word"] == "frozen on purpose"
    assert stage["depth_ratios"]["front_ratio"] > 0
    assert [r["step"] for r in stage["flow"]["reports"]] == list(range(1, 17, 2))


@pytest.mark.slow
def test_stages_are_judged_one_by_one(runs: Path, in_this_process: Command) -> None:
    done = in_this_process("diagnose", "grown", "--wide", "--runs", str(runs))
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[:3]] == [
        "stage 1", "stage grown", "stage 3",
    ]  # fmt: skip
    assert (runs / "grown-none-s0" / "flow" / "3" / "flow.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("unseen",),
            "was not watched: run it with --set watch.every_n_steps=10, or train it",
        ),
        (("watched", "--steps", "9"), "--steps is for a recipe"),
        (("watched", "--set", "seed=1"), "--set is for a recipe"),
        (("watched", "--epochs", "9"), "--epochs is for a recipe"),
        (("watched", "--seed", "0"), "--seed is for a recipe"),
        (("watched", "--out", "x"), "--out is for a recipe"),
        (("majority-gpt", "--steps", "0"), "--steps 0: must be at least 1"),
        (("majority-gpt", "--epochs", "0"), "--epochs 0: must be at least 1"),
        (("majority-gpt", "--epochs", "1", "--steps", "1"), "--epochs and --steps exclude each"),
        (("wached-explicit-s0",), "nor a recipe; did you mean `watched-explicit-s0`?"),
        (("majority-gtp",), "nor a recipe; did you mean `majority-gpt`?"),
        (("",), "`` is neither a run in"),
        (("majority-gpt", "--set", "watch=null"), "a diagnosis needs the measurements"),
        (("majority-gpt", "--epochs", "1", "--set", "watch=null"), "needs the measurements"),
        (("majority-gpt", "--set", "optim.lt=1"), "did you mean `lr`?"),
        (("majority-gpt", "--set", "train.epochs=1"), "the duration with --epochs or --steps"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], message: str, runs: Path, in_this_process: Command
) -> None:
    before = sorted(runs.iterdir())
    done = in_this_process("diagnose", *arguments, "--runs", str(runs))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert message in done.stderr
    assert sorted(runs.iterdir()) == before


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "too few numbers": ({"gradient": [1.0]}, "is damaged"),
    "no numbers": ({"weight": ["a"] * 16}, "weight.0 should be a number, but is 'a'"),
    "no list": ({"ends": 3}, "ends should be a list, but is 3"),
    "no such part": ({"broken": [99]}, "is damaged"),
    "no module": ({"entropy": [1]}, "entropy should be an object, but is [1]"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_events_are_one_line(
    damage: dict[str, Any], reason: str, runs: Path, tmp_path: Path, in_this_process: Command
) -> None:
    whole = runs / "watched-explicit-s0"
    shutil.copytree(whole, tmp_path / "spoilt")
    events = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    spoilt = [e | (damage if e["kind"] == "flow" else {}) for e in events]
    (tmp_path / "spoilt" / "events.jsonl").write_text("\n".join(map(json.dumps, spoilt)))
    done = in_this_process("diagnose", str(tmp_path / "spoilt"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"{tmp_path}/spoilt/events.jsonl" in done.stderr
    assert reason in done.stderr


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the first layer's feed-forward network out of the optimizer."""
    original = flowing.watch

    def without(model: Any, optimizer: Any, *given: Any, **more: Any) -> Any:
        lost = {id(p) for p in model.blocks[0].up.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in lost]
        return original(model, optimizer, *given, **more)

    monkeypatch.setattr(flowing, "watch", without)


def test_a_recipe_is_tried_out_and_its_fault_found(
    tmp_path: Path, in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tiny(model__dropout=0.0)))
    arguments = ("diagnose", str(path), "--steps", "24", "--runs", str(tmp_path / "runs"),
                 "--set", "optim.lr=1e-3", "--device", "cpu")  # fmt: skip
    done = in_this_process(*arguments)
    assert done.returncode == 0, done.stderr
    plant(monkeypatch)
    done = in_this_process(*arguments)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[0] == "1 of 18 parts does not learn: layers[0].up"
    assert "layers[0].up: not learning: it is missing from the optimizer" in done.stdout
    names = ("diagnose-mine-none-s0", "diagnose-mine-none-s0-2")
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == list(names)
    recipe = yaml.safe_load((tmp_path / "runs" / names[0] / "recipe.yaml").read_text())
    assert recipe["train"]["steps"] == 24
    assert recipe["optim"]["lr"] == 1e-3
    assert recipe["watch"]["every_n_steps"] == 1
    found = diagnose(tmp_path / "runs" / names[1])
    assert not found.healthy
    assert found.flows["train"].verdicts()["layers[0].up"].word == STILL


def test_an_eeg_recipe_is_trained_for_epochs_and_judged_by_three_targets(
    tmp_path: Path, in_this_process: Command
) -> None:
    recipe = hearing(data__seconds=9, data__unseen=0, data__length=128, train__epochs=1)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run = tmp_path / "run"
    done = in_this_process(
        "diagnose", str(tmp_path / "recipe.yaml"), "--epochs", "12", "--seed", "3",
        "--out", str(run), "--json",
    )  # fmt: skip
    kept = json.loads((run / "targets.json").read_text())
    shown = json.loads(done.stdout)
    failed = not kept["passed"] or shown["healthy"] is False
    assert done.returncode == (1 if failed else 0), done.stderr
    used = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (used["train"]["epochs"], used["watch"]["every_n_steps"], used["seed"]) == (12, 10, 3)
    assert [t["name"] for t in kept["targets"]] == ["front_ratio", "weight_change", "pearson"]
    assert all(t["value"] is not None for t in kept["targets"])
    result = json.loads((run / "result.json").read_text())
    assert kept["targets"][2]["value"] == result["best"]["value"]
    assert kept["passed"] == all(t["value"] > t["wanted"] for t in kept["targets"])
    assert shown["targets"] == kept["targets"]
    assert kept["verdict"] == shown["verdict"]
    assert shown["eeg"] == kept["eeg"]
    assert kept["eeg"]["gradient_norm"]["steps"] == result["steps"] // 2
    again = in_this_process("diagnose", str(run))
    text = " ".join(again.stdout.split())
    assert f"norm of the gradient in the last {result['steps'] // 2} steps: median" in text
    for hint in kept["eeg"]["hints"]:
        assert f"{hint['trouble']}: {hint['text']}" in text


def test_a_missed_target_is_exit_code_1(tmp_path: Path, in_this_process: Command) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny(evaluate__target=1.1)))
    done = in_this_process(
        "diagnose", str(tmp_path / "recipe.yaml"), "--epochs", "1", "--out", str(tmp_path / "run")
    )
    assert done.returncode == 1, done.stderr
    assert not [line for line in done.stdout.splitlines() if "do not learn" in line]
    assert "\n\ntargets: fail\n  validation accuracy" in done.stdout
    assert "wanted > 1.1  fail" in done.stdout
    assert "wanted > 0.01  fail" not in done.stdout, "a target of EEG alone"


@pytest.mark.slow
def test_epochs_are_shared_among_stages(tmp_path: Path, in_this_process: Command) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(progressive(optim={"warmup": 4})))
    done = in_this_process(
        "diagnose", str(tmp_path / "recipe.yaml"), "--epochs", "6", "--out", str(tmp_path / "run")
    )
    assert done.returncode in (0, 1), done.stderr
    used = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert [(stage["epochs"], stage["steps"]) for stage in used["stages"]] == [(2, None)] * 3
    assert used["optim"]["warmup"] == 0.1


def test_targets_that_do_not_apply_are_left_out(runs: Path) -> None:
    def names(diagnosis: Diagnosis) -> list[str]:
        return [target.name for target in targets_of(diagnosis)]

    text = diagnose(runs / "watched-explicit-s0")
    assert names(text) == []
    text = replace(text, wanted=FLOW_TARGETS)
    assert names(text) == ["front_ratio", "weight_change"]
    flow = text.flows["train"]
    measured = Flow("GPT", "AdamW")
    measured.parts, measured.groups = flow.parts, flow.groups
    heard = replace(text, metric="pearson", value=None, flows={"train": measured},
                    wanted=FLOW_TARGETS | {"pearson": 0.3})  # fmt: skip
    assert [target.value for target in targets_of(heard)] == [None] * 3, "nothing was measured"
    headless = [replace(r, largest=r.largest | {"output": math.nan}) for r in flow.reports]
    measured.reports.extend(headless)
    assert names(replace(text, flows={"train": measured})) == ["weight_change"]
    measured.reports[:] = [replace(report, ranges={}) for report in flow.reports]
    assert names(replace(text, flows={"train": measured})) == [], "the front is frozen"


def test_targets_pass_only_together() -> None:
    good = Target("pearson", 0.31, 0.3)
    assert targets_table((good,)) == (
        "targets: pass\n  validation pearson  0.31  wanted > 0.3  pass"
    )
    for bad in (Target("pearson", 0.3, 0.3), Target("pearson", None, 0.3)):
        assert targets_table((good, bad)).startswith("targets: fail")


def test_a_run_that_diverges_is_looked_at_all_the_same(
    tmp_path: Path, in_this_process: Command
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tiny(optim={"lr": 1e30, "clip": None})))
    done = in_this_process("diagnose", str(path), "--steps", "9", "--runs", str(tmp_path / "runs"))
    assert done.returncode == 1, done.stderr
    assert "the run diverged: step 2: the gradient of" in done.stdout


def test_the_sentence_names_what_is_wrong(runs: Path) -> None:
    flow = diagnose(runs / "watched-explicit-s0").flows["train"]
    assert sentence_of(Flow("GPT", "AdamW")) == "no step has been measured yet"
    early = Flow("GPT", "AdamW")
    early.parts, early.groups = flow.parts, flow.groups
    early.reports.append(flow.reports[0])
    assert sentence_of(early).startswith("only one step has been measured; most verdicts need two")
    flow.moved = ("layers[0].query",)
    assert sentence_of(flow) == (
        "1 of 18 parts moved though it is frozen: layers[0].query; 1 is frozen on purpose"
    )
    diagnosis = Diagnosis(
        runs, "running", None, 7, "pearson", 0.25, {"train": flow}, {"pearson": 0.3}
    )
    assert diagnosis.validation == "validation pearson 0.25 (wanted > 0.3, not reached)"
    assert not diagnosis.healthy


@pytest.mark.parametrize("name", slow_unless(TYPICAL, shipped_recipes()))
def test_every_shipped_recipe_can_be_cut_short(name: str) -> None:
    whole = load_recipe(name)
    short = load_recipe(name, short_run_settings(whole, steps=200))
    stages = stages_of(short, 10_000)
    assert sum(stage.steps for stage in stages) == 200 // len(stages) * len(stages)
    assert [stage.name for stage in stages] == [stage.name for stage in stages_of(whole, 10**6)]
    assert [stage.lr for stage in stages] == [stage.lr for stage in stages_of(whole, 10**6)]
    assert short.watch is not None
    assert short.watch.every_n_steps == max(1, stages[0].steps // 20)
    assert short.model == whole.model
    assert short.optim.lr == whole.optim.lr
    long, run_name = diagnose_command._shortened(name, 12, None, {}, None)
    stages = stages_of(long, 10_000)
    per_epoch = steps_per_epoch(10_000, long.train)
    assert {stage.steps for stage in stages} == {12 // len(stages) * per_epoch}
    assert [stage.name for stage in stages] == [stage.name for stage in stages_of(whole, 10**6)]
    assert long.watch is not None
    assert long.watch.every_n_steps == 10
    assert run_name == f"diagnose-{name}"


def test_pictures_are_not_written_through_links(
    runs: Path, tmp_path: Path, in_this_process: Command
) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(runs / "watched-explicit-s0", folder)
    shutil.rmtree(folder / "flow", ignore_errors=True)
    outside.mkdir()
    (folder / "flow").symlink_to(outside)
    done = in_this_process("diagnose", str(folder))
    assert done.returncode == 0
    reason = f"{folder / 'flow'} is not inside {folder}, after following links"
    assert f"no picture: {reason}" in done.stdout
    assert not list(outside.iterdir())

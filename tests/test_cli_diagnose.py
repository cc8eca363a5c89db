"""`frostlab diagnose`: a run that was watched, a recipe that is tried out, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from frostlab.flow.diagnosis import Diagnosis, diagnose, sentence_of
from frostlab.flow.judge import STILL
from frostlab.flow.measurements import Flow
from frostlab.recipe.load import load_recipe, shipped_recipes, shortened
from frostlab.training import loop as flowing
from frostlab.training.stages import stages_of
from stages import progressive
from test_cli import Command, in_this_process
from tiny import tiny

__all__ = ["in_this_process"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A watched run, one that nobody watched, and one in stages."""
    folder = tmp_path_factory.mktemp("diagnose")
    watched = tiny(watch={"every": 2}, treatment={"freeze": ["query"]})
    fl.run(watched, runs=folder, name="watched")
    fl.run(tiny(), runs=folder, name="unseen")
    fl.run(progressive(watch={"every": 2}), runs=folder, name="grown")
    return folder


def test_a_healthy_run(runs: Path, in_this_process: Command) -> None:
    done = in_this_process("diagnose", "watched", "--runs", str(runs))
    assert done.returncode == 0, done.stderr
    first, second, *rest = done.stdout.splitlines()
    assert first == "all 16 parts that should learn do; 2 are frozen on purpose"
    assert second.startswith(f"{runs / 'watched-explicit-s0'}, finished, step 16: validation acc")
    text = "\n".join(rest)
    assert "layers[0].query" in text
    assert "wanted > 0.1)" in text
    assert "wanted > 0.01)" in text
    assert (runs / "watched-explicit-s0" / "flow" / "flow.html").is_file()


def test_event_files_for_tensorboard(runs: Path, tmp_path: Path, in_this_process: Command) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("watched", "grown"):
        where = str(tmp_path / name)
        done = in_this_process("diagnose", name, "--runs", str(runs), "--tensorboard", where)
        assert done.returncode == 0, done.stderr
    read = EventAccumulator(str(tmp_path / "watched")).Reload()
    flow = fl.flow_of(runs / "watched-explicit-s0")
    found = {event.step: event.value for event in read.Scalars("Gradient/norm")}
    assert found == pytest.approx(flow.norms())
    assert read.Scalars("Validation/accuracy")
    grown = EventAccumulator(str(tmp_path / "grown")).Reload()
    stages = fl.flow_of(runs / "grown-none-s0").reports
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
    assert found["wanted"] == {"front_ratio": 0.1, "weight_change": 0.01, "pearson": 0.3}
    (stage,) = found["stages"].values()
    assert stage["verdicts"]["layers[1].query"]["word"] == "frozen on purpose"
    assert stage["ends"]["front_ratio"] > 0
    assert [r["step"] for r in stage["flow"]["reports"]] == list(range(1, 17, 2))


def test_stages_are_judged_one_by_one(runs: Path, in_this_process: Command) -> None:
    done = in_this_process("diagnose", "grown", "--runs", str(runs))
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[:3]] == [
        "stage 1", "stage grown", "stage 3",
    ]  # fmt: skip
    assert (runs / "grown-none-s0" / "flow" / "3" / "flow.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("unseen",), "was not watched: run it with --set watch.every=10, or `frostlab diagnose"),
        (("watched", "--steps", "9"), "--steps is for a recipe"),
        (("watched", "--set", "seed=1"), "--set is for a recipe"),
        (("majority-gpt", "--steps", "0"), "--steps is 0; a whole number"),
        (("wached-explicit-s0",), "no recipe; did you mean `watched-explicit-s0`?"),
        (("majority-gtp",), "no recipe; did you mean `majority-gpt`?"),
        (("",), "`` is no run in"),
        (("majority-gpt", "--set", "watch=null"), "a diagnosis watches"),
        (("majority-gpt", "--set", "optim.lt=1"), "did you mean `lr`?"),
        (("majority-gpt", "--set", "train.epochs=1"), "a diagnosis trains for --steps"),
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
    "too few numbers": ({"gradient": [1.0]}, "holds no whole flow"),
    "no numbers": ({"weight": ["a"] * 16}, "weight.0 should be a number, but is 'a'"),
    "no list": ({"ends": 3}, "ends should be a list, but is 3"),
    "no such part": ({"broken": [99]}, "holds no whole flow"),
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
    assert recipe["watch"]["every"] == 1
    found = diagnose(tmp_path / "runs" / names[1])
    assert not found.healthy
    assert found.flows["train"].verdicts()["layers[0].up"].word == STILL


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
    assert sentence_of(early).startswith("one step has been measured, and who learns is told")
    flow.moved = ("layers[0].query",)
    assert sentence_of(flow) == (
        "1 of 18 parts moved though it is frozen: layers[0].query; 1 is frozen on purpose"
    )
    told = Diagnosis(runs, "running", None, 7, "pearson", 0.25, {"train": flow})
    assert told.validation == "validation pearson 0.25 (wanted > 0.3, not reached)"
    assert not told.healthy


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_can_be_cut_short(name: str) -> None:
    whole = load_recipe(name)
    short = load_recipe(name, shortened(whole, 200))
    stages = stages_of(short, 10_000)
    assert sum(stage.steps for stage in stages) == 200 // len(stages) * len(stages)
    assert [stage.name for stage in stages] == [stage.name for stage in stages_of(whole, 10**6)]
    assert [stage.lr for stage in stages] == [stage.lr for stage in stages_of(whole, 10**6)]
    assert short.watch is not None
    assert short.watch.every == max(1, stages[0].steps // 20)
    assert short.model == whole.model
    assert short.optim.lr == whole.optim.lr

"""`frostlab runs`, `show`, `diff`, `note`, `tag` and `clean`, and all tables in 80 columns."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml

import frostlab as fl
from forked import Command
from frostlab.recipe.recipe import Recipe
from run_made import RESULT, START, step_event, write_events
from stages import progressive
from tiny import tiny

RECIPE = Recipe.model_validate({"train": {"batch": 8, "epochs": 2}})


def write_run(folder: Path, lr: float, seed: int, treatment: str, accuracy: float) -> None:
    folder.mkdir(parents=True)
    facts = {"seed": seed, "treatment": treatment, "recipe_digest": f"{lr}{seed}{treatment}"}
    write_events(folder, START | facts, step_event(1), step_event(2, loss=[lr]))
    recipe = RECIPE.to_dict() | {"treatment": treatment, "seed": seed}
    recipe["optim"] = recipe["optim"] | {"lr": lr}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    report = {"report": {"accuracy": accuracy, "loss": 1 - accuracy}, "caution": None}
    (folder / "result.json").write_text(json.dumps(RESULT | facts | report))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight runs: two treatments, two learning rates, two seeds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    accuracy = 0.5
    for treatment in ("none", "oelm"):
        for lr in (1e-3, 1e-4):
            for seed in (0, 1):
                name = f"imdb-{treatment}-{lr:g}-s{seed}"
                write_run(tmp_path / "runs" / name, lr, seed, treatment, accuracy)
                accuracy += 1 / 32
    return tmp_path / "runs"


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_runs_are_filtered_sorted_and_told_apart(runs: Path, in_this_process: Command) -> None:
    done = in_this_process(
        "runs", "--where", "treatment=oelm,optim.lr>1e-4", "--sort", "-accuracy",
        "--columns", "optim.lr,train.batch",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["imdb-oelm-0.001-s1", "imdb-oelm-0.001-s0"]
    assert "optim.lr  train.batch" in lines[0]
    assert lines[-1].startswith("--wide also shows")
    whole = in_this_process("runs").stdout
    assert "optim.lr" in whole.splitlines()[0], "it differs"
    assert "train.batch" not in whole
    assert widest(whole) <= 80
    wide = in_this_process("runs", "--wide", "--where", "seed=0", "--where", "optim.lr=1e-4").stdout
    assert "optim.lr" not in wide.splitlines()[0], "it is the same in the runs shown"
    assert wide.splitlines()[0].endswith("step ms    total")
    listed = json.loads(in_this_process("runs", "--where", "seed=1", "--json").stdout)
    assert {run["settings"]["optim.lr"] for run in listed} == {1e-3, 1e-4}
    none = in_this_process("runs", "--where", "seed=7")
    assert (none.returncode, none.stdout) == (0, "none of 8 runs fits --where\n")


def test_arms_over_seeds(runs: Path, in_this_process: Command) -> None:
    text = in_this_process("runs", "--group", "-seed", "--sort", "-accuracy").stdout
    head, *rows = text.splitlines()
    assert head.split() == ["treatment", "optim.lr", "n", "accuracy", "95", "%", "interval"]
    assert [row.split()[:3] for row in rows] == [
        ["oelm", "0.0001", "2"], ["oelm", "0.001", "2"],
        ["none", "0.0001", "2"], ["none", "0.001", "2"],
    ]  # fmt: skip
    assert widest(text) <= 80
    groups = json.loads(in_this_process("runs", "--group", "treatment", "--json").stdout)
    assert [group["means"]["accuracy"]["n"] for group in groups] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs", "--where", "optim.lt=1"), "did you mean `optim.lr`?"),
        (("runs", "--sort", "-acuracy"), "did you mean `accuracy`?"),
        (("runs", "--columns", "train.bach"), "did you mean `train.batch`?"),
        (("runs", "--group", "-sede"), "did you mean `seed`?"),
        (("diff", "imdb-none-0.001-s0", "nothing"), "no run 'nothing' in runs"),
        (("note", "imdb-none-0.001-s0", " "), "a note should have 1 to 2000 characters"),
        (("tag", "imdb-none-0.001-s0", "a b"), "should be one word"),
        (("tag", "imdb-none-0.001-s0", "keep", "--remove"), "has no tag 'keep'"),
        (("clean", "--older", "soon"), "'soon' is not a duration; e.g. 12h, 30d or 2w"),
        (("clean", "--older", "1d"), "add --yes to remove these runs, or --dry-run to look only"),
        (("clean", "--older", "1d", "--keep", "x"), "no run has this tag"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], message: str, runs: Path, in_this_process: Command
) -> None:
    done = in_this_process(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert len([path for path in runs.iterdir() if path.is_dir()]) == 8


def test_no_runs_yet_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: Command
) -> None:
    monkeypatch.setenv("FROSTLAB_RUNS", str(tmp_path / "later"))
    for arguments in ((), ("--where", "optim.lr>1"), ("--group", "-seed"), ("--columns", "x")):
        done = in_this_process("runs", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, "no runs yet\n", "")


def test_notes_and_tags_are_shown(runs: Path, in_this_process: Command) -> None:
    name = "imdb-oelm-0.001-s1"
    assert in_this_process("note", name, "too slow").stdout == f"{name}: 1 note\n"
    assert in_this_process("tag", name, "keep").stdout == f"{name}: keep\n"
    listed = in_this_process("runs", "--wide", "--where", "tag=keep").stdout.splitlines()
    assert len(listed) == 2
    assert "too slow" in listed[1]
    shown = in_this_process("show", name).stdout
    assert "  tags     keep\n" in shown
    assert shown.rstrip().endswith(": too slow")
    assert in_this_process("tag", name, "keep", "--remove").stdout == f"{name}: no tags\n"
    assert "  tag  " not in in_this_process("runs", "--wide").stdout.splitlines()[0]


def test_differences(runs: Path, in_this_process: Command) -> None:
    done = in_this_process("diff", "imdb-none-0.001-s0", "imdb-none-0.0001-s0")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["optim.lr", "0.001", "0.0001"] in lines
    assert "losses: first differ at step 2 (0.001 and 0.0001)" in done.stdout
    assert widest(done.stdout) <= 80
    found = json.loads(
        in_this_process("diff", *map(str, sorted(runs.glob("i*"))[:2]), "--json").stdout
    )
    assert found["settings"] == {"seed": [0, 1]}


def test_old_runs_are_removed(runs: Path, in_this_process: Command) -> None:
    in_this_process("tag", "imdb-none-0.001-s0", "keep")
    write_run(runs / "new", 1e-3, 0, "none", 0.5)
    ended = {"ended": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())}
    (runs / "new" / "result.json").write_text(json.dumps(RESULT | ended))
    looked = in_this_process("clean", "--older", "30d", "--dry-run")
    assert looked.returncode == 0, looked.stderr
    assert "imdb-none-0.001-s0 is kept: it is tagged keep\n" in looked.stdout
    assert "7 runs (" in looked.stdout
    assert looked.stdout.endswith(") would be removed\n")
    assert widest(looked.stdout) <= 80
    assert len(list(runs.glob("imdb-*"))) == 8
    done = in_this_process("clean", "--older", "30d", "--keep", "tagged", "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(") removed\n")
    assert sorted(name for name in os.listdir(runs) if name[0] != ".") == [
        "imdb-none-0.001-s0", "new",
    ]  # fmt: skip
    again = in_this_process("clean", "--older", "30d", "--yes").stdout
    assert again.endswith("nothing to remove: no run is older than 30d, except those kept\n")


@pytest.mark.parametrize(
    ("typed", "offered", "not_offered"),
    [
        ("runs --where opt", "optim.lr", "train.batch"),
        ("runs --where seed=1,treatment=o", "seed=1,treatment=oelm", "treatment=none"),
        ("runs --columns optim.lr,train.b", "optim.lr,train.batch", "optim.decay"),
        ("runs --sort accu", "accuracy", "name"),
        ("show imdb-oelm-0.001", "imdb-oelm-0.001-s1", "imdb-none-0.001-s0"),
    ],
)
def test_completion(
    typed: str,
    offered: str,
    not_offered: str,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: Command,
) -> None:
    monkeypatch.setenv("_FROSTLAB_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"frostlab {typed}")
    text = in_this_process().stdout
    assert f'"{offered}"' in text
    assert not_offered not in text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real records: a watched run in stages, and a comparison."""
    folder = tmp_path_factory.mktemp("records")
    fl.run(progressive(watch={"every_n_steps": 4}), runs=folder / "runs", name="grown")
    small = tiny(train={"steps": 4, "batch": 16, "threads": 1}, model__layers=1)
    fl.compare(small, arms=["baseline", "oelm"], seeds=2, clock=False, out=folder / "c")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs",),
        ("show", "grown"),
        ("diagnose", "grown"),
        ("judge", "../c"),
        ("show", "../c"),
        ("recipes",),
        ("inspect", "gpt2", "--freeze", "query,key"),
        ("inspect", "albert"),
        ("diff", "../c/runs/baseline-s0", "../c/runs/oelm-s0"),
    ],
)
def test_everything_fits_80_columns(
    arguments: tuple[str, ...],
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: Command,
) -> None:
    monkeypatch.chdir(trained / "runs")
    monkeypatch.setenv("FROSTLAB_RUNS", ".")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("frostlab.flow.show.flow_page", lambda flow, folder: [])  # it takes seconds
    done = in_this_process(*arguments)
    assert done.returncode == 0, done.stderr
    long = [line for line in done.stdout.splitlines() if len(line) > 80 and "/" not in line]
    assert long == [], "only a path may be longer"
    assert len(done.stdout.splitlines()) > 2


def test_a_comparison_is_shown(
    trained: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: Command
) -> None:
    monkeypatch.chdir(trained)
    in_this_process("tag", "c", "paper")
    in_this_process("note", "c", "the first try")
    text = in_this_process("show", "c").stdout
    for part in (
        "tags: paper", "oelm: too few seeds", "page: c/comparison.md", "\narms\n  baseline: ",
        "2 of 2 runs finished", "evidence.json", "the first try", "\n  runs/ ",
    ):  # fmt: skip
        assert part in text
    found = json.loads(in_this_process("show", "c", "--json").stdout)
    assert found["tags"] == ["paper"]
    assert set(found["evidence"]["arms"]) == {"baseline", "oelm"}
    assert in_this_process("verify", "c").returncode == 0, "notes and tags change no record"
    same = in_this_process("diff", "c", "c").stdout
    assert same.startswith("plan: equal\n")
    mixed = in_this_process("diff", "c", "runs/grown-none-s0")
    assert (mixed.returncode, "give two runs, or two comparisons" in mixed.stderr) == (2, True)

"""`frostlab recipes`, `run`, `runs`, `show`, `verify`, as programs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import frostlab as fl
from forked import Command, frostlab_command
from frostlab.cli.main import app
from frostlab.recipe.groups import group_names, load_group
from frostlab.recipe.load import shipped_comparisons, shipped_experiments, shipped_recipes
from tiny import tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: one by the command, one by the library."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "mine.yaml").write_text(yaml.safe_dump(tiny()))
    done = frostlab_command(
        "run", str(folder / "mine.yaml"), "--set", "treatment=oelm", "--seed", "3",
        "--runs", str(folder / "runs"), "--tensorboard", str(folder / "board"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert "step 8  accuracy " in done.stderr, "plain lines where nobody watches"
    fl.run(tiny(), runs=folder / "runs", name="other")
    return folder / "runs"


def test_recipes_are_listed() -> None:
    lines = frostlab_command("recipes").stdout.splitlines()
    names = [line.split()[0] for line in lines if line and line[0] != " "]
    experiments = shipped_experiments()
    recipes = {name: about for name, about in shipped_recipes().items() if name not in experiments}
    groups = {name: load_group(name).about for name in group_names()}
    assert names == [
        *recipes, "comparisons,", *shipped_comparisons(), "groups", *groups,
    ]  # fmt: skip
    listed = json.loads(frostlab_command("recipes", "--json").stdout)
    by_kind: dict[str, dict[str, str]] = {}
    for entry in listed:
        by_kind.setdefault(entry["kind"], {})[entry["name"]] = entry["about"]
    about = {name: values["about"] for name, values in shipped_comparisons().items()}
    own = {name: shipped_recipes()[name] for name in experiments}
    assert by_kind == {"recipe": recipes, "experiment": own, "comparison": about, "group": groups}


def test_the_experiments_of_a_group_are_listed(in_this_process: Command) -> None:
    lines = in_this_process("recipes", "--group", "phase3").stdout.splitlines()
    assert lines[0].startswith("phase3: GPT Medium-512 as a language model")
    assert lines[2].split() == ["id", "data", "method", "lr", "perplexity", "time"]
    assert lines[4].split() == ["gpt-02", "tinystories", "oelm", "1e-3", "4.69", "8", "h"]
    assert lines[10].split() == [
        "openwebtext-random", "openwebtext", "oelm-random", "1e-3", "optional", "12", "h",
    ]  # fmt: skip
    assert "perplexity and time: as the sources reported them, on 4 × RTX A5000" in lines
    fair = "comparisons whose arms differ only in what is compared, `frostlab compare phase3`:"
    assert " ".join(map(str.strip, lines)).endswith(f"{fair} tinystories, openwebtext, wikitext103")
    listed = json.loads(in_this_process("recipes", "--group", "xnli", "--json").stdout)
    assert (listed["name"], listed["machine"]) == ("xnli", "4 × RTX A5000")
    assert [entry["id"] for entry in listed["experiments"]] == ["xnli-01", "xnli-02", "xnli-random"]
    first = listed["experiments"][0]
    assert (first["data"], first["method"], first["lr"]) == ("xnli", "random-trainable", 2e-5)
    assert first["reported"] == {"accuracy": 0.7671, "step_seconds": 0.162}
    assert first["digest"] == fl.load_recipe("xnli-01").digest


@pytest.mark.parametrize("group", group_names())
def test_the_table_of_a_group_fits_into_80_columns(
    group: str, in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = in_this_process("recipes", "--group", group).stdout
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out, "every cell is whole"


def test_an_unknown_group_is_refused_in_one_line(in_this_process: Command) -> None:
    result = in_this_process("recipes", "--group", "phase5")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "no group is called 'phase5'; did you mean `phase" in result.stderr
    result = in_this_process("run", "gpt-08")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "no recipe is called 'gpt-08'; did you mean `gpt-0" in result.stderr
    result = in_this_process("run", "phase3")
    assert "it is a group of experiments: `frostlab compare phase3`" in result.stderr


def test_a_run_by_command_has_its_settings(finished: Path) -> None:
    record = fl.RunRecord(finished / "mine-oelm-s3")
    recipe = yaml.safe_load((record.folder / "recipe.yaml").read_text())
    assert (recipe["treatment"], recipe["seed"], recipe["train"]["batch"]) == ("oelm", 3, 32)
    assert record.status == "finished"
    assert "mine.yaml" in record.environment["command"]


def test_a_run_by_command_has_its_event_files(finished: Path, in_this_process: Command) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = finished.parent / "board"
    read = EventAccumulator(str(board)).Reload()
    assert [event.step for event in read.Scalars("Training/loss")] == list(range(1, 17))
    assert {"Training/learning_rate", "Validation/accuracy"} <= set(read.Tags()["scalars"])
    recipe = str(finished.parent / "mine.yaml")
    refused = in_this_process("run", recipe, "--tensorboard", str(board))
    assert (refused.returncode, refused.stderr) == (
        2, f"frostlab: --tensorboard {board} holds event files already; choose another folder\n"
    )  # fmt: skip


def test_verify(finished: Path, tmp_path: Path) -> None:
    done = frostlab_command("verify", str(finished))
    assert done.returncode == 0
    assert done.stdout == "runs and comparisons checked: 2; all files are unchanged\n"
    shutil.copytree(finished, tmp_path / "runs")
    result = tmp_path / "runs" / "mine-oelm-s3" / "result.json"
    result.write_text(result.read_text().replace('"steps": 16', '"steps": 17'))
    (result.parent / "digests.json").unlink()
    (result.parent / "more.txt").write_text("")
    done = frostlab_command("verify", str(tmp_path / "runs"))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"{result.parent / 'digests.json'} is missing",
        f"{result} was changed after it was written",
        f"{result.parent / 'more.txt'} was added",
    ]
    done = frostlab_command("verify", str(result.parent), "--json")
    assert done.returncode == 1
    listed = json.loads(done.stdout)
    assert listed["checked"] == 1
    assert listed["problems"][1] == {
        "path": str(result), "problem": "was changed after it was written",
    }  # fmt: skip
    done = frostlab_command("verify", str(tmp_path / "nowhere"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_runs_and_show(finished: Path) -> None:
    table = frostlab_command("runs", "--runs", str(finished)).stdout
    assert "mine-oelm-s3" in table
    assert "other-none-s0" in table
    listed = json.loads(frostlab_command("runs", "--runs", str(finished), "--json").stdout)
    assert {run["status"] for run in listed} == {"finished"}
    shown = frostlab_command("show", "mine", "--runs", str(finished)).stdout
    record = fl.RunRecord(finished / "mine-oelm-s3")
    for text in ("oelm", record.result.recipe_digest, "0:00:0", "finished", "macro_f1"):
        assert text in shown
    shown_json = json.loads(
        frostlab_command("show", "mine", "--runs", str(finished), "--json").stdout
    )
    assert shown_json["result"]["report"] == record.metrics


def test_no_runs_yet(tmp_path: Path, finished: Path) -> None:
    for exists in (False, True):
        assert (tmp_path / "runs").is_dir() is exists
        done = frostlab_command("runs", cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "no runs yet\n", "")
        assert json.loads(frostlab_command("runs", "--json", cwd=tmp_path).stdout) == []
        (tmp_path / "runs").mkdir(exist_ok=True)
    done = frostlab_command("runs", "--runs", str(tmp_path / "runs"))
    assert (done.returncode, done.stdout) == (0, "no runs yet\n")


def test_listing_needs_no_torch(finished: Path) -> None:
    program = (
        "import sys\n"
        "from frostlab.cli.main import main\n"
        "for arguments in {!r}:\n"
        "    sys.argv = ['frostlab', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as e: assert not e.code, (arguments, e.code)\n"
        "    assert not {{'torch', 'transformers'}} & sys.modules.keys(), arguments"
    )
    runs = ["--runs", str(finished)]
    commands = [
        ["recipes"], ["recipes", "--json"], ["runs", *runs], ["show", "mine", *runs],
        *([command.name, "--help"] for command in app.registered_commands),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program.format(commands)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--help") >= len(commands) - 4, "every command has run"


def test_a_run_of_an_own_model_imports_no_other_library(tmp_path: Path) -> None:
    """transformers alone would take as long to import as torch and frostlab together."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny(train__epochs=1)))
    program = (
        "import sys\n"
        "from frostlab.cli.main import main\n"
        "import frostlab.models.build as build\n"
        "_build_own = build._build_own\n"
        "def build_own(*arguments):\n"
        "    model = _build_own(*arguments)\n"
        "    assert 'torch._dynamo' not in sys.modules, 'the optimizer is the first to need it'\n"
        "    return model\n"
        "build._build_own = build_own\n"
        "sys.argv = {!r}\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "heavy = 'transformers scipy pandas jinja2 altair matplotlib datasets peft pyarrow PIL'\n"
        "assert not set(heavy.split()) & sys.modules.keys(), sorted(sys.modules)"
    )
    arguments = ["frostlab", "run", str(tmp_path / "mine.yaml"), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-c", program.format(arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "finished" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "docstring-gpt"), "did you mean `docstrings-gpt`?"),
        (("run", "docstrings-gpt", "--set", "optim.lt=1"), "did you mean `lr`?"),
        (("run", "docstrings-gpt", "--device", "gpu"), "train.device 'gpu' is not a device"),
        (("run", "sst2-bert", "--data-dir", "nowhere"), "--data-dir nowhere is not a folder"),
        (("run", "docstrings-gpt", "--seed", "-1"), "seed = -1 should be greater"),
        (("run", "openwebtext-gpt"), "openwebtext"),
        (("run", "sst2-bert", "--set", "data.name=majority"), "set model.weights to false"),
        (("show", "nothing", "--runs", "nowhere"), "nowhere"),
        (("runs", "--runs", "nowhere"), "nowhere"),
        (("runs", "--runs", "runs"), "runs"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = frostlab_command(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is half-written"

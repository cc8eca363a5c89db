"""`frostlab recipes`, `run`, `runs`, `show`, as programs."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import frostlab as fl
from forked import frostlab_command
from frostlab.recipe.load import shipped_comparisons, shipped_recipes
from stages import progressive
from tiny import tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: one by the command, one by the library."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "mine.yaml").write_text(yaml.safe_dump(tiny()))
    done = frostlab_command(
        "run", str(folder / "mine.yaml"), "--set", "treatment=oelm", "--seed", "3",
        "--runs", str(folder / "runs"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert "step 8  accuracy " in done.stderr, "plain lines where nobody watches"
    fl.run(tiny(), runs=folder / "runs", name="other")
    return folder / "runs"


def test_recipes_are_listed() -> None:
    lines = frostlab_command("recipes").stdout.splitlines()
    names = [line.split()[0] for line in lines if line]
    assert names == [*shipped_recipes(), "for", *shipped_comparisons()]
    assert json.loads(frostlab_command("recipes", "--json").stdout) == shipped_recipes()


def test_a_run_by_command_has_its_settings(finished: Path) -> None:
    record = fl.RunRecord(finished / "mine-oelm-s3")
    recipe = yaml.safe_load((record.folder / "recipe.yaml").read_text())
    assert (recipe["treatment"], recipe["seed"], recipe["train"]["batch"]) == ("oelm", 3, 32)
    assert record.status == "finished"
    assert "mine.yaml" in record.environment["command"]


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
    found = json.loads(frostlab_command("show", "mine", "--runs", str(finished), "--json").stdout)
    assert found["result"]["report"] == record.metrics


def test_listing_needs_no_torch(finished: Path) -> None:
    program = (
        "import sys\nsys.argv = ['frostlab', *{!r}]\n"
        "from frostlab.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    runs = ["--runs", str(finished)]
    for arguments in (["recipes"], ["runs", *runs], ["show", "mine", *runs], ["run", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", program.format(arguments)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "docstring-gpt"), "did you mean `docstrings-gpt`?"),
        (("run", "docstrings-gpt", "--set", "optim.lt=1"), "did you mean `lr`?"),
        (("run", "docstrings-gpt", "--device", "gpu"), "train.device gpu is no device"),
        (("run", "sst2-bert", "--data-dir", "nowhere"), "--data-dir nowhere is not a folder"),
        (("run", "docstrings-gpt", "--seed", "-1"), "seed = -1 should be greater"),
        (("run", "openwebtext-gpt"), "openwebtext"),
        (("run", "sst2-bert", "--set", "data.name=majority"), "set model.weights to false"),
        (("show", "nothing", "--runs", "nowhere"), "nowhere"),
        (("runs", "--runs", "nowhere"), "nowhere"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = frostlab_command(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is half-written"


def test_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """rich draws epoch, loss, speed and remaining time."""
    import io

    from rich.console import Console

    from frostlab.cli import progress

    bar, screen = progress.Bar(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    bar._progress.live.console = console
    bar.begin(0, 20, 10, None, 0)
    bar.advance(5, 1.25)
    bar.evaluated(10, {"accuracy": 0.5}, best=True)
    bar.close()
    for text in ("epoch", "10/20", "loss", "1.2500", "steps/s", "left", "accuracy 0.5000  (best)"):
        assert text in screen.getvalue()


def test_the_epoch_of_a_stage_is_counted_after_resuming_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Stages of two and of one epoch of 4 steps; stopped at step 10, the second of the second."""
    from frostlab.cli import progress
    from frostlab.training import run as running

    monkeypatch.setattr(progress, "_EVERY", 0.0)
    asked = iter([False] * 9 + [True] * 100)

    @contextmanager
    def interrupted() -> Iterator[Callable[[], bool]]:
        yield lambda: next(asked)

    recipe = progressive(stages=[{}, {"add": {}, "epochs": 2}])
    with monkeypatch.context() as patch:
        patch.setattr(running, "interruptions", interrupted)
        with pytest.raises(fl.RunFailed):
            fl.run(recipe, out=tmp_path / "run", display=progress.Lines())
    capsys.readouterr()
    fl.run(recipe, out=tmp_path / "run", resume=True, display=progress.Lines())
    shown = re.findall(r"step (\d+)  epoch (\d+)", capsys.readouterr().err)
    assert [int(epoch) for _, epoch in shown] == [1 + (int(s) - 9) // 4 for s, _ in shown]
    assert shown
    bar = progress.Bar()
    bar.begin(10, 16, 4, None, 8)
    assert bar._progress.tasks[0].fields["epoch"] == "1"
    bar.close()

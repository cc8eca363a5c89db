"""A scaled run, and a stand-in, is marked wherever its numbers appear."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import frostlab as fl
from forked import Command
from frostlab.cli.main import app
from frostlab.integrations.tensorboard import export_run
from offline import cut_off

MARKS = ("scale tiny", "stand-in")
# Files of a run or a comparison without results; steps.json is read by later calls only.
UNMARKED = {
    "data.json", "digests.json", "environment.json", "manifest.json", "annotations.json",
    "steps.json", "report.json",
}  # fmt: skip
FOLDERS = {"model", "tokenizer", "checkpoints"}
BINARY = {".npz", ".png", ".pdf", ".lock"}
# Commands that show no number of a run, and those whose marks other tests look for.
# The lines of `matrix` and `logs` are headed by the name of a run, which has both marks.
WITHOUT_NUMBERS = {
    "recipes", "inspect", "note", "tag", "clean", "verify", "bench", "data", "matrix", "stop",
    "logs", "check",
}  # fmt: skip
SETTINGS = {"train.steps": 2, "model.layers": 1, "watch.every_n_steps": 1}


def is_marked(text: str) -> bool:
    """Whether a text has both marks, in words or as settings of a recipe."""
    words = " ".join(text.split())
    scale = any(mark in words for mark in ("scale tiny", "scale: tiny", '"scale": "tiny"'))
    return scale and ("stand-in" in words or "stands_for" in words)


def unmarked_files(folder: Path) -> list[str]:
    """The files with results that do not say that these are of a scaled run with stand-ins."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [
        str(path.relative_to(folder))
        for path in paths
        if path.name not in UNMARKED
        and path.suffix not in BINARY
        and not path.name.startswith(".")
        and not FOLDERS & set(path.relative_to(folder).parts)
        and not is_marked(path.read_text())
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a scaled run on stand-ins, `one`, and a copy of it, `two`."""
    folder = tmp_path_factory.mktemp("marks")
    with pytest.MonkeyPatch.context() as patch:
        cut_off(patch)
        fl.run(
            "gpt-02", SETTINGS, scale="tiny", stand_in=True, out=folder / "runs" / "one",
            tensorboard=folder / "board",
        )  # fmt: skip
        shutil.copytree(folder / "runs" / "one", folder / "runs" / "two")
        yield folder


COMMANDS = {  # arguments to try, by command
    "runs": [[], ["--json"], ["--group", "-seed"], ["--wide"]],
    "status": [[], ["--json"], ["--markdown"]],
    "show": [["one"], ["one", "--json"]],
    "diff": [["one", "two"], ["one", "two", "--json"]],
    "evaluate": [["one"], ["one", "--json"], ["one", "--split", "train"],
                 ["one", "--data", "TEXT"]],
    "exits": [["one"], ["one", "--json"]],
    "predict": [["one", "TEXT"]],
    "generate": [["one", "--prompt", "Return", "--tokens", "2"]],
    "diagnose": [["one"], ["one", "--json"]],
}  # fmt: skip
ELSEWHERE = {"run", "compare", "judge", "export", "envelopes", "report"}  # in the tests below


@pytest.mark.parametrize(
    ("command", "arguments"), [(name, given) for name, many in COMMANDS.items() for given in many]
)
def test_commands(
    place: Path, in_this_process: Command, command: str, arguments: list[str], tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("Return a new array.\n" * 20)
    given = [str(texts) if text == "TEXT" else text for text in arguments]
    done = in_this_process(command, *given, "--runs", str(place / "runs"))
    assert done.returncode in (0, 1), done.stderr  # 1: diagnose found a part that does not learn
    assert is_marked(done.stdout + done.stderr), done.stdout


def test_every_command_is_looked_at() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert commands == WITHOUT_NUMBERS & commands | set(COMMANDS) | ELSEWHERE


def test_files_and_export(place: Path, in_this_process: Command, tmp_path: Path) -> None:
    runs = ["--runs", str(place / "runs")]
    for command in ("exits", "diagnose"):  # these write files
        in_this_process(command, "one", *runs)
    run = place / "runs" / "one"
    assert (run / "exits.json").exists()
    assert (run / "flow" / "flow.html").exists()
    assert in_this_process("report", str(run)).returncode == 0
    assert {"report.html", "report.md", "figures", "tables"} <= {p.name for p in run.iterdir()}
    assert unmarked_files(run) == []
    assert in_this_process("verify", str(run)).returncode == 0
    assert in_this_process("export", "one", str(tmp_path / "model"), *runs).returncode == 0
    assert is_marked((tmp_path / "model" / "README.md").read_text())
    assert [path.name for path in (place / "board").iterdir()] == ["tiny-stand-in"]
    exported = export_run(run, tmp_path / "board")
    assert exported == tmp_path / "board" / "tiny-stand-in"
    assert is_marked(repr(fl.load_run(run)))
    saved = fl.load_flow(run).save(tmp_path / "flow.json")
    assert is_marked(str(fl.load_flow(saved).table()))


def test_the_report_of_an_unfinished_run(
    place: Path, in_this_process: Command, tmp_path: Path
) -> None:
    shutil.copytree(place / "runs" / "two", tmp_path / "two")
    (tmp_path / "two" / "result.json").unlink()
    assert in_this_process("report", str(tmp_path / "two")).returncode == 0
    assert is_marked((tmp_path / "two" / "report.html").read_text())


def test_run_names_the_option_and_then_says_what_it_did(
    place: Path, in_this_process: Command, tmp_path: Path
) -> None:
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    runs = ["--runs", str(tmp_path)]
    refused = in_this_process("run", "gpt-02", "--scale", "tiny", *settings, *runs)
    assert refused.returncode == 2
    assert "data.name tinystories was not found" in refused.stderr
    assert "; or add --stand-in" in refused.stderr
    assert refused.stderr.count("\n") == 1
    wrong = in_this_process("run", "gpt-02", "--scale", "tini", *runs)
    assert wrong.stderr == "frostlab: --scale tini is not a scale; did you mean `tiny`?\n"
    done = in_this_process("run", "gpt-02", "--scale", "tiny", "--stand-in", *settings, *runs)
    assert done.returncode == 0, done.stderr
    assert is_marked(done.stdout)
    assert is_marked(done.stderr)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["gpt-02-tiny-stand-in-oelm-s0"]
    again = fl.load_run(tmp_path / "gpt-02-tiny-stand-in-oelm-s0")
    assert again.recipe.digest == fl.load_run(place / "runs" / "one").recipe.digest


def test_runs_of_different_scales_are_not_compared(place: Path, tmp_path: Path) -> None:
    one, other = place / "runs" / "one", tmp_path / "other"
    shutil.copytree(one, other)
    text = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(text.replace("scale: tiny", "scale: full"))
    with pytest.raises(fl.BadInput, match=r"differ in scale \(tiny and full\)"):
        fl.compare_runs(one, other, out=tmp_path / "comparison")


@pytest.mark.slow
def test_comparisons(place: Path, in_this_process: Command, tmp_path: Path) -> None:
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    out = ["--out", str(tmp_path / "one")]
    asked = ["compare", "tinystories-gpt", "--arms", "baseline,oelm", "--seeds", "2", *settings]
    refused = in_this_process(*asked, "--scale", "tiny", *out)
    assert refused.returncode == 2
    assert "; or add --stand-in" in refused.stderr
    done = in_this_process(*asked, "--scale", "tiny", "--stand-in", *out)
    assert done.returncode == 0, done.stderr
    assert is_marked(done.stdout)
    assert unmarked_files(tmp_path / "one") == []
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for arguments in (
        ["judge", folders[0]], ["show", folders[0]], ["diff", *folders],
        ["diff", *folders, "--json"], ["show", folders[0], "--json"],
        ["runs", "--runs", f"{folders[0]}/runs"],
    ):  # fmt: skip
        done = in_this_process(*arguments)
        assert done.returncode == 0, done.stderr
        assert is_marked(done.stdout), arguments
    again = in_this_process("compare", f"{folders[0]}/plan.json", "--stand-in")
    assert "is a plan, which cannot be changed; leave out: stand-in" in again.stderr


@pytest.mark.slow
def test_envelopes(in_this_process: Command, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_off(patch)
        settings = {"train.steps": 2, "model.layers": 1}
        fl.run("eeg-cocktail", settings, scale="tiny", stand_in=True, out=tmp_path / "eeg")
    assert in_this_process("envelopes", str(tmp_path / "eeg")).returncode == 0
    assert unmarked_files(tmp_path / "eeg") == []
    done = in_this_process("evaluate", str(tmp_path / "eeg"), "--json")
    assert is_marked(json.loads(done.stdout)["caution"])

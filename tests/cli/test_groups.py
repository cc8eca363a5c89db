"""`frostlab compare GROUP`, and the commands that read its folder."""

import json
from pathlib import Path

import pytest

from forked import Command
from tiny_group import write_group


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group's file in the working folder."""
    write_group(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_group_is_compared_shown_judged_and_verified(
    here: Path, in_this_process: Command
) -> None:
    command = ["compare", "mine.yaml", "--as-published", "--only", "random", "--seeds", "1",
               "--set", "train.steps=2", "--device", "cpu"]  # fmt: skip
    done = in_this_process(*command)
    assert done.returncode == 0, done.stderr
    assert "comparison 1 of 1: random" in done.stderr
    assert "rates: not run" in done.stdout
    assert "Caution: checkpoint selected on the reporting split." in done.stdout
    assert "\nNot as published: train.steps 3 → 2.\n" in done.stdout
    assert "random: confounded by optim.lr 0.003 → 0.01" in done.stdout
    folder = "comparisons/mine-as-published"
    summary, _, report = done.stdout.rpartition("report: ")
    assert summary.endswith(f"page: {folder}/summary.md\n")
    assert report == f"{folder}/report.html\n"
    assert in_this_process("judge", folder).stdout == done.stdout
    for name in (folder, "mine-as"):
        assert in_this_process("show", name).stdout == summary
    assert Path(folder, "random", "report.html").is_file()
    verified = in_this_process("verify", "comparisons")
    assert verified.stdout == "runs and comparisons checked: 1; all files are unchanged\n"
    member = in_this_process("show", "mine-as-published/random")
    assert "confounded by optim.lr 0.003 → 0.01" in member.stdout
    assert "caution: checkpoint selected on the reporting split" in member.stdout
    values = json.loads(in_this_process("show", folder, "--json").stdout)["summary"]
    assert values["comparisons"][1]["arms"][1]["verdict"] == "confounded"
    assert in_this_process("runs", "--runs", f"{folder}/random/runs").stdout.count("finished") == 2
    noted = in_this_process("note", folder, "for the paper")
    assert noted.stdout == "mine-as-published: 1 note\n"
    assert in_this_process("show", folder).stdout.endswith("notes\n  for the paper\n")
    assert in_this_process("verify", folder).returncode == 0
    as_json = in_this_process(*command, "--json")
    assert json.loads(as_json.stdout) == values
    refused = in_this_process("diff", folder, folder)
    assert refused.returncode == 2
    assert "is a group; give two runs, or two of its comparisons" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["mine.yaml", "--arms", "a"],
            "mine.yaml is a group of several comparisons, so --arms",
        ),
        (["mine.yaml", "--metric", "loss"], "so --metric has no meaning with it"),
        (["mine.yaml", "--tune", "lr"], "so --tune has no meaning with it"),
        (["mine.yaml", "--assay"], "so --assay has no meaning with it"),
        (["mine.yaml", "--allow-confound", "lr"], "so --allow-confound has no meaning with it"),
        (["mine.yaml", "--runs"], "mine.yaml: a comparison needs the runs of two arms"),
        (["mine.yaml", "phase3"], "phase3: a comparison has one source"),
        (["mine.yaml", "--only", "rate"], "--only rate is not a comparison of mine; did you mean"),
        (["plain.yaml", "--as-published"], "is for groups, and plain.yaml is not a group; there"),
        (["phase33", "--only", "x"], "is for groups, and phase33 is not a group; did you mean `ph"),
        (["phase33"], "no comparison, group or recipe is called 'phase33'; did you mean `phase3`?"),
        (["grwoth"], "no comparison, group or recipe is called 'grwoth'; did you mean `growth`?"),
        (["mine.yaml", "--seeds", "0"], "mine, rates: seeds 0: a comparison needs at least one"),
        (["mine.yaml", "--set", "optim.lt=1"], "optim.lt is not a key; did you mean `lr`?"),
        (["mine.yaml", "--out", "texts"], "texts is not empty and holds no group"),
    ],
)
def test_bad_input_is_one_line(
    here: Path, in_this_process: Command, arguments: list[str], message: str
) -> None:
    done = in_this_process("compare", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (here / "comparisons").exists()


def test_details_of_a_group(in_this_process: Command) -> None:
    details = ["recipes", "--group", "progressive", "--details"]
    shown = in_this_process(*details)
    assert shown.returncode == 0, shown.stderr
    assert "## progressive\n" in shown.stdout
    assert "## phase3" not in shown.stdout
    listed = json.loads(in_this_process(*details, "--json").stdout)
    assert [entry["trainable"] for entry in listed] == [4_534_784, 4_534_784]
    refused = in_this_process("recipes", "--group", "task-or-mask", "--details")
    assert refused.returncode == 2
    assert "group task-or-mask has no experiments of its own" in refused.stderr

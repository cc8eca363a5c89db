"""`frostlab compare`, as a program."""

import json
from pathlib import Path

import pytest
import yaml

from forked import Command, frostlab_command
from tiny import tiny

SMALL = tiny(data__examples=96, train__epochs=1, train__batch=16, model__layers=1)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    (folder / "mine.yaml").write_text(yaml.safe_dump(SMALL))
    (folder / "comparison.yaml").write_text(
        yaml.safe_dump({"recipe": "mine.yaml", "arms": ["baseline", "oelm"], "clock": None})
    )
    done = frostlab_command(
        "compare", str(folder / "comparison.yaml"), "--seeds", "2", "--out", str(folder / "out")
    )
    assert done.returncode == 0, done.stderr
    assert "run 4 of 4" in done.stderr
    assert "too few seeds" in done.stdout
    assert f"page: {folder / 'out' / 'comparison.md'}" in done.stdout
    return folder


def test_the_same_command_again_repeats_nothing(compared: Path, in_this_process: Command) -> None:
    done = in_this_process(
        "compare", str(compared / "comparison.yaml"), "--seeds", "2",
        "--out", str(compared / "out"), "--json",
    )  # fmt: skip
    assert "4 of 4 runs are done already" in done.stderr
    evidence = json.loads(done.stdout)
    assert set(evidence["arms"]) == {"baseline", "oelm"}


@pytest.mark.slow
def test_a_plan_is_carried_out_again(compared: Path, in_this_process: Command) -> None:
    plan, out = str(compared / "out" / "plan.json"), str(compared / "again")
    done = in_this_process("compare", plan, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "run 4 of 4" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("all 12 metrics are equal to those of the first")
    assert f"page: {out}/comparison.md" in done.stdout
    refused = in_this_process("compare", plan, "--out", out, "--seeds", "3", "--set", "seed=1")
    assert refused.returncode == 2
    assert refused.stderr == (
        f"frostlab: {plan} is a plan, which cannot be changed; leave out: seeds, seed\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "baseline"], "arms: baseline: a comparison needs two"),
        (["--seeds", "0"], "seeds 0: a comparison needs at least one"),
        (["--metric", "loss", "--out", "OUT"], "was made by another plan"),
        (["--data-dir", "nowhere"], "--data-dir nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_line(compared: Path, options: list[str], message: str) -> None:
    arguments = [str(compared / "out") if option == "OUT" else option for option in options]
    done = frostlab_command("compare", str(compared / "comparison.yaml"), *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (compared / "comparisons").exists()


def test_finished_runs_are_compared_judged_and_verified(
    compared: Path, in_this_process: Command
) -> None:
    patterns = [str(compared / "out" / "runs" / f"{name}-s*") for name in ("baseline", "oelm")]
    out = str(compared / "chosen")
    done = in_this_process("compare", "--runs", *patterns, "--metric", "loss", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "oelm: too few seeds to judge oelm against baseline on loss" in done.stdout
    assert "; runs chosen after the fact, untuned." in done.stdout
    assert f"page: {out}/comparison.md" in done.stdout
    judged = in_this_process("judge", out)
    assert judged.stdout == done.stdout
    verified = in_this_process("verify", out)
    assert verified.stdout == "runs and comparisons checked: 1; all files are unchanged\n"
    again = in_this_process("compare", f"{out}/plan.json")
    assert again.returncode == 2
    assert "there is nothing to carry out; judge them again with frostlab judge" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "A"], "A: a comparison needs the runs of two arms"),
        (["A", "B"], "B: a comparison has one source; add --runs to compare finished runs"),
        (["--runs", "A", "imdb-gpt"], "imdb-gpt is not a run: --runs compares runs"),
        (["--runs", "A", "B", "--seeds", "3"], "so --seeds has no meaning with it"),
        (["--runs", "A", "B", "--tune", "lr"], "so --tune has no meaning with it"),
        (["--runs", "A", "B", "--quick"], "so --quick has no meaning with it"),
        (["--runs", "A", "B", "--set", "optim.lr=1"], "so --set has no meaning with it"),
        (["--runs", "A", "B", "--data-dir", "."], "so --data-dir has no meaning with it"),
        (["--runs", "A", "B", "--device", "cpu"], "so --device has no meaning with it"),
        (["--runs", "A", "B", "--allow-confound", "optim.lt"], "did you mean `optim.lr`?"),
    ],
)
def test_bad_runs_are_refused_in_one_line(
    compared: Path, in_this_process: Command, arguments: list[str], message: str
) -> None:
    runs = compared / "out" / "runs"
    names = {"A": str(runs / "baseline-s*"), "B": str(runs / "oelm-s*")}
    done = in_this_process("compare", *(names.get(text, text) for text in arguments))
    assert done.returncode == 2, done.stderr
    for letter, pattern in names.items():
        message = message.replace(f"{letter}: ", f"{pattern}: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_variable_for_data_is_no_option(
    compared: Path, in_this_process: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROSTLAB_DATA", str(compared))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(compared / "out" / "runs")
    done = in_this_process("compare", "runs/baseline-s*", "runs/oelm-s*", "--runs")
    assert done.returncode == 0, done.stderr
    assert "comparisons/majority-gpt-baseline-vs-oelm-runs/comparison.md" in done.stdout

"""`frostlab compare`, as a program."""

import json
from pathlib import Path

import pytest
import yaml

from forked import frostlab_command
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


def test_the_same_command_again_repeats_nothing(compared: Path) -> None:
    done = frostlab_command(
        "compare", str(compared / "comparison.yaml"), "--seeds", "2",
        "--out", str(compared / "out"), "--json",
    )  # fmt: skip
    assert "4 of 4 runs are done already" in done.stderr
    evidence = json.loads(done.stdout)
    assert set(evidence["arms"]) == {"baseline", "oelm"}


def test_a_plan_is_carried_out_again(compared: Path) -> None:
    plan, out = str(compared / "out" / "plan.json"), str(compared / "again")
    done = frostlab_command("compare", plan, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "run 4 of 4" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("all 12 metrics are equal to those of the first")
    assert f"page: {out}/comparison.md" in done.stdout
    refused = frostlab_command("compare", plan, "--out", out, "--seeds", "3", "--set", "seed=1")
    assert refused.returncode == 2
    assert refused.stderr == (
        f"frostlab: {plan} is carried out as it is; it cannot be changed (seeds, seed)\n"
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

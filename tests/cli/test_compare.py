"""`frostlab compare`, as a program."""

import json
from pathlib import Path

import pytest
import yaml

from forked import frostlab_command
from tiny import tiny

SMALL = tiny(data__examples=96, train__epochs=1, train__batch=16, model__layers=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_the_same_command_again_repeats_nothing(made: Path) -> None:
    done = frostlab_command(
        "compare", str(made / "comparison.yaml"), "--seeds", "2", "--out", str(made / "out"),
        "--json",
    )  # fmt: skip
    assert "4 of 4 runs are there already" in done.stderr
    evidence = json.loads(done.stdout)
    assert set(evidence["arms"]) == {"baseline", "oelm"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--arms", "baseline"], "arms: baseline: a comparison needs two"),
        (["--seeds", "0"], "seeds 0: a comparison needs at least one"),
        (["--metric", "loss", "--out", "OUT"], "was made by another plan"),
        (["--data-dir", "nowhere"], "--data-dir nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_line(made: Path, options: list[str], said: str) -> None:
    given = [str(made / "out") if option == "OUT" else option for option in options]
    done = frostlab_command("compare", str(made / "comparison.yaml"), *given)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (made / "comparisons").exists()

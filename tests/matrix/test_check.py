"""`--check`: what it says agrees with a real run, and it starts nothing."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import frostlab as fl
from frostlab.cli.main import app
from frostlab.matrix import check
from frostlab.matrix.check import (
    Checked,
    Verdict,
    check_recipe,
    check_recipes,
    check_table,
    estimate_memory,
)
from frostlab.recipe.load import load_recipe, recipe_from
from tiny import tiny


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_it_agrees_with_a_run(tmp_path: Path) -> None:
    recipe = tiny(treatment={"freeze": ["query", "key"]}, model__width=64)
    checked = check_recipe("a", recipe_from(recipe))
    run = fl.run(recipe, out=tmp_path / "a")
    assert checked.problem is None
    assert checked.steps == run.result.steps
    assert (checked.parameters, checked.trainable) == (
        run.result.parameters.total, run.result.parameters.trainable,
    )  # fmt: skip
    assert checked.step_seconds is not None
    assert checked.kind == "eager"
    assert checked.disk_bytes is not None
    assert folder_bytes(tmp_path / "a") <= checked.disk_bytes, "it never promises too little"
    assert checked.memory is not None
    assert checked.memory > 16 * run.result.parameters.trainable


@pytest.mark.parametrize(
    ("evaluate", "checkpoint"), [({"every": 3}, 5), ({"every": "epoch"}, None), ({"every": 100}, 4)]
)
def test_the_time_is_that_of_everything_a_run_does(
    evaluate: dict[str, Any], checkpoint: int | None, tmp_path: Path
) -> None:
    train = {"batch": 32, "epochs": 2, "threads": 1, "checkpoint": checkpoint}
    recipe = tiny(train=train, evaluate={"batch": 64, **evaluate})
    checked = check_recipe("a", recipe_from(recipe))
    run = fl.run(recipe, out=tmp_path / "a")
    kinds = Counter(
        event.kind for event in run.events() if event.kind in ("evaluation", "checkpoint")
    )
    assert checked.evaluations == kinds["evaluation"] - 1, "all but the report"
    assert checked.checkpoints is not None
    assert kinds["checkpoint"] <= checked.checkpoints <= kinds["checkpoint"] + kinds["evaluation"]
    if checkpoint is None:
        assert kinds["checkpoint"] == checked.checkpoints
    parts = [
        (checked.steps, checked.step_seconds), (checked.evaluations, checked.evaluation_seconds),
        (1, checked.report_seconds), (checked.checkpoints, checked.checkpoint_seconds),
    ]  # fmt: skip
    assert all(seconds and seconds > 0 for _, seconds in parts)
    assert checked.seconds == pytest.approx(sum((n or 0) * (s or 0) for n, s in parts))


def test_an_evaluation_is_measured_on_some_batches_and_counted_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second a timed piece of work: 2 of 4 batches of the split of 256 examples were timed."""
    monkeypatch.setattr(check, "_timed", lambda work, place: (work(), 1.0)[1])
    checked = check_recipe("a", recipe_from(tiny(evaluate__batch=64, data__examples=64)))
    assert checked.evaluation_seconds == pytest.approx(2.0)
    assert checked.report_seconds == pytest.approx(2.0)
    assert checked.step_seconds == pytest.approx(1 / 3)


def test_the_report_of_recordings_decodes_windows_that_overlap() -> None:
    recipe = load_recipe("eeg-conformer-v2", {"scale": "tiny", "train.threads": 1})
    checked = check_recipe("a", recipe)
    assert checked.problem is None
    assert checked.report_seconds is not None
    assert checked.evaluation_seconds is not None
    assert checked.report_seconds > 2 * checked.evaluation_seconds


def test_stages_count_together() -> None:
    stages = [{"train": ["all"], "epochs": 1}, {"train": ["head"], "epochs": 2}]
    recipe = recipe_from(tiny(stages=stages, data__name="majority"))
    assert check_recipe("a", recipe).steps == 24


def test_a_recipe_that_cannot_run_is_named_and_the_others_are_checked(tmp_path: Path) -> None:
    lacking = tiny(data={"name": "own", "path": str(tmp_path / "nowhere"), "length": 8})
    broken = recipe_from({**lacking, "tokenizer": {"kind": "words"}})
    verdict = check_recipes([("good", recipe_from(tiny()), 3), ("bad", broken, 1)], tmp_path / "x")
    good, bad = verdict.checked
    assert good.problem is None
    assert "nowhere" in str(bad.problem)
    assert verdict.seconds == pytest.approx(3 * (good.seconds or 0))
    assert len(verdict.problems) == 1
    text = "\n".join(check_table(verdict, 100))
    assert "3 runs: 0:00:0" in text
    assert re.search(
        "the time is .* of steps, .* of evaluations, .* of final evaluations, .* of check", text
    )
    assert "cannot run: bad: " in text
    assert not (tmp_path / "x").exists()


def test_a_table_fits_the_terminal_and_ids_can_be_told_apart() -> None:
    one = Checked("x", 5, None, 1_234_567, 1_234_567, 12_000, 0.0123, "eager", 4000.0, 20, 1.2, 3.0,
                  20, 0.01, 249_000_000, None, 1_000_000_000)  # fmt: skip
    ids = [f"majority-gpt@lr={rate}-{name}" for rate in ("0.0001", "0.001") for name in ("a", "b")]
    verdict = Verdict(tuple(replace(one, id=name) for name in ids), 1.0, 1, 10, 20)
    for width, columns in ((None, 9), (100, 9), (80, 8), (50, 5)):
        lines = check_table(verdict, width)
        start = next(index for index, line in enumerate(lines) if line.startswith("id "))
        table = lines[start : start + 5]
        assert max(map(len, table)) <= (width or 200)
        assert len({row.split()[0] for row in table}) == 5
        assert len(re.split(r"  +", table[0])) == columns
        assert all("1:06:40" in row and "249 MB" in row for row in table[1:])
        note = lines[start + 5]
        assert note.endswith("; --wide shows all columns") == (columns < 9)
    assert lines[0] == "all names begin with majority-gpt@"


def test_too_small_a_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(check.shutil, "disk_usage", lambda path: Usage)
    verdict = check_recipes([("good", recipe_from(tiny()), 1)], tmp_path)
    assert verdict.problems == [
        f"the disk has 1 kB free, and the runs need about {verdict.disk_bytes / 1e6:.3g} MB"
    ]


def test_the_commands_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(tiny()))
    Path("mine.yaml").write_text(yaml.safe_dump({"recipes": ["small.yaml"], "seeds": 5}))
    done = CliRunner().invoke(app, ["matrix", "mine.yaml", "--check", "--json"])
    values = json.loads(done.stdout)
    assert (values["checked"][0]["runs"], values["problems"]) == (5, [])
    done = CliRunner().invoke(app, ["run", "small.yaml", "--check"])
    assert "1 run: " in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "small.yaml"]


def test_runs_that_are_done_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(tiny(train__epochs=1)))
    Path("mine.yaml").write_text(yaml.safe_dump({"recipes": ["small.yaml"], "seeds": 2}))
    fl.run("small.yaml", seed=1, out="runs/small-none-s1")
    call = CliRunner().invoke
    done = call(app, ["matrix", "mine.yaml", "--check"])
    assert done.exit_code == 0, done.output
    assert "1 of 2 runs are done already\n" in done.output
    assert "\n1 run: " in done.output
    values = json.loads(call(app, ["matrix", "mine.yaml", "--check", "--json"]).stdout)
    assert [entry["runs"] for entry in values["checked"]] == [1]
    fl.run("small.yaml", seed=0, out="runs/small-none-s0")
    all_done = call(app, ["matrix", "mine.yaml", "--check"])
    assert all_done.exit_code == 0, all_done.output
    assert "2 of 2 runs are done already\n" in all_done.output
    refused = call(app, ["matrix", "mine.yaml", "--check", "--add"]).exception
    assert isinstance(refused, fl.BadInput)
    assert "leave out --add, --wait and --notify" in str(refused)


def test_memory_is_estimated_without_data() -> None:
    small, large = (
        estimate_memory(load_recipe("gpt-02", {"train.batch": batch})) for batch in (8, 16)
    )
    assert small is not None
    assert large is not None
    assert 1e9 < small < large < 2 * small


def test_the_estimate_leaves_out_what_frozen_weights_do_not_need() -> None:
    trained, frozen, adapted = (
        estimate_memory(load_recipe("gpt-02", {"treatment": treatment}))
        for treatment in ("baseline", "oelm", {"peft": {"method": "lora", "select": ["query"]}})
    )
    assert trained is not None
    assert frozen is not None
    assert adapted is not None
    # gradients and Adam's two moments: 12 bytes for each of 3,145,728 weights
    assert trained - frozen == 12 * 3_145_728
    assert adapted < frozen

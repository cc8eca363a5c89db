"""Running tasks: interrupted, repeated, failing, several at once; and the folder."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import frostlab as fl
from comparing import SMALL, compare
from forked import wait_for
from frostlab.comparison import runner
from frostlab.matrix import workers
from frostlab.matrix.task import Outcome
from frostlab.recipe.load import recipe_from
from frostlab.records.checkpoint import checkpoints_in
from frostlab.records.folder import finished_status
from frostlab.training import loop
from frostlab.training import run as training_run
from frostlab.training.progress import Lines
from tiny import tiny


def test_the_time_left_of_alternating_rounds_is_of_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Outcome("finished", "done", 60.0)
    monkeypatch.setattr(workers, "run_task", lambda *task, **options: done)
    recipe = recipe_from(SMALL)
    tasks = [runner.ArmTask("arm", recipe, tmp_path / str(seed), "", seed) for seed in range(4)]
    runner.Runner(None, Lines(), jobs=3).run_all(tasks, alone=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("; ")[2] for line in lines] == [
        "3 min left", "2 min left", "60 s left", "0 s left",
    ]  # fmt: skip


def test_interrupted_it_goes_on_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    run = training_run.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        began.append(kwargs["out"].name)
        if len(began) == 3:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    monkeypatch.setattr(training_run, "run", counted)
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "c")
    assert (tmp_path / "c" / "plan.json").exists()
    assert not (tmp_path / "c" / "evidence.json").exists()
    compare(tmp_path / "c")
    once = ["baseline-s0", "oelm-s0", "oelm-s1", "oelm-s1", "baseline-s1"]
    assert began == [*once, "baseline-s0"]  # the last is the control
    compare(tmp_path / "c")
    assert len(began) == 6


@pytest.mark.slow
def test_several_runs_at_once_give_the_same(tmp_path: Path) -> None:
    one, two = (compare(tmp_path / f"{jobs}", jobs=jobs) for jobs in (1, 2))
    for name, arm in one.evidence.arms.items():
        for run, other in zip(arm.runs, two.evidence.arms[name].runs, strict=True):
            assert run.weights_digest == other.weights_digest


def test_a_folder_of_another_plan_is_refused(tmp_path: Path) -> None:
    compare(tmp_path / "c", seeds=1)
    with pytest.raises(fl.BadInput, match=r"made by another plan \(rules.alpha differ\)"):
        compare(tmp_path / "c", seeds=1, alpha=0.01)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("")
    with pytest.raises(fl.BadInput, match="is not empty and holds no comparison"):
        compare(tmp_path / "d")


def test_a_run_of_another_recipe_is_not_taken_for_this_one(tmp_path: Path) -> None:
    compare(tmp_path / "c", seeds=1)
    result = tmp_path / "c" / "runs" / "oelm-s0" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "recipe_digest": "other"}))
    with pytest.raises(fl.BadInput, match="holds a run of another recipe"):
        compare(tmp_path / "c", seeds=1)


def test_a_bug_in_one_arm_is_shown_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.measure

    def buggy(context: Any, *given: Any) -> Any:
        if context.current.audit is not None:
            raise ZeroDivisionError("a bug of its own")
        return real(context, *given)

    monkeypatch.setattr(loop, "measure", buggy)
    found = compare(tmp_path / "c", seeds=1)
    assert found.evidence.arms["baseline"].runs[0].status == "finished"
    assert found.evidence.arms["oelm"].runs[0].status == "failed"
    kept = (tmp_path / "c" / "runs" / "oelm-s0" / "traceback.txt").read_text()
    assert "ZeroDivisionError: a bug of its own" in kept
    assert "failed" in found.page.read_text()


def test_a_folder_that_was_barely_begun_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "compare.lock").touch()
    compare(tmp_path / "c", seeds=1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "has no schema, and this frostlab reads 3"),
        ("[]", "is not a JSON object"),
        ("null", "is damaged: it holds only null"),
        ('{"schema": 4}', "has schema 4, and this frostlab reads 3"),
    ],
)
def test_a_damaged_plan_is_said_to_be(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "plan.json").write_text(text)
    with pytest.raises(fl.BadInput, match=f"plan.json {reason}$"):
        compare(tmp_path / "c")


def test_rounds_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result runs may share the machine (here: would crash); rounds never do."""
    monkeypatch.setattr(runner, "LocalWorkers", None)
    values = {"recipe": SMALL, "arms": ["baseline", "oelm"], "clock": None, "rounds": 1}
    fl.compare({**values, "seeds": 1}, out=tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "rounds")
    fl.compare({**values, "seeds": 1}, out=tmp_path / "c", jobs=2)
    with pytest.raises(TypeError):
        fl.compare({**values, "seeds": 2}, out=tmp_path / "c", jobs=2)


def test_fewer_seeds_than_there_are_take_none_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"recipe": SMALL, "arms": ["baseline", "oelm"], "clock": None}
    folder = tmp_path / "c"
    fl.compare({**values, "seeds": 3}, out=folder, progress=True)
    assert "further seeds" not in capsys.readouterr().err
    again = fl.compare({**values, "seeds": 1}, out=folder, progress=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "seeds" in line]
    assert said == [
        f"{folder} already has 1, 2 as further seeds; they count too, so 3 seeds are compared"
    ]
    assert len(again.evidence.arms["oelm"].runs) == 3
    assert repr(again) == f"Comparison({folder}: oelm too few seeds)"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_parallel_runs_end_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    recipe = tiny(train={"batch": 8, "epochs": 4000, "threads": 1}, evaluate={"every": 200000})
    plan = {"recipe": recipe, "arms": ["baseline", "oelm"], "seeds": 2, "clock": None}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "frostlab", "compare", "plan.yaml", "--jobs", "2"]
    with subprocess.Popen(
        [*command, "--out", "c"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        training = [tmp_path / "c/runs" / f"{arm}-s0/events.jsonl" for arm in plan["arms"]]
        for path in training:
            wait_for(path, '"kind": "step"')
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        stderr = process.communicate(timeout=100)[1]
        psutil.wait_procs(workers, timeout=100)
    assert not [worker for worker in workers if worker.is_running()]
    assert "Traceback" not in stderr
    if number != signal.SIGKILL:
        assert process.returncode == 1
        stopped = "frostlab: stopped; the same command continues the comparison"
        assert stderr.strip().splitlines()[-1] == stopped
    for path in training:
        assert finished_status(path.parent) == "stopped"
        assert checkpoints_in(path.parent)

"""Whole comparisons: runs, pairs, verdicts, files; interrupted, extended, failing, confounded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from frostlab.comparison import run as comparing
from frostlab.comparison import runner
from frostlab.comparison.page import answers
from frostlab.comparison.verdict import why_unpaired
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EpochEvent
from tiny import tiny

SMALL = tiny(data__examples=96, train__epochs=1, train__batch=16, model__layers=1)


def compare(folder: Path, jobs: int = 1, **given: Any) -> fl.Comparison:
    values = {"recipe": SMALL, "arms": ["baseline", "oelm"], "seeds": 2, "clock": None, **given}
    return fl.compare(values, out=folder, jobs=jobs)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> fl.Comparison:
    folder = tmp_path_factory.mktemp("comparison") / "one"
    return compare(folder, arms=["baseline", "oelm", "oelm-random"], seeds=6, rounds=1)


def test_every_file_is_there_and_agrees(made: fl.Comparison) -> None:
    evidence = made.evidence
    assert set(evidence["arms"]) == {"baseline", "oelm", "oelm-random"}
    assert set(made.verdicts) == {"oelm", "oelm-random"}
    for name, arm in evidence["arms"].items():
        for run in arm["runs"]:
            record = RunRecord(made.folder / run["folder"])
            assert record.result.seed == run["seed"]
            assert record.metrics == run["metrics"]
            assert record.result.treatment == name
    values = [run["metrics"]["accuracy"] for run in evidence["arms"]["oelm"]["runs"]]
    base = [run["metrics"]["accuracy"] for run in evidence["arms"]["baseline"]["runs"]]
    effect = sum(a - b for a, b in zip(values, base, strict=True)) / 6
    assert made.verdicts["oelm"]["paired"]["effect"] == pytest.approx(effect)
    assert len(evidence["rounds"]["oelm"]["seconds"]) == 1
    assert evidence["rounds"]["oelm"]["paired"]["effect"] > 0
    assert len(evidence["mcnemar"]["oelm"]) == 6


def test_the_missions_keys(made: fl.Comparison) -> None:
    found = json.loads((made.folder / "comparison.json").read_text())
    assert set(found) == {
        "dataset", "model", "environment", "baseline", "oelm_freeze", "oelm_random", "comparison",
    }  # fmt: skip
    assert set(found["environment"]) == {
        "gpu", "cuda_version", "pytorch_version", "gpu_temp_start", "gpu_temp_end",
    }  # fmt: skip
    assert set(found["baseline"]) == {"performance", "trainable_params", "timing"}
    assert set(found["baseline"]["performance"]) == {
        "best_accuracy", "best_ppl", "final_loss", "epochs",
    }  # fmt: skip
    timing = {"total_seconds", "formatted", "per_epoch_avg", "per_step_avg", "validation_total"}
    assert set(found["baseline"]["timing"]) == timing
    for arm in ("oelm_freeze", "oelm_random"):
        assert set(found[arm]) == {*found["baseline"], "vs_baseline", "parameter_efficiency"}
        share = found[arm]["trainable_params"].partition(" ")[0]
        assert found[arm]["parameter_efficiency"] == f"{share} trainable"
    assert set(found["oelm_freeze"]["vs_baseline"]) == {
        "ppl_gap", "time_gap", "per_step_gap", "params_saved",
    }  # fmt: skip
    assert set(found["comparison"]) == {"accuracy_gap", "time_analysis", "conclusion"}
    assert set(found["comparison"]["time_analysis"]) == {
        "total_gap_seconds", "total_gap_percent", "per_step_gap", "speedup_ratio",
    }  # fmt: skip
    times = json.loads((made.folder / "timing.json").read_text())["timing"]
    assert set(times) == {"baseline", "oelm_freeze", "oelm_random", "comparison"}
    assert set(times["baseline"]) == {*timing, "total_formatted"}
    assert found["baseline"]["performance"]["best_ppl"] is None


def test_every_file_is_about_the_arm_of_the_questions(tmp_path: Path) -> None:
    """OELM, though another arm comes before it."""
    found = compare(tmp_path / "c", arms=["baseline", "oelm-random", "oelm"])
    (sentence,) = (v["sentence"] for n, v in found.verdicts.items() if n == "oelm")
    assert answers(found.evidence)[0] == ("How large is the gap?", sentence)
    whole = json.loads((found.folder / "comparison.json").read_text())
    assert whole["comparison"]["conclusion"] == sentence
    seconds = {arm: whole[arm]["timing"]["total_seconds"] for arm in ("baseline", "oelm_freeze")}
    gap = seconds["oelm_freeze"] - seconds["baseline"]
    assert whole["comparison"]["time_analysis"]["total_gap_seconds"] == pytest.approx(gap)
    times = json.loads((found.folder / "timing.json").read_text())["timing"]
    assert times["comparison"]["time_difference_seconds"] == pytest.approx(gap)


def test_the_time_left_of_alternating_rounds_is_of_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "take", lambda task, data_dir: ("done", 60.0))
    lines: list[str] = []
    recipe = recipe_from(SMALL)
    tasks = [runner.Task("arm", seed, recipe, tmp_path / str(seed), "") for seed in range(4)]
    runner.Runner(None, lines.append, jobs=3).run_all(tasks, alone=True)
    assert [line.rpartition("; ")[2] for line in lines] == [
        "3 min left", "2 min left", "60 s left", "0 s left",
    ]  # fmt: skip


def test_a_comparison_is_read_from_a_folder_by_name(made: fl.Comparison) -> None:
    again = fl.Comparison(str(made.folder))  # type: ignore[arg-type]
    assert again == made
    assert again.page == made.folder / "comparison.md"


def test_the_page_says_what_was_found(made: fl.Comparison) -> None:
    text = made.page.read_text()
    for verdict in made.verdicts.values():
        assert verdict["sentence"] in text
    assert "by digest" in text
    assert text.count("| finished |") == 18
    for question in ("How large is the gap?", "Is it faster?", "Is orthogonality needed?"):
        assert question in text


def test_a_frame_has_a_row_a_run(made: fl.Comparison) -> None:
    pytest.importorskip("pandas")
    frame = made.to_frame()
    assert len(frame) == 18
    assert set(frame["arm"]) == {"baseline", "oelm", "oelm-random"}


def test_interrupted_it_goes_on_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    run = runner.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        began.append(kwargs["out"].name)
        if len(began) == 3:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    monkeypatch.setattr(runner, "run", counted)
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "c")
    assert (tmp_path / "c" / "plan.json").exists()
    assert not (tmp_path / "c" / "evidence.json").exists()
    compare(tmp_path / "c")
    assert began == ["baseline-s0", "oelm-s0", "oelm-s1", "oelm-s1", "baseline-s1"]
    compare(tmp_path / "c")
    assert len(began) == 5


@pytest.mark.slow
def test_several_runs_at_once_give_the_same(tmp_path: Path) -> None:
    one, two = (compare(tmp_path / f"{jobs}", jobs=jobs) for jobs in (1, 2))
    for name, arm in one.evidence["arms"].items():
        for run, other in zip(arm["runs"], two.evidence["arms"][name]["runs"], strict=True):
            assert run["weights_digest"] == other["weights_digest"]


def test_seeds_can_be_added_and_the_page_says_so(tmp_path: Path) -> None:
    first = compare(tmp_path / "c", seeds=2)
    assert first.evidence["look"] == 1
    assert "looked at before" not in first.page.read_text()
    again = compare(tmp_path / "c", seeds=3)
    assert again.evidence["look"] == 2
    assert "looked at before" in again.page.read_text()
    assert len(again.evidence["arms"]["oelm"]["runs"]) == 3
    fewer = compare(tmp_path / "c", seeds=1)
    assert len(fewer.evidence["arms"]["oelm"]["runs"]) == 3, "what was run counts"


def test_a_folder_of_another_plan_is_refused(tmp_path: Path) -> None:
    compare(tmp_path / "c", seeds=1)
    with pytest.raises(fl.BadInput, match=r"made by another plan \(rules.alpha differ\)"):
        compare(tmp_path / "c", seeds=1, alpha=0.01)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("")
    with pytest.raises(fl.BadInput, match="is not empty and holds no comparison"):
        compare(tmp_path / "d")


def test_a_run_that_failed_is_shown_and_counted(tmp_path: Path) -> None:
    hot = {"name": "hot", "treatment": "oelm", "set": {"optim.lr": 1e30, "optim.clip": None}}
    found = compare(tmp_path / "c", arms=["baseline", hot], seeds=1, allow_confounds=["lr", "clip"])
    (run,) = found.evidence["arms"]["hot"]["runs"]
    assert run["status"] in ("diverged", "failed")
    assert found.verdicts["hot"]["word"] in ("confounded", "too few seeds")
    text = found.page.read_text()
    assert "diverged: " in text
    assert "optim.lr 0.003 → 1e+30" in text


@pytest.mark.parametrize("planted", ["data", "order", "weights", "precision"])
def test_a_planted_difference_keeps_runs_apart(
    planted: str, made: fl.Comparison, tmp_path: Path
) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for path, arm in ((one, "baseline"), (other, "oelm")):
        shutil.copytree(made.folder / "runs" / f"{arm}-s0", path)
    assert why_unpaired(RunRecord(one), RunRecord(other)) is None
    digests = json.loads((other / "digests.json").read_text())
    events = (other / "events.jsonl").read_text()
    if planted == "data":
        digests["data"] = "another"
    elif planted == "weights":
        key = next(key for key in digests["weights"] if key not in digests["touched"])
        digests["weights"][key] = "another"
    elif planted == "order":
        order = next(e.order for e in RunRecord(other).events(EpochEvent))
        events = events.replace(order, "another")
    else:
        events = events.replace('"precision": "float32"', '"precision": "bfloat16"')
    (other / "digests.json").write_text(json.dumps(digests))
    (other / "events.jsonl").write_text(events)
    reason = why_unpaired(RunRecord(one), RunRecord(other))
    assert reason is not None
    assert {"order": "order of examples", "weights": "initial weights"}.get(
        planted, planted
    ) in reason


@pytest.mark.parametrize("epochs", [50, pytest.param(1, marks=pytest.mark.slow)])
def test_a_quick_one_is_short_and_times_steps(
    epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "_QUICK_SECONDS", 0.5)
    recipe = tiny(train__epochs=epochs, data__examples=256, model__layers=1)
    values = {"recipe": recipe, "arms": ["baseline", "oelm"], "clock": {"seconds": 0.5}, "seeds": 1}
    found = fl.compare(values, out=tmp_path / "c", quick=True)
    quick = json.loads((tmp_path / "c" / "quick.json").read_text())
    runs = [run for arm in found.evidence["arms"].values() for run in arm["runs"]]
    assert {run["steps"] for run in runs} == {quick["steps"]}
    assert quick["of"] == 8 * epochs >= quick["steps"]
    timing = found.evidence["timing"]
    assert set(timing["arms"]) == {"baseline", "baseline again", "oelm"}
    assert timing["proven"] is False
    assert any("too few builds" in reason for reason in timing["reasons"])
    assert timing["arms"]["oelm"]["ceiling"] < 1 == timing["arms"]["baseline"]["ceiling"]
    assert timing["arms"]["oelm"]["word"] == "unproven"
    assert "**time, oelm**: unproven: a step took" in found.page.read_text()


def test_each_arm_is_tuned_on_the_same_grid_with_seeds_of_its_own(tmp_path: Path) -> None:
    found = compare(tmp_path / "c", seeds=1, tune={"values": [1e-6, 1e-5], "seeds": 1})
    (tuning,) = found.evidence["tuning"]
    assert tuning["extended"]
    assert tuning["values"] == [1e-06, 1e-05, 0.0001] or tuning["values"][0] == 1e-07
    assert tuning["curves"].keys() == {"baseline", "oelm"}
    for name, curve in tuning["curves"].items():
        assert [point["value"] for point in curve] == tuning["values"]
        best = max(curve, key=lambda point: point["mean"])
        assert best["mean"] == next(p["mean"] for p in curve if p["value"] == tuning["best"][name])
        (run,) = found.evidence["arms"][name]["runs"]
        record = RunRecord(tmp_path / "c" / run["folder"])
        recipe = yaml.safe_load((record.folder / "recipe.yaml").read_text())
        assert recipe["optim"]["lr"] == tuning["best"][name]
        assert record.result.seed == 0
    seeds = {p.name.rpartition("-s")[2] for p in (tmp_path / "c" / "tuning").iterdir()}
    assert seeds == {"900000"}
    assert "extended once" in found.page.read_text()

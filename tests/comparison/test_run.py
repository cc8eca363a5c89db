"""`fl.compare` from a plan to its result: extended, failing, quick."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import frostlab as fl
from comparing import compare
from frostlab.comparison import run as comparing
from frostlab.comparison.load import make_plan
from frostlab.comparison.page import page, show
from frostlab.comparison.run import _shortened as shortened
from frostlab.comparison.run import judge_again
from frostlab.comparison.runner import ComparisonFolder, Runner
from frostlab.comparison.timed_arms import CONTROLS
from frostlab.recipe.settings import Watch
from frostlab.records.folder import RunRecord
from tiny import tiny


def test_a_comparison_is_read_from_a_folder_by_name(made: fl.Comparison) -> None:
    again = fl.Comparison(str(made.folder))  # type: ignore[arg-type]
    assert again == made
    assert again.page == made.folder / "comparison.md"
    assert again.evidence is again.evidence, "it is read once"
    assert again.verdicts is again.evidence.verdicts


def test_a_frame_has_a_row_a_run(made: fl.Comparison) -> None:
    pytest.importorskip("pandas")
    frame = made.to_frame()
    assert len(frame) == 18
    assert set(frame["arm"]) == {"baseline", "oelm", "oelm-random"}


def test_a_notebook_shows_the_verdicts(made: fl.Comparison, tmp_path: Path) -> None:
    shown = made._repr_html_()
    evidence = made.evidence
    for name, verdict in evidence.verdicts.items():
        assert f">{name}<" in shown
        assert f">{verdict.word}<" in shown
        assert f">{verdict.paired}<" in shown
    assert "the baseline" in shown
    assert "<script" not in shown
    assert "no verdicts yet" in fl.Comparison(tmp_path)._repr_html_()


def test_seeds_can_be_added_and_the_page_says_so(tmp_path: Path) -> None:
    first = compare(tmp_path / "c", seeds=5)
    assert first.evidence.look == 1
    assert "look 2 at this question" not in first.page.read_text()
    again = compare(tmp_path / "c", seeds=6)
    assert again.evidence.look == 2
    assert "look 2 at this question" in again.page.read_text()
    assert len(again.evidence.arms["oelm"].runs) == 6
    fewer = compare(tmp_path / "c", seeds=1)
    assert len(fewer.evidence.arms["oelm"].runs) == 6, "what was run counts"


def test_a_run_that_failed_is_shown_and_counted(tmp_path: Path) -> None:
    hot = {"name": "hot", "treatment": "oelm", "set": {"optim.lr": 1e30, "optim.clip": None}}
    found = compare(tmp_path / "c", arms=["baseline", hot], seeds=1, allow_confounds=["lr", "clip"])
    (run,) = found.evidence.arms["hot"].runs
    assert run.status in ("diverged", "failed")
    assert found.verdicts["hot"].word in ("confounded", "too few seeds")
    text = found.page.read_text()
    assert "diverged: " in text
    assert "optim.lr 0.003 → 1e+30" in text


@pytest.mark.parametrize("epochs", [50, pytest.param(1, marks=pytest.mark.slow)])
def test_a_quick_one_is_short_and_times_steps(
    epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "_QUICK_SECONDS", 0.5)
    recipe = tiny(train__epochs=epochs, data__examples=256, model__layers=1)
    arms, clock = ["baseline", "oelm"], {"seconds": 0.01}
    values = {"recipe": recipe, "arms": arms, "clock": clock, "seeds": 1}
    found = fl.compare(values, out=tmp_path / "c", quick=True)
    assert show(found.evidence, found.page).startswith("A quick comparison with short runs.")
    assert json.loads((tmp_path / "c" / "comparison.json").read_text())["quick"]
    quick = json.loads((tmp_path / "c" / "quick.json").read_text())
    runs = [run for arm in found.evidence.arms.values() for run in arm.runs]
    assert {run.steps for run in runs} == {quick["steps"]}
    assert quick["of"] == 8 * epochs >= quick["steps"]
    timing = found.evidence.timing
    assert set(timing.arms) == {"baseline", *CONTROLS, "oelm"}
    assert timing.proven is False
    assert any("the models were built too few times" in reason for reason in timing.reasons)
    assert timing.arms["oelm"].ceiling < 1 == timing.arms["baseline"].ceiling
    assert timing.arms["oelm"].word == "unproven"
    assert "**time, oelm**: unproven: a step took" in found.page.read_text()
    noted = replace(found.evidence, timing=replace(timing, notes=("other processes were busy",)))
    assert "Notes: other processes were busy." in page(noted)


def test_a_quick_one_can_be_asked_for_again(tmp_path: Path) -> None:
    values = {"recipe": tiny(data__examples=96, train__epochs=50, model__layers=1),
              "arms": ["baseline", "oelm"], "seeds": 1, "clock": None}  # fmt: skip
    for seeds in (1, 2):
        fl.compare({**values, "seeds": seeds}, out=tmp_path / "q", quick=True)
    plan = json.loads((tmp_path / "q" / "plan.json").read_text())
    assert plan["plan"]["recipe"]["train"]["epochs"] == 50


def test_a_quick_one_tunes_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_QUICK_SECONDS", 20.0)  # two arms, a second a step is assumed
    values = {"recipe": tiny(data__examples=96, train__epochs=50, model__layers=1),
              "arms": ["baseline", "oelm"], "seeds": 1, "clock": None, "tune": "lr"}  # fmt: skip
    fl.compare(values, out=tmp_path / "q", quick=True)
    quick = json.loads((tmp_path / "q" / "quick.json").read_text())
    runs = list((tmp_path / "q" / "runs").iterdir())
    assert len(runs) >= 2 * 3
    assert {RunRecord(run).result.steps for run in runs} == {quick["steps"]}
    assert quick["steps"] < quick["of"]


def test_data_that_are_not_there_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"recipe": "wikitext2-decoder", "arms": ["baseline", "oelm"]}
    with pytest.raises(fl.BadInput, match="wikitext2 was not found"):
        fl.compare(values, data_dir=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("steps", "every"), [(11, 1), (60, 3), (900, 20)])
def test_a_quick_look_is_watched_as_often_as_it_needs(
    steps: int, every: int, tmp_path: Path
) -> None:
    folder = ComparisonFolder(tmp_path)
    folder.write("quick.json", {"steps": steps, "of": 1000})
    plan = shortened(make_plan("eeg-ablation", quick=True), folder, None, Runner(None))
    assert plan.recipe_of(plan.baseline, 0).watch == Watch(every_n_steps=every)


def test_the_baseline_is_trained_twice(made: fl.Comparison) -> None:
    repeat = made.evidence.repeat
    assert repeat is not None
    assert repeat.same_weights  # on one processor, a run repeats itself
    first, second = repeat.metrics["accuracy"]
    assert first == second
    assert (made.folder / repeat.folder / "result.json").exists()
    assert "The same run twice (baseline, seed 0): accuracy" in made.page.read_text()


@pytest.mark.slow
def test_judging_again_changes_nothing_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"tune": {"values": [1e-3, 1e-2]}, "seeds": 2, "assay": True}
    first = compare(tmp_path / "c", **given)
    evidence, page = first.evidence, first.page.read_text()
    first.page.write_text("lost")
    monkeypatch.setattr("frostlab.training.run.run", None)
    again = judge_again(tmp_path / "c")
    assert again.evidence == evidence
    assert again.page.read_text() == page
    shutil.rmtree(tmp_path / "c" / "repeat")
    with pytest.raises(fl.BadInput, match="has no readable result; finish the comparison with"):
        judge_again(tmp_path / "c")
    with pytest.raises(fl.BadInput, match="is not the folder of a comparison"):
        judge_again(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(fl.BadInput, match=r"it has no plan\.json"):
        judge_again(tmp_path / "empty")


@pytest.mark.slow
def test_a_planted_harm_is_found_or_said_to_be_missed(tmp_path: Path) -> None:
    learning = tiny(
        data__examples=96, train__epochs=4, train__batch=16, model__layers=1, optim__lr=0.01
    )
    found = compare(tmp_path / "a", recipe=learning, seeds=5, metric="loss", assay=True)
    assay = found.evidence.assay
    assert assay is not None
    assert (assay.steps, assay.of) == (12, 24)
    assert assay.found
    assert "The planted harm, a baseline trained for 12 of 24 steps, was found" in (
        found.page.read_text()
    )
    missed = compare(tmp_path / "b", seeds=1, assay=True)
    assert "was NOT found, so this comparison cannot see" in missed.page.read_text()

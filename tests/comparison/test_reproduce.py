"""The plan of a comparison is carried out again elsewhere, and gives the same numbers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from comparing import ARMS, compare, own_data, plant, reseal
from frostlab.comparison.judging.pairing import unlike
from frostlab.comparison.plan import Plan
from frostlab.data import prepare as prepare_module
from frostlab.data.prepare import data_digest, find_path, prepare
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunRecord
from tiny import tiny


def own_recipe(path: Path) -> dict[str, Any]:
    data = {"name": "own", "path": str(path), "length": 12}
    return tiny(data=data, train__epochs=1, train__batch=16, model__layers=1)


def numbers(folder: Path) -> dict[str, Any]:
    """Every number of a comparison's runs that does not depend on the clock."""
    records = {str(path.parent.relative_to(folder)): RunRecord(path.parent)
               for path in folder.glob("*/*/result.json")}  # fmt: skip
    return {
        name: (record.result.report, record.result.best, record.result.last,
               record.result.weights_digest, record.result.order_digest, record.digests)
        for name, record in sorted(records.items())
    }  # fmt: skip


@pytest.mark.slow
def test_a_moved_comparison_is_reproduced_in_every_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder, its data and the cache are elsewhere; the data have another name."""
    data = own_data(tmp_path / "here" / "mine.csv")
    values = {"recipe": own_recipe(data), "arms": [*ARMS, "oelm-random"], "seeds": 2, "clock": None,
              "tune": {"values": [1e-3, 3e-3]}, "assay": True}  # fmt: skip
    first = fl.compare(values, out=tmp_path / "here" / "c")
    expected, evidence = numbers(first.folder), first.evidence
    there = tmp_path / "there"
    own_data(there / "data" / "decoy" / "mine.csv", first=1000)
    shutil.move(data, there / "data" / "renamed.csv")
    shutil.move(first.folder, there / "received")
    monkeypatch.setenv("FROSTLAB_CACHE", str(there / "cache"))
    monkeypatch.chdir(there)
    again = fl.compare("received/plan.json", data_dir=there / "data", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert (
        again.folder == there / "comparisons" / "comparison-baseline-vs-oelm-vs-oelm-random-again"
    )
    assert numbers(again.folder) == expected
    assert len(expected) > 3 * 2 * 2
    assert f"the data were found at {there / 'data' / 'renamed.csv'}" in lines
    assert lines[-1].startswith("all 18 metrics are equal to those of the first comparison")
    assert again.evidence.made.plan == evidence.made.plan
    for part in ("verdicts", "secondary", "contrasts", "assay", "tuning", "mcnemar", "look"):
        assert getattr(again.evidence, part) == getattr(evidence, part), part


def test_a_plan_is_carried_out_again_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = compare(tmp_path / "c", seeds=1)
    again = fl.compare(tmp_path / "c" / "plan.json", out="d", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert numbers(again.folder) == numbers(first.folder)
    assert lines[-1] == "all 6 metrics are equal to those of the first comparison, in every digit"
    monkeypatch.setattr("frostlab.training.run.run", None)  # nothing is left to train
    assert fl.compare(tmp_path / "c" / "plan.json", out="d").evidence == again.evidence


def test_a_quick_comparison_is_repeated_with_its_own_steps(tmp_path: Path) -> None:
    recipe = tiny(data__examples=96, train__epochs=50, model__layers=1)
    values = {"recipe": recipe, "arms": ARMS, "seeds": 1, "clock": None}
    fl.compare(values, out=tmp_path / "q", quick=True)
    plant(tmp_path / "q" / "quick.json", steps=3)  # as on a slow machine
    with pytest.raises(fl.BadInput, match=r"quick\.json was changed after it was written"):
        fl.compare(tmp_path / "q" / "plan.json", out=tmp_path / "again")
    reseal(tmp_path / "q")
    again = fl.compare(tmp_path / "q" / "plan.json", out=tmp_path / "again")
    assert {run.steps for arm in again.evidence.arms.values() for run in arm.runs} == {3}


def test_differences_are_said(made: fl.Comparison) -> None:
    evidence = made.evidence
    assert unlike(evidence, evidence) == [
        "all 54 metrics are equal to those of the first comparison, in every digit"
    ]
    arm = evidence.arms["oelm"]
    run = replace(arm.runs[0], metrics={**arm.runs[0].metrics, "accuracy": 0.125})
    changed = replace(
        evidence,
        arms={**evidence.arms, "oelm": replace(arm, runs=(run, *arm.runs[1:]))},
        made=replace(evidence.made, versions={**evidence.made.versions, "torch": "1.0"}),
    )
    assert len(unlike(replace(evidence, arms={"gone": arm}), evidence)) == 1
    first, second = unlike(evidence, changed)
    accuracy = arm.runs[0].metrics["accuracy"]
    assert first == (
        f"1 of 54 metrics differ, such as oelm seed 0: accuracy {accuracy} and now 0.125"
    )
    assert second == f"torch: {evidence.made.versions['torch']} and now 1.0"


def test_a_plan_is_not_changed(made: fl.Comparison, tmp_path: Path) -> None:
    plan = made.folder / "plan.json"
    with pytest.raises(fl.BadInput, match=r"cannot be changed; leave out: seeds, alpha, quick$"):
        fl.compare(plan, seeds=2, alpha=0.01, quick=True)
    with pytest.raises(fl.BadInput, match=r"cannot be changed; leave out: optim\.lr$"):
        fl.compare(plan, settings={"optim.lr": 1})
    with pytest.raises(fl.BadInput, match="is the folder of the plan; choose another"):
        fl.compare(plan, out=made.folder)
    with pytest.raises(fl.BadInput, match=r"none\.json does not exist"):
        fl.compare(tmp_path / "none.json")
    stored = json.loads(plan.read_text())
    for name, values in {
        "../../evil": stored | {"plan": stored["plan"] | {"name": "../../evil"}},
        "seeds": stored | {"plan": stored["plan"] | {"seeds": [-1]}},
    }.items():
        (tmp_path / "plan.json").write_text(json.dumps(values))
        with pytest.raises(fl.BadInput, match="should be a plain file name|a seed is 0 or more"):
            fl.compare(tmp_path / "plan.json")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], name


def test_other_data_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compare(tmp_path / "c", seeds=1)
    for run in (tmp_path / "c" / "runs").iterdir():
        plant(run / "digests.json", data="0" * 64)
    with pytest.raises(fl.BadInput, match=r"the data here have the digest \w{16}, not 0000000000"):
        fl.compare("c/plan.json")
    assert not (tmp_path / "comparisons").exists()


def test_data_are_found_by_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_from(own_recipe(own_data(tmp_path / "a" / "mine.csv")))
    digest = data_digest(recipe)
    assert digest == prepare(recipe).digest
    assert find_path(recipe, digest, None) == str(tmp_path / "a" / "mine.csv")
    (tmp_path / "b" / "x").mkdir(parents=True)
    shutil.move(tmp_path / "a" / "mine.csv", tmp_path / "b" / "x" / "moved.csv")
    own_data(tmp_path / "a" / "mine.csv", first=500)  # another file of the same name
    own_data(tmp_path / "b" / "mine.csv", first=700)
    (tmp_path / "b" / "broken.csv").write_text("x")
    assert find_path(recipe, digest, tmp_path / "b") == str(tmp_path / "b" / "x" / "moved.csv")
    with pytest.raises(fl.BadInput, match=rf"\(digest {digest[:16]}\) are neither at .*mine"):
        find_path(recipe, digest, tmp_path / "a")
    monkeypatch.setattr(prepare_module, "MOST_PLACES", 3)
    with pytest.raises(fl.BadInput, match="holds more than 3 files and folders"):
        find_path(recipe, digest, tmp_path / "b")
    shutil.copy(tmp_path / "b" / "x" / "moved.csv", tmp_path / "a" / "mine.csv")
    assert find_path(recipe, digest, tmp_path / "b") == str(tmp_path / "a" / "mine.csv")


def test_the_digest_of_a_plan_does_not_depend_on_where_the_data_are(made: fl.Comparison) -> None:
    plan = made.evidence.plan

    def at(path: str) -> Plan:
        data = {"name": "own", "path": path}
        return plan.model_copy(update={"recipe": {**plan.recipe, "data": data}})

    assert at("a").digest == at("b").digest != plan.digest
    assert at("a").recipe["data"]["path"] == "a"


def test_the_page_shows_how_it_was_made(made: fl.Comparison) -> None:
    facts, text = made.evidence.made, made.page.read_text()
    record = RunRecord(made.folder / "runs" / "baseline-s0")
    assert facts.data == record.digests.data
    assert facts.plan == made.evidence.plan.digest
    assert facts.code == record.environment["code"]["digest"]
    assert facts.began <= record.result.started <= record.result.ended <= facts.ended
    section = text.partition("## How it was made\n")[2].partition("\n## ")[0]
    assert f"- Plan {facts.plan}; data {facts.data}." in section
    for fact in (facts.began, f"torch {facts.versions['torch']}", f"digest {facts.code}"):
        assert fact in section
    assert record.environment["host"]["cpu"] in section
    assert facts.source is None

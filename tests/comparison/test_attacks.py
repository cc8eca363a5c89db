"""What a second reader found: each was silent or a traceback once."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from frostlab.comparison import run as comparing
from frostlab.comparison import runner
from frostlab.comparison.load import make_plan
from frostlab.comparison.verdict import why_unpaired
from frostlab.records.folder import RunRecord
from frostlab.training import loop
from frostlab.training.run import RunFailed
from tiny import tiny

SMALL = tiny(data__examples=96, train__epochs=1, train__batch=16, model__layers=1)
LANGUAGE = tiny(
    data={"name": "induction", "examples": 96, "length": 16, "symbols": 16},
    train__epochs=1, train__batch=16, model__layers=1,
)  # fmt: skip


def compare(folder: Path, **given: Any) -> fl.Comparison:
    values = {"recipe": SMALL, "arms": ["baseline", "oelm"], "seeds": 2, "clock": None, **given}
    return fl.compare(values, out=folder)


def arm(**changes: Any) -> list[Any]:
    return ["baseline", {"name": "other", "treatment": "oelm", "set": changes}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arms": arm(seed=3)}, "set.seed cannot be"),
        ({"arms": arm(treatment="bitfit")}, "set.treatment cannot be"),
        ({"arms": arm(**{"optim.lr.x": 1})}, "lr has nothing below it"),
        ({"arms": ["baseline", {"name": "same", "treatment": "none", "set": {"optim.lr": 3e-3}}]},
         "are the same treatment"),
        ({"arms": ["baseline", "oelm", {"name": "oelm-freeze", "treatment": "frozen-qk"}]},
         "its name is taken in comparison.json"),
        ({"arms": ["baseline", {"name": "dataset", "treatment": "oelm"}]}, "is taken"),
        ({"arms": 5}, "arms"),
        ({"arms": {"baseline": None, "oelm": None}}, "arms"),
        ({"seeds": 5.5}, "seeds"),
        ({"seeds": True}, "seeds"),
        ({"seeds": [-1, 2]}, "none below 0"),
        ({"seeds": {1: 2}}, "seeds"),
        ({"tune": ["lr"]}, "tune"),
        ({"tune": 5}, "tune"),
        ({"set": "train.epochs=1"}, "set"),
        ({"metric": ["accuracy"]}, "metric"),
        ({"allow_confounds": 5}, "allow_confounds"),
        ({1: 2}, "1 is no key of a comparison"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(given: dict[Any, Any], said: str) -> None:
    with pytest.raises(fl.BadInput) as refused:
        make_plan({"recipe": SMALL, "arms": ["baseline", "oelm"], **given})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_tuning_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning run fails once; when seeds are added it would succeed, and choose otherwise."""
    run = runner.run

    def failing(recipe: Any, **options: Any) -> Any:
        if options["out"].name.startswith("baseline-0.01-"):
            raise RunFailed("out of memory")
        return run(recipe, **options)

    grid = {"values": [1e-5, 1e-4, 1e-2, 1e-1], "seeds": 1}
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", failing)
        first = compare(tmp_path / "c", tune=grid, metric="loss", seeds=1)
    again = compare(tmp_path / "c", tune=grid, metric="loss", seeds=2)
    assert again.evidence["tuning"] == first.evidence["tuning"]
    folders = [
        tmp_path / "c" / each["folder"] for each in again.evidence["arms"]["baseline"]["runs"]
    ]
    recipes = [yaml.safe_load((folder / "recipe.yaml").read_text()) for folder in folders]
    assert len({recipe["optim"]["lr"] for recipe in recipes}) == 1 < len(folders)
    assert "was tuned for each" in again.page.read_text()


def test_a_run_of_another_recipe_is_not_taken_for_this_one(tmp_path: Path) -> None:
    compare(tmp_path / "c", seeds=1)
    result = tmp_path / "c" / "runs" / "oelm-s0" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "recipe_digest": "other"}))
    with pytest.raises(fl.BadInput, match="holds a run of another recipe"):
        compare(tmp_path / "c", seeds=1)


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
    runs = [*(tmp_path / "q" / "tuning").iterdir(), *(tmp_path / "q" / "runs").iterdir()]
    assert len(runs) >= 2 * (3 + 1)
    assert {RunRecord(run).result.steps for run in runs} == {quick["steps"]}
    assert quick["steps"] < quick["of"]


def test_data_that_are_not_there_leave_nothing_behind(tmp_path: Path) -> None:
    values = {"recipe": "wikitext2-decoder", "arms": ["baseline", "oelm"]}
    with pytest.raises(fl.BadInput, match="wikitext2 was not found"):
        fl.compare(values, comparisons=tmp_path / "all", data_dir=tmp_path)
    assert not (tmp_path / "all").exists()


def test_a_bug_in_one_arm_is_shown_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.measure

    def buggy(setting: Any, *given: Any) -> Any:
        if setting.frozen is not None:
            raise ZeroDivisionError("a bug of its own")
        return real(setting, *given)

    monkeypatch.setattr(loop, "measure", buggy)
    found = compare(tmp_path / "c", seeds=1)
    assert found.evidence["arms"]["baseline"]["runs"][0]["status"] == "finished"
    assert found.evidence["arms"]["oelm"]["runs"][0]["status"] == "failed"
    kept = (tmp_path / "c" / "runs" / "oelm-s0" / "traceback.txt").read_text()
    assert "ZeroDivisionError: a bug of its own" in kept
    assert "failed" in found.page.read_text()


def test_settings_change_a_recipe_that_is_spelled_out_and_the_clock_can_be_left_out() -> None:
    plan = make_plan({"recipe": SMALL, "arms": ["baseline", "oelm"]},
                     settings=["train.batch=8"], clock=None)  # fmt: skip
    assert plan.recipe["train"]["batch"] == 8
    assert plan.clock is None
    assert make_plan({"recipe": SMALL, "arms": ["baseline", "oelm"]}).clock is not None


def test_orthogonality_knows_of_confounds(tmp_path: Path) -> None:
    arms = ["baseline", "oelm", {"name": "oelm-random", "treatment": "oelm-random",
                                 "set": {"optim.lr": 0.01}}]  # fmt: skip
    found = compare(tmp_path / "c", arms=arms, allow_confounds=["lr"], seeds=1)
    assert found.evidence["orthogonality"]["word"] == "confounded"


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_language_model(seeds: int, tmp_path: Path) -> None:
    found = compare(tmp_path / "c", recipe=LANGUAGE, seeds=seeds)
    assert "perplexity within 1.05 × the baseline's?" in found.page.read_text()


def test_a_perplexity_beyond_numbers_counts_as_failed(tmp_path: Path) -> None:
    hot = {"name": "hot", "treatment": "oelm", "set": {"optim.lr": 300.0, "optim.clip": None}}
    given = {"recipe": LANGUAGE, "arms": ["baseline", hot], "allow_confounds": ["lr", "clip"]}
    for _ in range(2):
        found = compare(tmp_path / "c", seeds=1, **given)
    (run,) = found.evidence["arms"]["hot"]["runs"]
    assert run["status"] != "finished" or run["metrics"]["perplexity"] is None
    assert found.verdicts["hot"]["paired"] is None


def test_a_folder_that_was_barely_begun_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "compare.lock").touch()
    compare(tmp_path / "c", seeds=1)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"schema": 2, "plan": {}, "looks": []}'])
def test_a_damaged_plan_is_said_to_be(text: str, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "plan.json").write_text(text)
    with pytest.raises(fl.BadInput, match="is damaged, or of another version"):
        compare(tmp_path / "c")


def test_a_run_resumed_elsewhere_is_no_pair(tmp_path: Path) -> None:
    found = compare(tmp_path / "c", seeds=1)
    records = [RunRecord(found.folder / "runs" / f"{name}-s0") for name in ("baseline", "oelm")]
    assert why_unpaired(*records) is None
    shape = {key: getattr(records[1].start, key) for key in ("device", "processes", "threads")}
    resumed = {"kind": "resume", "at": 1.0, "step": 99, "precision": "bfloat16", **shape}
    with (records[1].folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(resumed) + "\n")
    again = RunRecord(records[1].folder)
    assert "precision differs" in (why_unpaired(records[0], again) or "")


def test_rounds_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result runs may share the machine (here: would crash); rounds never do."""
    monkeypatch.setattr(runner, "ProcessPoolExecutor", None)
    values = {"recipe": SMALL, "arms": ["baseline", "oelm"], "clock": None, "rounds": 1}
    fl.compare({**values, "seeds": 1}, out=tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "rounds")
    fl.compare({**values, "seeds": 1}, out=tmp_path / "c", jobs=2)
    with pytest.raises(TypeError):
        fl.compare({**values, "seeds": 2}, out=tmp_path / "c", jobs=2)


def plant(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_caution_is_shown_and_other_data_are_not_paired(tmp_path: Path) -> None:
    found = compare(tmp_path / "c")
    assert "Caution" not in found.page.read_text()
    for name in ("baseline", "oelm"):
        plant(tmp_path / "c" / "runs" / f"{name}-s0" / "result.json", caution="selected on it")
        plant(tmp_path / "c" / "runs" / f"{name}-s1" / "digests.json", data="another")
    again = compare(tmp_path / "c")
    assert "Caution: selected on it." in again.page.read_text()
    (refused,) = again.evidence["refused_pairs"]
    assert (refused["seed"], refused["reason"]) == (1, "the data are no longer those of seed 0")
    assert again.verdicts["oelm"]["paired"]["n"] == 1

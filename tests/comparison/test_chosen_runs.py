"""`fl.compare_runs`: runs that have ended, compared after the fact."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import frostlab as fl
from comparing import plant
from frostlab.comparison.chosen_runs import plan_of_runs
from frostlab.comparison.page import show
from frostlab.comparison.plan import Plan
from frostlab.comparison.run import judge_again
from frostlab.recipe.load import recipe_from
from frostlab.records.folder import RunRecord
from frostlab.records.manifest import verify, write_manifest


@pytest.fixture
def runs(made: fl.Comparison, tmp_path: Path) -> Path:
    """A copy of the 18 runs of a comparison, in a folder of runs."""
    return Path(shutil.copytree(made.folder / "runs", tmp_path / "runs"))


def change_recipe(folder: Path, pattern: str, settings: dict[str, Any]) -> None:
    """Pretend that runs were trained with other settings."""
    for run in folder.glob(pattern):
        values = yaml.safe_load((run / "recipe.yaml").read_text())
        recipe = recipe_from(values, settings=settings)
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
        write_manifest(run)


def unfinish(run: Path) -> None:
    """Make a run as it was before it ended."""
    for name in ("result.json", "manifest.json"):
        (run / name).unlink()


def test_the_effect_is_that_of_the_planned_comparison(
    made: fl.Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostlab.training.run.run", None)  # nothing is trained
    arms = [made.folder / "runs" / f"{name}-s*" for name in ("baseline", "oelm", "oelm-random")]
    compared = fl.compare_runs(*arms, out=tmp_path / "c")
    assert list(compared.evidence.arms) == ["baseline", "oelm", "oelm-random"]
    for name, planned in made.verdicts.items():
        assert compared.verdicts[name].paired == planned.paired
        assert compared.verdicts[name].word == planned.word
    assert compared.evidence.orthogonality.paired == made.evidence.orthogonality.paired
    runs = compared.evidence.arms["oelm"].runs
    first = made.folder / "runs" / "oelm-s0"
    assert (compared.folder / runs[0].folder).resolve() == first.resolve()
    assert not (compared.folder / "runs").exists()
    assert compared.evidence.timing is None
    assert compared.evidence.repeat is None


def test_the_verdict_says_what_a_plan_would_have_guaranteed(runs: Path, tmp_path: Path) -> None:
    compared = fl.compare_runs(runs / "baseline-s*", runs / "oelm-s*", out=tmp_path / "c")
    verdict = compared.verdicts["oelm"]
    assert verdict.sentence.endswith("; runs chosen after the fact, untuned.")
    after, untuned = verdict.notes[-2:]
    assert after.startswith("runs chosen after the fact: no plan was made before the results")
    assert untuned.startswith("untuned: both arms have optim.lr 0.003, and no record shows")
    text = compared.page.read_text()
    assert "Caution: runs chosen after the fact, when their results could be seen." in text
    assert "holds only for runs that are chosen before their results are known" in text
    assert "Whole runs were trained at different times" in text
    assert "carries out this plan again" not in text
    assert "chosen beforehand" not in text
    shown = " ".join(show(compared.evidence, compared.page).split())
    assert f"oelm: {untuned}" in shown
    comparison = json.loads((compared.folder / "comparison.json").read_text())
    assert comparison["comparison"]["conclusion"] == verdict.sentence
    assert comparison["oelm_freeze"]["timing"]["step"] is None


def test_seeds_without_a_partner_are_left_out_of_their_pair_only(
    runs: Path, tmp_path: Path
) -> None:
    shutil.rmtree(runs / "baseline-s0")
    shutil.rmtree(runs / "oelm-s4")
    shutil.rmtree(runs / "oelm-s5")
    groups = [runs / f"{name}-s*" for name in ("baseline", "oelm", "oelm-random")]
    compared = fl.compare_runs(*groups, out=tmp_path / "c")
    verdicts = compared.verdicts
    assert [verdicts[name].paired.n for name in ("oelm", "oelm-random")] == [3, 5]
    assert verdicts["oelm"].word == "too few seeds"
    assert verdicts["oelm-random"].word not in ("too few seeds", "unproven")
    assert "seeds that only oelm has are left out: 0" in verdicts["oelm"].notes
    assert "seeds that only baseline has are left out: 4, 5" in verdicts["oelm"].notes
    assert [run.seed for run in compared.evidence.arms["oelm"].runs] == [0, 1, 2, 3]
    assert compared.evidence.pairs == 8
    assert len(compared.evidence.mcnemar["oelm"]) == 3
    assert compared.evidence.made.data == RunRecord(runs / "baseline-s1").digests.data


def test_runs_that_do_not_fit_together_are_not_paired(runs: Path, tmp_path: Path) -> None:
    plant(runs / "oelm-s1" / "digests.json", data="another")
    environment = json.loads((runs / "oelm-s2" / "environment.json").read_text())
    environment["versions"]["torch"] = "0.1"
    plant(runs / "oelm-s2" / "environment.json", **environment)
    for seed in (1, 2):
        write_manifest(runs / f"oelm-s{seed}")
    compared = fl.compare_runs(runs / "baseline-s*", runs / "oelm-s*", out=tmp_path / "c")
    assert [pair.seed for pair in compared.evidence.refused_pairs] == [1, 2]
    assert compared.verdicts["oelm"].paired.n == 4
    shown = show(compared.evidence, compared.page)
    assert "oelm seed 1 is not paired: the data differ" in shown
    assert "oelm seed 2 is not paired: torch differs" in shown


def test_an_unfinished_run_leaves_the_difference_unknown(runs: Path, tmp_path: Path) -> None:
    unfinish(runs / "oelm-s3")
    compared = fl.compare_runs(runs / "baseline-s*", runs / "oelm-s*", out=tmp_path / "c")
    verdict = compared.verdicts["oelm"]
    assert verdict.word == "unproven"
    assert "1 of 6 runs of oelm did not finish" in verdict.sentence
    assert "finish them with frostlab run --resume" in verdict.sentence
    run = compared.evidence.arms["oelm"].runs[3]
    assert (run.status, run.steps > 0) == ("unfinished", True)
    assert verify(compared.folder) == (1, [])
    (problem,) = judged_after(compared, lambda: shutil.rmtree(runs / "oelm-s2"))
    assert problem.endswith(f"is not a run any more; the comparison in {compared.folder} needs it")


def judged_after(compared: fl.Comparison, change: Callable[[], Any]) -> list[str]:
    """Change something, judge again, and return the error's message, if there is one."""
    change()
    try:
        judge_again(compared.folder)
    except fl.BadInput as error:
        return [str(error)]
    return []


def test_a_diverged_run_counts_as_the_worst(runs: Path, tmp_path: Path) -> None:
    plant(runs / "oelm-s3" / "result.json", status="diverged", report=None, error="loss is nan")
    write_manifest(runs / "oelm-s3")
    compared = fl.compare_runs(runs / "baseline-s*", runs / "oelm-s*", out=tmp_path / "c")
    verdict = compared.verdicts["oelm"]
    assert verdict.missing == {"oelm": 1}
    assert "diverged, and each counts as the worst value of all runs" in verdict.sentence
    assert verdict.paired.low is None, "nothing is known about how bad it would have been"


def test_one_setting_is_compared_like_a_treatment(runs: Path, tmp_path: Path) -> None:
    change_recipe(runs, "oelm-s*", {"treatment": "none", "optim.lr": 0.01})
    compared = fl.compare_runs(runs / "baseline-s*", runs / "oelm-s*", out=tmp_path / "c")
    assert list(compared.evidence.arms) == ["lr-0.003", "lr-0.01"]
    verdict = compared.verdicts["lr-0.01"]
    assert verdict.word != "confounded"
    assert verdict.sentence.endswith("; runs chosen after the fact.")
    assert compared.evidence.plan.vary == ("optim.lr",)


@pytest.mark.parametrize("treatment", ["oelm", "none"])
def test_several_differences_are_confounds(runs: Path, tmp_path: Path, treatment: str) -> None:
    settings = {"treatment": treatment, "optim.lr": 0.01}
    if treatment == "none":
        settings["optim.decay"] = 0.5
    change_recipe(runs, "oelm-s*", settings)
    groups = (runs / "baseline-s*", runs / "oelm-s*")
    with pytest.raises(fl.BadInput, match="which is a confound; choose runs that share it, or"):
        fl.compare_runs(*groups, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()
    allowed = ["lr", "decay"]
    compared = fl.compare_runs(*groups, allow_confounds=allowed, out=tmp_path / "c")
    (verdict,) = compared.verdicts.values()
    assert verdict.word == "confounded"
    assert "optim.lr 0.003 → 0.01" in verdict.sentence


def test_flow_that_only_one_arm_measured_is_not_compared(runs: Path, tmp_path: Path) -> None:
    change_recipe(runs, "baseline-s*", {"watch": {"every_n_steps": 1}})
    groups = (runs / "baseline-s*", runs / "oelm-s*")
    compared = fl.compare_runs(*groups, allow_confounds="watch", out=tmp_path / "c")
    assert compared.evidence.flow == {}


def test_arms_are_named_by_what_differs(runs: Path) -> None:
    def names(*groups: str) -> list[str]:
        plan = plan_of_runs([str(runs / group) for group in groups], {"allow_confounds": "optim"})
        return [each.name for each in plan.arms]

    assert names("oelm-s*", "baseline-s*") == ["oelm", "none"]
    change_recipe(runs, "oelm-s*", {"treatment": {"freeze": ["query"]}})
    change_recipe(runs, "oelm-random-s*", {"treatment": {"freeze": ["key"]}})
    three = ("baseline-s*", "oelm-s*", "oelm-random-s*")
    assert names(*three) == ["baseline", "explicit", "explicit-2"]
    change_recipe(runs, "oelm-s*", {"optim.schedule": {"every": "epoch", "factor": 0.5}})
    assert names(*three[:2]) == ["baseline-schedule-linear", "explicit-schedule"]
    assert plan_of_runs([runs / name for name in three[::2]]).baseline.name == "baseline"


def test_the_same_runs_are_judged_in_the_same_folder(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = fl.compare_runs("runs/baseline-s*", "runs/oelm-s*")
    assert first.folder.name.endswith("-baseline-vs-oelm-runs")
    assert first.evidence.look == 1
    assert fl.compare_runs("runs/baseline-s*", "runs/oelm-s*") == first
    assert first.evidence.look == 1, "the same results are the same look"
    fewer = fl.compare_runs("runs/baseline-s[0-4]", [f"runs/oelm-s{i}" for i in range(5)])
    assert fewer.folder.name == f"{first.folder.name}-2"
    assert fewer.evidence.look == 2
    records = (fl.load_run(run) for run in runs.glob("oelm-s*"))
    assert fl.compare_runs("runs/baseline-s*", records) == first


def test_the_folder_is_judged_and_verified_where_it_is_moved_with_its_runs(
    runs: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    runs.rename(old / "runs")
    compared = fl.compare_runs(
        old / "runs" / "baseline-s*", old / "runs" / "oelm-s*", out=old / "comparisons" / "c"
    )
    evidence = compared.evidence
    old.rename(new)
    again = judge_again(new / "comparisons" / "c")
    assert again.evidence == evidence
    assert verify(again.folder) == (1, [])
    run = new / "runs" / "oelm-s1"
    (run / "recipe.yaml").write_text("seed: 3")
    (problem,) = verify(again.folder)[1]
    assert os.path.normpath(problem.path) == str(run / "recipe.yaml")
    assert problem.problem == "was changed after it was written"
    write_manifest(run)
    (problem,) = verify(again.folder)[1]
    assert os.path.normpath(problem.path) == str(run / "manifest.json")


def test_a_plan_of_finished_runs_is_not_carried_out(runs: Path, tmp_path: Path) -> None:
    compared = fl.compare_runs(runs / "baseline-s*", runs / "oelm-s*", out=tmp_path / "c")
    with pytest.raises(fl.BadInput, match=f"judge them again with frostlab judge {tmp_path}/c"):
        fl.compare(compared.folder / "plan.json")


def test_an_edited_run_is_refused_and_leaves_nothing_behind(runs: Path, tmp_path: Path) -> None:
    plant(runs / "oelm-s1" / "result.json", steps=3)
    with pytest.raises(fl.BadInput, match=r"result\.json was changed after it was written"):
        fl.compare_runs(runs / "baseline-s*", runs / "oelm-s*", out=tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": {"oelm": {}}}, "runs: their arms and seeds are not those of the plan"),
        ({"rounds": 2}, "runs: a plan of finished runs trains nothing, so it cannot"),
    ],
)
def test_a_plan_of_runs_that_contradicts_itself_is_refused(
    made: fl.Comparison, change: dict[str, Any], message: str
) -> None:
    plan = plan_of_runs([made.folder / "runs" / f"{name}-s*" for name in ("baseline", "oelm")])
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    with pytest.raises(fl.BadInput, match=message):
        plan.model_copy(update=change).check()


def test_two_manifests_that_list_each_other_are_checked_once(runs: Path) -> None:
    one, other = runs / "oelm-s0", runs / "oelm-s1"
    for run, listed in ((one, other), (other, one)):
        plant(run / "manifest.json", **{f"../{listed.name}/manifest.json": [1, "x"]})
    problems = verify(one)[1]
    assert 1 <= len(problems) <= 4


Change = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("change", "groups", "message"),
    [
        (None, ["baseline-s*"], "a comparison needs the runs of two arms, such as 'runs/a-"),
        (None, [], "nothing: a comparison needs the runs of two arms"),
        (None, ["baseline-s*", "olm-s0*"], "no run matches .*; did you mean `oelm-s0`?"),
        (None, ["baseline-s*", "none/*"], "none is not a folder"),
        (None, ["baseline-s*", "docstrings-gpt"], "no run matches"),
        (None, ["", "baseline-s*"], "oelm-.* differs from .*baseline-s0 in treatment"),
        (None, ["baseline-s*", "oelm-s*", "oelm-s3"], "oelm-s3 is in two arms"),
        (None, ["oelm-s0", "oelm-s1"], "were trained in the same way.* in quotes: 'runs/a-"),
        (None, ["baseline-s[012]", "oelm-s[34]"], "no seed in common: .* has 0, 1, 2, and .* 3, 4"),
        (lambda runs: (runs / "oelm-sx").mkdir(), ["baseline-s*", "oelm-s*"],
         "oelm-sx is not a run; choose a pattern that matches only runs"),
        (lambda runs: shutil.copytree(runs / "oelm-s0", runs / "oelm-s0-2"),
         ["baseline-s*", "oelm-s*"], "oelm-s0 and .*oelm-s0-2 both have seed 0; leave one"),
        (lambda runs: change_recipe(runs, "oelm-s2", {"optim.lr": 1.0, "optim.decay": 0.0}),
         ["baseline-s*", "oelm-s*"], "oelm-s2 differs from .*oelm-s0 in optim.lr, optim.decay"),
        (lambda runs: change_recipe(runs, "oelm-s*", {"data.examples": 97}),
         ["baseline-s*", "oelm-s*"], r"differ in data.examples \(96 and 97\): arms must see"),
        (lambda runs: change_recipe(runs, "oelm-s*", {"data.name": "induction",
                                                         "evaluate.metric": None}),
         ["baseline-s*", "oelm-s*"], r"is classification, and that of .* is language"),
        (lambda runs: [plant(run / "digests.json", data="another") for run in runs.glob("oelm-s*")],
         ["baseline-s*", "oelm-s*"], r"were trained on different data \(digests .* and another\)"),
        (lambda runs: change_recipe(runs, "oelm-s*", {"evaluate.metric": "loss"}),
         ["baseline-s*", "oelm-s*"], "were selected by accuracy, and those of .* by loss; choose"),
        (lambda runs: [unfinish(run) for run in runs.glob("oelm-s*")],
         ["baseline-s*", "oelm-s*"], "no run has ended; finish oelm-s0, .* with frostlab run"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    runs: Path, tmp_path: Path, change: Change | None, groups: list[str], message: str
) -> None:
    if change is not None:
        change(runs)
    with pytest.raises(fl.BadInput, match=message) as refused:
        fl.compare_runs(*(f"{runs}/{group}" for group in groups), out=tmp_path / "c")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "c").exists()


def test_names_that_cannot_be_runs_are_refused(made: fl.Comparison, tmp_path: Path) -> None:
    runs = str(made.folder / "runs" / "baseline-s*")
    for name, message in (
        ("", "an arm has no runs: the name of a run or the pattern is empty"),
        ("docstrings-gpt", "docstrings-gpt is not a run: --runs compares runs that have ended"),
        ("mine.yaml", "mine.yaml is not a run: --runs compares runs that have ended"),
        (str(made.folder), f"is a comparison; name an arm's runs, such as {made.folder}/runs/oelm"),
        (str(tmp_path), "has no runs"),
        ("x" * 5000, "no run matches x"),
    ):
        with pytest.raises(fl.BadInput) as refused:
            fl.compare_runs(runs, name, out=tmp_path / "c")
        assert message in str(refused.value)
    with pytest.raises(fl.BadInput, match="3 is not a run, a folder of runs or a pattern"):
        fl.compare_runs(runs, 3, out=tmp_path / "c")  # type: ignore[arg-type]
    with pytest.raises(fl.BadInput, match="an arm has no runs: the list is empty"):
        fl.compare_runs(runs, [], out=tmp_path / "c")
    with pytest.raises(fl.BadInput, match="metric speed does not exist for classification"):
        fl.compare_runs(runs, runs.replace("baseline", "oelm"), metric="speed", out=tmp_path / "c")

"""A group is carried out, continued, evaluated on further data, and refused if data are missing."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import yaml

import frostlab as fl
import frostlab.use.evaluation
from frostlab.comparison.judging.statistics import paired
from frostlab.experiments.further import further_results, read_scores_of
from frostlab.experiments.run import judge_group
from frostlab.records.manifest import verify
from tiny_group import GROUP, write_group


def test_as_published_every_place_says_confounded(published: fl.GroupResult) -> None:
    entry, other = published.summary.comparisons
    assert (entry.name, entry.status, entry.metric, entry.seeds) == (
        "rates", "finished", "accuracy", 2,
    )  # fmt: skip
    plain, oelm = entry.arms
    assert (plain.arm, plain.verdict, plain.gap, plain.confounds) == ("plain", None, None, ())
    assert (oelm.verdict, oelm.confounds) == ("confounded", ("optim.lr 0.003 → 0.01",))
    assert (plain.reported, oelm.reported) == ({"accuracy": 0.9}, {"accuracy": 0.93})
    assert oelm.retained == pytest.approx(oelm.mean / plain.mean)  # type: ignore[operator]
    assert oelm.gap is not None
    assert oelm.gap.effect == pytest.approx(oelm.mean - plain.mean)  # type: ignore[operator]
    assert oelm.time is not None
    assert oelm.time.ratio > 0  # type: ignore[operator]
    assert entry.caution == "checkpoint selected on the reporting split"
    assert (entry.changed, entry.reduced, entry.baseline_treated) == ((), (), None)
    assert (other.name, other.status, other.arms) == ("random", "not run", ())
    folder = published.folder / "rates"
    values = json.loads((folder / "comparison.json").read_text())
    assert values["caution"] == "checkpoint selected on the reporting split"
    gap = values["comparison"]["accuracy_gap"]
    assert (gap["verdict"], gap["confounds"]) == ("confounded", ["optim.lr 0.003 → 0.01"])
    page = (folder / "comparison.md").read_text()
    assert "The comparison rates of the group mine (a tiny group), as published:" in page
    assert "Caution: checkpoint selected on the reporting split." in page
    summary = published.page.read_text()
    assert "| confounded |" in summary
    assert "optim.lr 0.003 → 0.01" in summary
    assert "Caution: checkpoint selected on the reporting split." in summary


def test_a_run_of_an_arm_has_the_recipe_of_its_experiment(published: fl.GroupResult) -> None:
    run = fl.load_run(published.folder / "rates" / "runs" / "oelm-s1")
    recipe = run.recipe.to_dict()
    own = fl.load_recipe(str(published.folder.parents[1] / "oelm.yaml"), seed=1).to_dict()
    assert recipe.pop("evaluate") == {**own.pop("evaluate"), "metric": "accuracy"}
    assert recipe == own


def test_the_five_questions_say_what_was_not_run(published: fl.GroupResult) -> None:
    questions = {entry.question: entry for entry in published.summary.questions}
    assert len(questions) == 5
    gap = questions["How large is the gap?"].by_comparison
    assert gap["random"] == "not run"
    assert gap["rates"].endswith(" on accuracy: confounded by optim.lr 0.003 → 0.01")
    transfer = questions["Does it carry from BERT to GPT?"].answer
    assert transfer.startswith("Not known: BERT: no effect measured. GPT: rates ")


def test_the_same_call_trains_nothing_again(
    published: fl.GroupResult, group_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = published.summary

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("everything is done")

    monkeypatch.setattr("frostlab.training.run.run", refuse)
    monkeypatch.setattr(frostlab.use.evaluation, "evaluate_run", refuse)
    shutil.move(group_file.parent / "texts", group_file.parent / "away")
    try:
        again = fl.compare_group(
            group_file, as_published=True, only=["rates"], seeds=2, out=published.folder
        )
    finally:
        shutil.move(group_file.parent / "away", group_file.parent / "texts")
    assert again.summary == before
    assert repr(again) == f"GroupResult({published.folder}: rates finished, random not run)"


def test_a_fair_arm_stands_beside_the_experiment_with_its_treatment(fair: fl.GroupResult) -> None:
    (entry,) = fair.summary.comparisons
    assert [arm.experiment for arm in entry.arms] == ["plain.yaml", "oelm.yaml"]
    assert [arm.reported["accuracy"] for arm in entry.arms] == [0.9, 0.93]
    assert entry.arms[1].verdict == "too few seeds"
    assert entry.caution is None
    assert entry.arms[1].time is None


def test_further_data_are_evaluated_with_every_run(fair: fl.GroupResult, group_file: Path) -> None:
    results = {result.data: result for result in fair.summary.further}
    assert set(results) == {"more", "validation"}
    runs = fair.folder / "rates" / "runs"
    values = {
        (arm, seed): fl.load_run(runs / f"{arm}-s{seed}")
        .evaluate(group_file.parent / "more.csv")
        .metrics["accuracy"]
        for arm in ("baseline", "oelm")
        for seed in (0, 1)
    }
    arms = results["more"].arms
    for arm in ("baseline", "oelm"):
        summary = arms[arm].summary
        assert summary is not None
        assert summary.mean == pytest.approx(fmean(values[arm, seed] for seed in (0, 1)))
    expected = paired(
        [values["oelm", seed] for seed in (0, 1)],
        [values["baseline", seed] for seed in (0, 1)],
        alpha=0.05 / 2,  # two sets of data
    )
    gap = arms["oelm"].gap
    assert gap is not None
    assert (gap.effect, gap.alpha, gap.n) == pytest.approx((expected.effect, 0.025, 2))
    assert (arms["baseline"].gap, results["more"].n) == (None, 120)
    assert results["validation"].caution == "the weights were selected on this split"
    text = fair.page.read_text()
    assert "## Further data" in text
    assert "Caution: validation: the weights were selected on this split." in text


def test_another_split_by_name_is_that_split(fair: fl.GroupResult, group_file: Path) -> None:
    run = fl.load_run(fair.folder / "rates" / "runs" / "oelm-s0")
    named = run.evaluate(settings={"data.report": "validation"})
    file = run.evaluate(group_file.parent / "texts" / "validation.csv")
    assert named.metrics == file.metrics
    assert named.metrics != run.evaluate().metrics
    with pytest.raises(fl.BadInput, match="leave out the path"):
        run.evaluate(group_file.parent / "more.csv", settings={"data.report": "validation"})
    with pytest.raises(fl.BadInput, match="leave out --split tune"):
        run.evaluate(split="tune", settings={"data.report": "validation"})
    with pytest.raises(fl.BadInput, match="data.report valdation is not a split"):
        run.evaluate(settings={"data.report": "valdation"})


def test_scores_of_another_run_do_not_count(fair: fl.GroupResult) -> None:
    comparison, scores = fair.comparisons["rates"], read_scores_of(fair.folder)
    assert len(scores) == 8
    stale = [score for score in scores if (score.arm, score.seed) != ("oelm", 1)]
    stale += [type(score)(**{**vars(score), "weights": "other"})
              for score in scores if (score.arm, score.seed) == ("oelm", 1)]  # fmt: skip
    for result in further_results(stale, "rates", comparison.evidence):
        assert result.arms["oelm"].summary.n == 1  # type: ignore[union-attr]
        assert result.arms["baseline"].summary.n == 2  # type: ignore[union-attr]


def test_a_group_is_sealed(fair: fl.GroupResult, tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    shutil.copytree(fair.folder, copy)
    assert verify(copy) == (1, [])
    for name in ("summary.json", "further.json", "group.json", "rates/comparison.md"):
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(before + b" ")
        _, problems = verify(copy)
        assert [problem.path for problem in problems] == [str(copy / name)]
        (copy / name).write_bytes(before)


def test_a_group_of_somebody_else_stays_inside_its_folder(
    fair: fl.GroupResult, tmp_path: Path
) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    values = json.loads((fair.folder / "group.json").read_text())
    values["group"]["fair"] = {"../outside": values["group"]["fair"]["rates"]}
    (folder / "group.json").write_text(json.dumps(values))
    with pytest.raises(fl.BadInput, match="the comparison's name '../outside' should be a plain"):
        judge_group(folder)
    for text, message in (
        ("[]", "is not a JSON object"),
        (json.dumps(values | {"name": 3}), "name should be a text"),
        (json.dumps(values | {"group": {"fair": {}}}), "group.json: about is missing"),
    ):
        (folder / "group.json").write_text(text)
        with pytest.raises(fl.BadInput, match=message) as error:
            judge_group(folder)
        assert "\n" not in str(error.value)


def test_missing_data_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_group(tmp_path)
    lost = {**GROUP["fair"]["rates"], "set": {"data.path": "nowhere"}}  # type: ignore[index]
    values = {**GROUP, "fair": {"one": lost, **GROUP["fair"], "two": lost}}  # type: ignore[dict-item]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    out = tmp_path / "out"
    with pytest.raises(fl.BadInput) as error:
        fl.compare_group(tmp_path / "mine.yaml", seeds=1, out=out)
    text = str(error.value)
    assert text.startswith("mine: 2 of 3 comparisons cannot run: one (data.path ")
    assert "; two (data.path " in text
    assert text.endswith("; get the data, or carry out only the others with --only rates")
    assert "\n" not in text
    assert not out.exists()
    with pytest.raises(fl.BadInput, match="1 of 1 comparisons cannot run: .*; get the data$"):
        fl.compare_group(tmp_path / "mine.yaml", only="one", seeds=1, out=out)


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"x": {"optim.lr": 1}}, "mine: further.x: optim.lr cannot be set for an evaluation"),
        ({"x": {"data.path": "nowhere.csv"}}, "nowhere.csv does not exist"),
        ({"x": {"data.report": ""}}, "mine: further.x: data.report '' is not a name"),
        ({"x": {"data.report": "tests"}}, "data.report tests is not a split of "),
    ],
)
def test_bad_further_data_are_refused_before_anything_is_written(
    tmp_path: Path, further: dict[str, object], message: str
) -> None:
    write_group(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**GROUP, "further": further}))
    with pytest.raises(fl.BadInput) as error:
        fl.compare_group(tmp_path / "mine.yaml", seeds=1, out=tmp_path / "out")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_comparison_of_another_plan_is_refused_by_its_name(
    fair: fl.GroupResult, group_file: Path
) -> None:
    before = fair.summary
    with pytest.raises(fl.BadInput, match="^mine, rates: .* was made by another plan .*recipe"):
        fl.compare_group(group_file, seeds=2, settings={"train.steps": 4}, out=fair.folder)
    assert fair.summary == before
    fl.compare_group(group_file, seeds=2, out=fair.folder)  # writes the manifest again


def test_a_folder_of_something_else_is_refused(
    fair: fl.GroupResult, group_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(fl.BadInput, match="holds the group mine; choose another folder with --out"):
        fl.compare_group(group_file, as_published=True, seeds=2, out=fair.folder)
    with pytest.raises(fl.BadInput, match="is not empty and holds no group"):
        fl.compare_group(group_file, seeds=2, out=group_file.parent)
    with pytest.raises(fl.BadInput, match="is a file"):
        fl.compare_group(group_file, seeds=2, out=group_file)
    with pytest.raises(fl.BadInput, match="no group is called 'phase33'; did you mean `phase3`"):
        fl.compare_group("phase33")
    assert repr(fl.GroupResult(tmp_path)) == f"GroupResult({tmp_path}: no summary yet)"

"""Evaluations of a run: its own splits again, other files, other languages, other recordings."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frostlab as fl
from eeg_made import made
from frostlab.data.sources import LANGUAGES
from frostlab.records.model_files import read_inputs
from frostlab.use.evaluation import evaluate_languages
from frostlab.use.scoring import evaluation_lines, languages_lines
from tiny import tiny
from weather import recipe, rows, write_table


@pytest.mark.parametrize("name", ["classifier", "language", "listener"])
def test_the_report_split_gives_the_recorded_metrics(
    name: str, request: pytest.FixtureRequest
) -> None:
    run: fl.Run = request.getfixturevalue(name)
    evaluation = run.evaluate()
    assert evaluation.metrics == run.metrics
    assert next(iter(evaluation.metrics)) == run.recipe.metric
    assert {int(n): metrics for n, metrics in evaluation.layers.items()} == run.layers
    assert evaluation.n.keys() == evaluation.unit.keys() == evaluation.metrics.keys()
    assert max(map(len, evaluation_lines(evaluation)[1:])) <= 80
    assert str(evaluation).splitlines() == evaluation_lines(evaluation)


def test_generated_data_are_evaluated_again_but_nothing_else_is(tmp_path: Path) -> None:
    run = fl.run(tiny(), runs=tmp_path)
    assert run.evaluate().metrics == run.metrics
    with pytest.raises(fl.BadInput, match="was trained on generated tokens"):
        run.evaluate(tmp_path / "x.csv")


def test_text_has_no_subjects_that_were_not_trained_on(classifier: fl.Run, tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match="--split unseen is for EEG; there are "):
        classifier.evaluate(tmp_path, split="unseen")


def test_the_split_that_selects_gives_the_best_value(classifier: fl.Run) -> None:
    evaluation = classifier.evaluate(split="tune")
    assert evaluation.metrics["accuracy"] == classifier.result.best.value
    assert evaluation.caution == "the weights were selected on this split"
    train = classifier.evaluate(split="train")
    assert train.n["accuracy"] == classifier.data.splits["train"].examples
    assert train.caution == "the model was trained on these examples"


def test_counts_and_recall_of_every_class(classifier: fl.Run) -> None:
    evaluation, predictions = classifier.evaluate(), classifier.predictions
    assert predictions is not None
    pairs = list(zip(predictions.labels, predictions.classes, strict=True))
    for index, score in enumerate(evaluation.classes):
        assert score.label == ("dry", "wet")[index]
        assert score.n == sum(label == index for label, _ in pairs)
        assert score.predicted == sum(predicted == index for _, predicted in pairs)
        assert score.correct == sum(pair == (index, index) for pair in pairs)
        assert score.recall == score.correct / score.n
    assert evaluation.n["accuracy"] == len(pairs)
    right = sum(score.correct for score in evaluation.classes)
    assert evaluation.metrics["accuracy"] == right / len(pairs)


def test_a_moved_folder_is_enough(
    classifier: fl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the data, the cache and the old place: a copy of test.csv gives the same metrics."""
    own = tmp_path / "own"
    own.mkdir()
    write_table(own / "train.csv", ["text", "label"], rows(0, 40))
    write_table(own / "test.csv", ["text", "label"], rows(40, 12))
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path / "cache"))
    run = fl.run(recipe(own), out=tmp_path / "before")
    expected = run.metrics
    (own / "test.csv").rename(tmp_path / "other.csv")
    shutil.rmtree(own)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path / "empty"))
    moved = fl.load_run(str((tmp_path / "before").rename(tmp_path / "after")))
    evaluation = moved.evaluate(str(tmp_path / "other.csv"))
    assert evaluation.metrics == expected
    assert (evaluation.split, evaluation.caution) == ("data", None)
    assert moved.predict(["sun on day 3"])[0].label in ("dry", "wet")
    with pytest.raises(fl.BadInput, match=r"own.* does not exist; to evaluate other data, use"):
        moved.evaluate()


def test_every_format_and_a_folder_give_the_same(classifier: fl.Run, tmp_path: Path) -> None:
    import pandas

    table = pandas.DataFrame(rows(40, 12), columns=["text", "label"])
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "folder").mkdir()
    table.to_csv(tmp_path / "folder" / "test.csv", index=False)
    table.to_csv(tmp_path / "folder" / "train.csv", index=False)
    names = ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "folder"]
    assert [classifier.evaluate(tmp_path / name).metrics for name in names] == (
        [classifier.metrics] * len(names)
    )
    renamed = table.rename(columns={"text": "sentence", "label": "y"})
    renamed.to_csv(tmp_path / "b.csv", index=False)
    settings: dict[str, Any] = {"data.text": "sentence", "data.label": "y"}
    assert classifier.evaluate(tmp_path / "b.csv", settings=settings).metrics == classifier.metrics
    limited = classifier.evaluate(
        settings={**settings, "data.path": str(tmp_path / "b.csv"), "data.evaluation_limit": 7}
    )
    assert limited.n["accuracy"] == 7


def test_training_files_are_recognised(classifier: fl.Run, weather: Path) -> None:
    evaluation = classifier.evaluate(weather / "train.csv")
    assert evaluation.caution == "the model was trained on these examples"


def test_running_text_is_evaluated(language: fl.Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(text for text, _ in rows(40, 12)))
    evaluation = language.evaluate(tmp_path / "a.txt")
    assert evaluation.metrics == language.metrics, "the documents of test.csv"
    assert evaluation.unit["perplexity"] == "tokens"
    assert evaluation.n["loss"] > 100


def test_a_pretrained_model_is_evaluated_without_its_folder(pairs: fl.Run, tmp_path: Path) -> None:
    """Its data come back; the folder of the model and the tokenizer does not."""
    path = Path(pairs.recipe.data.path)  # type: ignore[union-attr]
    table = [(text, f"day {number}", label) for number, (text, label) in enumerate(rows(0, 40))]
    try:
        write_table(path, ["first", "second", "answer"], table)
        assert pairs.evaluate().metrics == pairs.metrics
        whole = pairs.evaluate(path)
    finally:
        path.unlink()
    assert whole.n["accuracy"] == len(table)


def test_languages(tmp_path: Path) -> None:
    """One model, trained on English, evaluated on files of three languages; MNLI may be gone."""
    table = [(text, "day", str(number % 3)) for number, (text, _) in enumerate(rows(0, 20))]
    head = ["premise", "hypothesis", "label"]
    write_table(tmp_path / "mnli" / "train.csv", head, table)
    for number, language in enumerate(LANGUAGES):
        shifted = table[number : number + 20]
        for split in ("validation", "test"):
            other = [(f"{text} {split} {language}", *rest) for text, *rest in shifted]
            write_table(tmp_path / "xnli" / language / f"{split}.csv", head, other)
    settings = {"name": "xnli", "length": 16, "evaluation_limit": 15}
    made = recipe(tmp_path)
    run = fl.run({**made, "data": settings}, runs=tmp_path / "runs", data_dir=tmp_path)
    shutil.rmtree(tmp_path / "mnli")
    evaluations = evaluate_languages(run, "all", data_dir=tmp_path)
    assert list(evaluations) == list(LANGUAGES)
    assert evaluations["en"].metrics == run.metrics
    assert {e.n["accuracy"] for e in evaluations.values()} == {15}
    chinese = run.evaluate(settings={"data.language": "zh"}, data_dir=tmp_path)
    assert chinese == evaluations["zh"]
    assert chinese.metrics["loss"] != run.metrics["loss"]
    lines = languages_lines(evaluate_languages(run, "en,zh", data_dir=tmp_path))
    assert [line.split()[0] for line in lines] == ["language", "en", "zh"]
    with pytest.raises(fl.BadInput, match="'xx' is not a language of xnli; choose all, or some"):
        evaluate_languages(run, "en,xx", data_dir=tmp_path)


def recordings(folder: Path, subjects: list[str], channels: int = 64) -> Path:
    folder.mkdir()
    for number, subject in enumerate(subjects):
        for story in range(2):
            one = made("x", subject, seed=10 * number + story, samples=640, channels=channels)
            stem = folder / f"test_-_{subject}_-_story{story}"
            np.save(f"{stem}_-_eeg.npy", one.eeg)
            np.save(f"{stem}_-_envelope.npy", one.envelope[:, None])
    return folder


def test_other_recordings_are_scored(listener: fl.Run, tmp_path: Path) -> None:
    known = read_inputs(listener.folder).subjects
    assert known == ["sub-001", "sub-002"]
    subjects = [*known, "somebody"]
    evaluation = listener.evaluate(recordings(tmp_path / "eeg", subjects))
    names = [
        "pearson", "loss", "chance", "segment_pearson", "segment_std", "pearson_unseen",
        "chance_unseen", "segment_pearson_unseen", "challenge", "window_pearson",
    ]  # fmt: skip
    assert list(evaluation.metrics) == names
    assert [evaluation.n[name] for name in ("segment_pearson", "challenge")] == [2, 3]
    assert evaluation.n["pearson"] == 2
    assert evaluation.n["pearson_unseen"] == 1
    assert evaluation.n["loss"] == 4 * 10, "windows of 64 in recordings of 640 samples"
    strangers = listener.evaluate(recordings(tmp_path / "strangers", ["a", "b"]))
    assert "pearson" not in strangers.metrics
    assert strangers.n["pearson_unseen"] == 2


def test_the_scores_of_recordings_are_those_of_the_record(listener: fl.Run) -> None:
    evaluation, recorded = listener.evaluate(), listener.result.scores
    assert recorded is not None
    assert evaluation.scores.keys() == recorded.keys() == {"report", "unseen"}
    for group, decoders in recorded.items():
        for decoder, score in decoders.items():
            expected = {k: v for k, v in asdict(score).items() if k != "digest"}
            assert json.loads(json.dumps(evaluation.scores[group][decoder])) == expected
    assert any(line.startswith("unseen  ridge") for line in evaluation_lines(evaluation))


def test_splits_of_recordings(listener: fl.Run) -> None:
    tune = listener.evaluate(split="tune")
    assert tune.n["pearson"] == 2
    assert "ridge" not in tune.metrics
    train = listener.evaluate(split="train")
    assert train.caution == "the model was trained on these examples"
    unseen = listener.evaluate(split="unseen")
    assert unseen.metrics["pearson_unseen"] == listener.metrics["pearson_unseen"]


def test_recordings_that_do_not_fit_are_refused(listener: fl.Run, tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match="has 4 channels; the run's model has 64"):
        listener.evaluate(recordings(tmp_path / "few", ["a"], channels=4))
    with pytest.raises(fl.BadInput, match="there is no folder"):
        listener.evaluate(tmp_path / "nowhere")
    with pytest.raises(fl.BadInput, match="only data.path can be set"):
        listener.evaluate(settings={"data.evaluation_limit": 3})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\nsun,cloudy\n", "label cloudy is not one of the classes dry, wet"),
        ("text,label\n", "holds no text"),
        ("", "holds no text"),
        ("words,label\nsun,dry\n", "no column text"),
        ("text\nsun\n", "no column label"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    classifier: fl.Run, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(fl.BadInput, match=message) as error:
        classifier.evaluate(tmp_path / "a.csv")
    assert "a.csv" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "a.cvs"}, "a.cvs does not exist; did you mean `a."),
        ({"data": "a.md"}, "is not one of .jsonl, .csv"),
        ({"data": "a.txt"}, "has no labels; use a jsonl"),
        ({"data": "empty"}, "has no file for report; it has no data file"),
        ({"data": "several"}, "has no file for report; it has x.csv, y.csv"),
        ({"split": "tuned"}, "did you mean `tune`"),
        ({"data": "a.csv", "split": "tune"}, "a.csv is one file"),
        ({"settings": {"optim.lr": 1}}, "optim.lr cannot be set for an evaluation; only data"),
        ({"settings": {"data.length": 4}}, "data.length cannot be set for an evaluation"),
        ({"settings": {"data.language": "zh"}}, "own has no languages"),
        ({"settings": {"data.text": ["a", "b"]}, "data": "a.csv"}, "names 2 columns; the run"),
        ({"settings": {"data.evaluation_limit": 0}}, "evaluation_limit 0 is not a whole number"),
        ({"settings": {"data.path": "a.csv"}, "data": "a.csv"}, "both name the data"),
        ({"data": ""}, "data.path '' is not a name"),
        ({"settings": {"data.evaluation_limit": 3}, "split": "tune"}, "is a share of train"),
    ],
)  # fmt: skip
def test_bad_choices_are_one_line(
    classifier: fl.Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "a.md", "a.txt"):
        (tmp_path / name).write_text("text,label\nsun,dry\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "several").mkdir()
    for name in ("x.csv", "y.csv"):
        (tmp_path / "several" / name).write_text("text,label\nsun,dry\n")
    with pytest.raises(fl.BadInput) as error:
        classifier.evaluate(**arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_changed_data_are_not_taken_for_the_runs(weather: Path, tmp_path: Path) -> None:
    own = shutil.copytree(weather, tmp_path / "own")
    run = fl.run(recipe(own, train__epochs=1), runs=tmp_path / "runs")
    write_table(own / "test.csv", ["text", "label"], rows(40, 11))
    with pytest.raises(fl.BadInput) as error:
        run.evaluate()
    changed = f"have changed since the run: {own / 'test.csv'}; to evaluate other data, use --data"
    assert str(error.value).endswith(changed)
    assert run.evaluate(own / "test.csv").split == "data"

"""Users extend frostlab from outside the package: with data, metrics and treatments."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import frostlab as fl
from comparing import rules_for
from frostlab.data.prepare import prepare
from frostlab.pages import chart_parts
from frostlab.recipe.data import LOADERS
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import METRICS, MetricFacts
from frostlab.recipe.treatment import TREATMENTS
from frostlab.records.schema import EvaluationEvent
from frostlab.training.evaluate import COMPUTED, Totals
from frostlab.training.treatment import CHANGES
from tiny import tiny

MODEL = {"data": {"name": "weather", "length": 8}, "tokenizer": {"kind": "words"}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own; what it registers is gone afterwards."""
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path / "cache"))
    tables: list[dict[str, Any]] = [LOADERS, TREATMENTS, CHANGES, *METRICS.values(),
                                    *COMPUTED.values()]  # fmt: skip
    before = [dict(table) for table in tables]
    yield tmp_path / "cache"
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def weather(data_dir: Path | None) -> dict[str, Any]:
    """Sentences whose first word gives the label; the reporting split is a generator."""

    def sentences(start: int, stop: int) -> Iterator[tuple[str, str]]:
        for number in range(start, stop):
            label = ("dry", "wet")[number % 2]
            yield f"{'sun' if label == 'dry' else 'rain'} on day {number}", label

    return {"train": list(sentences(0, 200)), "report": sentences(200, 260)}


def test_registered_data_train_a_model(tmp_path: Path) -> None:
    fl.register_data("weather", weather)
    record = fl.run(tiny(**MODEL), out=tmp_path / "run")
    assert record.metrics["accuracy"] > 0.9
    data = prepare(recipe_from(tiny(**MODEL)))
    assert {role: len(split) for role, split in data.splits.items()} == {
        "train": 190, "tune": 10, "report": 60,
    }  # fmt: skip
    assert data.origin["report"] == "weather: report"
    assert data.classes == 2


def test_rows_name_the_cache(cache: Path) -> None:
    rows = [(f"text {number}", number % 2) for number in range(100)]
    fl.register_data("numbers", lambda data_dir: {"train": rows})
    recipe = recipe_from(tiny(data={"name": "numbers", "length": 8, "limit": 20}))
    digest = prepare(recipe).digest
    assert len(prepare(recipe).splits["train"]) == 20
    assert prepare(recipe).digest == digest
    assert len(list((cache / "registered").glob("*[0-9a-f]"))) == 1
    rows[0] = ("another text", 0)
    assert prepare(recipe).digest != digest


def test_registered_texts_train_a_language_model(tmp_path: Path) -> None:
    def tales(data_dir: Path | None) -> dict[str, list[str]]:
        assert data_dir == tmp_path
        return {"train": [f"tale {number} of a fox and a crow" for number in range(60)]}

    fl.register_data("tales", tales, task="language")
    recipe = recipe_from(tiny(data={"name": "tales", "length": 8}, tokenizer={"kind": "words"}))
    assert recipe.data.task == "language"
    assert "perplexity" in fl.run(recipe, out=tmp_path / "run", data_dir=tmp_path).metrics
    with pytest.raises(fl.BadInput, match="tales is registered for language"):
        recipe_from(tiny(data={"name": "tales", "task": "classification"}))


def test_registered_names_are_suggested() -> None:
    with pytest.raises(fl.BadInput, match="'weather' should be one of docstrings,"):
        recipe_from(tiny(data={"name": "weather"}))
    fl.register_data("weather", weather)
    with pytest.raises(fl.BadInput, match="weather; did you mean `weather`?"):
        recipe_from(tiny(data={"name": "waether"}))
    with pytest.raises(fl.BadInput, match="data.lenght is not a key; did you mean `length`?"):
        recipe_from(tiny(data={"name": "weather", "lenght": 8}))


def test_a_function_may_be_registered_again() -> None:
    fl.register_data("weather", weather)
    fl.register_data("weather", weather, task="language")
    assert LOADERS["weather"].task == "language"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"name": "imdb"}, "the name imdb is taken"),
        ({"name": "taken"}, "the name taken is taken"),
        ({"name": ""}, "'' is not a name"),
        ({"task": "clasification"}, "did you mean `classification`?"),
        ({"task": "envelope"}, "should be one of classification, language"),
        ({"load": [("a", 1)]}, "not a function"),
    ],
)
def test_bad_registrations_are_refused_in_one_line(given: dict[str, Any], problem: str) -> None:
    fl.register_data("taken", lambda data_dir: {})
    with pytest.raises(fl.BadInput) as error:
        fl.register_data(**{"name": "weather", "load": weather} | given)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    assert "weather" not in LOADERS


ROW = ("some text", 1)


@pytest.mark.parametrize(
    ("splits", "problem"),
    [
        ({}, "load returned a dict of nothing, not a dict with train"),
        ({"report": [ROW]}, "load returned a dict of report, not a dict with train"),
        ([ROW], "load returned a list, not a dict with train"),
        ({"train": [ROW], "validation": [ROW]}, "validation is not a split; there are train,"),
        ({"train": [ROW], "tunes": [ROW]}, "tunes is not a split; did you mean `tune`?"),
        ({"train": [ROW, "text"]}, "train: row 2 is 'text', not (text, label)"),
        ({"train": [("text", 0.5)]}, "the label of row 1 is 0.5, neither a whole"),
        ({"train": [("text", 10**5000)]}, "the label of row 1 is an int of many digits, neither"),
        ({"train": [("text", 2**63)]}, "the label of row 1 is 9223372036854775808, neither"),
        ({"train": [("text", "\ud800")]}, "the label of row 1 is '\\ud800', neither"),
        ({"train": [("text", np.arange(2))]}, "the label of row 1 is array([0, 1]), neither"),
        ({"train": [10**5000]}, "row 1 is an int of many digits, not (text, label)"),
        ({"train": 5}, "train is 5, not a list of rows"),
        ({"train": "text"}, "train is 'text', not a list of rows"),
        ({"train": []}, "train: split train holds no text"),
        ({"train": [("a", 1), ("b", 1)]}, "every label is 1"),
    ],
)
def test_bad_rows_are_refused_in_one_line(splits: Any, problem: str) -> None:
    fl.register_data("weather", lambda data_dir: splits)
    with pytest.raises(fl.BadInput) as error:
        prepare(recipe_from(tiny(**MODEL)))
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def error_rate(totals: Totals) -> float:
    counts = (totals.count, totals.correct, *(cell for row in totals.confusion for cell in row))
    assert all(type(count) is int for count in counts)
    return 1 - totals.correct / totals.count


def test_a_registered_metric_is_computed_and_selects(tmp_path: Path) -> None:
    fl.register_metric("error_rate", error_rate, lower_is_better=True)
    fl.register_metric("error_rate", error_rate, lower_is_better=True)  # as a notebook does
    record = fl.run(tiny(evaluate__metric="error_rate"), out=tmp_path / "run")
    assert record.metrics["error_rate"] == pytest.approx(1 - record.metrics["accuracy"])
    assert record.result.best.metric == "error_rate"
    values = [e.metrics["error_rate"] for e in record.events(EvaluationEvent) if e.split == "tune"]
    assert record.result.best.value == min(values)
    arms = {"recipe": tiny(train__epochs=1), "arms": ["baseline", "oelm"], "metric": "error_rate",
            "clock": None}  # fmt: skip
    evidence = fl.compare(arms, seeds=1, out=tmp_path / "compared").evidence
    assert evidence.plan.rules.lower_is_better


def test_a_registered_metric_has_the_facts_that_it_was_given() -> None:
    bounds = (0.0, math.inf)
    fl.register_metric("odds", error_rate, lower_is_better=True, ratio=True, bounds=bounds)
    assert METRICS["classification"]["odds"] == MetricFacts(True, "ratio", bounds=bounds)
    rules = rules_for("odds")
    assert rules.lower_is_better
    assert rules.log
    rows = [{"low": -0.1, "high": 3.0}]
    chart_parts.cut_off(rows, "odds")
    assert rows == [{"low": 0.0, "high": 3.0}]
    with pytest.raises(fl.BadInput, match=r"register_metric: bounds \(1.0, 0.0\) should be"):
        fl.register_metric("mine", error_rate, bounds=(1.0, 0.0))
    assert "mine" not in METRICS["classification"]


@pytest.mark.parametrize(
    ("name", "compute", "task", "message"),
    [
        ("accuracy", error_rate, "classification", "the name accuracy is taken"),
        ("pearson", error_rate, "classification", "the name pearson is taken"),
        ("", error_rate, "classification", "'' is not a name"),
        ("mine", 3, "classification", "3 is not a function"),
        ("mine", error_rate, "clasification", "did you mean `classification`?"),
    ],
)
def test_metrics_that_cannot_be_registered(
    name: str, compute: Any, task: Any, message: str
) -> None:
    with pytest.raises(fl.BadInput, match="register_metric: ") as error:
        fl.register_metric(name, compute, task=task)
    assert message in str(error.value)
    assert "mine" not in METRICS["classification"]


def negate_keys(model: nn.Module, seed: int) -> None:
    """Turn the sign of every key weight."""
    for part in fl.anatomy(model).select("key"):
        if part.kind == "weight":
            with torch.no_grad():
                model.get_parameter(part.name).neg_()


def test_a_registered_treatment_is_an_arm(tmp_path: Path) -> None:
    fl.register_treatment("negated-keys", negate_keys, freeze=["key"])
    model = {"kind": "pretrained", "name": "bert", "weights": False,
             "config": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2,
                        "intermediate_size": 32, "vocab_size": 40}}  # fmt: skip
    values = {"recipe": tiny(train__epochs=1, model=model), "arms": ["baseline", "negated-keys"],
              "clock": None}  # fmt: skip
    comparison = fl.compare(values, seeds=2, out=tmp_path / "c")
    assert not comparison.evidence.refused_pairs, "untouched weights are equal across arms"
    run = fl.load_run(tmp_path / "c" / "runs" / "negated-keys-s0")
    plain = fl.load_run(tmp_path / "c" / "runs" / "baseline-s0")
    name = "bert.encoder.layer.{}.attention.self.key.weight"
    assert set(run.digests.touched) == {name.format(layer) for layer in (0, 1)}
    assert run.digests.frozen, "the keys are frozen"
    assert not plain.digests.frozen
    assert run.result.parameters.frozen > 0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("oelm", negate_keys, "the name oelm is taken"),
        (" x", negate_keys, "' x' is not a name"),
        ("mine", None, "None is not a function"),
    ],
)
def test_treatments_that_cannot_be_registered(name: str, change: Any, message: str) -> None:
    with pytest.raises(fl.BadInput, match="register_treatment: ") as error:
        fl.register_treatment(name, change)
    assert message in str(error.value)
    assert "mine" not in TREATMENTS


def test_a_treatment_that_is_not_registered_suggests_the_nearest() -> None:
    fl.register_treatment("negated-keys", negate_keys)
    with pytest.raises(fl.BadInput, match="did you mean `negated-keys`?"):
        recipe_from(tiny(treatment="negated-key"))

"""Runs are filtered, sorted and grouped by typed keys; a wrong key names the nearest one."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from frostlab.comparison.judging.statistics import t_critical
from frostlab.errors import BadInput
from frostlab.records.finding.index import Summary
from frostlab.records.finding.listing import groups_table
from frostlab.records.finding.query import (
    Group,
    Mean,
    conditions,
    differing,
    group_keys,
    grouped,
    keys_of,
    select,
    value_of,
)
from run_made import RESULT, START, write_events

SETTINGS: dict[str, Any] = {
    "data.name": "sst2", "model.kind": "gpt", "model.bias": True, "optim.lr": 3e-4,
    "optim.betas": [0.9, 0.999], "train.steps": None, "evaluate.every": "epoch", "loss": None,
}  # fmt: skip


def made(name: str, seed: int, treatment: str, lr: float, accuracy: float | None) -> Summary:
    report = None if accuracy is None else {"accuracy": accuracy, "loss": 1 - accuracy}
    return Summary(
        name, Path(name), "interrupted" if report is None else "finished", seed=seed,
        treatment=treatment, data="sst2", model="gpt", started=1e9 + 86_400 * seed,
        metric="accuracy", value=0.5, report=report, settings=SETTINGS | {"optim.lr": lr},
    )  # fmt: skip


RUNS = [
    made("a", 0, "none", 3e-4, 0.75),
    replace(made("b", 1, "none", 3e-4, 0.5), tags=("keep", "paper"), notes=("too, slow",)),
    made("c", 0, "oelm", 1e-4, 0.625),
    replace(made("d", 1, "oelm", 1e-3, None), value=0.9),
]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("", "abcd"),
        ("treatment=oelm", "cd"),
        ("treatment!=oelm", "ab"),
        ("treatment=oelm,optim.lr>1e-4", "d"),
        ("optim.lr>=1e-4", "abcd"),
        ("optim.lr<3e-4", "c"),
        ("optim.lr<=0.0003", "abc"),
        ("optim.lr = 3e-4 , seed = 1", "b"),
        ("optim.lr==3e-4", "ab"),
        ("accuracy>0.6", "ac"),
        ("accuracy=null", "d"),
        ("accuracy!=null", "abc"),
        ("loss<0.4", "ac"),
        ("best>0.8", "d"),
        ("train.steps=null", "abcd"),
        ("train.steps!=null", ""),
        ("model.bias=true", "abcd"),
        ("model.bias=false", ""),
        ("optim.betas=[0.9, 0.999]", "abcd"),
        ("evaluate.every=epoch", "abcd"),
        ("status=interrupted", "d"),
        ("status~FIN", "abc"),
        ("name~b", "b"),
        ("tag=keep", "b"),
        ("tag!=keep", "acd"),
        ("tag=null", "acd"),
        ("note~slow", "b"),
        ('note~"too, slow"', "b"),
        ("note='too, slow',seed=1", "b"),
        ("started>2001-09-09T12:00", "bd"),
        ("started=2001-09-09", "ac"),
        ("started=2001-09-09T01:46", "ac"),
        ("started=2001-09-09T03:46:40+02:00", "ac"),
        ("started<=2001-09-09", ""),
    ],
)
def test_filters(where: str, names: str) -> None:
    assert "".join(run.name for run in select(RUNS, where)) == names


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("-accuracy", "acbd"),
        ("accuracy", "bcad"),
        ("-optim.lr,name", "dabc"),
        ("treatment,-seed", "badc"),
        ("-name", "dcba"),
        ("tag", "bacd"),
    ],
)
def test_sorting_puts_missing_values_last(sort: str, names: str) -> None:
    assert "".join(run.name for run in select(RUNS, sort=sort)) == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"where": "optim.lt>1"},
            "--where optim.lt>1: no run has the key 'optim.lt'; did you mean",
        ),
        ({"where": "lr>1"}, "did you mean `optim.lr`?"),
        ({"sort": "-acuracy"}, "--sort -acuracy: no run has the key 'acuracy'; did you mean `acc"),
        ({"where": "optim.lr>fast"}, "'fast' is not a number; e.g. optim.lr>0.0003"),
        ({"where": "optim.lr=fast"}, "'fast' is not a number; e.g. optim.lr=0.0003"),
        ({"where": "optim.lr>null"}, "null has no order; use optim.lr!=null"),
        ({"where": "optim.lr>nan"}, "'nan' is not a number"),
        ({"where": "treatment>3"}, "treatment is not a number, e.g. none; use = != or ~"),
        ({"where": "model.bias=yes"}, "model.bias is true or false"),
        ({"where": "oelm"}, "'oelm' is not a condition such as treatment=oelm,optim.lr>1e-4"),
        ({"where": "treatment=oelm,none"}, "'none' is not a condition"),
        ({"where": "started>yesterday"}, "--where: 'yesterday' is not a date; e.g. started>2026-"),
        ({"where": "=3"}, "is not a condition"),
    ],
)
def test_a_bad_filter_is_one_line(options: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput) as error:
        select(RUNS, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_folder_takes_any_filter() -> None:
    assert select([], "no.such.key=3", "-nothing") == []
    assert [str(c) for c in conditions(" a=1,, b~x ,")] == ["a=1", "b~x"]


def test_a_metric_comes_before_a_setting_of_the_same_name() -> None:
    assert value_of(RUNS[0], "loss") == 0.25
    assert "loss" in keys_of(RUNS)
    assert value_of(RUNS[3], "accuracy") is None, "best is on another split than the report"


def test_every_fact_of_a_run_is_a_key() -> None:
    """A new field of `Summary` can be shown, filtered and sorted by without a further list."""
    inside = {"report", "settings"}  # their own entries are keys
    renamed = {"value": "best", "tags": "tag", "notes": "note"}
    names = {field.name for field in fields(Summary)} - inside - {"folder", "caution"}
    assert {renamed.get(name, name) for name in names} <= set(keys_of([]))
    assert value_of(replace(RUNS[0], runs_at_once=3), "runs_at_once") == 3


def test_settings_that_differ() -> None:
    assert differing(RUNS) == ["optim.lr"]
    assert differing(RUNS[:2]) == []
    eeg = replace(RUNS[0], settings={"data.name": "eeg", "data.rate": 64, "optim.lr": 1.0})
    assert differing([*RUNS, eeg])[:2] == ["optim.lr", "data.name"], "first what varies in a family"
    assert differing([RUNS[0], Summary("x", Path("x"), "damaged")]) == []


def test_a_narrow_table_of_groups_keeps_the_numbers() -> None:
    mean = Mean(n=3, mean=0.625, low=0.5, high=0.75)
    keys = {f"key.{i}": "v" * 9 for i in range(9)}
    paths = [f"/a/long/way/to/the/data/{name}" for name in ("films", "news.csv")]
    groups = [
        Group({"data.path": path, **keys}, tuple(RUNS[:3]), {"accuracy": mean}) for path in paths
    ]
    lines = groups_table(groups, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:2] == ["data.path", "key.0"]
    for line, name in zip(lines[1:3], ("films", "news.csv"), strict=True):
        assert line.split()[0] == name
        assert line.endswith("3     0.625  [0.5, 0.75]")
    assert lines[3].startswith("--wide also shows key.")
    assert lines[3].endswith("key.8")
    wide = groups_table(groups)
    assert "/a/long/way/to/the/data/films" in wide
    assert "--wide" not in wide
    several = [replace(group, means={f"quantity-{i}": mean for i in range(4)}) for group in groups]
    cut = groups_table(several, 80).splitlines()
    assert max(map(len, cut)) <= 80
    assert any(line.startswith("--wide shows") for line in cut)


def test_groups_over_seeds() -> None:
    arms = (("none", 1.0, 0.5), ("oelm", 1.0, 0.25), ("oelm", 2.0, 0.125))
    runs = [
        made(f"{t}{lr}{seed}", seed, t, lr, accuracy + seed / 8)
        for t, lr, accuracy in arms
        for seed in range(3)
    ]
    runs[4] = replace(runs[4], report=None, status="failed")
    groups = grouped(runs, group_keys(runs, "-seed"), (), t_critical)
    assert [group.keys for group in groups] == [
        {"treatment": t, "optim.lr": lr} for t, lr in (("none", 1.0), ("oelm", 1.0), ("oelm", 2.0))
    ]
    mean = groups[0].means["accuracy"]
    assert (mean.n, mean.mean) == (3, 0.625)
    half = 4.302652729911275 * 0.125 / math.sqrt(3)  # the 97.5 % quantile of t with 2 degrees
    assert mean.low == pytest.approx(0.625 - half)
    assert mean.high == pytest.approx(0.625 + half)
    assert groups[1].means["accuracy"].n == 2
    text = groups_table(groups, 80).splitlines()
    assert text[0].split() == ["treatment", "optim.lr", "n", "accuracy", "95", "%", "interval"]
    assert "2 of 3" in text[2]
    by_key = grouped(runs, group_keys(runs, "treatment"), ["loss"], t_critical, "-loss")
    assert [group.keys["treatment"] for group in by_key] == ["oelm", "none"]
    assert by_key[0].means["loss"].n == 5
    assert json.dumps(by_key[0].to_dict())
    single = grouped(runs[:1], ["seed"], (), t_critical)[0].means["accuracy"]
    assert (single.n, single.low) == (1, None)


@pytest.mark.parametrize(
    ("group", "quantities", "sort", "message"),
    [
        ("-sed", [], "", "--group -sed: no run has the key 'sed'; did you mean `seed`?"),
        (
            "-seed,treatment",
            [],
            "",
            "give either keys to group by or keys with - to leave out, not both",
        ),
        (",", [], "", "--group is empty"),
        ("-seed", ["status"], "", "--columns status: no run has a number to average"),
        ("-seed", [], "-acuracy", "the groups have no 'acuracy'; did you mean `accuracy`?"),
    ],
)
def test_bad_groups(group: str, quantities: list[str], sort: str, message: str) -> None:
    with pytest.raises(BadInput) as error:
        grouped(RUNS, group_keys(RUNS, group), quantities, t_critical, sort)
    assert message in str(error.value)


def test_runs_with_other_metrics_are_not_averaged_together() -> None:
    other = replace(RUNS[0], metric="perplexity", report={"perplexity": 30.0})
    groups = grouped([RUNS[1], other], ["treatment"], (), t_critical)
    assert [(g.keys["metric"], g.means["report"].mean) for g in groups] == [
        ("accuracy", 0.5), ("perplexity", 30.0),
    ]  # fmt: skip


def test_runs_in_python(tmp_path: Path) -> None:
    for name, lr, accuracy in (("a", 0.1, 0.5), ("b", 0.2, 0.75)):
        folder = tmp_path / name
        folder.mkdir()
        write_events(folder, START)
        report = {"report": {"accuracy": accuracy, "loss": 0.5}}
        (folder / "result.json").write_text(json.dumps(RESULT | report))
        (folder / "recipe.yaml").write_text(f"optim: {{lr: {lr}}}\nloss: null\nseed: 3\n")
    import pandas

    frame = pandas.DataFrame(fl.runs(tmp_path, sort="-accuracy"))
    assert list(frame["name"]) == ["b", "a"]
    assert list(frame["optim.lr"]) == [0.2, 0.1]
    assert list(frame["loss"]) == [0.5, 0.5]
    assert [row["name"] for row in fl.runs(str(tmp_path), where="optim.lr<0.2")] == ["a"]
    with pytest.raises(BadInput, match="is not a folder of runs"):
        fl.runs(tmp_path / "nowhere")

"""Figures of comparisons: their rows against plain loops over the records, and hostile input."""

import json
import math
import re
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from frostlab.charts import cleaned, svg, themed
from frostlab.comparison.evidence import Effect, Evidence, RefusedPair, Summary, read_evidence
from frostlab.pages import chart_parts, figures
from frostlab.pages.content import Figure, Records
from frostlab.pages.one_comparison import compared_curves as drawn_curves
from frostlab.pages.one_comparison import compared_figures as drawn
from frostlab.pages.one_comparison.compared import Compared, document
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent

LONG = "a" * 60
HOSTILE = [f"{LONG}{LONG[:39]}1", f"{LONG}{LONG[:39]}2", "<script>alert(1)</script>", 'x"\n\x1b../']


def opened(folder: Path, **changes: Any) -> Compared:
    """Return a comparison, some of whose evidence is replaced."""
    evidence = read_evidence(folder / "evidence.json")
    assert evidence is not None
    return Compared(folder, replace(evidence, **changes), Records(folder), "en")


def evaluated(folder: Path, target: Path) -> Path:
    """Return a copy of a comparison whose runs were also evaluated after their first step.

    They have no warm-up.
    """
    shutil.copytree(folder, target)
    for number, path in enumerate(sorted(target.glob("runs/*/events.jsonl"))):
        lines = re.sub(r'"warmup": \d+', '"warmup": 0', path.read_text()).splitlines()
        at = next(i for i, line in enumerate(lines) if '"evaluation"' in line)
        event = json.loads(lines[at])
        earlier = event | {
            "step": 1,
            "total_seconds": event["total_seconds"] / (number + 2),
            "metrics": event["metrics"] | {"accuracy": number / 100},
        }
        path.write_text("\n".join([*lines[:at], json.dumps(earlier), *lines[at:]]) + "\n")
    return target


def only(figures: list[Figure], name: str) -> Figure:
    return next(figure for figure in figures if figure.name == name)


def row_of(figure: Figure, **values: Any) -> dict[str, Any]:
    """Return the only row with these values."""
    (row,) = [row for row in figure.rows if values.items() <= row.items()]
    return row


def values_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evidence.json").read_text())


def parts(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a specification that have marks."""
    inner = [*spec.get("layer", []), *([spec["spec"]] if "spec" in spec else [])]
    if not inner:
        yield spec
    for part in inner:
        yield from parts(part)


# Which figures there are


def test_each_figure_appears_where_its_records_exist(
    compared: Path, tuned: Path, spoken: Path, tmp_path: Path
) -> None:
    more = evaluated(tuned, tmp_path / "tuned")
    names = [
        {figure.name for figure in document(folder, "en").figures}
        for folder in (compared, more, spoken)
    ]
    always = {
        "paired-differences", "metric-means", "training-loss", "run-time-bars",
        "parameters", "trained-share",
    }  # fmt: skip
    # curves need two evaluations, or two steps after the warm-up
    curves = {"training-curves", "metric-by-seconds", "metric-by-flops", "step-time-curve"}
    timed = {"step-time-ratios", "memory", "tuning-optim-lr"}
    watched = {"flow-ratios", "gradient-heat-maps"}
    assert names == [always | watched, always | timed | curves, always]


def test_a_comparison_without_finished_runs_has_no_figure_of_them(compared: Path) -> None:
    evidence = opened(compared).evidence
    arms = {
        name: replace(
            arm, runs=tuple(replace(run, status="failed", metrics={}) for run in arm.runs),
            metrics={}, seconds=None, parameters=None,
        )
        for name, arm in evidence.arms.items()
    }  # fmt: skip
    empty = opened(compared, arms=arms, flow={}, timing=None)
    assert drawn.paired_differences(empty) is None
    for make in (
        drawn.metric_bars, drawn_curves.training_curves, drawn.time_ratios, drawn.time_bars,
        drawn_curves.step_times, drawn.tuning, drawn_curves.cost_curves, drawn.gradient_flow,
        drawn.parameters, drawn.trained_share,
    ):  # fmt: skip
        assert make(empty) == []


# Rows against the records


def test_paired_differences_are_those_of_the_runs(compared: Path) -> None:
    figure = drawn.paired_differences(opened(compared))
    assert figure is not None
    reports = {
        folder.name: RunRecord(folder).metrics["accuracy"]
        for folder in (compared / "runs").iterdir()
    }
    for arm in ("oelm", "oelm-random"):
        for seed in range(5):
            row = row_of(figure, arm=arm, seed=seed)
            own, base = reports[f"{arm}-s{seed}"], reports[f"baseline-s{seed}"]
            assert row["value"] == own - base
        paired = values_of(compared)["verdicts"][arm]["paired"]
        row = next(row for row in figure.rows if row["arm"] == arm and "effect" in row)
        assert [row[key] for key in ("effect", "low", "high")] == [
            paired[key] for key in ("effect", "low", "high")
        ]


def test_ratios_are_drawn_on_a_logarithmic_scale(spoken: Path) -> None:
    figure = drawn.paired_differences(opened(spoken))
    assert figure is not None
    evidence = opened(spoken).evidence
    base, own = (evidence.arms[arm].runs[0].metrics["perplexity"] for arm in ("baseline", "oelm"))
    assert base is not None
    assert own is not None
    assert row_of(figure, seed=0)["value"] == own / base
    scales = [part["encoding"]["x"]["scale"]["type"] for part in parts(figure.chart)]
    assert set(scales) == {"log"}
    assert "ratio" in figure.caption


def test_runs_that_cannot_be_paired_are_left_out(compared: Path) -> None:
    evidence = opened(compared).evidence
    pairs = tuple(
        RefusedPair(arm, seed, "another machine") for arm, seed in (("oelm", 1), ("oelm-random", 2))
    )
    refused = opened(compared, refused_pairs=pairs)
    figure = drawn.paired_differences(refused)
    assert figure is not None
    seeds = {(row["arm"], row["seed"]) for row in figure.rows if "seed" in row}
    assert ("oelm", 1) not in seeds
    assert len(seeds) == 2 * len(evidence.plan.seeds) - 2
    assert len(refused.curves["oelm"]) == 4


def test_training_curves_are_the_mean_of_the_runs(compared: Path, tmp_path: Path) -> None:
    compared = evaluated(compared, tmp_path / "more")
    figure = only(drawn_curves.training_curves(opened(compared)), "training-curves")
    for arm in ("baseline", "oelm"):
        values: dict[int, list[float]] = {}
        for seed in range(5):
            for event in RunRecord(compared / "runs" / f"{arm}-s{seed}").events(EvaluationEvent):
                if event.checkpoint is None:
                    values.setdefault(event.step, []).append(event.metrics["accuracy"])  # type: ignore[arg-type]
        assert [row["x"] for row in figure.rows if row["arm"] == arm] == sorted(values)
        for step, own in values.items():
            row = row_of(figure, arm=arm, x=step)
            mean, spread = statistics.fmean(own), statistics.stdev(own)
            assert row["mean"] == pytest.approx(mean)
            assert (row["low"], row["high"]) == pytest.approx((mean - spread, mean + spread))
            assert row["runs"] == 5
    assert set(figure.files) == {
        f"runs/{arm}-s{seed}/events.jsonl"
        for arm in ("baseline", "oelm", "oelm-random")
        for seed in range(5)
    }


def test_bars_have_the_interval_of_the_t_distribution(compared: Path) -> None:
    (figure,) = drawn.metric_bars(opened(compared))
    for arm, evidence in values_of(compared)["arms"].items():
        values = [run["metrics"]["accuracy"] for run in evidence["runs"]]
        low, high = stats.t.interval(0.95, len(values) - 1, statistics.fmean(values),
                                     statistics.stdev(values) / math.sqrt(len(values)))  # fmt: skip
        row = row_of(figure, arm=arm)
        assert (row["mean"], row["low"], row["high"]) == pytest.approx(
            (statistics.fmean(values), low, high)
        )


def test_nothing_is_drawn_beyond_the_ends_of_a_scale(compared: Path, tmp_path: Path) -> None:
    folder = evaluated(compared, tmp_path / "copy")
    for number, path in enumerate(sorted(folder.glob("runs/*/events.jsonl"))):
        wide = 1.0 if number % 2 else 0.0
        text = re.sub(r'"accuracy": [0-9.e-]+', f'"accuracy": {wide}', path.read_text())
        path.write_text(text)
    evidence = read_evidence(folder / "evidence.json")
    assert evidence is not None
    arms = {
        name: replace(arm, metrics={"accuracy": Summary(5, 0.9, 0.5, 0.6, 0.1, 1.0)})
        for name, arm in evidence.arms.items()
    }
    shown = opened(folder, arms=arms)
    bars = only(drawn.metric_bars(shown), "metric-means")
    curves = only(drawn_curves.training_curves(shown), "training-curves")
    cut = "cut off at the smallest and largest possible value"
    for figure in (bars, curves):
        assert cut in figure.caption
        assert max(row["high"] for row in figure.rows) == 1.0
        assert min(row["low"] for row in figure.rows) >= 0.0
    assert "1.521" in bars.rows[0]["text"], "the interval itself is still told"
    assert cut not in only(drawn.metric_bars(opened(compared)), "metric-means").caption
    (tuning,) = [chart_parts.cut_off(rows := [{"low": -1.5, "high": 0.5}], "pearson")]
    assert rows == [{"low": -1.0, "high": 0.5}]
    assert tuning
    assert (
        chart_parts.cut_off([{"low": -9.0, "high": 9.0}, {"low": None, "high": None}], "mine") == ""
    )


def test_an_interval_of_a_bar_is_drawn_on_both_sides_of_zero() -> None:
    rows = [{"arm": "a", "mean": 0.1, "low": -0.05, "high": 0.25, "text": ""},
            {"arm": "b", "mean": 0.1, "low": -9.0, "high": 0.2, "text": ""}]  # fmt: skip
    spec = cleaned(themed(figures.bars(rows, ["a", "b"], "r"), in_page=True))
    drawn_rows = next(iter(spec["datasets"].values()))
    assert (drawn_rows[0]["from"], drawn_rows[0]["to"]) == (-0.05, 0.25)
    assert -9 < drawn_rows[1]["from"] == drawn_rows[1]["beyond_low"] < -0.05
    assert drawn_rows[0]["beyond_low"] is None
    positive = figures.bars([rows[0] | {"low": 0.0}], ["a"], "r")
    assert '"domain": [0.0' in json.dumps(cleaned(themed(positive, in_page=True)))


def test_the_axis_of_means_shows_intervals_of_about_the_same_length() -> None:
    rows = [{"arm": "a", "mean": 0.5, "low": 0.3, "high": 0.7},
            {"arm": "b", "mean": 0.51, "low": 0.3, "high": 0.72},
            {"arm": "c", "mean": 0.5, "low": -50.0, "high": 51.0}]  # fmt: skip
    low, high = chart_parts.window_of_means(rows, False)
    assert -5 < low < 0.3 < 0.72 < high < 5
    assert chart_parts.window_of_means([{"mean": 2.0, "low": None, "high": None}], True)[0] < 2.0


def test_time_has_its_ceiling_and_its_control(tuned: Path) -> None:
    figure, *_ = drawn.time_ratios(opened(tuned))
    timing = values_of(tuned)["timing"]
    row, control = row_of(figure, arm="oelm"), row_of(figure, arm="A/A control")
    own = timing["arms"]["oelm"]
    assert (row["effect"], row["low"], row["high"], row["ceiling"]) == (
        own["ratio"], own["low"], own["high"], own["ceiling"],
    )  # fmt: skip
    assert (control["low"], control["high"]) == (
        timing["control"]["low"],
        timing["control"]["high"],
    )
    assert ("unproven" in figure.caption) == (not timing["proven"])


def test_times_of_runs_refer_to_timed_steps_only_if_there_are_any(tuned: Path) -> None:
    (timed,) = drawn.time_bars(opened(tuned))
    (untimed,) = drawn.time_bars(opened(tuned, timing=None))
    assert "steps" in timed.caption
    assert "may come from the machine" in untimed.caption
    assert "steps" not in untimed.caption


def test_tuning_has_one_scale_and_marks_the_choice(tuned: Path) -> None:
    (figure,) = drawn.tuning(opened(tuned))
    (setting,) = values_of(tuned)["tuning"]
    for arm, points in setting["curves"].items():
        for point in points:
            row = row_of(figure, arm=arm, value=point["value"])
            assert {key: row[key] for key in ("mean", "high", "chosen")} == {
                key: point[key] for key in ("mean", "high", "chosen")
            }
            assert row["low"] == max(0.0, point["low"]), "no accuracy is below 0"
    scales = [
        json.dumps(part["encoding"]["y"]["scale"])
        for part in parts(figure.chart)
        if "scale" in part["encoding"]["y"]
    ]
    assert len(set(scales)) == 1
    assert "resolve" not in figure.chart
    assert {part["encoding"]["x"]["scale"]["type"] for part in parts(figure.chart)} == {"log"}


def test_flops_are_those_of_the_timed_steps(tuned: Path, tmp_path: Path) -> None:
    tuned = evaluated(tuned, tmp_path / "more")
    figure = only(drawn_curves.cost_curves(opened(tuned)), "metric-by-flops")
    for arm, timed in values_of(tuned)["timing"]["arms"].items():
        rows = [row for row in figure.rows if row["arm"] == arm]
        assert len(rows) == 2 * (arm in ("baseline", "oelm"))
        assert all(row["x"] == row["step"] * timed["limits"]["flops"] for row in rows)


def test_seconds_are_the_mean_until_the_evaluation(compared: Path, tmp_path: Path) -> None:
    compared = evaluated(compared, tmp_path / "more")
    figure = only(drawn_curves.cost_curves(opened(compared)), "metric-by-seconds")
    for row in figure.rows:
        seconds = [
            event.total_seconds
            for seed in range(5)
            for event in RunRecord(compared / "runs" / f"{row['arm']}-s{seed}").events(
                EvaluationEvent
            )
            if event.step == row["step"] and event.checkpoint is None
        ]
        assert row["x"] == pytest.approx(statistics.fmean(seconds))


def test_heat_maps_show_frozen_parts_of_every_arm(compared: Path) -> None:
    figure = only(drawn.gradient_flow(opened(compared)), "gradient-heat-maps")
    frozen = {(row["arm"], row["row"]) for row in figure.rows if row["text"] == "frozen"}
    assert frozen == {
        (arm, f"layers[0].{role}") for arm in ("oelm", "oelm-random") for role in ("query", "key")
    }
    assert {row["arm"] for row in figure.rows} == {"baseline", "oelm", "oelm-random"}
    assert "· is frozen" in figure.caption


def test_parameters_add_up(compared: Path) -> None:
    (figure,) = drawn.parameters(opened(compared))
    for arm, evidence in values_of(compared)["arms"].items():
        sizes = [row_of(figure, arm=arm, kind=kind)["size"] for kind in ("trainable", "frozen")]
        assert sizes[0] == evidence["parameters"]["trainable"]
        assert sum(sizes) == evidence["parameters"]["total"]


# Scales


def test_a_loss_that_spans_a_decade_is_logarithmic() -> None:
    def is_log(metric: str, *values: float) -> bool:
        return drawn_curves._is_logarithmic(metric, {"arm": [dict(enumerate(values))]})

    assert is_log("loss", 10.1, 1.0)
    assert is_log("perplexity", 300.0, 20.0)
    assert not is_log("loss", 9.0, 1.0)
    assert not is_log("loss", 100.0, 0.0)
    assert not is_log("accuracy", 0.01, 0.9)
    assert not is_log("loss")


def test_an_axis_shows_all_points_but_not_every_interval() -> None:
    assert chart_parts.window([0.0, 1.0], [-0.5, None], False) == pytest.approx((-0.56, 1.06))
    low, high = chart_parts.window([0.0, 1.0], [-1000.0, 1000.0], False)
    assert -6 < low < -3
    assert 4 < high < 7
    low, high = chart_parts.window([1.0, 2.0], [1e-9, None], True)
    assert 0 < low < 1 < 2 < high < 3
    low, high = chart_parts.window([3.0], [], False)
    assert low < 3 < high


def test_an_interval_beyond_the_axis_has_an_arrow() -> None:
    rows = [
        {"arm": "wide", "effect": 1.0, "low": -9.0, "high": None},
        {"arm": "narrow", "effect": 1.0, "low": 0.5, "high": 1.5},
        {"arm": "one seed", "effect": 1.0, "low": None, "high": None},
        {"arm": "none", "effect": None, "low": None, "high": None},
    ]
    wide, narrow, alone = chart_parts.clipped(rows, (0.0, 2.0))
    assert (wide["from"], wide["to"], wide["beyond_low"], wide["beyond_high"]) == (0, 2, 0, 2)
    assert (narrow["from"], narrow["to"]) == (0.5, 1.5)
    assert narrow["beyond_low"] is narrow["beyond_high"] is None
    assert "from" not in alone


def test_one_seed_has_dots_but_no_interval(compared: Path) -> None:
    evidence = opened(compared).evidence
    single = _with_one_seed(evidence)
    figure = drawn.paired_differences(opened(compared, **single))
    assert figure is not None
    assert [row["seed"] for row in figure.rows if "seed" in row] == [0, 0]
    assert "interval" not in figure.caption
    assert "from" not in json.dumps(figure.chart["datasets"]["effects"])
    svg(themed(figure.chart, in_page=True), figure.name)


def _with_one_seed(evidence: Evidence) -> dict[str, Any]:
    effect = Effect(1, False, 0.05, 0.1, None, None, None, None)
    return {
        "arms": {name: replace(arm, runs=arm.runs[:1]) for name, arm in evidence.arms.items()},
        "verdicts": {
            name: replace(verdict, paired=effect, could_have_seen=None)
            for name, verdict in evidence.verdicts.items()
        },
    }


# Hostile names


@pytest.fixture
def hostile() -> dict[str, Any]:
    """Charts of arms whose names are hostile."""
    means = [{"arm": arm, "mean": 1.0 + n, "low": 0.5, "high": 9.0, "text": arm, "share": 0.5,
              "at": 0.5, "share_text": "", "effect": 1.0 + n, "quantity": "update", "value": 0.1,
              "chosen": n, "mark": arm, "seeds": arm, "seed": n}
             for n, arm in enumerate(HOSTILE)]  # fmt: skip
    points = [row | {"x": x, "runs": 1, "all": x < 2, "turn": x == 1, "dot": True}
              for row in means for x in range(3)]  # fmt: skip
    cells = [{"arm": arm, "row": arm, "place": 0, "step": 1, "power": power, "sign": "·",
              "text": arm} for arm in HOSTILE for power in (0.5, None)]  # fmt: skip
    sizes = [{"arm": arm, "kind": "frozen", "size": 5, "text": arm} for arm in HOSTILE]
    failed = [*means, means[0] | {"value": 0.2, "mean": None, "low": None, "high": None}]
    control = {"low": 0.9, "high": 1.1, "text": "control"}
    title = HOSTILE[2]
    return {
        "paired": figures.paired_differences(means, means, HOSTILE, title, True),
        "curves": figures.curves(points, HOSTILE, title, title, True, True),
        "times": figures.time_ratios(means, HOSTILE, control, title),
        "responses": figures.responses(failed, HOSTILE, title, title),
        "bars": figures.bars(means, HOSTILE, title),
        "sizes": figures.sizes(sizes, HOSTILE, title, ["frozen"], stacked=False),
        "ratios": figures.ratios(means, HOSTILE, title, ["update"]),
        "heat": figures.heat_maps(cells, HOSTILE, title),
        "trade": figures.trade_off(means, HOSTILE, title, title),
    }


def test_hostile_names_are_drawn_as_text(
    hostile: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for name, chart in hostile.items():
        picture = svg(themed(chart, in_page=True), name)
        assert "<script" not in picture, name
        assert "…" in picture or name == "ratios", name  # the long names, shortened
    assert "ERROR" not in capfd.readouterr().err  # of the charts' expressions


def test_every_part_with_data_of_arms_can_be_switched_off(hostile: dict[str, Any]) -> None:
    for name, chart in hostile.items():
        assert {"name": "hidden_arms", "value": []} in chart["params"], name
        has_filter = "hidden_arms" in json.dumps(chart.get("transform", []))
        for part in parts(chart):
            own = "hidden_arms" in json.dumps(part.get("transform", []))
            assert has_filter or own or "values" in part.get("data", {}), name


def test_names_that_end_alike_stay_different(hostile: dict[str, Any]) -> None:
    for name, chart in hostile.items():
        arms = {row["arm"] for rows in cleaned(chart)["datasets"].values() for row in rows}
        assert len(arms) == len(HOSTILE), name

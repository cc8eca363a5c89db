"""Convergence, times, retained shares and the overview: what is measured beside the verdicts."""

import json
import math
from dataclasses import replace
from statistics import fmean, geometric_mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import frostlab as fl
from comparing import plan
from frostlab.comparison.evidence import CONVERGED, Evidence, RefusedPair, RoundTimes
from frostlab.comparison.measures import convergence as measured
from frostlab.comparison.measures.arms import (
    arm_times,
    data_name,
    mean_of,
    model_name,
    overview,
    retained,
    total_gap,
)
from frostlab.comparison.measures.convergence import convergence
from frostlab.comparison.measures.show import convergence_section, run_times
from frostlab.comparison.plan import Plan, Rules
from frostlab.matrix.show import HEAD, OverviewRow, overview_table
from frostlab.recipe.load import load_recipe
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent

RULES = Rules(metric="accuracy", lower_is_better=False)
PERPLEXITY = Rules(metric="perplexity", lower_is_better=True, log=True)
Curves = dict[str, dict[int, list[float] | str]]  # by arm and seed: values, or the run's status


def made_runs(curves: Curves, given: Plan, metric: str = "accuracy", **changes: Any) -> Any:
    """Runs that were evaluated every 10 steps, an epoch of 20, a second a step."""
    records, summaries = {}, {}
    for arm, by_seed in curves.items():
        for seed, values in by_seed.items():
            ended = values if isinstance(values, str) else "finished"
            summaries[arm, seed] = SimpleNamespace(status=ended, finished=ended == "finished")
            events = [] if isinstance(values, str) else [
                EvaluationEvent(0.0, 10 * n, "tune", {metric: value}, 0, n / 2, 0.5, 10.0 * n, True)
                for n, value in enumerate(values, 1)
            ]  # fmt: skip
            if events:  # the report is no evaluation while training
                report = EvaluationEvent(0, 99, "report", {metric: 1.0}, 0, 9, 1, 99, None, 10)
                events.append(report)
            records[arm, seed] = SimpleNamespace(events=lambda kind, events=events: events)
    return SimpleNamespace(
        plan=given, records=records, summaries=summaries, refused=(),
        seeds_of=lambda arm: [seed for name, seed in summaries if name == arm],
        finished=lambda arm, seed: summaries[arm, seed].finished, **changes,
    )  # fmt: skip


def test_the_target_is_the_baselines_mean_halfway() -> None:
    base = {0: [0.2, 0.5, 0.4, 0.9], 1: [0.1, 0.7, 0.8, 0.9]}
    arm = {0: [0.1, 0.2, 0.6, 0.9], 1: [0.1, 0.2, 0.6, 0.65]}
    found = convergence(made_runs({"baseline": base, "oelm": arm}, plan()), RULES)
    assert found is not None
    assert found.target == pytest.approx(0.6)
    assert found.place == (
        "the mean of the best values that the baseline's runs had reached by evaluation 2 of 4, at "
        "step 20; no other arm's runs were used to choose it"
    )
    other = convergence(made_runs({"baseline": base, "oelm": {0: [0.9]}}, plan()), RULES)
    assert other is not None
    assert other.target == found.target, "no run of another arm decides"
    baseline, oelm = found.arms["baseline"], found.arms["oelm"]
    assert {key: baseline.spent[key].mean for key in CONVERGED} == {
        "steps": 30.0, "epochs": 1.5, "seconds": 30.0,
    }  # fmt: skip
    assert (baseline.runs, baseline.reached, baseline.ratios) == (2, 2, {})
    assert oelm.spent["steps"].mean == 30.0
    ratio = oelm.ratios["steps"]
    assert ratio.effect == pytest.approx(math.sqrt(30 / 40 * 30 / 20))
    assert ratio.low < 1 < ratio.high
    assert ratio.alpha == 0.05


def test_perplexity_has_a_geometric_target_and_arrives_from_above() -> None:
    base = {0: [40.0, 20.0, 10.0], 1: [90.0, 80.0, 5.0]}
    runs = made_runs({"baseline": base, "oelm": base}, plan(), metric="perplexity")
    found = convergence(runs, PERPLEXITY)
    assert found is not None
    assert found.target == pytest.approx(40.0)
    assert "geometric mean" in found.place
    assert found.arms["baseline"].spent["steps"].mean == fmean([10, 30])
    ratio = found.arms["oelm"].ratios["steps"]
    assert (ratio.effect, ratio.low, ratio.high) == (1.0, None, None), "no spread, no interval"


def test_a_target_of_the_recipe_comes_first() -> None:
    base = {0: [0.2, 0.5], 1: [0.3, 0.6]}
    given = plan(set={"evaluate.target": 0.55})
    found = convergence(made_runs({"baseline": base, "oelm": base}, given), RULES)
    assert found is not None
    assert (found.target, found.place) == (0.55, "evaluate.target of the recipe")
    assert (found.arms["oelm"].reached, found.arms["oelm"].runs) == (1, 2)
    other = convergence(made_runs({"baseline": base, "oelm": base}, given, "loss"),
                        Rules(metric="loss", lower_is_better=True))  # fmt: skip
    assert other is not None
    assert other.target != 0.55, "the recipe's target is of another metric"


def test_runs_that_never_arrive_are_counted_and_leave_the_bad_side_open() -> None:
    base = {seed: [0.1 * seed, 0.5, 0.6, 0.6] for seed in range(5)}
    late = [0.0, 0.0, 0.0, 0.6]
    arm: dict[int, Any] = {0: late, 1: late, 2: [0.0, 0.6, 0.6, 0.6], 3: [0.0] * 4, 4: "diverged"}
    runs = made_runs({"baseline": base, "oelm": arm}, plan(seeds=5, set={"evaluate.target": 0.5}))
    found = convergence(runs, RULES)
    assert found is not None
    oelm = found.arms["oelm"]
    assert (oelm.runs, oelm.reached) == (5, 3)
    ratio = oelm.ratios["steps"]
    assert (ratio.n, ratio.high) == (3, None)
    assert ratio.effect == pytest.approx((2 * 2 * 1) ** (1 / 3))
    turned = convergence(made_runs({"baseline": arm, "oelm": base}, plan(
        seeds=5, set={"evaluate.target": 0.5})), RULES)  # fmt: skip
    assert turned is not None
    assert turned.arms["oelm"].ratios["steps"].low == 0
    failed = made_runs({"baseline": base, "oelm": arm | {4: "failed"}}, runs.plan)
    assert convergence(failed, RULES).arms["oelm"].runs == 4, "a failed run is tried again"
    refused = made_runs({"baseline": base, "oelm": arm}, runs.plan)
    refused.refused = (RefusedPair("oelm", 0, "for a test"),)
    assert convergence(refused, RULES).arms["oelm"].ratios["steps"].n == 2


def test_nothing_arrives_and_nothing_was_evaluated() -> None:
    base = {0: [0.2, 0.5], 1: [0.3, 0.6]}
    given = plan(set={"evaluate.target": 0.9})
    found = convergence(made_runs({"baseline": base, "oelm": base}, given), RULES)
    assert found is not None
    assert (found.arms["oelm"].reached, found.arms["oelm"].spent) == (0, {})
    assert found.arms["oelm"].ratios == {}
    none = {0: "failed", 1: "failed"}
    assert convergence(made_runs({"baseline": none, "oelm": base}, given), RULES) is None


def test_equal_arms_are_rarely_told_apart() -> None:
    """The target is made from the baseline's runs, and yet favours neither arm."""
    draw, times, sims, alarms = np.random.default_rng(0), np.arange(1, 21), 250, [0, 0]
    for _ in range(sims):
        seeds = draw.normal(0, 0.05, (6, 1))
        base, arm = (
            1 - np.exp(-times / 10) + seeds + draw.normal(0, 0.05, (6, 1))
            + draw.normal(0, 0.01, (6, 20)) for _ in range(2)
        )  # fmt: skip
        curves = {
            name: {seed: [measured._Evaluation(value, {"steps": float(step)})
                          for step, value in zip(times, row, strict=True)]
                   for seed, row in enumerate(values)}
            for name, values in (("base", base), ("arm", arm))
        }  # fmt: skip
        target, _ = measured._baseline_target(curves["base"], 20, RULES)
        own, other = (
            {seed: spent["steps"] for seed, curve in curves[name].items()
             if (spent := measured._arrival(curve, target, RULES)) is not None}
            for name in ("arm", "base")
        )  # fmt: skip
        both = [seed for seed in own if seed in other]
        missed = len(other) - len(own)
        ratio = measured._ratio([own[s] for s in both], [other[s] for s in both], missed, 0.05)
        assert ratio is not None
        alarms[0] += ratio.low is not None and ratio.low > 1
        alarms[1] += ratio.high is not None and ratio.high < 1
    assert sum(alarms) < 0.08 * sims
    assert max(alarms) < 0.05 * sims


def test_a_real_comparison_says_when_its_arms_arrived(spoken: fl.Comparison) -> None:
    evidence = spoken.evidence
    found = evidence.convergence
    assert found is not None
    events = {
        name: [RunRecord(spoken.folder / run.folder).events(EvaluationEvent) for run in arm.runs]
        for name, arm in evidence.arms.items()
    }
    halfway = [min(event.metrics["perplexity"] for event in run[:2]) for run in events["baseline"]]
    assert found.target == pytest.approx(geometric_mean(halfway))
    for name, runs in events.items():
        steps = [
            next((e.step for e in run if e.checkpoint is None
                  and e.metrics["perplexity"] <= found.target), None)
            for run in runs
        ]  # fmt: skip
        reached = [step for step in steps if step is not None]
        assert (found.arms[name].reached, found.arms[name].runs) == (len(reached), 2)
        if reached:
            assert found.arms[name].spent["steps"].mean == fmean(reached)
    values = json.loads((spoken.folder / "comparison.json").read_text())
    assert values["convergence"]["target"] == found.target
    assert values["oelm_freeze"]["convergence"]["reached"] == found.arms["oelm"].reached
    text = spoken.page.read_text()
    assert f"The target is perplexity {found.target:.6g} on the split" in text
    assert f"| oelm | {found.arms['oelm'].reached} of 2 |" in text
    once = replace(evidence, convergence=replace(found, evaluations=1))
    assert "evaluated only once" in convergence_section(once)
    assert "evaluated only once" not in text


def test_what_is_retained_of_the_baseline(made: fl.Comparison) -> None:
    evidence = made.evidence
    values = {
        name: [run.metrics["accuracy"] for run in evidence.arms[name].runs]
        for name in ("baseline", "oelm")
    }
    share = retained(evidence, "oelm")
    assert share is not None
    assert share.effect == pytest.approx(
        geometric_mean(values["oelm"]) / geometric_mean(values["baseline"])
    )
    assert share.low < share.effect < share.high
    loss = retained(evidence, "oelm", "loss")
    assert loss is not None
    assert (loss.effect > 1) == (
        geometric_mean(run.metrics["loss"] for run in evidence.arms["oelm"].runs)
        < geometric_mean(run.metrics["loss"] for run in evidence.arms["baseline"].runs)
    )
    assert mean_of(evidence, "oelm", "accuracy") == pytest.approx(fmean(values["oelm"]))
    assert mean_of(evidence, "oelm", "perplexity") is None
    assert retained(evidence, "oelm", "perplexity") is None
    fewer = replace(evidence, refused_pairs=(RefusedPair("oelm", 0, "for a test"),))
    assert retained(fewer, "oelm").n == 5
    page = made.page.read_text()
    assert f"| {share.effect:.2%} |" in page


def with_rounds(evidence: Evidence, **seconds: tuple[float, ...]) -> Evidence:
    """Evidence whose alternating runs took so long."""
    rounds = {name: RoundTimes(own, 0.25, None, True) for name, own in seconds.items()}
    return replace(evidence, rounds=rounds)


def test_the_total_gap_prefers_runs_that_alternate(spoken: fl.Comparison) -> None:
    twice = with_rounds(spoken.evidence, baseline=(10.0, 20.0), oelm=(8.0, 16.0))
    gap = total_gap(twice, "oelm")
    assert gap is not None
    assert gap.of == "alternating rounds"
    assert (gap.seconds.effect, gap.saved) == (-3.0, pytest.approx(0.2))
    once = with_rounds(spoken.evidence, baseline=(10.0,), oelm=(8.0,))
    whole = total_gap(once, "oelm")
    assert whole is not None
    assert (whole.of, whole.ratio.n) == ("whole runs", 2)
    refused = (RefusedPair("oelm", 0, "another machine"),)
    fewer = total_gap(replace(once, refused_pairs=refused), "oelm")
    assert fewer is not None
    assert fewer.ratio.n == 1
    text = run_times(twice)
    assert "-20.0 %" in text
    assert "| time saved | – | 20.0 % |" in text
    assert "10, 20 s (cv 25.0%)" in text


def test_rounds_and_steps_have_their_stability(spoken: fl.Comparison) -> None:
    evidence = spoken.evidence
    values = json.loads((spoken.folder / "timing.json").read_text())["timing"]
    for name, key in (("baseline", "baseline"), ("oelm", "oelm_freeze")):
        seconds = evidence.rounds[name].seconds
        assert len(seconds) == 2
        cv = float(np.std(seconds, ddof=1) / np.mean(seconds))
        assert evidence.rounds[name].cv == pytest.approx(cv)
        assert values[key]["rounds"] == {"seconds": list(seconds), "cv": evidence.rounds[name].cv}
        blocks = evidence.timing.arms[name].blocks
        assert values[key]["step_cv"] == pytest.approx(np.std(blocks, ddof=1) / np.mean(blocks))
        runs = [RunRecord(spoken.folder / run.folder) for run in evidence.arms[name].runs]
        each = [seconds for run in runs for seconds in run.result.clocks.evaluation_seconds]
        assert len(each) == 8
        assert values[key]["validation_each"] == pytest.approx(fmean(each))
        assert values[key]["validations"] == 4


def test_the_gpu_is_used_by_arm(spoken: fl.Comparison) -> None:
    evidence = spoken.evidence
    busy = {"baseline": (80.0, 90.0), "oelm": (50.0, None)}
    arms = {
        name: replace(arm, runs=tuple(
            replace(run, gpu_utilisation=percent)
            for run, percent in zip(arm.runs, busy[name], strict=True)
        ))
        for name, arm in evidence.arms.items()
    }  # fmt: skip
    found = replace(evidence, arms=arms)
    assert [arm_times(found, name).utilisation for name in arms] == [85.0, 50.0]
    assert "| GPU utilisation | 85 % | 50 % | resource use |" in run_times(found)


def test_the_timing_table_has_every_row(spoken: fl.Comparison) -> None:
    lines = run_times(spoken.evidence).splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    named = {row[0].removeprefix("| "): row[-1].removesuffix(" |") for row in rows[2:]}
    assert named == {
        "total": "gap to the baseline", "time saved": "gap to the baseline",
        "per epoch": "stability", "per step": "efficiency", "validation": "extra overhead",
        "GPU utilisation": "resource use", "alternating runs": "stability",
    }  # fmt: skip
    assert rows[0][1:3] == ["baseline", "oelm"]


def test_the_overview_has_a_row_for_every_arm(made: fl.Comparison) -> None:
    rows = overview(made.evidence, "phase4", {"oelm": "imdb-oelm"})
    assert [(row.phase, row.id, row.method, row.status) for row in rows] == [
        ("phase4", "baseline", "baseline", "finished"),
        ("phase4", "imdb-oelm", "oelm", "finished"),
        ("phase4", "oelm-random", "oelm-random", "finished"),
    ]
    assert rows[1].gap.endswith(f": {made.verdicts['oelm'].word}")
    assert rows[0].gap == "baseline"
    table = overview_table([*rows, OverviewRow("phase4", "agnews-oelm", "ag_news", "oelm")])
    assert table.splitlines()[0] == f"| {' | '.join(HEAD)} |"
    last = "| phase4 | agnews-oelm | ag_news | oelm | – | – | – | not run |"
    assert table.splitlines()[-1] == last
    values = json.loads((made.folder / "comparison.json").read_text())
    assert [row["id"] for row in values["overview"]] == ["baseline", "oelm", "oelm-random"]
    arm = made.evidence.arms["oelm"]
    spoilt = replace(arm, runs=(replace(arm.runs[0], status="failed"), *arm.runs[1:]))
    fewer = replace(made.evidence, arms={**made.evidence.arms, "oelm": spoilt})
    assert overview(fewer)[1].status == "5 of 6 runs finished"


@pytest.mark.parametrize(
    ("recipe", "settings", "data", "model"),
    [
        ("xnli-bert", {}, "xnli_en", "bert-base-uncased"),
        ("xnli-bert", {"data.language": "zh", "model.name": "/models/bert-base-uncased"}, "xnli_zh",
         "bert-base-uncased"),
        ("sst2-bert", {"model.weights": False}, "sst2", "bert-base-uncased (random weights)"),
        ("imdb-gpt", {}, "imdb", "GPT-Medium-512"),
        ("imdb-gpt", {"model.layers": 12, "model.width": 768, "model.heads": 12}, "imdb",
         "GPT-12x768"),
        ("wikitext2-decoder", {}, "wikitext2", "Decoder-4x64"),
        ("progressive-standard", {}, "wikitext2", "Decoder-4x64"),
        ("eeg-conformer-v2", {}, "eeg-simulated", "Conformer-4x32"),
    ],
)  # fmt: skip
def test_data_and_models_have_the_studys_names(
    recipe: str, settings: dict[str, Any], data: str, model: str
) -> None:
    values = load_recipe(recipe, settings).to_dict()
    assert (data_name(values), model_name(values)) == (data, model)

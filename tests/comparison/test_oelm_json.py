"""comparison.json and timing.json have the original scripts' keys and the page's verdicts."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import pytest
import torch

import frostlab as fl
from comparing import compare, plan
from frostlab.comparison.evidence import Evidence, MachineLoad, StepTiming, TimedArm
from frostlab.comparison.oelm_json import (
    _duration,
    answers,
    comparison_json,
    have_equal_norms,
    main_arm,
    oelm_arm,
    orthogonality_arms,
    timing_json,
)
from frostlab.records.folder import RunRecord
from frostlab.records.schema import TelemetrySummary
from frostlab.typed import read
from run_made import TELEMETRY

# The layout of the study's files, with its examples of the form of every value.
COMPARISON = json.loads("""
{"dataset": "...", "model": "...", "environment": {"gpu": "...", "cuda_version": "...",
  "pytorch_version": "...", "gpu_temp_start": 0, "gpu_temp_end": 0},
 "baseline":    {"performance": {"best_accuracy": 0, "best_ppl": 0, "final_loss": 0, "epochs": 3},
                 "trainable_params": "100% (82M)",
                 "timing": {"total_seconds": 0, "formatted": "8h 15min", "per_epoch_avg": 0,
                            "per_step_avg": 0, "validation_total": 0}},
 "oelm_freeze": {"performance": {}, "timing": {}, "trainable_params": "87.1% (71M)",
                 "vs_baseline": {"ppl_gap": "+3.9%", "time_gap": "+2.4%",
                                 "per_step_gap": "+14.8%", "params_saved": "12.9%"}},
 "comparison":  {"accuracy_gap": 0, "time_analysis": {"total_gap_seconds": 0,
                   "total_gap_percent": 0, "per_step_gap": 0, "speedup_ratio": 0},
                 "conclusion": "..."}}
""")
TIMING = json.loads("""
{"timing": {"baseline": {"total_formatted": "8h 10m"}, "oelm_freeze": {"total_formatted": "8h 10m"},
            "comparison": {"time_difference_seconds": 720, "time_difference_percent": "+2.45%",
                           "speedup_ratio": 0.976}}}
""")
for part in ("performance", "timing"):  # the other arms have the baseline's shape
    COMPARISON["oelm_freeze"][part] = COMPARISON["baseline"][part]
for name in ("baseline", "oelm_freeze"):
    TIMING["timing"][name] |= COMPARISON["baseline"]["timing"]
NO_GPU = {"environment.gpu", "environment.cuda_version", "environment.gpu_temp_start",
          "environment.gpu_temp_end"}  # fmt: skip
NOT_FOR_CLASSES = {"baseline.performance.best_ppl", "oelm_freeze.performance.best_ppl",
                   "oelm_freeze.vs_baseline.ppl_gap"}  # fmt: skip
NOT_FOR_LANGUAGE = {"baseline.performance.best_accuracy", "oelm_freeze.performance.best_accuracy",
                    "comparison.accuracy_gap"}  # fmt: skip


def paths(values: dict[str, Any], before: str = "") -> list[str]:
    """Every dotted path to a value that is no object."""
    parts = []
    for key, value in values.items():
        path = f"{before}{key}"
        parts += paths(value, f"{path}.") if isinstance(value, dict) else [path]
    return parts


def at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def empty(values: dict[str, Any], layout: dict[str, Any]) -> set[str]:
    """The paths of the study's layout that have no value; a path that is not there is an error."""
    return {path for path in paths(layout) if at(values, path) is None}


def timed(evidence: Evidence, **changes: Any) -> Evidence:
    """Evidence with interleaved timing: each arm takes 0.8 of the baseline's time."""
    arms = {
        name: TimedArm(
            4.0, 4.1, *((None,) * 3 if name == evidence.baseline else (0.8, 0.64, 1.25)), 0.9, None,
            None if name == evidence.baseline else "faster than the FLOPs allow",
            None if name == evidence.baseline else "unproven", "A sentence.", "eager", None, 1, 1,
            1, (),
        )
        for name in evidence.arms
    }  # fmt: skip
    timing = StepTiming(
        evidence.baseline, arms, arms[evidence.baseline], False, ("too few builds",), (), 4,
        2, 1, 2, 3.0, "time", 0.01, "cpu", {},
        MachineLoad(2, 0.5, None, read(TelemetrySummary, TELEMETRY, "telemetry")),
    )  # fmt: skip
    return replace(evidence, timing=timing, **changes)


def record_of(made: fl.Comparison) -> RunRecord:
    return RunRecord(made.folder / "runs" / "baseline-s0")


def test_every_key_of_the_study_has_a_value(made: fl.Comparison, spoken: fl.Comparison) -> None:
    gpu = set() if torch.cuda.is_available() else NO_GPU
    gpu = gpu - ({"environment.cuda_version"} if torch.version.cuda else set())
    evidence = timed(made.evidence)
    assert empty(comparison_json(evidence, record_of(made)), COMPARISON) == gpu | NOT_FOR_CLASSES
    assert empty(timing_json(evidence), TIMING) == set()
    values = json.loads((spoken.folder / "comparison.json").read_text())
    assert empty(values, COMPARISON) == gpu | NOT_FOR_LANGUAGE
    assert empty(json.loads((spoken.folder / "timing.json").read_text()), TIMING) == set()
    assert {path for path in paths(COMPARISON) if path.startswith("baseline.timing")}, "walked"


def test_values_have_the_forms_of_the_study(spoken: fl.Comparison) -> None:
    values = json.loads((spoken.folder / "comparison.json").read_text())
    assert (values["dataset"], values["model"]) == ("induction", "GPT-1x16")
    arm = values["oelm_freeze"]
    assert re.fullmatch(r"\d+min \d+s", arm["timing"]["formatted"])
    assert re.fullmatch(r"\d+m \d+s", arm["timing"]["total_formatted"])
    for key in ("ppl_gap", "time_gap", "per_step_gap"):
        for part in ("gap", "low", "high"):
            assert re.fullmatch(r"[+-]\d+\.\d\d%", arm["vs_baseline"][key][part]), (key, part)
    assert re.fullmatch(r"\d+\.\d% \(\d+\.\dM\)", arm["trainable_params"])
    share = arm["trainable_params"].partition(" ")[0]
    assert arm["parameter_efficiency"] == f"{share} trainable"
    for nested in (values["baseline"], arm):  # nested, and also flat
        for part in ("performance", "timing"):
            for key in COMPARISON["baseline"][part]:
                assert nested[key] == nested[part][key]
    times = json.loads((spoken.folder / "timing.json").read_text())["timing"]
    assert times["oelm_freeze"] == arm["timing"]


@pytest.mark.parametrize(
    ("seconds", "long", "short"),
    [(29_700.4, "8h 15min", "8h 15m"), (29_439.0, "8h 10min", "8h 10m"),
     (903.2, "15min 3s", "15m 3s"), (3599.7, "1h 0min", "1h 0m"), (0.0, "0min 0s", "0m 0s")],
)  # fmt: skip
def test_durations_have_both_forms(seconds: float, long: str, short: str) -> None:
    assert (_duration(seconds, "min"), _duration(seconds, "m")) == (long, short)
    assert _duration(None, "min") is None


def test_best_and_final_values_come_from_one_split(spoken: fl.Comparison) -> None:
    evidence = spoken.evidence
    values = json.loads((spoken.folder / "comparison.json").read_text())
    for name, key in (("baseline", "baseline"), ("oelm", "oelm_freeze")):
        performance = values[key]["performance"]
        runs = [RunRecord(spoken.folder / run.folder) for run in evidence.arms[name].runs]
        reports = [run.result.report for run in runs]
        assert performance["split"] == "report"
        assert performance["best_ppl"] == pytest.approx(
            geometric_mean(report["perplexity"] for report in reports)
        )
        assert performance["final_loss"] == pytest.approx(fmean(r["loss"] for r in reports))
        assert math.exp(performance["final_loss"]) == pytest.approx(performance["best_ppl"])
        training = performance["while_training"]
        assert training["split"] == "tune"
        best = [run.result.best.value for run in runs]
        assert training["best_ppl"] == pytest.approx(geometric_mean(best))
        assert training["final_loss"] == pytest.approx(fmean(r.result.last["loss"] for r in runs))
    ratio = (values["oelm_freeze"]["performance"]["best_ppl"]
             / values["baseline"]["performance"]["best_ppl"])  # fmt: skip
    assert values["oelm_freeze"]["vs_baseline"]["ppl_gap"]["gap"] == f"{100 * (ratio - 1):+.2f}%"
    assert values["comparison"]["retained"]["share"] == pytest.approx(1 / ratio)


def test_a_run_shorter_than_an_epoch_is_scaled_and_says_so(spoken: fl.Comparison) -> None:
    times = json.loads((spoken.folder / "timing.json").read_text())["timing"]["baseline"]
    runs = [RunRecord(spoken.folder / run.folder).result
            for run in spoken.evidence.arms["baseline"].runs]  # fmt: skip
    assert not any(run.clocks.epoch_seconds for run in runs)
    assert times["per_epoch_scaled"] is True
    assert times["per_epoch_avg"] == pytest.approx(
        fmean(run.clocks.train_seconds * 12 / 8 for run in runs), rel=1e-4
    )
    values = json.loads((spoken.folder / "comparison.json").read_text())
    assert values["baseline"]["performance"]["epochs"] == pytest.approx(8 / 12, rel=1e-5)
    page = spoken.page.read_text()
    assert "scaled from 0.6667 epochs" in page
    assert "*Scaled*: the runs are shorter than an epoch" in page


def test_whole_epochs_are_counted_and_not_scaled(made: fl.Comparison) -> None:
    values = json.loads((made.folder / "comparison.json").read_text())
    assert values["baseline"]["performance"]["epochs"] == 1
    assert values["baseline"]["timing"]["per_epoch_scaled"] is False
    assert "*Scaled*" not in made.page.read_text()


def test_without_timed_steps_no_speed_is_stated(made: fl.Comparison) -> None:
    """A gap between whole runs is unproven, and says how the runs were taken."""
    assert made.evidence.timing is None
    values = json.loads((made.folder / "comparison.json").read_text())
    times = json.loads((made.folder / "timing.json").read_text())["timing"]
    analysis = values["comparison"]["time_analysis"]
    assert analysis["speedup_ratio"] is analysis["per_step_gap"] is None
    assert times["comparison"]["speedup_ratio"] is times["oelm_freeze"]["step_speedup"] is None
    gaps = [analysis["total_gap_seconds"], analysis["total_gap_percent"],
            analysis["time_saved_percent"], values["oelm_random"]["vs_baseline"]["time_gap"],
            times["comparison"]["time_difference_seconds"],
            times["comparison"]["time_difference_percent"]]  # fmt: skip
    for gap in gaps:
        assert gap["verdict"] == "unproven"
        assert gap["note"].startswith("whole runs were trained one after another, so their times")
        assert (gap["of"], gap["pairs"]) == ("whole runs", 6), "one round is no repetition"
    shared = timing_json(replace(made.evidence, jobs=2))["timing"]["comparison"]["note"]
    assert shared.startswith("whole runs shared the machine, up to 2 at a time, so their times")


def test_a_speed_has_the_pages_interval_and_verdict(made: fl.Comparison) -> None:
    evidence = timed(made.evidence, confounds={"oelm": ("optim.lr 1 → 2",), "oelm-random": ()})
    comparison = comparison_json(evidence, record_of(made))
    timing = timing_json(evidence)["timing"]
    trust = {
        "confidence": 0.99, "verdict": "unproven", "flag": "faster than the FLOPs allow",
        "proven": False, "reasons": ["too few builds"], "confounds": ["optim.lr 1 → 2"],
    }  # fmt: skip
    speedup = {"ratio": 1.25, "low": 0.8, "high": 1 / 0.64} | trust
    assert comparison["comparison"]["time_analysis"]["speedup_ratio"] == speedup
    assert timing["comparison"]["speedup_ratio"] == speedup
    assert timing["oelm_freeze"]["step_speedup"] == speedup
    assert timing["oelm_random"]["step_speedup"] == speedup | {"confounds": []}
    assert timing["baseline"]["step_speedup"] is None
    assert timing["baseline"]["step"] == 0.004
    gap = {"gap": "-20.00%", "low": "-36.00%", "high": "+25.00%", "seconds": 0.0} | trust
    assert comparison["oelm_freeze"]["vs_baseline"]["per_step_gap"] == gap


def test_a_gap_has_the_pages_interval_and_verdict(made: fl.Comparison) -> None:
    values = json.loads((made.folder / "comparison.json").read_text())
    verdict = made.evidence.verdicts["oelm"]
    assert verdict.paired is not None
    assert values["comparison"]["accuracy_gap"] == {
        "gap": verdict.paired.effect, "low": verdict.paired.low, "high": verdict.paired.high,
        "confidence": pytest.approx(1 - 0.05 / 3), "pairs": 6, "statements": 3,
        "verdict": verdict.word, "missing_runs": {}, "confounds": [],
    }  # fmt: skip
    assert values["oelm_freeze"]["vs_baseline"]["ppl_gap"] is None


def test_a_gap_of_perplexity_is_the_pages_ratio(spoken: fl.Comparison) -> None:
    values = json.loads((spoken.folder / "comparison.json").read_text())
    assert values["comparison"]["accuracy_gap"] is None
    gap, paired = values["oelm_freeze"]["vs_baseline"]["ppl_gap"], spoken.verdicts["oelm"].paired
    assert paired is not None
    assert gap["gap"] == f"{100 * (paired.effect - 1):+.2f}%"
    assert gap["low"] == f"{100 * (paired.low - 1):+.2f}%"
    assert (gap["verdict"], gap["pairs"]) == ("too few seeds", 2)


def test_every_file_is_about_the_arm_of_the_questions(tmp_path: Path) -> None:
    """OELM, though another arm comes before it."""
    found = compare(tmp_path / "c", arms=["baseline", "oelm-random", "oelm"])
    (sentence,) = (v.sentence for n, v in found.verdicts.items() if n == "oelm")
    assert answers(found.evidence)[0] == ("How large is the gap?", sentence)
    whole = json.loads((found.folder / "comparison.json").read_text())
    assert whole["comparison"]["conclusion"] == sentence
    gap = whole["oelm_freeze"]["total_seconds"] - whole["baseline"]["total_seconds"]
    analysis = whole["comparison"]["time_analysis"]
    assert analysis["total_gap_seconds"]["gap"] == pytest.approx(gap)
    times = json.loads((found.folder / "timing.json").read_text())["timing"]
    assert times["comparison"]["time_difference_seconds"]["gap"] == pytest.approx(gap)


def test_the_treatment_decides_and_not_the_name(tmp_path: Path) -> None:
    arms = [
        {"name": "baseline", "treatment": "frozen-qk"},
        {"name": "oelm", "treatment": "none"},
        {"name": "oelm-random", "treatment": "oelm"},
        {"name": "plain", "treatment": "oelm-random-matched"},
    ]
    found = compare(tmp_path / "c", arms=arms)
    evidence = found.evidence
    assert evidence.oelm == main_arm(evidence) == "oelm-random"
    said = dict(answers(evidence))
    assert said["How large is the gap?"] == found.verdicts["oelm-random"].sentence
    assert evidence.orthogonality is not None
    assert (evidence.orthogonality.arm, evidence.orthogonality.baseline) == ("oelm-random", "plain")
    assert "isolates orthogonality, at an equal norm of every head" in said[
        "Is orthogonality needed?"
    ]  # fmt: skip
    values = json.loads((found.folder / "comparison.json").read_text())
    assert values["oelm"]["trainable_params"].startswith("100%")
    assert values["comparison"]["conclusion"] == found.verdicts["oelm-random"].sentence
    assert values["oelm_freeze"]["performance"]["best_accuracy"] == pytest.approx(
        evidence.arms["oelm-random"].metrics["accuracy"].mean
    )
    assert "oelm_random" not in values
    text = found.page.read_text()
    assert "- **oelm**: everything trains\n" in text
    assert "The questions are about oelm-random: query and key of every head: orthogonal" in text


def test_an_arm_that_is_only_called_oelm(tmp_path: Path) -> None:
    arms = [{"name": "baseline", "treatment": "frozen-qk"}, {"name": "oelm", "treatment": "none"}]
    found = compare(tmp_path / "c", arms=arms, seeds=1)
    assert found.evidence.oelm is None
    assert "oelm_freeze" not in json.loads((found.folder / "comparison.json").read_text())
    assert "The questions are about oelm: everything trains." in found.page.read_text()
    assert dict(answers(found.evidence))["Is orthogonality needed?"].startswith("Not asked: ")


def test_scale_and_orthogonality_together(made: fl.Comparison) -> None:
    said = dict(answers(made.evidence))["Is orthogonality needed?"]
    assert made.evidence.orthogonality is not None
    assert said.startswith(made.evidence.orthogonality.sentence)
    assert "This compares orthogonality and scale together: the heads of oelm-random" in said


def arm(name: str, select: list[str], freeze: list[str], **change: Any) -> dict[str, Any]:
    init = [{"method": "orthogonalize", "select": select, **change}]
    return {"name": name, "treatment": {"init": init, "freeze": freeze}}


QK = ["query", "key"]


@pytest.mark.parametrize(
    ("arms", "oelm", "pair", "equal"),
    [
        (["oelm", "oelm-random"], "oelm", ("oelm", "oelm-random"), False),
        (["oelm", "oelm-random", "oelm-random-matched"], "oelm", ("oelm", "oelm-random-matched"),
         True),
        (["oelm-global", "oelm"], "oelm", None, False),
        (["oelm-global", "oelm-random-matched"], "oelm-global",
         ("oelm-global", "oelm-random-matched"), False),
        (["oelm-k", "oelm-random"], None, None, False),
        (["orthogonal-trainable", "oelm-random"], None, None, False),
        (["frozen-qk", "lora"], None, None, False),
        ([arm("a", ["key.weight", "query"], ["all", "!head"])], "a", None, False),
        ([arm("a", QK, ["all", "!layers[0]"])], None, None, False),
        ([arm("a", QK, ["all", "!key"])], None, None, False),
        ([arm("a", QK, ["query", "layers[0].key"])], None, None, False),
        ([arm("a", ["query", "layers[0].key"], QK)], None, None, False),
        ([arm("a", QK, ["all", "!head"]), "oelm-random-matched"], "a", None, False),
        ([arm("a", QK, ["key", "query"]), "oelm-random-matched"], "a",
         ("a", "oelm-random-matched"), True),
        ([{"name": "hot", "treatment": "oelm", "set": {"optim.lr": 0.01}}, "oelm",
          "oelm-random-matched"], "oelm", ("oelm", "oelm-random-matched"), True),
    ],
)  # fmt: skip
def test_which_arms_the_questions_are_about(
    arms: list[Any], oelm: str | None, pair: tuple[str, str] | None, equal: bool
) -> None:
    lora = {"name": "lora", "treatment": {"peft": {"method": "lora", "select": ["output"]}}}
    given = [lora if name == "lora" else name for name in arms]
    found = plan(arms=["baseline", *given], allow_confounds=["lr"])
    assert oelm_arm(found) == oelm
    assert orthogonality_arms(found) == pair
    assert have_equal_norms(found, pair) == equal

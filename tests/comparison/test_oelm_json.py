"""comparison.json and timing.json have the original scripts' keys and the page's verdicts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from comparing import LANGUAGE, compare, plan
from frostlab.comparison.evidence import Evidence, StepTiming, TimedArm
from frostlab.comparison.oelm_json import (
    answers,
    comparison_json,
    have_equal_norms,
    main_arm,
    oelm_arm,
    orthogonality_arms,
    timing_json,
)
from frostlab.records.folder import RunRecord

WHOLE_RUN = {
    "total_seconds", "formatted", "per_epoch_avg", "per_step_avg", "validation_total", "note",
}  # fmt: skip
TRUST = {"confidence", "verdict", "flag", "proven", "reasons", "confounds"}


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
        2, 1, 2, 3.0, "time", 0.01, "cpu", {}, {},
    )  # fmt: skip
    return replace(evidence, timing=timing, **changes)


def record_of(made: fl.Comparison) -> RunRecord:
    return RunRecord(made.folder / "runs" / "baseline-s0")


def test_the_missions_keys(made: fl.Comparison) -> None:
    found = json.loads((made.folder / "comparison.json").read_text())
    assert set(found) == {
        "dataset", "model", "quick", "caution", "environment", "baseline", "oelm_freeze",
        "oelm_random", "comparison",
    }  # fmt: skip
    assert set(found["environment"]) == {
        "gpu", "cuda_version", "pytorch_version", "gpu_temp_start", "gpu_temp_end",
    }  # fmt: skip
    assert set(found["baseline"]) == {"performance", "trainable_params", "timing"}
    assert set(found["baseline"]["performance"]) == {
        "best_accuracy", "best_ppl", "final_loss", "epochs",
    }  # fmt: skip
    assert set(found["baseline"]["timing"]) == {"step", "step_speedup", "whole_run"}
    assert set(found["baseline"]["timing"]["whole_run"]) == WHOLE_RUN
    for arm in ("oelm_freeze", "oelm_random"):
        assert set(found[arm]) == {*found["baseline"], "vs_baseline", "parameter_efficiency"}
        share = found[arm]["trainable_params"].partition(" ")[0]
        assert found[arm]["parameter_efficiency"] == f"{share} trainable"
    assert set(found["oelm_freeze"]["vs_baseline"]) == {
        "ppl_gap", "per_step_gap", "whole_run_time_gap", "params_saved", "note",
    }  # fmt: skip
    assert set(found["comparison"]) == {"accuracy_gap", "time_analysis", "conclusion"}
    assert set(found["comparison"]["time_analysis"]) == {
        "per_step_gap", "speedup_ratio", "whole_run_gap_seconds", "whole_run_gap_percent", "note",
    }  # fmt: skip
    times = json.loads((made.folder / "timing.json").read_text())["timing"]
    assert set(times) == {"baseline", "oelm_freeze", "oelm_random", "comparison"}
    assert times["oelm_freeze"] == found["oelm_freeze"]["timing"]
    assert found["baseline"]["performance"]["best_ppl"] is None


def numbers_about_time(values: Any, path: str = "") -> dict[str, Any]:
    """Every value of a file that is about time, by its path, except of single runs or steps."""
    if isinstance(values, dict):
        parts = (numbers_about_time(value, f"{path}.{key}") for key, value in values.items())
        return {key: value for part in parts for key, value in part.items()}
    about = any(word in path for word in ("gap", "speedup", "ratio", "difference"))
    return {path: values} if about and "ppl_gap" not in path and "accuracy" not in path else {}


def test_without_timed_steps_no_speed_is_stated(made: fl.Comparison) -> None:
    """Whole runs that were taken one after another say nothing about speed, and say so."""
    assert made.evidence.timing is None
    for name in ("comparison.json", "timing.json"):
        values = json.loads((made.folder / name).read_text())
        stated = {key: value for key, value in numbers_about_time(values).items() if value}
        assert stated
        assert all(".whole_run_" in key for key in stated), "a speed-up of whole runs"
        text = json.dumps(values)
        assert text.count("whole runs were taken one after another") >= 3
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
    gap = {"gap": "-20.00%", "low": "-36.00%", "high": "+25.00%"} | trust
    assert comparison["oelm_freeze"]["vs_baseline"]["per_step_gap"] == gap


def test_a_gap_has_the_pages_interval_and_verdict(made: fl.Comparison, tmp_path: Path) -> None:
    values = json.loads((made.folder / "comparison.json").read_text())
    verdict = made.evidence.verdicts["oelm"]
    assert verdict.paired is not None
    assert values["comparison"]["accuracy_gap"] == {
        "gap": verdict.paired.effect, "low": verdict.paired.low, "high": verdict.paired.high,
        "confidence": pytest.approx(1 - 0.05 / 3), "pairs": 6, "statements": 3,
        "verdict": verdict.word, "missing_runs": {}, "confounds": [],
    }  # fmt: skip
    assert values["oelm_freeze"]["vs_baseline"]["ppl_gap"] is None
    language = compare(tmp_path / "c", recipe=LANGUAGE)
    values = json.loads((language.folder / "comparison.json").read_text())
    assert values["comparison"]["accuracy_gap"] is None
    gap, paired = values["oelm_freeze"]["vs_baseline"]["ppl_gap"], language.verdicts["oelm"].paired
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
    seconds = {arm: whole[arm]["timing"]["whole_run"]["total_seconds"]
               for arm in ("baseline", "oelm_freeze")}  # fmt: skip
    gap = seconds["oelm_freeze"] - seconds["baseline"]
    assert whole["comparison"]["time_analysis"]["whole_run_gap_seconds"] == pytest.approx(gap)
    times = json.loads((found.folder / "timing.json").read_text())["timing"]
    assert times["comparison"]["whole_run_difference_seconds"] == pytest.approx(gap)


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
    assert "This compares orthogonality and scale together: the weights of oelm-random" in said


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

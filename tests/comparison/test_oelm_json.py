"""comparison.json and timing.json have the keys of the original scripts."""

import json
from pathlib import Path

import pytest

import frostlab as fl
from comparing import compare
from frostlab.comparison.oelm_json import answers


def test_the_missions_keys(made: fl.Comparison) -> None:
    found = json.loads((made.folder / "comparison.json").read_text())
    assert set(found) == {
        "dataset", "model", "environment", "baseline", "oelm_freeze", "oelm_random", "comparison",
    }  # fmt: skip
    assert set(found["environment"]) == {
        "gpu", "cuda_version", "pytorch_version", "gpu_temp_start", "gpu_temp_end",
    }  # fmt: skip
    assert set(found["baseline"]) == {"performance", "trainable_params", "timing"}
    assert set(found["baseline"]["performance"]) == {
        "best_accuracy", "best_ppl", "final_loss", "epochs",
    }  # fmt: skip
    timing = {"total_seconds", "formatted", "per_epoch_avg", "per_step_avg", "validation_total"}
    assert set(found["baseline"]["timing"]) == timing
    for arm in ("oelm_freeze", "oelm_random"):
        assert set(found[arm]) == {*found["baseline"], "vs_baseline", "parameter_efficiency"}
        share = found[arm]["trainable_params"].partition(" ")[0]
        assert found[arm]["parameter_efficiency"] == f"{share} trainable"
    assert set(found["oelm_freeze"]["vs_baseline"]) == {
        "ppl_gap", "time_gap", "per_step_gap", "params_saved",
    }  # fmt: skip
    assert set(found["comparison"]) == {"accuracy_gap", "time_analysis", "conclusion"}
    assert set(found["comparison"]["time_analysis"]) == {
        "total_gap_seconds", "total_gap_percent", "per_step_gap", "speedup_ratio",
    }  # fmt: skip
    times = json.loads((made.folder / "timing.json").read_text())["timing"]
    assert set(times) == {"baseline", "oelm_freeze", "oelm_random", "comparison"}
    assert set(times["baseline"]) == {*timing, "total_formatted"}
    assert found["baseline"]["performance"]["best_ppl"] is None


def test_every_file_is_about_the_arm_of_the_questions(tmp_path: Path) -> None:
    """OELM, though another arm comes before it."""
    found = compare(tmp_path / "c", arms=["baseline", "oelm-random", "oelm"])
    (sentence,) = (v.sentence for n, v in found.verdicts.items() if n == "oelm")
    assert answers(found.evidence)[0] == ("How large is the gap?", sentence)
    whole = json.loads((found.folder / "comparison.json").read_text())
    assert whole["comparison"]["conclusion"] == sentence
    seconds = {arm: whole[arm]["timing"]["total_seconds"] for arm in ("baseline", "oelm_freeze")}
    gap = seconds["oelm_freeze"] - seconds["baseline"]
    assert whole["comparison"]["time_analysis"]["total_gap_seconds"] == pytest.approx(gap)
    times = json.loads((found.folder / "timing.json").read_text())["timing"]
    assert times["comparison"]["time_difference_seconds"] == pytest.approx(gap)

"""The five questions of the OELM study, and its output files comparison.json and timing.json.

OELM replaces the query and key weights by orthogonal matrices and freezes them. The files keep
the format of the study's scripts, but the numbers are means over seeds. Times are in seconds, and
an unknown value is null.
"""

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

from frostlab.comparison.evidence import ArmEvidence, Evidence, RunSummary
from frostlab.comparison.verdict import Word
from frostlab.errors import BadInput
from frostlab.records.folder import RunRecord

QUESTIONS = (
    "How large is the gap?",
    "Is the parameter saving worth it?",
    "Is it faster?",
    "Is orthogonality needed?",
    "Does it carry from BERT to GPT?",
)
_OELM = "oelm"
_RANDOM = ("oelm-random-matched", "oelm-random")  # the first keeps the scale of the weights
_KEYS = {_OELM: "oelm_freeze"}  # by arm: its key in comparison.json if that is not its name
_OTHER_KEYS = ("dataset", "model", "environment", "comparison")  # keys that are not arms
_COST: dict[Word, str] = {  # what the saved parameters cost, by verdict on the arm
    "better": "it is also better, so the saving costs nothing",
    "worse": "the saving costs performance: see the gap",
    "no difference found": "no cost was found, but these seeds may have missed a small one",
}


def arm_key(arm: str, baseline: str) -> str:
    """Return the key of an arm in comparison.json."""
    return "baseline" if arm == baseline else _KEYS.get(arm, arm.replace("-", "_"))


def check_names(arms: Sequence[str], baseline: str) -> None:
    """Refuse an arm whose key in comparison.json is already in use."""
    taken = set(_OTHER_KEYS)
    for arm in arms:
        key = arm_key(arm, baseline)
        if key in taken:
            raise BadInput(f"arm {arm}: its name is taken in comparison.json; choose another")
        taken.add(key)


def orthogonality_arms(arms: Collection[str]) -> tuple[str, str] | None:
    """Return the two arms that show the effect of orthogonality, or None if one is missing.

    They are OELM and an arm with random frozen weights, preferably weights of the original scale.
    """
    random = next((arm for arm in _RANDOM if arm in arms), None)
    return None if _OELM not in arms or random is None else (_OELM, random)


def main_arm(evidence: Evidence) -> str:
    """Return the arm that the questions are about: OELM, else the first besides the baseline."""
    others = [arm for arm in evidence.arms if arm != evidence.baseline]
    named = [arm for arm in others if arm_key(arm, evidence.baseline) == _KEYS[_OELM]]
    return (named or others)[0]


def answers(evidence: Evidence) -> list[tuple[str, str]]:
    """Return the five questions with their answers for the main arm."""
    arm = main_arm(evidence)
    texts = (
        evidence.verdicts[arm].sentence,
        _saving(evidence, arm),
        _speed(evidence, arm),
        _orthogonality(evidence),
        _transfer(evidence),
    )
    return list(zip(QUESTIONS, texts, strict=True))


def _saving(evidence: Evidence, arm: str) -> str:
    counts = evidence.arms[arm].parameters
    base_counts = evidence.arms[evidence.baseline].parameters
    if counts is None or base_counts is None:
        return "Not known: an arm has no finished run."
    saved = 1 - counts.trainable / base_counts.trainable
    if saved <= 0:
        return f"{arm} trains as many parameters as the baseline, or more: there is no saving."
    word = evidence.verdicts[arm].word
    return (
        f"{arm} trains {saved:.1%} fewer parameters "
        f"({counts.trainable:,} of {base_counts.trainable:,}), "
        "and needs that much less memory for gradients and Adam's moments; "
        f"{_COST.get(word, f'the cost is not known ({word})')}."
    )


def _speed(evidence: Evidence, arm: str) -> str:
    if evidence.timing is None:
        return "Not known: steps were not timed."
    return str(evidence.timing.arms[arm].sentence)


def _orthogonality(evidence: Evidence) -> str:
    verdict = evidence.orthogonality
    if verdict is None:
        return "Not asked: it needs the arms oelm and oelm-random-matched (or oelm-random)."
    scale = "" if verdict.baseline == _RANDOM[0] else (
        " oelm-random also changes the scale of the weights; oelm-random-matched would keep it."
    )  # fmt: skip
    return f"{verdict.sentence}{scale}"


def _transfer(evidence: Evidence) -> str:
    return (
        f"One model cannot answer this: the comparison has only {_model_name(evidence)}; "
        "run it with the other model too."
    )


def _model_name(evidence: Evidence) -> str:
    model = evidence.plan.recipe["model"]
    return str(model.get("name") or model["kind"])


def comparison_json(evidence: Evidence, first: RunRecord) -> dict[str, Any]:
    """Return the values of comparison.json; `first` is the run that describes the environment."""
    baseline = evidence.arms[evidence.baseline]
    values: dict[str, Any] = {
        "dataset": evidence.plan.recipe["data"]["name"],
        "model": _model_name(evidence),
        "environment": _environment(first),
        "baseline": _arm_values(baseline),
    }
    for name in (arm.name for arm in evidence.plan.others):
        arm = evidence.arms[name]
        fraction = _trainable_fraction(arm)
        values[arm_key(name, evidence.baseline)] = _arm_values(arm) | {
            "vs_baseline": _against_baseline(arm, baseline),
            "parameter_efficiency": None if fraction is None else f"{fraction:.1%} trainable",
        }
    main = main_arm(evidence)
    accuracies = (_mean_metric(arm, "accuracy") for arm in (evidence.arms[main], baseline))
    values["comparison"] = {
        "accuracy_gap": _gap(*accuracies),
        "time_analysis": _time_analysis(evidence.arms[main], baseline),
        "conclusion": evidence.verdicts[main].sentence,
    }
    return values


def timing_json(evidence: Evidence) -> dict[str, Any]:
    """Return the values of timing.json."""
    values: dict[str, Any] = {}
    for name, arm in evidence.arms.items():
        times = _times(arm)
        values[arm_key(name, evidence.baseline)] = {
            **times,
            "total_formatted": times["formatted"],
        }
    main, baseline = evidence.arms[main_arm(evidence)], evidence.arms[evidence.baseline]
    analysis = _time_analysis(main, baseline)
    values["comparison"] = {
        "time_difference_seconds": analysis["total_gap_seconds"],
        "time_difference_percent": _percent(analysis["total_gap_percent"], digits=2),
        "speedup_ratio": analysis["speedup_ratio"],
    }
    return {"timing": values}


def _environment(record: RunRecord) -> dict[str, Any]:
    environment, result = record.environment, record.result
    return {
        "gpu": (environment["gpu"] or {}).get("name"),
        "cuda_version": environment["versions"].get("cuda"),
        "pytorch_version": environment["versions"].get("torch"),
        "gpu_temp_start": result.gpu_before and result.gpu_before.temperature_c,
        "gpu_temp_end": result.gpu_after and result.gpu_after.temperature_c,
    }


def _arm_values(arm: ArmEvidence) -> dict[str, Any]:
    """Return an arm's performance, trainable parameters and times, as means over finished runs."""
    fraction, parameters = _trainable_fraction(arm), arm.parameters
    trainable = None
    if fraction is not None and parameters is not None:
        trainable = f"{fraction:.1%} ({parameters.trainable / 1e6:.1f}M)"
    return {
        "performance": {
            "best_accuracy": _mean_metric(arm, "accuracy"),
            "best_ppl": _mean_metric(arm, "perplexity"),
            "final_loss": _mean([run.final_loss for run in arm.finished]),
            "epochs": max((len(run.epoch_seconds) for run in arm.finished), default=None),
        },
        "trainable_params": trainable and trainable.replace("100.0%", "100%"),
        "timing": _times(arm),
    }


def _times(arm: ArmEvidence) -> dict[str, Any]:
    runs: Sequence[RunSummary] = arm.finished
    total = _mean([run.total_seconds for run in runs])
    return {
        "total_seconds": total,
        "formatted": _duration(total),
        "per_epoch_avg": _mean([seconds for run in runs for seconds in run.epoch_seconds]),
        "per_step_avg": _mean([run.step_ms / 1e3 for run in runs if run.step_ms is not None]),
        "validation_total": _mean([run.validation_seconds for run in runs]),
    }


def _against_baseline(arm: ArmEvidence, baseline: ArmEvidence) -> dict[str, Any]:
    times, base_times = _times(arm), _times(baseline)
    perplexities = (_mean_metric(evidence, "perplexity") for evidence in (arm, baseline))
    fraction, base_fraction = _trainable_fraction(arm), _trainable_fraction(baseline)
    saved = None if fraction is None or not base_fraction else 1 - fraction / base_fraction
    return {
        "ppl_gap": _percent(_relative_gap(*perplexities)),
        "time_gap": _percent(_relative_gap(times["total_seconds"], base_times["total_seconds"])),
        "per_step_gap": _percent(_relative_gap(times["per_step_avg"], base_times["per_step_avg"])),
        "params_saved": None if saved is None else f"{saved:.1%}",
    }


def _time_analysis(arm: ArmEvidence, baseline: ArmEvidence) -> dict[str, Any]:
    times, base_times = _times(arm), _times(baseline)
    total, base_total = times["total_seconds"], base_times["total_seconds"]
    both_timed = total is not None and base_total
    return {
        "total_gap_seconds": total - base_total if both_timed else None,
        "total_gap_percent": _relative_gap(total, base_total),
        "per_step_gap": _gap(times["per_step_avg"], base_times["per_step_avg"]),
        "speedup_ratio": base_total / total if both_timed and total else None,
    }


def _mean_metric(arm: ArmEvidence, metric: str) -> float | None:
    return _mean([run.metrics.get(metric) for run in arm.finished])


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _gap(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _relative_gap(value: float | None, base: float | None) -> float | None:
    """Return value − base in percent of base."""
    return None if value is None or not base else 100 * (value - base) / base


def _percent(value: float | None, digits: int = 1) -> str | None:
    return None if value is None else f"{value:+.{digits}f}%"


def _trainable_fraction(arm: ArmEvidence) -> float | None:
    parameters = arm.parameters
    return None if parameters is None else parameters.trainable / parameters.total


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}h {rest // 60}min" if hours else f"{rest // 60}min {rest % 60}s"

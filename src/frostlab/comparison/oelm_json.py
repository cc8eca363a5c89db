"""A comparison in the keys that the experiments' own records have; seconds everywhere."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from frostlab.comparison.page import main_arm
from frostlab.comparison.plan import Plan, key_of
from frostlab.records.folder import RunRecord

Arm = dict[str, Any]


def comparison_json(
    evidence: dict[str, Any], records: Mapping[tuple[str, int], RunRecord], plan: Plan
) -> dict[str, Any]:
    """Means over seeds of what finished; what is not known is null."""
    name, arms = evidence["baseline"], evidence["arms"]
    base = arms[name]
    first = records[name, plan.seeds[0]]
    made: dict[str, Any] = {
        "dataset": plan.recipe["data"]["name"],
        "model": plan.recipe["model"].get("name") or plan.recipe["model"]["kind"],
        "environment": _environment(first),
        "baseline": _arm(base),
    }
    for arm in plan.others:
        one = arms[arm.name]
        share = _share(one)
        made[key_of(arm.name, name)] = _arm(one) | {
            "vs_baseline": _against(one, base),
            "parameter_efficiency": None if share is None else f"{share:.1%} trainable",
        }
    other = main_arm(evidence)
    verdict = evidence["verdicts"][plan.rules.metric][other]
    made["comparison"] = {
        "accuracy_gap": _gap(arms[other], base, "accuracy"),
        "time_analysis": _time_analysis(arms[other], base),
        "conclusion": verdict["sentence"],
    }
    return made


def timing_json(evidence: dict[str, Any]) -> dict[str, Any]:
    """Times alone, in the form of the experiments' own `timing.json`."""
    name, arms = evidence["baseline"], evidence["arms"]
    timing: dict[str, Any] = {}
    for arm, found in arms.items():
        times = _timing(found)
        timing[key_of(arm, name)] = {**times, "total_formatted": _formatted(times["total_seconds"])}
    gap = _time_analysis(arms[main_arm(evidence)], arms[name])
    timing["comparison"] = {
        "time_difference_seconds": gap["total_gap_seconds"],
        "time_difference_percent": _percent(gap["total_gap_percent"], digits=2),
        "speedup_ratio": gap["speedup_ratio"],
    }
    return {"timing": timing}


def _environment(record: RunRecord) -> dict[str, Any]:
    found, result = record.environment, record.result
    return {
        "gpu": (found["gpu"] or {}).get("name"),
        "cuda_version": found["versions"].get("cuda"),
        "pytorch_version": found["versions"].get("torch"),
        "gpu_temp_start": result.gpu_before and result.gpu_before.temperature_c,
        "gpu_temp_end": result.gpu_after and result.gpu_after.temperature_c,
    }


def _arm(arm: Arm) -> Arm:
    runs = _finished(arm)
    parameters = arm["parameters"]
    share = _share(arm)
    return {
        "performance": {
            "best_accuracy": _mean(runs, "accuracy"),
            "best_ppl": _mean(runs, "perplexity"),
            "final_loss": _average([(run["last"] or {}).get("loss") for run in runs]),
            "epochs": max((len(run["clocks"]["epoch_seconds"]) for run in runs), default=None),
        },
        "trainable_params": None
        if share is None
        else f"{share:.1%} ({parameters['trainable'] / 1e6:.1f}M)".replace("100.0%", "100%"),
        "timing": _timing(arm),
    }


def _timing(arm: Arm) -> dict[str, Any]:
    clocks = [run["clocks"] for run in _finished(arm)]
    total = _average([clock["total_seconds"] for clock in clocks])
    steps = [clock["step_ms"]["mean"] / 1e3 for clock in clocks if clock["step_ms"]]
    return {
        "total_seconds": total,
        "formatted": _formatted(total),
        "per_epoch_avg": _average([s for clock in clocks for s in clock["epoch_seconds"]]),
        "per_step_avg": _average(steps),
        "validation_total": _average([clock["validation_seconds"] for clock in clocks]),
    }


def _against(arm: Arm, base: Arm) -> dict[str, Any]:
    one, other = _timing(arm), _timing(base)
    share, whole = _share(arm), _share(base)
    return {
        "ppl_gap": _percent(_relative(*(_mean(_finished(a), "perplexity") for a in (arm, base)))),
        "time_gap": _percent(_relative(one["total_seconds"], other["total_seconds"])),
        "per_step_gap": _percent(_relative(one["per_step_avg"], other["per_step_avg"])),
        "params_saved": None if share is None or not whole else f"{1 - share / whole:.1%}",
    }


def _time_analysis(arm: Arm, base: Arm) -> dict[str, Any]:
    one, other = _timing(arm), _timing(base)
    total, whole = one["total_seconds"], other["total_seconds"]
    known = total is not None and whole
    steps = (one["per_step_avg"], other["per_step_avg"])
    return {
        "total_gap_seconds": total - whole if known else None,
        "total_gap_percent": _relative(total, whole),
        "per_step_gap": None if None in steps else steps[0] - steps[1],
        "speedup_ratio": whole / total if known and total else None,
    }


def _finished(arm: Arm) -> list[dict[str, Any]]:
    return [run for run in arm["runs"] if run["status"] == "finished"]


def _mean(runs: Sequence[dict[str, Any]], metric: str) -> float | None:
    return _average([(run["metrics"] or {}).get(metric) for run in runs])


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _gap(arm: Arm, base: Arm, metric: str) -> float | None:
    one, other = (_mean(_finished(each), metric) for each in (arm, base))
    return None if one is None or other is None else one - other


def _relative(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else 100 * (one - other) / other


def _percent(value: float | None, digits: int = 1) -> str | None:
    return None if value is None else f"{value:+.{digits}f}%"


def _share(arm: Arm) -> float | None:
    parameters = arm["parameters"]
    return None if parameters is None else parameters["trainable"] / parameters["total"]


def _formatted(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}h {rest // 60}min" if hours else f"{rest // 60}min {rest % 60}s"

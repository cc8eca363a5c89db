"""The five questions of the OELM study, and its output files comparison.json and timing.json.

OELM orthogonalizes the query and key weights and freezes them. An arm's treatment decides whether
it is OELM, never its name. The files have the layout of the study's scripts, but a gap (difference
from the baseline) has the interval and the verdict of comparison.md, and speed-ups come from steps
that the arms took in turn. A gap between the times of whole runs is no evidence about speed, so it
is marked as unproven. An unknown value is null.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from frostlab.comparison.evidence import ArmEvidence, ArmVerdict, Effect, Evidence
from frostlab.comparison.judging.verdict import SHOWING_COST
from frostlab.comparison.judging.wording import excluded_costs
from frostlab.comparison.measures.arms import (
    arm_times,
    data_name,
    gap_note,
    mean,
    mean_of,
    model_name,
    overview,
    paired_runs,
    retained,
    total_gap,
    whole_run_note,
)
from frostlab.comparison.plan import Arm, Plan
from frostlab.errors import BadInput
from frostlab.recipe.treatment import (
    KnownChange,
    Orthogonalize,
    Randomize,
    RegisteredChange,
    Treatment,
)
from frostlab.records.folder import RunRecord
from frostlab.roles import ROLES

QUESTIONS = (
    "How large is the gap?",
    "Is the parameter saving worth it?",
    "Is OELM faster?",
    "Is orthogonality needed?",
    "Does it carry from BERT to GPT?",
)
_OELM_KEY = "oelm_freeze"  # key of the OELM arm in comparison.json
_OTHER_KEYS = (  # keys that are not arms
    "dataset", "model", "quick", "caution", "environment", "convergence", "comparison",
    "overview",
)  # fmt: skip
_PERFORMANCE = ("best_accuracy", "best_ppl", "final_loss", "epochs")
_TIMING = ("total_seconds", "formatted", "per_epoch_avg", "per_step_avg", "validation_total")
_QK = ("query", "key")


def oelm_arm(plan: Plan) -> str | None:
    """Return the arm that orthogonalizes and freezes query and key weights, or None.

    Rows of the identity do not count, though they are orthonormal. Of several such arms, those that
    change no other setting come first, and among equals those that orthogonalize the model's own
    weights of each head. The baseline is never returned.
    """
    arms = [arm for arm in plan.others if _is_oelm(_surgery(plan, arm))]
    arms.sort(key=lambda arm: (bool(arm.set), not _is_usual(_surgery(plan, arm))))
    return arms[0].name if arms else None


def orthogonality_arms(plan: Plan) -> tuple[str, str] | None:
    """Return the two arms that show the effect of orthogonality, or None if one is missing.

    Both freeze query and key; the first makes them orthogonal, the second random. Of several pairs,
    the first criterion is equal other settings; the second, the same norm of each head in both
    arms; the third, a first arm that orthogonalizes the model's own weights of each head.
    """
    surgeries = {arm.name: _surgery(plan, arm) for arm in plan.arms}
    pairs = [
        (arm, other)
        for arm in plan.arms
        for other in plan.arms
        if _differ_in_orthogonality(surgeries[arm.name], surgeries[other.name])
    ]
    if not pairs:
        return None
    arm, other = min(
        pairs,
        key=lambda pair: (
            pair[0].set != pair[1].set,
            not have_equal_norms(plan, (pair[0].name, pair[1].name)),
            not _is_usual(surgeries[pair[0].name]),
        ),
    )
    return arm.name, other.name


def have_equal_norms(plan: Plan, pair: tuple[str, str] | None) -> bool:
    """Return whether each head certainly has the same norm in the two arms."""
    if pair is None:
        return False
    arms = {arm.name: arm for arm in plan.arms}
    own, other = (_changes(_surgery(plan, arms[name])) for name in pair)
    return all(
        isinstance(change := own.get(role), Orthogonalize)
        and change.scope == "head"
        and isinstance(drawn := other.get(role), Randomize)
        and drawn.std == "orthonormal"
        for role in _QK
    )


def _surgery(plan: Plan, arm: Arm) -> Treatment:
    return plan.recipe_of(arm, plan.seeds[0]).surgery


def _changes(surgery: Treatment) -> dict[str, KnownChange]:
    """Return role → the change by which a treatment sets its values (the last one, if several).

    The result is empty if a change is a registered function, which may change anything, or if it
    selects something other than roles, such as some layers only.
    """
    changes: dict[str, KnownChange] = {}
    for change in surgery.init:
        if isinstance(change, RegisteredChange):
            return {}
        for selection in change.select:
            changes[selection.removesuffix(".weight")] = change
    return changes if changes.keys() <= set(ROLES) else {}


def _freezes_all(surgery: Treatment, role: str) -> bool:
    """Return whether the weights of a role are frozen in every layer."""
    names = (role, f"{role}.weight", "all")
    exceptions = [name.removeprefix("!") for name in surgery.freeze if name.startswith("!")]
    return any(name in surgery.freeze for name in names) and all(
        name.partition(".")[0] in ROLES and name.partition(".")[0] != role for name in exceptions
    )


def _has_frozen(surgery: Treatment, kind: type[Orthogonalize | Randomize]) -> bool:
    changes = _changes(surgery)
    return all(isinstance(changes.get(role), kind) and _freezes_all(surgery, role) for role in _QK)


def _is_oelm(surgery: Treatment) -> bool:
    return _has_frozen(surgery, Orthogonalize)


def _is_usual(surgery: Treatment) -> bool:
    """Return whether query and key are orthogonalized from their own weights, head by head."""
    return all(
        isinstance(change, Orthogonalize) and (change.scope, change.source) == ("head", "weights")
        for change in map(_changes(surgery).get, _QK)
    )


def _differ_in_orthogonality(surgery: Treatment, other: Treatment) -> bool:
    """Return whether only query and key differ: orthogonal in the first, random in the second."""
    if not _is_oelm(surgery) or not _has_frozen(other, Randomize):
        return False
    rest, other_rest = (
        {role: change for role, change in _changes(treatment).items() if role not in _QK}
        for treatment in (surgery, other)
    )
    return rest == other_rest and set(surgery.freeze) == set(other.freeze)


def arm_key(arm: str, baseline: str, oelm: str | None) -> str:
    """Return the key of an arm in comparison.json; `oelm` is the name of the OELM arm."""
    if arm == baseline:
        return "baseline"
    return _OELM_KEY if arm == oelm else arm.replace("-", "_")


def check_names(plan: Plan) -> None:
    """Refuse an arm whose key in comparison.json is already in use."""
    taken, oelm = set(_OTHER_KEYS), oelm_arm(plan)
    for arm in plan.arms:
        key = arm_key(arm.name, plan.baseline.name, oelm)
        if key in taken:
            raise BadInput(f"arm {arm.name}: its name is taken in comparison.json; choose another")
        taken.add(key)


def main_arm(evidence: Evidence) -> str:
    """Return the arm that the questions are about: OELM, else the first besides the baseline."""
    others = [arm for arm in evidence.arms if arm != evidence.baseline]
    return others[0] if evidence.oelm is None else evidence.oelm


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
        return "Not known: an arm has no finished run that can be paired."
    saved = 1 - counts.trainable / base_counts.trainable
    if saved <= 0:
        return f"{arm} trains as many parameters as the baseline, or more: there is no saving."
    return (
        f"{arm} trains {saved:.1%} fewer parameters "
        f"({counts.trainable:,} of {base_counts.trainable:,}), "
        "and needs that much less memory for gradients and the optimizer's moments; "
        f"{_cost(evidence.verdicts[arm], evidence)}."
    )


def _cost(verdict: ArmVerdict, evidence: Evidence) -> str:
    """Say what the saved parameters cost, as far as the interval shows it."""
    margin = verdict.margin
    if verdict.word == "better":
        return "it is also better, so no cost was found"
    if verdict.word == "worse":
        small = margin is not None and margin.answer == "yes"
        within = f", but at most {evidence.rules.margin_text()}" if small else ""
        return f"the saving costs performance{within} (see the first question)"
    if verdict.word in SHOWING_COST and margin is not None:
        return excluded_costs(margin.answer, margin.largest, evidence.rules)
    return f"the cost is not known ({verdict.word})"


def _speed(evidence: Evidence, arm: str) -> str:
    if evidence.timing is None:
        return "Not known: steps were not timed."
    return str(evidence.timing.arms[arm].sentence)


def _orthogonality(evidence: Evidence) -> str:
    verdict = evidence.orthogonality
    if verdict is None:
        return (
            "Not asked: it needs two arms that freeze query and key, one with orthogonal weights "
            "(treatment oelm) and one with random weights (oelm-random-matched or oelm-random)."
        )
    if evidence.equal_norms:
        return f"{verdict.text} This isolates orthogonality, at an equal norm of every head."
    return (
        f"{verdict.text} This compares orthogonality and scale together: the heads of "
        f"{verdict.baseline} may also have other norms. With the treatments oelm and "
        "oelm-random-matched, every head has the same norm in both arms."
    )


def _transfer(evidence: Evidence) -> str:
    model = model_name(evidence.plan.recipe)
    return (
        f"One comparison cannot answer this: its recipe has the model {model}; "
        "make another one whose recipe has the other kind of model."
    )


def comparison_json(evidence: Evidence, first: RunRecord) -> dict[str, Any]:
    """Return the values of comparison.json; `first` is the run that describes the environment."""
    convergence = evidence.convergence
    values: dict[str, Any] = {
        "dataset": data_name(evidence.plan.recipe),
        "model": model_name(evidence.plan.recipe),
        "quick": evidence.plan.quick,  # whether long runs were shortened
        "caution": evidence.caution,  # a warning to show with every number
        "environment": _environment(first),
        "convergence": None
        if convergence is None
        else {key: getattr(convergence, key) for key in ("metric", "target", "place")},
        "baseline": _arm_values(evidence, evidence.baseline),
    }
    for name in (arm.name for arm in evidence.plan.others):
        key = arm_key(name, evidence.baseline, evidence.oelm)
        values[key] = _arm_values(evidence, name) | _against_baseline(evidence, name)
    main = main_arm(evidence)
    values["comparison"] = {
        "accuracy_gap": _metric_gap(evidence, main, "accuracy"),
        "retained": _retained(evidence, main),
        "time_analysis": _total_gap(evidence, main, "total_gap_seconds", "total_gap_percent")
        | {
            "per_step_gap": _step_gap(evidence, main),
            "speedup_ratio": _speedup(evidence, main),
            "note": whole_run_note(evidence),
        },
        "conclusion": evidence.verdicts[main].sentence,
    }
    values["overview"] = [asdict(row) for row in overview(evidence)]
    return values


def timing_json(evidence: Evidence) -> dict[str, Any]:
    """Return the values of timing.json."""
    values: dict[str, Any] = {
        arm_key(name, evidence.baseline, evidence.oelm): _times(evidence, name)
        for name in evidence.arms
    }
    main = main_arm(evidence)
    keys = ("time_difference_seconds", "time_difference_percent")
    values["comparison"] = _total_gap(evidence, main, *keys) | {
        "per_step_gap": _step_gap(evidence, main),
        "speedup_ratio": _speedup(evidence, main),
        "note": whole_run_note(evidence),
    }
    return {"caution": evidence.caution, "timing": values}


def _environment(record: RunRecord) -> dict[str, Any]:
    environment, result = record.environment, record.result
    return {
        "gpu": (environment["gpu"] or {}).get("name"),
        "cuda_version": environment["versions"].get("cuda"),
        "pytorch_version": environment["versions"].get("torch"),
        "gpu_temp_start": result.gpu_before and result.gpu_before.temperature_c,
        "gpu_temp_end": result.gpu_after and result.gpu_after.temperature_c,
    }


def _arm_values(evidence: Evidence, name: str) -> dict[str, Any]:
    """Return an arm's performance, trainable parameters and times.

    The values that the study's scripts wrote appear twice: in sections, and directly in the arm.
    """
    arm = evidence.arms[name]
    fraction, parameters = _trainable_fraction(arm), arm.parameters
    trainable = None
    if fraction is not None and parameters is not None:
        trainable = f"{fraction:.1%} ({parameters.trainable / 1e6:.1f}M)"
    performance, timing = _performance(evidence, name), _times(evidence, name)
    return {
        "performance": performance,
        "trainable_params": trainable and trainable.replace("100.0%", "100%"),
        "timing": timing,
        "convergence": _convergence(evidence, name),
        **{key: performance[key] for key in _PERFORMANCE},
        **{key: timing[key] for key in _TIMING},
    }


def _performance(evidence: Evidence, name: str) -> dict[str, Any]:
    """Return the metrics of the best checkpoint on the report split, and those while training.

    `while_training` is about the split that selects the checkpoint: the best evaluation, and the
    loss of the last one.
    """
    runs, metric = paired_runs(evidence, name), evidence.rules.metric
    best, last = [run.best for run in runs], [run.final_loss for run in runs]
    split = None
    if evidence.data is not None:
        split = "tune" if "tune" in evidence.data.splits else "report"
    return {
        "best_accuracy": mean_of(evidence, name, "accuracy"),
        "best_ppl": mean_of(evidence, name, "perplexity"),
        "final_loss": mean_of(evidence, name, "loss"),
        "epochs": _whole(arm_times(evidence, name).epochs),
        "split": "report",
        "while_training": {
            "split": split,
            best_key(metric): mean(best, metric),
            "final_loss": mean(last, "loss"),
        },
    }


def best_key(metric: str) -> str:
    """Return the key of a metric's best value, which is named as in the study's scripts."""
    return "best_ppl" if metric == "perplexity" else f"best_{metric}"


def _convergence(evidence: Evidence, name: str) -> dict[str, Any] | None:
    """Return the steps, epochs and seconds to the target, and how many runs reached it."""
    if evidence.convergence is None:
        return None
    arm = evidence.convergence.arms[name]
    return {
        "runs": arm.runs,
        "reached": arm.reached,
        **{key: summary.mean for key, summary in arm.spent.items()},
        "vs_baseline": None
        if name == evidence.baseline
        else {key: _effect(ratio, "ratio") for key, ratio in arm.ratios.items()},
    }


def _times(evidence: Evidence, name: str) -> dict[str, Any]:
    """Return the time of a step (which the arms took in turn) and of whole runs, in seconds."""
    times = arm_times(evidence, name)
    total, per_epoch, rounds = times.total, times.per_epoch, times.rounds
    mean = None if total is None else total.mean
    return {
        "total_seconds": mean,
        "formatted": _duration(mean, "min"),
        "total_formatted": _duration(mean, "m"),
        "total_std": None if total is None else total.std,
        "per_epoch_avg": None if per_epoch is None else per_epoch.mean,
        "per_epoch_cv": None if per_epoch is None else per_epoch.cv,
        "per_epoch_scaled": times.scaled,
        "per_step_avg": times.per_step,
        "validation_total": times.validation,
        "validation_each": None if times.evaluation is None else times.evaluation.mean,
        "validations": _whole(times.evaluations),
        "gpu_utilisation_percent": times.utilisation,
        "rounds": None if rounds is None else {"seconds": list(rounds.seconds), "cv": rounds.cv},
        "step": times.step,
        "step_cv": times.step_cv,
        "step_speedup": None if name == evidence.baseline else _speedup(evidence, name),
        "note": whole_run_note(evidence),
    }


def _against_baseline(evidence: Evidence, name: str) -> dict[str, Any]:
    """Return an arm's gaps to the baseline, and its share of trainable parameters."""
    fraction = _trainable_fraction(evidence.arms[name])
    base_fraction = _trainable_fraction(evidence.arms[evidence.baseline])
    saved = None if fraction is None or not base_fraction else 1 - fraction / base_fraction
    total = _total_gap(evidence, name, "seconds", "percent")
    return {
        "vs_baseline": {
            "accuracy_gap": _metric_gap(evidence, name, "accuracy"),
            "ppl_gap": _metric_gap(evidence, name, "perplexity"),
            "retained": _retained(evidence, name),
            "time_gap": total["percent"],
            "time_saved_percent": total["time_saved_percent"],
            "per_step_gap": _step_gap(evidence, name),
            "params_saved": None if saved is None else f"{saved:.1%}",
            "note": whole_run_note(evidence),
        },
        "parameter_efficiency": None if fraction is None else f"{fraction:.1%} trainable",
    }


def _metric_gap(evidence: Evidence, arm: str, metric: str) -> dict[str, Any] | None:
    """Return an arm's paired effect on a metric with its interval; None without the metric.

    A ratio becomes a difference in percent of the baseline. Only the plan's metric has a verdict.
    """
    verdict = evidence.verdicts[arm] if metric == evidence.rules.metric else None
    if verdict is None and metric not in evidence.secondary:
        return None
    paired = evidence.secondary[metric][arm] if verdict is None else verdict.paired
    gap, low, high = (None,) * 3 if paired is None else (paired.effect, paired.low, paired.high)
    is_ratio = paired is not None and paired.log
    return {
        "gap": _percent_of_ratio(gap) if is_ratio else gap,
        "low": _percent_of_ratio(low) if is_ratio else low,
        "high": _percent_of_ratio(high) if is_ratio else high,
        "confidence": None if paired is None else 1 - paired.alpha,
        "pairs": 0 if paired is None else paired.n,
        "statements": None if verdict is None else verdict.family,
        "verdict": None if verdict is None else verdict.word,
        "missing_runs": None if verdict is None else verdict.missing,
        "confounds": list(evidence.confounds.get(arm, ())),
    }


def _step_gap(evidence: Evidence, arm: str) -> dict[str, Any] | None:
    """Return how much longer an arm's steps take than the baseline's, in percent and seconds."""
    if evidence.timing is None:
        return None
    timed = evidence.timing.arms[arm]
    return {
        "gap": _percent_of_ratio(timed.ratio),
        "low": _percent_of_ratio(timed.low),
        "high": _percent_of_ratio(timed.high),
        "seconds": (timed.ms - evidence.timing.arms[evidence.baseline].ms) / 1e3,
    } | _trust(evidence, arm)


def _speedup(evidence: Evidence, arm: str) -> dict[str, Any] | None:
    """Return the baseline's step time divided by an arm's, from steps taken in turn."""
    if evidence.timing is None:
        return None
    timed = evidence.timing.arms[arm]
    ratio, low, high = (value and 1 / value for value in (timed.ratio, timed.high, timed.low))
    return {"ratio": ratio, "low": low, "high": high} | _trust(evidence, arm)


def _trust(evidence: Evidence, arm: str) -> dict[str, Any]:
    """Return the verdict on an arm's step time; `proven`: whether the timing can be trusted."""
    assert evidence.timing is not None
    timed = evidence.timing.arms[arm]
    return {
        "confidence": 1 - evidence.rules.time_level,
        "verdict": timed.word,
        "flag": timed.flag,
        "proven": evidence.timing.proven,
        "reasons": list(evidence.timing.reasons),
        "confounds": list(evidence.confounds.get(arm, ())),
    }


def _retained(evidence: Evidence, arm: str) -> dict[str, Any] | None:
    """Return the share of the baseline's metric that an arm retains, with its interval."""
    share, verdict = retained(evidence, arm), evidence.verdicts[arm]
    if share is None:
        return None
    return (
        {"metric": evidence.rules.metric}
        | _effect(share, "share")
        | {
            "verdict": verdict.word,
            "missing_runs": verdict.missing,
            "confounds": list(evidence.confounds.get(arm, ())),
        }
    )


def _total_gap(evidence: Evidence, arm: str, seconds: str, percent: str) -> dict[str, Any]:
    """Return the gap between the times of whole runs, always marked as unproven.

    `seconds` and `percent` are the keys under which the gap appears in these units.
    """
    gap = total_gap(evidence, arm)
    if gap is None:
        return {seconds: None, percent: None, "time_saved_percent": None}
    unproven = {
        "of": gap.of,
        "verdict": "unproven",
        "note": gap_note(evidence, gap),
        "confounds": list(evidence.confounds.get(arm, ())),
    }
    return {
        seconds: _effect(gap.seconds, "gap") | unproven,
        percent: _effect(gap.ratio, "gap", _percent_of_ratio) | unproven,
        "time_saved_percent": _effect(gap.ratio, "saved", _saved_percent, falls=True) | unproven,
    }


def _effect(
    effect: Effect,
    key: str,
    form: Callable[[float | None], Any] = lambda value: value,
    falls: bool = False,
) -> dict[str, Any]:
    """Return a paired effect under `key`, with its interval; `form` formats each number.

    If the formatted number `falls` as the effect rises, the ends of the interval change places.
    """
    low, high = (effect.high, effect.low) if falls else (effect.low, effect.high)
    return {
        key: form(effect.effect),
        "low": form(low),
        "high": form(high),
        "confidence": 1 - effect.alpha,
        "pairs": effect.n,
    }


def _percent_of_ratio(ratio: float | None) -> str | None:
    return None if ratio is None else _percent(100 * (ratio - 1), digits=2)


def _percent(value: float | None, digits: int = 1) -> str | None:
    return None if value is None else f"{value:+.{digits}f}%"


def _trainable_fraction(arm: ArmEvidence) -> float | None:
    parameters = arm.parameters
    return None if parameters is None else parameters.trainable / parameters.total


def _whole(value: float | None) -> float | None:
    """Return a float that is a whole number as an int."""
    return int(value) if value is not None and value.is_integer() else value


def _saved_percent(ratio: float | None) -> str | None:
    return None if ratio is None else _percent(100 * (1 - ratio), digits=2)


def _duration(seconds: float | None, minutes: str) -> str | None:
    """Format seconds as `8h 15min`, and below an hour as `15min 3s`.

    `minutes` is the sign for minutes, `min` or `m`.
    """
    if seconds is None:
        return None
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours}h {rest // 60}{minutes}"
    return f"{rest // 60}{minutes} {rest % 60}s"

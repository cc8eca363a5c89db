"""Sections of comparison.md about the times and the convergence of arms (variants of a recipe)."""

from frostlab.comparison.evidence import CONVERGED, Evidence, TimedArm
from frostlab.comparison.measures.arms import (
    ArmTimes,
    TotalGap,
    arm_times,
    total_gap,
    whole_run_note,
)
from frostlab.text import NONE, escaped, hms, markdown, number


def step_times(evidence: Evidence) -> str:
    """Return the section about the times of steps, which the arms took in turn."""
    timing = evidence.timing
    if timing is None:
        return ""
    rows = [
        [
            name,
            number(arm.ms),
            ratio_text(arm) if name != evidence.baseline else "1",
            number(arm.ceiling),
            arm.flag or "",
            _mebibytes(arm.peak_bytes),
            _mebibytes(arm.optimizer_bytes),
            _mebibytes(arm.checkpoint_bytes),
        ]
        for name, arm in timing.arms.items()
    ]
    confidence = f"{100 * (1 - evidence.rules.time_level):.4g} % over all arms"
    head = ["arm", "ms a step", f"ratio [{confidence}]", "FLOPs allow", "remark", "peak memory",
            "optimizer", "trained weights"]  # fmt: skip
    stopped = "the time was up" if timing.stopped_by == "time" else "all intervals were narrow"
    proof = "passed its checks"
    if not timing.proven:
        proof = f"is **unproven**: {escaped('; '.join(timing.reasons))}"
    note = (
        f"The arms took turns in one process for {timing.rounds} rounds in {timing.seconds:.0f} s, "
        f"until {stopped}; all models were built and timed {timing.builds} times. "
        "The A/A controls are more copies of the baseline. The control that differs most from the "
        f"other copies has the ratio {ratio_text(timing.control)} (95 % confidence over all "
        f"controls). The timing {proof}. FLOPs allow: a lower bound on the ratio, from the "
        "matrix products that are saved; a remark says if the whole interval is below it. "
        "Peak memory is measured during the first build and its warm-up; optimizer is the size of "
        "its state, and trained weights the size of the trainable parameters."
    )
    if timing.notes:
        note += f" Notes: {escaped('; '.join(timing.notes))}."
    return f"{markdown(head, rows)}\n\n{note}"


def ratio_text(values: TimedArm | None) -> str:
    """Format the ratio of a step's time to the baseline's, with its interval if it has one."""
    if values is None or values.ratio is None:
        return NONE
    interval = ""
    if values.low is not None and values.high is not None:
        interval = f" [{values.low:.4f}, {values.high:.4f}]"
    return f"{values.ratio:.4f}{interval}"


def _mebibytes(value: float | None) -> str:
    return NONE if value is None else f"{value / 2**20:,.0f} MiB"


def run_times(evidence: Evidence) -> str:
    """Return the section about whole runs: a row for each quantity, a column for each arm."""
    arms = [name for name, arm in evidence.arms.items() if arm.finished]
    if not arms:
        return ""
    times = {name: arm_times(evidence, name) for name in arms}
    gaps = {name: None if name == evidence.baseline else total_gap(evidence, name)
            for name in arms}  # fmt: skip
    scaled = any(own.scaled for own in times.values())
    rows = [
        ["total", *(_total(times[name], gaps[name]) for name in arms), "gap to the baseline"],
        ["time saved", *(_saved(gaps[name]) for name in arms), "gap to the baseline"],
        ["per epoch", *(_per_epoch(times[name]) for name in arms), "stability"],
        ["per step", *(_per_step(evidence, name, times[name]) for name in arms), "efficiency"],
        ["validation", *(_validation(times[name]) for name in arms), "extra overhead"],
        ["GPU utilisation", *(_percent(times[name].utilisation) for name in arms), "resource use"],
    ]
    note = (
        f"{whole_run_note(evidence).capitalize()}. Total is h:mm:ss, the mean of the runs, with "
        "the gap to the baseline over paired runs and its 95 % interval; time saved is a share of "
        "the baseline's total. Per epoch and per step leave out validation. cv is the coefficient "
        "of variation: over all epochs, over the blocks of interleaved steps and, for alternating "
        "runs, over these runs. Validation: its seconds in a run, the seconds of one evaluation, "
        "and its share of the total time."
    )
    if scaled:
        note += " *Scaled*: the runs are shorter than an epoch, whose time is extrapolated."
    if evidence.rounds:
        rows.append(["alternating runs", *(_rounds(times[name]) for name in arms), "stability"])
        note += " The alternating runs are extra runs, one at a time; a round has one of every arm."
    return f"{markdown(['time', *arms, 'shows'], rows)}\n\n{note}"


def _total(times: ArmTimes, gap: TotalGap | None) -> str:
    if times.total is None or times.total.mean is None:
        return NONE
    text = f"{hms(times.total.mean)} ({times.total} s)"
    if gap is None or gap.ratio.effect is None:
        return text
    low, high = gap.ratio.low, gap.ratio.high
    ends = "" if low is None or high is None else f" [{_gap(low)}, {_gap(high)}]"
    return f"{text}, {_gap(gap.ratio.effect)}{ends} in {gap.of}"


def _gap(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _saved(gap: TotalGap | None) -> str:
    return NONE if gap is None or gap.saved is None else f"{100 * gap.saved:.1f} %"


def _per_epoch(times: ArmTimes) -> str:
    if times.per_epoch is None:
        return NONE
    scaled = f", scaled from {number(times.epochs)} epochs" if times.scaled else ""
    return f"{number(times.per_epoch.mean)} s{_cv(times.per_epoch.cv)}{scaled}"


def _per_step(evidence: Evidence, arm: str, times: ArmTimes) -> str:
    """Format the step time: interleaved if it was measured, else that of whole runs."""
    if times.step is None:
        per_step = times.per_step
        return NONE if per_step is None else f"{number(1e3 * per_step)} ms in whole runs"
    timed = None if evidence.timing is None else evidence.timing.arms[arm]
    ratio = f", {ratio_text(timed)} ×" if arm != evidence.baseline else ""
    return f"{number(1e3 * times.step)} ms{_cv(times.step_cv)}{ratio}"


def _validation(times: ArmTimes) -> str:
    if times.validation is None:
        return NONE
    text = f"{number(times.validation)} s"
    if times.evaluation is not None:
        text += f", {number(times.evaluation.mean)} s each"
    if times.total is not None and times.total.mean:
        text += f", {times.validation / times.total.mean:.1%}"
    return text


def _rounds(times: ArmTimes) -> str:
    if times.rounds is None:
        return NONE
    seconds = ", ".join(map(number, times.rounds.seconds))
    ratio = "" if times.rounds.paired is None else f", {times.rounds.paired}"
    return f"{seconds} s{_cv(times.rounds.cv)}{ratio}"


def _cv(cv: float | None) -> str:
    return "" if cv is None else f" (cv {cv:.1%})"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f} %"


def convergence_section(evidence: Evidence) -> str:
    """Return the section about the steps, epochs and seconds to a target."""
    convergence = evidence.convergence
    if convergence is None:
        return ""
    rows = []
    for name, arm in convergence.arms.items():
        cells = [name, f"{arm.reached} of {arm.runs}"]
        for key in CONVERGED:
            spent, ratio = arm.spent.get(key), arm.ratios.get(key)
            cells.append(NONE if spent is None else str(spent))
            cells.append(NONE if ratio is None else str(ratio))
        pairs = {ratio.n for ratio in arm.ratios.values()}
        rows.append([*cells, "" if name == evidence.baseline else str(max(pairs, default=0))])
    quantities = (cell for key in CONVERGED for cell in (key, f"ratio of {key}"))
    head = ["arm", "reached", *quantities, "pairs"]
    confidence = 100 * (1 - evidence.rules.level)
    note = (
        f"The target is {escaped(convergence.metric)} {convergence.target:.6g} on the split that "
        f"selects the checkpoint: {escaped(convergence.place)}. A run reaches it at the first "
        "evaluation that is as good, so the numbers are only as fine as the interval between "
        "evaluations. Reached: finished runs that reached it, of all that finished or diverged; "
        "means are over the runs that reached it. Ratios are paired by seed over the seeds with "
        f"which both arms reached it, with {confidence:.4g} % confidence over all arms, and "
        "without an interval if all ratios are equal. An arm that reached it less often than the "
        "baseline is flattered by that choice of seeds, so its interval has no upper end; it has "
        "no lower end if the baseline reached the target less often. "
        f"{whole_run_note(evidence).capitalize()}. No verdict is drawn from these numbers."
    )
    if convergence.evaluations == 1:
        note += (
            " A baseline run was evaluated only once, so it is not known when it reached the "
            "target; set evaluate.every to a shorter interval."
        )
    return f"{markdown(head, rows)}\n\n{note}"

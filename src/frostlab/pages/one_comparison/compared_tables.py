"""The tables of a comparison's measurements: performance, time, convergence, tuning and others."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from frostlab.comparison.evidence import CONVERGED, QUANTITIES
from frostlab.comparison.judging.verdict import DOUBTFUL
from frostlab.comparison.oelm_json import best_key
from frostlab.matrix.show import HEAD
from frostlab.pages.content import Block, Cell, Table, is_filled, words
from frostlab.text import plain

if TYPE_CHECKING:
    from frostlab.pages.one_comparison.compared import Compared

Row = Sequence[str | Cell]
COMPARISON, TIMING = "comparison.json", "timing.json"
_FLOW = {  # title of each gradient-flow quantity; the front is the first two layers
    "front_ratio": "front/output gradient",
    "weight_change": "front weight change",
    "update": "front update/weight",
}
_SEGMENTS = {
    "seen": "subjects trained on",
    "unseen": "subjects not trained on",
    "score": "challenge score",
}


def table(name: str, title: str, head: Sequence[str], rows: Iterable[Row], note: str = "") -> Table:
    """Return a table without its empty columns; the first column is always kept."""
    rows = [tuple(row) for row in rows]
    kept = [
        number
        for number, _ in enumerate(head)
        if not number or any(is_filled(row[number]) for row in rows)
    ]
    return Table(
        name,
        title,
        tuple(plain(head[number]) for number in kept),
        tuple(tuple(row[number] for number in kept) for row in rows),
        note,
    )


def arm_name(compared: "Compared", name: str) -> str | Cell:
    """Return the name of an arm; in red, with a remark, if it is confounded."""
    if compared.evidence.confounds.get(name):
        return Cell(f"{plain(name)} (confounded)", alarm=True)
    return plain(name)


def word(compared: "Compared", name: str, *keys: str | int) -> str | Cell:
    """Return the word of a verdict on an arm; in red if the verdict is doubtful."""
    if name == compared.evidence.baseline:
        return "the baseline"
    doubtful = compared.records.value("evidence.json", *keys, "word") in DOUBTFUL
    return compared.cell(*keys, "word", format="text", alarm=doubtful)


def overview(compared: "Compared") -> list[Block]:
    """Return the overview: one row per arm, with its data, treatment, times, gap and status."""
    formats = {"total_seconds": "hms", "step_seconds": "seconds as ms"}
    keys = ("phase", "id", "data", "method", "total_seconds", "step_seconds", "gap", "status")
    rows = [
        [compared.records.cell(COMPARISON, "overview", number, key,
                               format=formats.get(key, "text"),
                               alarm=key == "status" and not _all_finished(compared, arm))
         for key in keys]
        for number, arm in enumerate(compared.arms)
    ]  # fmt: skip
    return [table("overview", "Overview", HEAD, rows,
                  "Phase is the comparison, id the arm, method its treatment. Total is the mean of "
                  "the arm's runs that finished and can be paired, h:mm:ss. Step is the time of a "
                  "step, measured in turns or, if that was not done, in whole runs. The gap is the "
                  f"effect on {plain(compared.evidence.rules.metric)} with its interval and "
                  "verdict.")]  # fmt: skip


def _all_finished(compared: "Compared", arm: str) -> bool:
    own = compared.evidence.arms[arm]
    return len(own.finished) == len(own.runs)


def performance(compared: "Compared") -> list[Block]:
    """Return the tables of the metric that is judged, of training, and of the further metrics."""
    metric = compared.evidence.rules.metric
    rows: list[Row] = []
    for name in compared.arms:
        other = name in compared.others
        rows.append([
            arm_name(compared, name),
            compared.cell("arms", name, "metrics", metric, format="summary"),
            compared.cell("verdicts", name, "paired", format="effect") if other else "",
            word(compared, name, "verdicts", name),
            compared.of_arm(name, "vs_baseline", "retained", "share", format="short percent"),
            compared.of_arm(name, "performance", "while_training", "final_loss"),
            compared.cell("convergence", "arms", name, "spent", "steps", format="summary"),
            compared.cell("arms", name, "parameters", format="trainable share"),
        ])  # fmt: skip
    head = ["arm", f"best {metric}", "against the baseline", "verdict", "retained", "final loss",
            "steps to target", "trainable"]  # fmt: skip
    note = (
        f"Best {plain(metric)}: the best checkpoint of each run, evaluated on the report split; "
        "mean ± standard deviation over the runs that finished and can be paired. Against the "
        "baseline: the effect over paired seeds with its interval, a ratio if it ends in ×; all "
        "intervals hold simultaneously. Retained: the arm's value divided by the baseline's (for "
        "perplexity and loss the baseline's divided by the arm's), so more than 100 % is better. "
        "Final loss: the loss in the last evaluation on the split that selects the checkpoint."
    )
    return [
        table("performance", "What every arm reached", head, rows, note),
        _while_training(compared),
        *_further_metrics(compared),
    ]


def _while_training(compared: "Compared") -> Table:
    metric = compared.evidence.rules.metric
    best = best_key(metric)
    rows: list[Row] = [
        [arm_name(compared, name),
         compared.cell("arms", name, "runs", format="finished runs",
                       alarm=not _all_finished(compared, name)),
         compared.of_arm(name, "performance", "while_training", best),
         compared.of_arm(name, "performance", "epochs"),
         compared.cell("arms", name, "parameters", "trainable", format="count"),
         compared.cell("arms", name, "parameters", "total", format="count"),
         compared.cell("arms", name, "runs", format="clipped steps")]
        for name in compared.arms
    ]  # fmt: skip
    head = ["arm", "runs finished", f"best {metric} while training", "epochs", "trained parameters",
            "all parameters", "clipped steps"]  # fmt: skip
    note = (
        "Best while training: on the split that selects the checkpoint. Clipped steps: the share "
        "whose gradient was clipped; frozen weights do not count in the gradient's norm, so an arm "
        "that freezes weights may be clipped less."
    )
    return table("training", "While training", head, rows, note)


def _further_metrics(compared: "Compared") -> list[Block]:
    rows = [
        [plain(metric), arm_name(compared, name),
         compared.cell("arms", name, "metrics", metric, format="summary"),
         compared.cell("secondary", metric, name, format="effect") if name in compared.others
         else ""]
        for metric in compared.evidence.secondary
        for name in compared.arms
    ]  # fmt: skip
    if not rows:
        return []
    head = ["metric", "arm", "mean ± std", "against the baseline"]
    note = "Only the metric that the rules name is judged; these metrics get no verdict."
    return [table("further-metrics", "Further metrics", head, rows, note)]


def further_numbers(compared: "Compared") -> list[Block]:
    """Return further numbers about every arm but the baseline, from which no verdict is drawn."""
    log = compared.evidence.rules.log
    ends, size = ("ends of a ratio", "percent of a ratio") if log else ("ends", "number")
    rows = []
    for name in compared.others:
        keys = ("verdicts", name)
        rows.append([
            arm_name(compared, name),
            compared.cell(*keys, format="adjusted p"),
            compared.of_arm(name, "vs_baseline", "retained", format="share"),
            compared.cell(*keys, "could_have_seen", format=size),
            compared.cell(*keys, "improvement"),
            compared.cell(*keys, "margin", "probability_above", format="probability"),
            compared.cell(*keys, "anytime", format=ends),
            compared.cell(*keys, "population", format="effect"),
        ])  # fmt: skip
    head = ["arm", "p", "retained", "could have been seen", "P(improvement)", "P(cost > margin)",
            "valid if seeds are added", "for other test examples"]  # fmt: skip
    note = (
        "p is multiplied by the number of statements. Retained: the share of the baseline's "
        "value, with its interval. Could have been seen: the smallest true difference that 8 of "
        "10 such comparisons would find. P(improvement): how often a run of the arm beats a run "
        "of the baseline, over all pairs of runs. P(cost > margin): posterior probability under a "
        "flat prior. Valid if seeds are added: an interval that stays valid if seeds are added "
        "until it no longer contains zero (or the ratio 1). For other test examples: seeds and "
        "test examples are both taken as samples. No verdict is drawn from these numbers."
    )
    return [table("further-numbers", "Further numbers without a verdict", head, rows, note)]


def times(compared: "Compared") -> list[Block]:
    """Return the tables of steps that were timed in turns, and of whole runs."""
    return [*_step_times(compared), *_run_times(compared)]


def _step_times(compared: "Compared") -> list[Block]:
    timing = compared.evidence.timing
    if timing is None:
        return [words("Steps were not timed, so nothing is known about speed.")]
    unproven, rows = not timing.proven, []
    for name in timing.arms:
        keys, control = ("timing", "arms", name), name not in compared.arms
        rows.append([
            "A/A control" if control else arm_name(compared, name),
            compared.cell(*keys, "ms", format="ms"),
            compared.cell(*keys, format="step ratio", alarm=unproven),
            compared.cell(*keys, "ceiling"),
            "" if control else word(compared, name, *keys),
            compared.cell(*keys, "flag", format="text", alarm=True),
            compared.cell(*keys, "step", format="text"),
            compared.cell(*keys, "peak_bytes", format="bytes"),
            compared.cell(*keys, "optimizer_bytes", format="bytes"),
            compared.cell(*keys, "checkpoint_bytes", format="bytes"),
        ])  # fmt: skip
    head = ["arm", "step", "ratio to the baseline", "FLOPs allow", "verdict", "remark",
            "kind of step", "peak memory", "optimizer state", "trainable weights"]  # fmt: skip
    note = (
        "Median time of a step; the arms took turns in one process. The intervals of all ratios "
        "hold simultaneously. FLOPs allow: the smallest ratio that the saved matrix products "
        "explain. The A/A controls are further copies of the baseline, so their difference from "
        "it is noise."
    )
    stopped = "the time was up" if timing.stopped_by == "time" else "all intervals were narrow"
    blocks: list[Block] = [
        table("step-times", "Time of a step, measured in turns", head, rows, note),
        words("The arms took turns for ", compared.cell("timing", "rounds", format="count"),
              " rounds in ", compared.cell("timing", "seconds", format="seconds"),
              f", until {stopped}; all models were built and timed ",
              compared.cell("timing", "builds", format="count"), " times, on ",
              compared.cell("timing", "device", format="text"),
              ". The control that differs most has the ratio ",
              compared.cell("timing", "control", format="step ratio"), "."),
    ]  # fmt: skip
    if unproven:
        blocks.append(words("These times are unproven: ",
                            compared.cell("timing", "reasons", format="list"), ".",
                            alarm=True))  # fmt: skip
    if timing.notes:
        blocks.append(words("Remarks: ", compared.cell("timing", "notes", format="list"), "."))
    return blocks


def _run_times(compared: "Compared") -> list[Block]:
    evidence = compared.evidence
    arms = [name for name in compared.arms if evidence.arms[name].finished]
    if not arms:
        return []
    quantities: tuple[tuple[str, tuple[str, ...], str], ...] = (
        ("total, h:mm:ss", ("total_seconds",), "hms"),
        ("per epoch", ("per_epoch_avg",), "seconds"),
        ("variation of epochs", ("per_epoch_cv",), "short percent"),
        ("per step, in whole runs", ("per_step_avg",), "seconds as ms"),
        ("per step, in turns", ("step",), "seconds as ms"),
        ("variation of steps", ("step_cv",), "short percent"),
        ("validation of a run", ("validation_total",), "seconds"),
        ("one validation", ("validation_each",), "seconds"),
        ("GPU utilisation", ("gpu_utilisation_percent",), "whole percent"),
        ("alternating runs", ("rounds", "seconds"), "seconds of rounds"),
        ("variation of alternating runs", ("rounds", "cv"), "short percent"),
    )
    rows: list[list[str | Cell]] = [[
        "total, mean ± std",
        *(compared.cell("arms", name, "seconds", format="summary in s") for name in arms),
    ]]  # fmt: skip
    for title, keys, form in quantities:
        rows.append([title, *(_of_times(compared, name, *keys, form=form) for name in arms)])
    gaps = (
        ("gap of the total", "time_gap", "gap"),
        ("time saved", "time_saved_percent", "saved"),
        ("gap of a step, in turns", "per_step_gap", "gap"),
    )
    for title, key, form in gaps:
        rows.append([title, *(_gap(compared, name, key, form) for name in arms)])
    rows = [row for row in rows if any(map(is_filled, row[1:]))]
    note = (
        "Means over the runs that finished and can be paired; the times per epoch and per step "
        "leave out validation. Time saved is (T of the baseline − T of the arm) / T of the "
        "baseline, for whole runs. Gaps of whole runs have 95 % intervals; the gap of a step has "
        "the interval of its verdict. A gap in red is confounded, or unproven: it cannot be "
        "trusted. Gaps of whole runs are always unproven, because no further copy of the baseline "
        "shows their noise. Variation is the standard deviation divided by the mean."
    )
    if evidence.rounds:
        note += " Alternating runs are further runs, trained in turns only to be timed."
    scaled = any(
        compared.records.value(TIMING, "timing", compared.key(name), "per_epoch_scaled")
        for name in arms
    )
    if scaled:
        note += " The runs are shorter than an epoch, so the time of an epoch is extrapolated."
    head = ["time", *(plain(name) for name in arms)]
    return [Table("run-times", "Time of whole runs", tuple(head), tuple(map(tuple, rows)), note)]


def _of_times(compared: "Compared", name: str, *keys: str, form: str) -> Cell:
    return compared.records.cell(TIMING, "timing", compared.key(name), *keys, format=form)


def _gap(compared: "Compared", name: str, key: str, form: str) -> str | Cell:
    """Return a gap to the baseline, in red if the gap is confounded or cannot be trusted."""
    if name == compared.evidence.baseline:
        return ""
    keys = (COMPARISON, compared.key(name), "vs_baseline", key)
    values = compared.records.value(*keys) or {}
    proven = values.get("proven", values.get("verdict") != "unproven")
    return compared.records.cell(
        *keys, format=form, alarm=not proven or bool(values.get("confounds"))
    )


def convergence(compared: "Compared") -> list[Block]:
    """Return how soon each arm reached the target."""
    reached = compared.evidence.convergence
    if reached is None:
        return []
    rows = []
    for name in compared.arms:
        keys = ("convergence", "arms", name)
        cells: list[str | Cell] = [arm_name(compared, name),
                                   compared.cell(*keys, format="reached")]  # fmt: skip
        for quantity in CONVERGED:
            cells.append(compared.cell(*keys, "spent", quantity, format="summary"))
            cells.append(compared.cell(*keys, "ratios", quantity, format="effect"))
        rows.append(cells)
    head = ["arm", "reached", *(cell for quantity in CONVERGED
                                for cell in (quantity, f"ratio of {quantity}"))]  # fmt: skip
    note = (
        "A run reaches the target at the first evaluation that is as good, so the numbers are only "
        "as fine as the interval between evaluations. Reached: finished runs that reached the "
        "target, of all runs that finished or diverged. Ratios are paired by seed, over the seeds "
        "with which both arms reached it. If one arm reached it less often, the interval has no "
        "bound on the side that is worse for this arm. No verdict is drawn from these numbers."
    )
    target = words("The target is ", compared.cell("convergence", "metric", format="text"), " ",
                   compared.cell("convergence", "target", format="exact"),
                   " on the split that selects the checkpoint: ",
                   compared.cell("convergence", "place", format="text"), ".")  # fmt: skip
    blocks: list[Block] = [target, table("target", "Until the target", head, rows, note)]
    if reached.evaluations == 1:
        blocks.append(words("A run of the baseline was evaluated only once, so it is not known "
                            "when it reached the target.", alarm=True))  # fmt: skip
    return blocks


def tuning(compared: "Compared") -> list[Block]:
    """Return the values that were tried for every tuned setting."""
    blocks: list[Block] = []
    for number, setting in enumerate(compared.evidence.tuning):
        rows: list[Row] = []
        for name in compared.arms:
            for place, point in enumerate(setting.curves[name]):
                keys = ("tuning", number, "curves", name, place)
                best = point.value == setting.best[name]
                at_end = best and setting.on_edge[name]
                remark: str | Cell = "best" if best else ""
                if at_end:
                    remark = Cell("best, at an end of the grid", alarm=True)
                rows.append([
                    plain(name),
                    compared.cell(*keys, "value"),
                    compared.cell(*keys, format="tuned value") if point.mean is not None
                    else Cell("a run did not finish", alarm=True),
                    compared.cell(*keys, "chosen", format="count"),
                    remark,
                ])  # fmt: skip
        title = f"Tuning of {plain(setting.key)}"
        head = ["arm", setting.key, "score [95 %]", "seeds it was chosen for", "remark"]
        note = (
            "Score: the mean over the seeds of the metric's best value, on the split that selects "
            "the checkpoint. The grid is the same for every arm. The value for each seed is chosen "
            "by the scores of the other seeds, if there are any; best is the choice of all seeds "
            "together."
        )
        if setting.extended:
            note += " A best value was at an end of the grid, so the grid was extended once."
        name = "tuned-values" if not number else f"tuned-values-{number + 1}"
        blocks.append(table(name, title, head, rows, note))
    return blocks


def stages(compared: "Compared") -> list[Block]:
    """Return every stage of every run, if runs have several."""
    rows: list[Row] = []
    for name in compared.arms:
        for number, run in enumerate(compared.evidence.arms[name].runs):
            if len(run.stages) < 2:
                continue
            for place, _ in enumerate(run.stages):
                keys = ("arms", name, "runs", number)
                stage = (*keys, "stages", place)
                rows.append([
                    plain(name), compared.cell(*keys, "seed", format="count"),
                    compared.cell(*stage, "name", format="text"),
                    compared.cell(*stage, format="trainable share"),
                    compared.cell(*stage, "trainable", format="count"),
                    compared.cell(*stage, "total", format="count"),
                    compared.cell(*stage, "best"), compared.cell(*stage, "epoch"),
                    compared.cell(*stage, "seconds", format="seconds"),
                ])  # fmt: skip
    if not rows:
        return []
    head = ["arm", "seed", "stage", "trainable", "trained parameters", "all parameters",
            "best value", "best epoch", "time"]  # fmt: skip
    note = "The best value is on the split that selects the checkpoint."
    return [table("stages-of-runs", "Every stage of every run", head, rows, note)]


def subjects(compared: "Compared") -> list[Block]:
    """Return the tests of EEG decoders: by subject, against ridge regression, and on segments."""
    rows: list[Row] = []
    ridge: list[Row] = []
    segments: list[Row] = []
    for split, tests in compared.evidence.subjects.items():
        for name in tests.subjects:
            keys = ("subjects", split, "subjects", name)
            rows.append([
                plain(split), arm_name(compared, name),
                compared.cell(*keys, format="subjects better"), compared.cell(*keys, "r"),
                compared.cell(*keys, "z", format="effect"),
                *(compared.cell(*keys, p, format="probability")
                  for p in ("p", "p_signed", "p_adjusted")),
            ])  # fmt: skip
        for name in tests.ridge:
            ridge.append([
                plain(split), arm_name(compared, name),
                compared.cell("subjects", split, "ridge", name, format="effect"),
                compared.cell("subjects", split, "ridge", name, "p", format="probability"),
            ])  # fmt: skip
    for name in compared.evidence.segments:
        segments.append([
            arm_name(compared, name),
            *(compared.cell("segments", name, key, "summary", format="summary")
              for key in _SEGMENTS),
            compared.cell("segments", name, "score", "against", format="effect"),
        ])  # fmt: skip
    blocks: list[Block] = []
    if rows:
        head = ["split", "arm", "subjects better", "difference of r", "difference of z [95 %]", "p",
                "p (signed ranks)", "p (Holm)"]  # fmt: skip
        note = (
            "A test compares the arm with the baseline for each subject, by Fisher's z averaged "
            f"over the seeds (the baseline is {compared.baseline}); r is the correlation of the "
            "decoded envelope with that of the heard speech. report: other recordings of the "
            "training subjects (or other parts of the same ones); unseen: subjects held out of "
            "training."
        )
        blocks.append(table("subject-tests", "Tests by subject", head, rows, note))
    if ridge:
        head = ["split", "arm", "r − ridge [95 %]", "p"]
        note = (
            "The mean over seeds of r minus the r of a ridge regression, which is trained on the "
            "same recordings and is the same for every seed."
        )
        blocks.append(table("ridge-tests", "Against the ridge decoder", head, ridge, note))
    if segments:
        head = ["arm", *_SEGMENTS.values(), "score against the baseline [95 %]"]
        blocks.append(table("segments", "r on segments", head, segments,
                            "r on segments of one minute: mean ± standard deviation over seeds. "
                            "The challenge score is two thirds of r on subjects trained on and "
                            "one third of r on the others."))  # fmt: skip
    return blocks


def gradients(compared: "Compared") -> list[Block]:
    """Return the gradient flow of watched runs."""
    rows = [
        [arm_name(compared, name),
         *(compared.cell("flow", name, key, of, format=form) for key in QUANTITIES
           for of, form in (("summary", "summary"), ("against", "effect")))]
        for name in compared.evidence.flow
    ]  # fmt: skip
    if not rows:
        return []
    head = ["arm", *(cell for key in QUANTITIES for cell in (_FLOW[key], "ratio [95 %]"))]
    note = (
        "Means over seeds in the last stage, and ratios to the baseline, paired by seed. Front is "
        "the first two layers, output is the head. Front/output gradient: the largest absolute "
        "gradient of a tensor at the last measured step, averaged over the front's tensors, "
        "relative to the head's. Weight change: the relative change of a tensor's range since the "
        "first measured step. Update/weight: the median over the front's parts, such as the "
        "query of a layer, then over the measured steps."
    )
    return [
        table(
            "gradient-flow-of-arms", "Gradients and updates of the first layers", head, rows, note
        )
    ]

"""The page of a comparison, comparison.md, and a short summary for the terminal.

A comparison trains several arms, which are variants of one recipe, with the same seeds. The page is
a list of sections. Each section has a title and a function that returns its text; the text is empty
if the section does not apply.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from frostlab.comparison.evidence import (
    ArmVerdict,
    EarlierLook,
    Evidence,
    Parameters,
    Repeat,
    RunSummary,
    StageSummary,
    TunedSetting,
    interval_text,
    shown,
)
from frostlab.comparison.judging.verdict import MEANINGS
from frostlab.comparison.measures.arms import mean_of, retained
from frostlab.comparison.measures.eeg import segments_section
from frostlab.comparison.measures.show import (
    convergence_section,
    ratio_text,
    run_times,
    step_times,
)
from frostlab.comparison.oelm_json import answers, main_arm
from frostlab.recipe.settings import metric_facts
from frostlab.text import NONE, Markdown, columns, escaped, markdown, number, plain, wrapped

_BAR = 30  # width of the longest bar of a tuning curve, in characters
_GAIN = (
    "(Compares how much the best value of the metric changed from the first stage to the last, on "
    "the split that also selects the checkpoint.) "
)
_FLOW = {  # gradient-flow quantity → title of its column
    "front_ratio": "front/output gradient",
    "weight_change": "front weight change",
    "update": "front update/weight",
}
# Word of the verdict on the planted harm (the baseline with half its steps) → what the page says
# about the harm. After any other word, the page says that the harm was not found.
_ASSAY = {"worse": "was found", "better": "is no harm here, so it tests nothing"}
_QUICK = "A quick comparison with short runs"


def page(evidence: Evidence) -> str:
    """Return the whole page in Markdown."""
    parts = [f"# {escaped(evidence.plan.name)}: {escaped(', '.join(evidence.arms))}"]
    parts += [escaped(evidence.plan.about)] * bool(evidence.plan.about)
    if evidence.caution:
        parts.append(f"Caution: {escaped(evidence.caution)}.")
    if evidence.plan.quick:
        parts.append(f"{_QUICK}, to see whether a full comparison is worthwhile.")
    for title, section in SECTIONS:
        if text := section(evidence):
            parts.append(f"## {title}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def show(evidence: Evidence, page: Path, width: int | None = 80) -> str:
    """Return the main results in lines of up to `width` characters; `page` is the page's path."""
    metric, verdicts, timing = evidence.plan.rules.metric, evidence.verdicts, evidence.timing
    rows = [["arm", metric, "against baseline", "trainable"]]
    times = [["arm", "ms a step", "ratio to baseline"]]
    for name, arm in evidence.arms.items():
        verdict = verdicts.get(name)
        timed = None if timing is None else timing.arms.get(name)
        rows.append([
            name,
            shown(arm.metrics.get(metric)),
            "" if verdict is None else shown(verdict.paired),
            _trainable(arm.parameters),
        ])  # fmt: skip
        if timed is not None:
            times.append([name, number(timed.ms), "" if timed.ratio is None else ratio_text(timed)])
    lines = [f"{_QUICK}."] if evidence.plan.quick else []
    lines += [f"caution: {evidence.caution}"] if evidence.caution else []
    lines += [*columns(rows, {1, 2, 3}, width), ""]
    lines += [*columns(times, {1, 2}, width), ""] if len(times) > 1 else []
    lines += [f"{name}: {verdict.sentence}" for name, verdict in verdicts.items()]
    if evidence.plan.runs:  # runs that the user chose may not form pairs
        lines += [f"{name}: {note}" for name, verdict in verdicts.items() for note in verdict.notes]
        lines += map(str, evidence.refused_pairs)
    if timing is not None and not timing.proven:
        lines.append(f"timing is unproven: {'; '.join(timing.reasons)}")
    planned = [(answer.question, answer.verdict.sentence) for answer in evidence.contrasts]
    lines += ["", *(f"{question} {text}" for question, text in planned or answers(evidence))]
    text = [part for line in lines for part in wrapped(plain(line), width)]
    return "\n".join([*text, "", plain(f"page: {page}")])


def _verdicts(evidence: Evidence) -> str:
    rules, verdicts, timing = evidence.rules, evidence.verdicts, evidence.timing
    lines = [
        f"- **{escaped(name)}**: {escaped(verdict.sentence)}" for name, verdict in verdicts.items()
    ]
    for name, verdict in verdicts.items():
        lines += [f"  - {escaped(f'{name}: {note}')}" for note in verdict.notes]
    if timing is not None:
        for name in verdicts:
            confounds = ", ".join(evidence.confounds.get(name, ()))
            mark = f" Confounded by {confounds}." if confounds else ""
            sentence = f"{timing.arms[name].sentence}{mark}"
            lines.append(f"- **time, {escaped(name)}**: {escaped(sentence)}")
    lines += [f"- {escaped(line)}" for line in _controls(evidence)]
    family = next(iter(verdicts.values())).family
    share = f", and {rules.time_level:.2%} any arm faster or slower" if rules.timed else ""
    count = f"{family} statements" if family > 1 else "One statement"
    lines.append(
        f"- {count} about {escaped(rules.metric)}: if no arm differed, at most {rules.level:.2%} "
        f"of such pages would call any arm better or worse{share}."
        + " This holds only for runs that are chosen before their results are known."
        * bool(evidence.plan.runs)
    )
    history = rules.history()
    if history is not None:
        lines.append(f"- {escaped(history)}")
    lines += [f"  - {escaped(_earlier(look))}" for look in evidence.earlier_looks]
    return "\n".join(lines)


def _controls(evidence: Evidence) -> list[str]:
    """Return lines on the two tests of the comparison: the repeated run and the planted harm."""
    lines, metric, repeat, assay = [], evidence.rules.metric, evidence.repeat, evidence.assay
    if repeat is not None:
        lines.append(_repeat_text(repeat, metric))
    if assay is not None:
        missed = "was NOT found, so this comparison cannot see a harm of that size"
        outcome = _ASSAY.get(assay.verdict.word, missed)
        lines.append(
            f"The planted harm, a baseline trained for {assay.steps:,} of {assay.of:,} steps, "
            f"{outcome}: {assay.verdict.sentence}"
        )
    return lines


def _repeat_text(repeat: Repeat, metric: str) -> str:
    """Describe the run that was trained twice: how much the metric changed."""
    first, second = repeat.metrics.get(metric, (None, None))
    if first is None or second is None:
        return f"The baseline's seed {repeat.seed}, trained a second time: {repeat.status}."
    weights = "the same weights" if repeat.same_weights else "other weights"
    return (
        f"The same run twice (baseline, seed {repeat.seed}): {metric} {first:.6g} and "
        f"{second:.6g}, {weights}; the difference of {abs(second - first):.3g} is the noise of the "
        "device and the evaluation."
    )


def _earlier(look: EarlierLook) -> str:
    day = datetime.fromtimestamp(look.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"earlier look: {day}, {look.metric}, {look.seeds} seeds, {look.folder}"


def _further_numbers(evidence: Evidence) -> str:
    """Return further numbers about every arm but the baseline, from which no verdict is drawn."""
    verdicts = evidence.verdicts
    rows = []
    for name, verdict in verdicts.items():
        margin = verdict.margin
        rows.append([
            name,
            number(verdict.improvement),
            "" if margin is None else number(margin.probability_above),
            NONE if verdict.anytime is None
            else interval_text(*verdict.anytime, evidence.rules.log),
            shown(verdict.population),
            ", ".join(f"{arm}: {count}" for arm, count in verdict.missing.items()) or "0",
        ])  # fmt: skip
    rules = evidence.rules
    cost = f"P(cost > {rules.margin_text()})" if rules.margin is not None else "P(cost > margin)"
    head = ["arm", "P(improvement)", cost, "valid if seeds are added", "for other test examples",
            "runs missing"]  # fmt: skip
    note = (
        "P(improvement): how often a run of the arm beats a run of the baseline, over all pairs of "
        "runs. P(cost > margin): posterior probability that the arm is worse by more than the "
        "margin, under a flat prior, with a variance pooled over similar arms. Valid if seeds are "
        "added: an interval that stays valid if seeds are added until it excludes 0 (or the ratio "
        "1). For other test examples: seeds and test examples are both taken as samples; only "
        "known for accuracy. Runs missing: paired runs without a finite value. No verdict is drawn "
        "from these numbers."
    )
    return f"{markdown(head, rows)}\n\n{note}"


def _arms(evidence: Evidence) -> str:
    """Describe each arm: its treatment, and the settings that it changes."""
    lines = []
    for arm in evidence.plan.arms:
        settings = ", ".join(f"{key} {json.dumps(value)}" for key, value in arm.set.items())
        does = evidence.arms[arm.name].does + (f"; set: {settings}" if settings else "")
        mark = " (the baseline)" if arm.name == evidence.baseline else ""
        lines.append(f"- **{escaped(arm.name)}**{mark}: {escaped(does)}")
    return "\n".join(lines)


def _planned_questions(evidence: Evidence) -> str:
    return _numbered(
        (answer.question, f"{_GAIN if answer.of == 'gain' else ''}{answer.verdict.text}")
        for answer in evidence.contrasts
    )


def _default_questions(evidence: Evidence) -> str:
    """Answer the OELM study's five questions about the OELM arm or, without one, the first arm.

    OELM freezes orthogonal query and key weights. The text is empty if the plan has questions.
    """
    if evidence.contrasts:
        return ""
    arm = main_arm(evidence)
    subject = f"The questions are about {arm}: {evidence.arms[arm].does}."
    return f"{escaped(subject)}\n\n{_numbered(answers(evidence))}"


def _numbered(answers: Iterable[tuple[str, str]]) -> str:
    return "\n".join(
        f"{n}. **{escaped(question)}** {escaped(text)}"
        for n, (question, text) in enumerate(answers, 1)
    )


def _performance(evidence: Evidence) -> str:
    metrics = [evidence.rules.metric, *evidence.secondary]
    rows = []
    for name, arm in evidence.arms.items():
        primary = arm.metrics.get(metrics[0])
        mark = " (confounded)" if evidence.confounds.get(name) else ""
        rows.append([
            name + mark,
            f"{len(arm.finished)} of {len(arm.runs)}",
            *(shown(arm.metrics.get(metric)) for metric in metrics),
            number(None if primary is None else primary.cv),
            _trainable(arm.parameters),
            _clipped(arm.finished),
        ])  # fmt: skip
    effects = [
        [name, metrics[0], *_means(evidence, name, metrics[0]), shown(verdict.paired),
         _adjusted_p(verdict), verdict.word]
        for name, verdict in evidence.verdicts.items()
    ]  # fmt: skip
    effects += [
        [name, metric, *_means(evidence, name, metric), shown(effect), "", ""]
        for metric, by_arm in evidence.secondary.items()
        for name, effect in by_arm.items()
    ]
    used = {verdict.word for verdict in evidence.verdicts.values()}
    note = (
        "Mean ± standard deviation over the runs that finished and can be paired; cv is the "
        "coefficient of variation "
        "of the first metric. Clipped is the share of steps whose gradient was clipped. Frozen "
        "weights do not count in the gradient's norm, so an arm that freezes weights may be "
        "clipped less. The next table shows the effect over paired seeds. All "
        "intervals about the same metric hold simultaneously, with "
        f"{100 * (1 - evidence.rules.level):.4g} % confidence; for perplexity, the means in that "
        "table are geometric, and the effect is their ratio. Retained: the arm's value "
        "divided by the baseline's (for perplexity and loss the baseline's divided by the arm's), "
        "so more than 100 % is better. p is multiplied by the number of statements. "
        "Only the first metric is judged; the others get no verdict."
    )
    return "\n\n".join([
        markdown(["arm", "seeds", *metrics, "cv", "trainable", "clipped"], rows),
        note,
        markdown(["arm", "metric", "mean", "baseline's mean", "retained", "against the baseline",
                  "p", "verdict"], effects),
        " ".join(f"*{word}*: {text}." for word, text in MEANINGS.items() if word in used),
    ])  # fmt: skip


def _means(evidence: Evidence, arm: str, metric: str) -> list[str]:
    """Return the means of an arm and the baseline, and the share that the arm retains."""
    share = retained(evidence, arm, metric)
    return [
        number(mean_of(evidence, arm, metric)),
        number(mean_of(evidence, evidence.baseline, metric)),
        NONE if share is None or share.effect is None else f"{share.effect:.2%}",
    ]


def _adjusted_p(verdict: ArmVerdict) -> str:
    """Format p times the number of statements, at most 1."""
    if verdict.paired is None or verdict.paired.p is None:
        return NONE
    return number(min(1.0, verdict.family * verdict.paired.p))


def _subjects(evidence: Evidence) -> str:
    parts = []
    for split, tests in evidence.subjects.items():
        rows = [
            [name, f"{test.better} of {test.n}", number(test.r), shown(test.z), number(test.p),
             number(test.p_signed), number(test.p_adjusted)]
            for name, test in tests.subjects.items()
        ]  # fmt: skip
        head = ["arm", "subjects better", "r difference", "z difference [95 %]", "p",
                "p (signed ranks)", "p (Holm)"]  # fmt: skip
        ridge = [[name, shown(test), number(test.p)] for name, test in tests.ridge.items()]
        parts.append(
            f"### {escaped(split)}\n\n{markdown(head, rows)}\n\n"
            f"{markdown(['arm', 'r − ridge, over seeds [95 %]', 'p'], ridge)}"
        )
    if not parts:
        return ""
    note = (
        "Tests are paired by subject: a subject's mean Fisher z over the seeds, with the arm "
        f"and with {escaped(evidence.baseline)}. p is of a t test on z, p (signed ranks) of a test "
        "on r; p (Holm) is the first p, corrected for the number of arms. `report`: other "
        "recordings of the training subjects (or other parts of the same recordings, if the files "
        "are split in that way); `unseen`: subjects held out of training. The ridge decoder is the "
        "same for every seed."
    )
    return "\n\n".join([note, *parts])


def _gradients(evidence: Evidence) -> str:
    if not evidence.flow:
        return ""
    head = ["arm", *(cell for column in _FLOW.values() for cell in (column, "ratio [95 %]"))]
    rows = [
        [name, *(cell for key in _FLOW
                 for cell in (shown(flow[key].summary), shown(flow[key].against)))]
        for name, flow in evidence.flow.items()
    ]  # fmt: skip
    note = (
        "Means over seeds in the last stage, and ratios to the baseline, paired by seed. Front is "
        "layers 0 and 1, output is the head. For front/output gradient, the largest absolute "
        "gradient of each tensor at the last measured step is taken; its mean over the front's "
        "tensors is divided by its mean over the head's. Weight change is the relative change of "
        "a tensor's range (largest − smallest weight) since the first measured step, averaged "
        "over the front's tensors. Update/weight is the size of an update relative to the weights: "
        "the median over the front's parts, then over the measured steps."
    )
    return f"{note}\n\n{markdown(head, rows)}"


def _stages(evidence: Evidence) -> str:
    rows: list[list[str]] = []
    for name, arm in evidence.arms.items():
        runs = [run.stages for run in arm.finished]
        if runs and len(runs[0]) > 1:
            rows += _stage_rows(name, runs)
    if not rows:
        return ""
    head = ["arm", "stage", "trainable", "best value", "best epoch", "seconds",
            "change"]  # fmt: skip
    note = (
        "Means over seeds. The best value is on the split that selects the checkpoint. Change is "
        "the relative change of the best value from the stage before, positive if it improved."
    )
    return f"{markdown(head, rows)}\n\n{note}"


def _stage_rows(name: str, runs: Sequence[Sequence[StageSummary]]) -> list[list[str]]:
    """Return one row per stage of an arm, with means over its runs."""
    rows: list[list[str]] = []
    before: float | None = None
    for stages in zip(*runs, strict=True):  # the same stage of every run
        first = stages[0]
        best = _mean(stage.best for stage in stages)
        rows.append([
            name if not rows else "",
            first.name,
            f"{first.trainable:,} of {first.total:,}",
            number(best),
            number(_mean(stage.epoch for stage in stages)),
            number(fmean(stage.seconds for stage in stages)),
            "" if not before or best is None else f"{_gain(before, best, first.metric):+.2%}",
        ])  # fmt: skip
        before = best
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _gain(before: float, after: float, metric: str) -> float:
    """Return the relative change of a metric, positive if it improved."""
    change = (after - before) / abs(before)  # a correlation may be negative
    return -change if metric_facts(metric).lower_is_better else change


def _tuning(evidence: Evidence) -> str:
    return "\n\n".join(map(_tuning_curves, evidence.tuning))


def _tuning_curves(setting: TunedSetting) -> str:
    means = [point.mean for curve in setting.curves.values() for point in curve
             if point.mean is not None]  # fmt: skip
    low, high = (min(means), max(means)) if means else (0.0, 1.0)  # one scale for all arms
    lines = []
    for name, curve in setting.curves.items():
        lines.append(plain(name))
        for point in curve:
            mark = "  ← best" if point.value == setting.best[name] else ""
            ends = "" if point.low is None else f" {interval_text(point.low, point.high, True)}"
            chosen = f"  chosen for {point.chosen} seeds" if point.chosen else ""
            lines.append(f"  {point.value:<10g} {_bar(point.mean, low, high)}{ends}{chosen}{mark}")
    edges = [name for name, on_edge in setting.on_edge.items() if on_edge]
    note = (
        f"{escaped(setting.key)}: the metric, averaged over the seeds, on the split that selects "
        "the checkpoint, with its 95 % interval; the grid is the same for every arm. For each "
        "seed, the value was chosen by the scores of all other seeds (with a single seed, by its "
        "own score); `best` is the choice by the scores of all seeds. If several settings are "
        "tuned, the others have their best values here."
    )
    if setting.extended:
        note += " A best value was at an end of the grid, so the grid was extended once."
    if edges:
        note += f" The best value is still at an end of the grid for {escaped(', '.join(edges))}."
    curves = "\n".join(f"    {line}" for line in lines)  # no name can end an indented block
    return f"{note}\n\n{curves}"


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return "a run did not finish"
    height = (value - low) / (high - low) if high > low else 1.0
    return f"{'▇' * (1 + round(height * (_BAR - 1))):<{_BAR}} {value:.4g}"


def _differences(evidence: Evidence) -> str:
    lines = _varied_settings(evidence)
    lines += [
        f"- {escaped(name)}: confounded by {escaped(', '.join(confounds))}"
        for name, confounds in evidence.confounds.items()
        if confounds
    ]
    lines += [f"- {escaped(str(pair))}" for pair in evidence.refused_pairs]
    lines += [
        f"- {escaped(f'{pair.arm} and {pair.against} seed {pair.seed}')}: the order of examples "
        f"was compared for the first {pair.compared} of the {pair.steps} steps that both took."
        for pair in evidence.partly_compared
    ]
    lines += [f"- {escaped(str(fact))}." for fact in evidence.varied_facts]
    for setting in evidence.tuning:
        values = ", ".join(
            f"{name} {value:g}" + " (at an end of the grid)" * setting.on_edge[name]
            for name, value in setting.best.items()
        )
        tuned = f"{setting.key} was tuned for each arm with the same grid and seeds; best: {values}"
        lines.append(f"- {escaped(tuned)}")
    if not evidence.pairs:
        lines.append("- No pair of runs finished, so nothing could be compared.")
    if not lines:
        lines = ["- The arms differ only in the treatment: for every pair, the data, the examples "
                 "of every step that both runs took, and the initial weights that no treatment "
                 "changes are equal by digest, and device, precision, libraries and frostlab's "
                 "code are equal."
                 ]  # fmt: skip
    return "\n".join(lines)


def _varied_settings(evidence: Evidence) -> list[str]:
    """List the settings that the plan varies between arms, and their values in each arm."""
    plan = evidence.plan
    if not plan.vary:
        return []
    varied = escaped(", ".join(plan.vary))
    lines = [f"- Compared settings: {varied}. Any other difference is listed below."]
    if any(key.partition(".")[0] == "model" for key in plan.vary):
        lines.append("- The model differs, so equal seeds need not give equal initial weights.")
    for arm in plan.arms:
        values = "; ".join(f"{key} {json.dumps(value)}" for key, value in arm.set.items())
        lines.append(f"- {escaped(arm.name)}: {escaped(values or 'as in the recipe')}")
    return lines


def _runs(evidence: Evidence) -> str:
    metric = evidence.plan.rules.metric
    rows = [
        [name, str(run.seed), _status(run), f"{run.steps:,}", number(run.metrics.get(metric)),
         _link(run.folder)]
        for name, arm in evidence.arms.items()
        for run in arm.runs
    ]  # fmt: skip
    return markdown(["arm", "seed", "status", "steps", metric, "record"], rows)


def _made(evidence: Evidence) -> str:
    made = evidence.made
    weights = f"; pretrained weights {made.source}" if made.source else ""
    weights += f" at revision {made.revision}" if made.revision else ""
    commit = f", commit {made.commit}" if made.commit else ""
    command = "The command frostlab compare plan.json carries out this plan again"
    again = "" if evidence.plan.runs else f" {command}, in a new folder."
    lines = [
        f"Plan {made.plan}; data {made.data}{weights}.{again}",
        f"Trained from {made.began} to {made.ended} on {made.machine}.",
        "Versions: " + ", ".join(f"{key} {value}" for key, value in made.versions.items()),
        f"frostlab's code: digest {made.code}{commit}",
        f"Command: {made.command}",
    ]
    return "\n".join(f"- {escaped(line)}" for line in lines)


def _link(folder: str) -> Markdown:
    """Return a link to a run's folder, whose path is relative to the folder of the page."""
    text = plain(folder)
    return Markdown(f"[{escaped(text)}]({quote(text)})")


def _status(run: RunSummary) -> str:
    status = run.status if run.error is None else f"{run.status}: {run.error}"
    return status if run.attempts == 1 else f"{status}, attempt {run.attempts}"


def _trainable(parameters: Parameters | None) -> str:
    if parameters is None or parameters.total < 1:
        return NONE
    return f"{parameters.trainable / parameters.total:.1%}"


def _clipped(runs: Sequence[RunSummary]) -> str:
    """Format the mean share of clipped steps, or `NONE` if the recipe does not clip."""
    shares = [run.clipped_steps / run.steps for run in runs
              if run.clipped_steps is not None and run.steps]  # fmt: skip
    return f"{fmean(shares):.1%}" if shares else NONE


SECTIONS: tuple[tuple[str, Callable[[Evidence], str]], ...] = (
    ("The arms", _arms),
    ("Verdicts", _verdicts),
    ("The questions", _planned_questions),
    ("The five questions", _default_questions),
    ("Performance", _performance),
    ("Further numbers without a verdict", _further_numbers),
    ("Subjects", _subjects),
    ("Segments", segments_section),
    ("Gradients", _gradients),
    ("Stages", _stages),
    ("Convergence", convergence_section),
    ("Time of a step", step_times),
    ("Time of whole runs", run_times),
    ("Tuning", _tuning),
    ("What differs between the arms", _differences),
    ("Data", lambda evidence: evidence.data.markdown() if evidence.data else ""),
    ("How it was made", _made),
    ("Runs", _runs),
)

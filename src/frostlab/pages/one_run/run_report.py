"""The report of one run: its result, curves, stages, times, gradient flow, data and environment."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from frostlab.flow.diagnosis import findings_of
from frostlab.flow.figures import TITLES, front_chart, heat_charts, norm_chart
from frostlab.flow.judge import FROZEN, LEARNING
from frostlab.pages.content import (
    FORMATS,
    Block,
    Cell,
    Document,
    Figure,
    Paragraph,
    Records,
    Section,
    Table,
    item,
    words,
)
from frostlab.pages.generated import generated_texts
from frostlab.pages.one_run import eeg_run, run_facts, run_figures
from frostlab.pages.one_run.run_facts import CLASSES, DATA, RECIPE, OneRun
from frostlab.recipe.settings import all_metrics, metric_facts
from frostlab.records.finding.index import EVENTS, RESULT, read_run, result_of
from frostlab.records.schema import StepEvent
from frostlab.text import NONE, plain, short

# a metric with one of these words in its name is a correlation
_CORRELATIONS = ("pearson", "ridge", "chance", "segment", "challenge")
_ENDS = {
    "failed": "The run failed", "diverged": "The run diverged", "stopped": "The run was stopped",
    "running": "The run is still going on", "interrupted": "The run was interrupted",
    "damaged": "The records of the run are damaged",
}  # fmt: skip


def document(folder: Path, language: str) -> Document:
    """Return the report of a run."""
    result_of(folder)  # refuses a result that is damaged or has another schema
    run = OneRun(folder, Records(folder))
    sections = []
    for name, title, make in SECTIONS:
        if blocks := make(run):
            sections.append(Section(name, title, tuple(blocks)))
    about = run.value("about", file=RECIPE)
    return Document(
        title=short(plain(folder.resolve().name), 120),
        about=plain(about) if about else "A run of a recipe without a description.",
        first=tuple(_first_screen(run)),
        sections=tuple(sections),
        language=language,
        problems=tuple(run.problems),
        caution=read_run(folder).caution,
    )


def sources(folder: Path) -> tuple[str, ...]:
    """Return the records that show whether a report is up to date; none for an unfinished run."""
    if not (folder / RESULT).exists():
        return ()
    return (RESULT, EVENTS, RECIPE, "targets.json", "exits.json", "annotations.json")


def metric_format(name: str) -> str:
    """Return the name of the format in which a metric is shown."""
    if name in (known := all_metrics()):
        return known[name].form
    if name.startswith("match"):
        return "percent"
    return "r" if any(word in name for word in _CORRELATIONS) else "number"


# The first screen


def _first_screen(run: OneRun) -> list[Block]:
    blocks: list[Block] = [*_alarms(run)]
    name, model = (run.cell(*keys, file=RECIPE, format="text")
                   for keys in (("data", "name"), ("model", "kind")))  # fmt: skip
    treatment = run.cell("treatment", file=RECIPE, format="setting")
    blocks.append(item("Trained: ", model, " on ", name, ", treatment ", treatment, ", seed ",
                       run.cell("seed", file=RECIPE), "."))  # fmt: skip
    metric, shown = run.metric, metric_format(run.metric)
    if run.value("report", metric) is not None:
        references: list[str | Cell] = []
        for other, text in (("ridge", "; a linear decoder has "), ("chance", "; by chance up to ")):
            if run.value("report", other) is not None:
                references += [text, run.cell("report", other, format=metric_format(other))]
        blocks.append(item(f"Result: {plain(metric)} ", run.cell("report", metric, format=shown),
                           " on the report split", *references, "."))  # fmt: skip
    if run.value("best", "value") is not None:
        blocks.append(item(
            f"Best {plain(metric)} on the split that selects the checkpoint: ",
            run.cell("best", "value", format=shown), " at step ",
            run.cell("best", "step", format="count"), " of ", run.cell("steps", format="count"),
            ". Training stopped early, by patience." if run.value("stopped_early") else ".",
        ))  # fmt: skip
    if run.value("parameters") is not None:
        blocks.append(item(
            "Trainable: ", run.cell("parameters", format="trainable share"), " of ",
            run.cell("parameters", "total", format="count"), " parameters; training took ",
            run.cell("clocks", "total_seconds", format="hms"), ", a step ",
            run.cell("clocks", "step_ms", "median", format="ms"), ".",
        ))  # fmt: skip
    if (figure := _training_figure(run)) is not None:
        blocks.append(figure)
    return blocks


def _alarms(run: OneRun) -> Iterator[Paragraph]:
    """Yield warnings, in red, that a reader must know before the result."""
    status = run.value("status")
    if status is None:
        summary = read_run(run.folder)
        reason = f": {plain(summary.error)}" if summary.error else ", so it has no result yet"
        yield words(f"{_ENDS.get(summary.status, 'The run has not finished')}{reason}.", alarm=True)
        if summary.caution:
            yield words(f"Caution: {plain(summary.caution)}.", alarm=True)
    elif status != "finished":
        yield words(f"{_ENDS[status]}: ", run.cell("error", format="text"), ".", alarm=True)
    if run.value("caution"):
        yield words("Caution: ", run.cell("caution", format="text"), ".", alarm=True)
    for number, target in enumerate(run.value("targets", file="targets.json") or []):
        if target.get("reached") is False:
            at = ("targets", number)
            name = plain(str(target.get("name", "")).replace("_", " "))
            yield item(f"Target missed: {name} ", run.cell(*at, "value", file="targets.json"),
                       f", wanted {_side(target)} ", run.cell(*at, "wanted", file="targets.json"),
                       ".", alarm=True)  # fmt: skip
    for stage, flow in run.flows.items():
        where = f" in stage {plain(stage)}" if len(run.flows) > 1 else ""
        for finding in findings_of(flow) if flow.reports else ():
            if finding.alarming:
                names = _names(finding.parts, 3)
                yield item(f"Gradient flow{where}: {finding.word}: {names}.", alarm=True)


def _training_figure(run: OneRun) -> Figure | None:
    losses = [
        {"step": row["step"], "loss": row["value"], "text": row["text"]}
        for row in run_figures.thinned(run.per_step("loss"))
    ]
    evaluations = _evaluation_rows(run)
    if not losses and not evaluations:
        return None
    percent = metric_format(run.metric) == "percent"
    chart = run_figures.training(losses, evaluations, run.later_stages, plain(run.metric), percent)
    better = "smaller" if metric_facts(run.metric).lower_is_better else "larger"
    shown = (
        f"{plain(run.metric)} at each evaluation on the split that selects the checkpoint "
        f"({better} is better). A ring marks the best one; with stages, that of the last stage."
    )
    loss = "the loss of each step; in a long run, each point is the mean of neighbouring steps."
    both = f"Above, {shown} Below, {loss}"
    caption = both if evaluations and losses else shown if evaluations else loss.capitalize()
    rows = [*({"curve": plain(run.metric)} | row for row in evaluations),
            *({"curve": "training loss"} | row for row in losses)]  # fmt: skip
    return Figure("training", "Training", chart, caption, rows, (EVENTS,))


def _evaluation_rows(run: OneRun) -> list[dict[str, Any]]:
    rows, best = [], run.value("best", "step")
    for event in run.evaluations:
        value = event.metrics.get(run.metric)
        if isinstance(value, int | float):
            text = FORMATS[metric_format(run.metric)](value)
            rows.append({"step": event.step, "value": value, "text": text,
                         "best": event.step == best})  # fmt: skip
    # two stages can evaluate at the same step; the best belongs to the later one
    for row in [row for row in rows if row["best"]][:-1]:
        row["best"] = False
    return rows


# Sections


def _results(run: OneRun) -> list[Block]:
    """Return the metrics: on the report split, in the best evaluation and in the last one."""
    report, last = run.value("report") or {}, run.value("last") or {}
    stages = run.value("stages") or []
    best = stages[-1]["metrics"] if stages else {}
    parts = (report, best, last)
    names = [name for name in dict.fromkeys([*report, *best, *last])
             if not any(isinstance(part.get(name), dict) for part in parts)]  # fmt: skip
    if not names:
        return []
    rows = tuple(
        (
            plain(name.replace("_", " ")),
            run.cell("report", name, format=metric_format(name)),
            run.cell("stages", len(stages) - 1, "metrics", name, format=metric_format(name)),
            run.cell("last", name, format=metric_format(name)),
        )
        for name in names
    )
    head = ("metric", "report", "best evaluation", "last evaluation")
    note = (
        "The best evaluation (in a run with stages, of the last stage) selects the checkpoint. The "
        "column report has the metrics of this checkpoint on the report split. If the recipe has "
        "splits: published, the report split also selects the checkpoint."
    )
    blocks: list[Block] = [Table("results", "Metrics", head, rows, note)]
    if (figure := _confusion(run)) is not None:
        blocks.append(figure)
    return blocks


def _confusion(run: OneRun) -> Figure | None:
    """Draw the classes that were predicted for the examples of each class."""
    labels, predicted = (run.value(key, file="predictions.json") for key in ("labels", "classes"))
    names = run.value("labels", file=DATA)
    if not labels or not predicted or not names or len(names) > CLASSES:
        return None
    rows = []
    for number, name in enumerate(names):
        own = [guess for label, guess in zip(labels, predicted, strict=False) if label == number]
        for other, guessed in enumerate(names):
            share = own.count(other) / len(own) if own else None
            rows.append({
                "label": short(plain(str(name)), 24), "predicted": short(plain(str(guessed)), 24),
                "share": share, "count": own.count(other),
                "text": NONE if share is None else f"{share:.0%}",
            })  # fmt: skip
    caption = (
        "Each row is a class of the report split, each column a predicted class; the colour is the "
        "share of the row's examples."
    )
    return Figure("confusion", "Predicted classes", run_figures.confusion(rows), caption, rows,
                  ("predictions.json", DATA))  # fmt: skip


def _curves(run: OneRun) -> list[Block]:
    rates = [(event.step, event.rate) for event in run.events if isinstance(event, StepEvent)]
    shown = (
        ("learning-rate", "Learning rate", "learning rate", rates,
         "The learning rate at the end of each recorded block of steps; in a long run, each point "
         "is the mean of neighbouring blocks."),
        ("gradient-norm", "Gradient norm", "norm before clipping", run.per_step("norm"),
         "The norm of the whole gradient of each step, before clipping; in a long run, each point "
         "is the mean of neighbouring steps."),
        ("step-time", "Step time", "milliseconds", run.per_step("ms"),
         "The time of each step; the first steps warm up. In a long run, each point is the mean of "
         "neighbouring steps."),
    )  # fmt: skip
    blocks: list[Block] = []
    for name, title, quantity, values, caption in shown:
        points = run_figures.thinned(values)
        if len(points) > 1:
            from_zero = name == "learning-rate"
            chart = run_figures.by_step(points, run.later_stages, quantity, from_zero)
            blocks.append(Figure(name, title, chart, caption, points, (EVENTS,)))
    return blocks


def _stages(run: OneRun) -> list[Block]:
    stages = run.value("stages") or []
    blocks: list[Block] = []
    if len(stages) > 1:
        blocks.append(_stages_table(run, stages))
        blocks.append(_stages_figure(run, stages))
    if (figure := _layers_figure(run, stages)) is not None:
        blocks.append(figure)
    return blocks


def _stages_table(run: OneRun, stages: list[dict[str, Any]]) -> Table:
    """Return the stages with their best evaluations, and the change from the first to the last."""
    names = [
        name for name, value in stages[0]["metrics"].items()
        if not isinstance(value, dict) and all(name in stage["metrics"] for stage in stages)
    ]  # fmt: skip
    # shares first, the loss last
    names.sort(key=lambda name: (metric_facts(name).form != "percent", name == "loss"))
    rows: list[tuple[str | Cell, ...]] = []
    for number, stage in enumerate(stages):
        at = ("stages", number)
        rows.append((
            run.cell(*at, "name", format="text"),
            run.cell(*at, "trainable", format="count"),
            *(run.cell(*at, "metrics", name, format=metric_format(name)) for name in names),
            run.cell(*at, "epochs"),
            run.cell(*at, "best", "epoch"),
            run.cell(*at, "seconds", format="seconds"),
            "patience" if stage["stopped_early"] else "its last step",
        ))  # fmt: skip
    changes = (
        run.cell("stages", format=f"change of {name}") if f"change of {name}" in FORMATS else ""
        for name in names
    )
    total = run.cell("clocks", "total_seconds", format="seconds")
    rows.append(("change", "", *changes, "", "", total, ""))
    head = ("stage", "trainable", *(plain(name.replace("_", " ")) for name in names), "epochs",
            "best epoch", "time", "ended by")  # fmt: skip
    note = (
        "Metrics are of each stage's best evaluation, at its best epoch. The last row has the "
        "change from the first stage to the last, positive when better, and the total time."
    )
    return Table("stages", "Stages", head, tuple(rows), note)


def _stages_figure(run: OneRun, stages: list[dict[str, Any]]) -> Figure:
    spans, start, before = [], 0.0, 0
    last_steps = []
    for number, stage in enumerate(stages, 1):
        name = short(plain(f"{number}: {stage['name']}"), 40)
        end = start + stage["seconds"]
        before += stage["steps"]
        last_steps.append(before)
        spans.append({"stage": name, "start": start, "end": end,
                      "text": f"{stage['seconds']:.4g} s"})  # fmt: skip
        start = end
    points, place, previous = [], 0, -1
    for event in run.evaluations:
        # an evaluation after a stage's last step, or at a smaller step than the one before, belongs
        # to the next stage
        while place < len(stages) - 1 and (event.step > last_steps[place] or event.step < previous):
            place += 1
        previous = event.step
        value = event.metrics.get(run.metric)
        if isinstance(value, int | float):
            points.append({"stage": spans[place]["stage"], "seconds": event.total_seconds,
                           "value": value,
                           "text": FORMATS[metric_format(run.metric)](value)})  # fmt: skip
    chart = run_figures.stages_in_time(spans, points, plain(run.metric))
    caption = (
        f"All stages on one axis of time: the bands are the stages, the points "
        f"{plain(run.metric)} at each evaluation on the split that selects the checkpoint."
    )
    return Figure("stages-in-time", "Stages in time", chart, caption, [*spans, *points],
                  (RESULT, EVENTS))  # fmt: skip


def _layers_figure(run: OneRun, stages: list[dict[str, Any]]) -> Figure | None:
    """Draw, for each layer, the loss that the model has if its head reads this layer's output.

    This loss is known for layers that have a loss in training and, after `frostlab exits`, for all
    layers. If the run's metric is the perplexity, the perplexity is drawn instead.
    """
    name = "perplexity" if run.metric == "perplexity" else "loss"
    points, files, split = [], [RESULT], "split that selects the checkpoint"
    for number, stage in enumerate(stages, 1):
        title = f"{number}: {stage['name']}" if len(stages) > 1 else split
        for layer, metrics in (stage["metrics"].get("layers") or {}).items():
            points.append((title, layer, metrics.get(name)))
    exits = run.value("exits", file="exits.json") or []
    if exits:
        files.append("exits.json")
    points += [("early exits, report split", layer["layer"], layer.get(name)) for layer in exits]
    rows = [
        {"stage": short(plain(stage), 40), "layer": int(layer), "value": value,
         "text": f"{value:.4g}"}
        for stage, layer, value in points
        if value is not None
    ]  # fmt: skip
    if not rows:
        return None
    caption = (
        f"{name.capitalize()} if the head reads the output of a layer: for the layers that have a "
        "loss in training, at each stage's best evaluation on the split that selects the checkpoint"
        + ("; and for every layer, with the best checkpoint on the report split." if exits else ".")
    )
    return Figure("layers", f"{name.capitalize()} by layer", run_figures.by_layer(rows, name),
                  caption, rows, tuple(files))  # fmt: skip


def _times(run: OneRun) -> list[Block]:
    clocks = run.value("clocks")
    if clocks is None:
        return []
    cells: dict[str, tuple[Cell, Cell | str]] = {
        "total": (run.cell("clocks", "total_seconds", format="hms"), ""),
        **{
            name: (run.cell("clocks", key, format="seconds"),
                   run.cell("clocks", format=f"share of {key}"))
            for name, key in (("training", "train_seconds"), ("validation", "validation_seconds"),
                              ("checkpoints and stage changes", "checkpoint_seconds"))
        },
        "waiting for data": (run.cell("clocks", format="data wait"), ""),
        "setup, before the total": (run.cell("clocks", "setup_seconds", format="seconds"), ""),
        "step, median": (run.cell("clocks", "step_ms", "median", format="ms"), ""),
        "step, 95 % quantile": (run.cell("clocks", "step_ms", "p95", format="ms"), ""),
        "step, coefficient of variation": (
            run.cell("clocks", "step_ms", "cv", format="percent"), ""),
        "tokens (EEG: samples)": (run.cell("clocks", "tokens_per_second", format="rate"), ""),
        "examples": (run.cell("clocks", "examples_per_second", format="rate"), ""),
        "padding": (run.cell("clocks", "padding_share", format="percent"), ""),
    }  # fmt: skip
    rows = tuple((name, *pair) for name, pair in cells.items() if pair[0].file)
    waited = clocks["data_seconds"] - clocks["data_overlapped_seconds"]
    parts = [
        {"part": name, "seconds": seconds, "text": f"{seconds:.4g} s"}
        for name, seconds in (
            ("training", clocks["train_seconds"]), ("validation", clocks["validation_seconds"]),
            ("checkpoints", clocks["checkpoint_seconds"]), ("waiting for data", max(0.0, waited)),
            ("setup, before the total", clocks["setup_seconds"]),
        )
    ]  # fmt: skip
    caption = "Where the time went. Setup comes before training and is not part of the total."
    return [
        Figure("times", "Where the time went", run_figures.times(parts), caption, parts, (RESULT,)),
        Table("times", "Times", ("", "value", "share of the total"), rows),
    ]


_HEAT = {
    "gradient": "Norm of the gradient that the optimizer got.",
    "ratio": "How far a step moved the weights, relative to their norm.",
}
_HEAT_KEY = (
    " A row is a part of the model or a whole layer. A column is a measured step or, if there are "
    "too many, the median of several steps. Brighter is larger. Signs: · frozen, - no gradient, "
    "! NaN or infinity; the digit zero is a value of zero."
)


def _names(parts: Sequence[str], most: int) -> str:
    """Join at most `most` names of parts."""
    more = " and more" if len(parts) > most else ""
    return plain(", ".join(parts[:most])) + more


def _flow(run: OneRun) -> list[Block]:
    flows = run.flows
    blocks: list[Block] = [*_targets(run)]
    for number, (stage, flow) in enumerate(flows.items(), 1):
        suffix = f"-{number}" if len(flows) > 1 else ""
        where = f" in stage {short(plain(stage), 40)}" if len(flows) > 1 else ""
        rows = [
            (finding.word, _names(finding.parts, 6),
             "" if finding.word in (LEARNING, FROZEN) else plain(finding.hint))
            for finding in findings_of(flow)
        ]  # fmt: skip
        columns = 3 if any(hint for _, _, hint in rows) else 2
        blocks.append(Table(
            f"flow-verdicts{suffix}", f"Verdicts on the parts{where}",
            ("verdict", "parts", "what to try")[:columns], tuple(row[:columns] for row in rows),
        ))  # fmt: skip
        for quantity, (chart, cells) in heat_charts(flow, 460).items():
            title = TITLES[quantity].capitalize()
            blocks.append(Figure(f"flow-{quantity}{suffix}", f"{title}{where}", chart,
                                 _HEAT[quantity] + _HEAT_KEY, cells, (EVENTS,)))  # fmt: skip
        norms = [{"step": step, "norm": norm} for step, norm in flow.norms().items()]
        blocks.append(Figure(
            f"flow-norm{suffix}", f"Norm of the whole gradient{where}",
            norm_chart(flow).properties(width=460),
            "The norm of the gradients of all parameters together, at every measured step.", norms,
            (EVENTS,),
        ))  # fmt: skip
        if (chart := front_chart(flow)) is not None:
            ends = [{"step": report.step, **report.largest} for report in flow.reports]
            caption = (
                "For each tensor, the largest absolute gradient is taken. The line is the average "
                "of these values over the first two layers' tensors, divided by the head's "
                "average. A dashed line is the threshold of the verdict that stands next to it."
            )
            blocks.append(Figure(f"flow-front{suffix}", f"Front over output gradient{where}",
                                 chart, caption, ends, (EVENTS,)))  # fmt: skip
    return blocks


def _targets(run: OneRun) -> list[Block]:
    targets = run.value("targets", file="targets.json")
    if not targets:
        return []
    rows = []
    for number, target in enumerate(targets):
        missed = target.get("reached") is False
        rows.append((
            plain(str(target.get("name", "")).replace("_", " ")),
            run.cell("targets", number, "value", file="targets.json", alarm=missed),
            _side(target),
            run.cell("targets", number, "wanted", file="targets.json"),
            "missed" if missed else "reached",
        ))  # fmt: skip
    head = ("target", "measured", "wanted", "", "result")
    return [Table("targets", "Targets of the diagnosis", head, tuple(rows))]


def _side(target: dict[str, Any]) -> str:
    """Return whether a good value lies below or above the target."""
    return "below" if metric_facts(str(target.get("name"))).lower_is_better else "above"


def _eeg(run: OneRun) -> list[Block]:
    return eeg_run.blocks(run.folder, run.records, run.problems)


def _samples(run: OneRun) -> list[Block]:
    return generated_texts(run.records, [("", "")], run.problems)


SECTIONS: tuple[tuple[str, str, Callable[[OneRun], list[Block]]], ...] = (
    ("results", "Results", _results),
    ("stages", "Stages", _stages),
    ("eeg", "Decoded speech", _eeg),
    ("samples", "Generated texts", _samples),
    ("curves", "Curves", _curves),
    ("times", "Times", _times),
    ("flow", "Gradient flow", _flow),
    ("parameters", "Parameters and memory", run_facts.parameters),
    ("data", "Data", run_facts.data),
    ("configuration", "Configuration", run_facts.configuration),
    ("environment", "Environment", run_facts.environment),
    ("notes", "Notes", run_facts.notes),
)

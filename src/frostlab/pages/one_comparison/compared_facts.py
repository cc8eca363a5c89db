"""The facts behind a comparison: differences, data, environment, rules, runs and methods."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from frostlab.comparison.evidence import VariedFact
from frostlab.errors import BadInput
from frostlab.pages.content import Block, Cell, Listing, Paragraph, Table, item, words
from frostlab.pages.one_comparison.compared_tables import COMPARISON, Row, arm_name, table
from frostlab.records.finding.annotations import ANNOTATIONS, read_annotations
from frostlab.storage import path_inside
from frostlab.text import plain

if TYPE_CHECKING:
    from frostlab.pages.one_comparison.compared import Compared

_SHOWN_CLASSES = 60  # most rows of the table of classes
_LENGTHS = {"least": "shortest", "median": "median", "mean": "mean", "most": "longest",
            "cut": "examples cut at the maximum length"}  # fmt: skip


def confounds(compared: "Compared") -> list[Paragraph]:
    """Return, in red, the settings that differ from the baseline's but are not compared."""
    return [
        item(f"{plain(name)} is confounded: it also differs from {compared.baseline} in ",
             compared.cell("confounds", name, format="list"), ".", alarm=True)
        for name, differing in compared.evidence.confounds.items()
        if differing
    ]  # fmt: skip


def refused_pairs(compared: "Compared") -> list[Paragraph]:
    """Return, in red, the runs that could not be paired, with the reason."""
    return [
        item(compared.cell("refused_pairs", number, "arm", format="text"), ", seed ",
             compared.cell("refused_pairs", number, "seed", format="count"), ", is not paired: ",
             compared.cell("refused_pairs", number, "reason", format="text"), ".", alarm=True)
        for number, _ in enumerate(compared.evidence.refused_pairs)
    ]  # fmt: skip


def differences(compared: "Compared") -> list[Block]:
    """Return everything in which the arms differ, and the tuned values of each arm."""
    evidence, plan = compared.evidence, compared.evidence.plan
    blocks: list[Block] = []
    if plan.vary:
        blocks.append(item("Compared settings: ", compared.cell("plan", "vary", format="list"),
                           ". Any other difference is listed below."))  # fmt: skip
        if any(key.partition(".")[0] == "model" for key in plan.vary):
            blocks.append(item("The model differs, so equal seeds need not give equal initial "
                               "weights."))  # fmt: skip
    blocks += confounds(compared)
    blocks += refused_pairs(compared)
    for number, _ in enumerate(evidence.partly_compared):
        keys = ("partly_compared", number)
        blocks.append(item(
            compared.cell(*keys, "arm", format="text"), " and ",
            compared.cell(*keys, "against", format="text"), ", seed ",
            compared.cell(*keys, "seed", format="count"),
            ": the order of examples was compared for the first ",
            compared.cell(*keys, "compared", format="count"), " of the ",
            compared.cell(*keys, "steps", format="count"), " steps that both took.", alarm=True,
        ))  # fmt: skip
    blocks += [_varied_fact(compared, number, fact)
               for number, fact in enumerate(evidence.varied_facts)]  # fmt: skip
    for number, setting in enumerate(evidence.tuning):
        pieces: list[str | Cell] = [f"{plain(setting.key)} was tuned for each arm with the same "
                                    "grid and seeds; best values:"]  # fmt: skip
        for name in compared.arms:
            pieces += [f" {plain(name)} ", compared.cell("tuning", number, "best", name),
                       " (at an end of the grid)" * setting.on_edge[name], ","]  # fmt: skip
        blocks.append(item(*pieces[:-1], ".", alarm=any(setting.on_edge.values())))
    if not evidence.pairs:
        blocks.append(item("No pair of runs finished, so nothing could be compared.", alarm=True))
    return blocks or [
        words("The arms differ only in the treatment: for every pair, the data, the examples of "
              "every step that both runs took, and the initial weights that no treatment changes "
              "are equal by digest, and device, precision, libraries and frostlab's code are "
              "equal.")
    ]  # fmt: skip


def _varied_fact(compared: "Compared", number: int, fact: VariedFact) -> Paragraph:
    pieces: list[str | Cell] = [
        compared.cell("varied_facts", number, "name", format="text"),
        " is not the same in all runs:",
    ]
    for value in fact.seeds:
        pieces += [f" {plain(value)} (seeds ",
                   compared.cell("varied_facts", number, "seeds", value, format="list"),
                   ");"]  # fmt: skip
    return item(*pieces, alarm=True)


def data(compared: "Compared") -> list[Block]:
    """Return the splits with their sources and lengths, and the examples of each class."""
    record = compared.evidence.data
    if record is None:
        return []
    rows: list[Row] = []
    lengths: list[Row] = []
    for split, own in record.splits.items():
        keys = ("data", "splits", split)
        rows.append([
            plain(split),
            *(compared.cell(*keys, key, format="count")
              for key in ("examples", "tokens", "recordings", "subjects")),
            compared.cell(*keys, "seconds", format="hms"),
            *(compared.cell(*keys, key, format="count")
              for key in ("empty", "duplicates", "contradictions")),
            compared.cell(*keys, "source", format="file name"),
            compared.cell(*keys, "note", format="text"),
            compared.cell(*keys, "digest", format="short digest"),
        ])  # fmt: skip
        if own.lengths is not None:
            lengths.append([plain(split), *(compared.cell(*keys, "lengths", key)
                                            for key in _LENGTHS)])  # fmt: skip
    head = ["split", "examples", "tokens", "recordings", "subjects", "duration", "empty texts",
            "repeated texts", "contradicting labels", "source", "note", "digest"]  # fmt: skip
    blocks: list[Block] = [table("splits", "Splits", head, rows,
                                 "The model learns from train; tune selects the checkpoint; report "
                                 "gives the reported numbers and, without tune, also selects the "
                                 "checkpoint.")]  # fmt: skip
    if lengths:
        blocks.append(table("lengths", "Lengths of the examples, in tokens",
                            ["split", *_LENGTHS.values()], lengths))  # fmt: skip
    if record.labels is not None:
        blocks.append(_classes(compared, record.labels))
    blocks += [item(compared.cell("data", "notes", number, format="text"), alarm=True)
               for number, _ in enumerate(record.notes)]  # fmt: skip
    return blocks


def _classes(compared: "Compared", labels: list[Any]) -> Table:
    assert compared.evidence.data is not None
    splits = list(compared.evidence.data.splits)
    rows = [
        [compared.cell("data", "labels", number, format="text"),
         *(compared.cell("data", "splits", split, "classes", number, format="count")
           for split in splits)]
        for number in range(min(len(labels), _SHOWN_CLASSES))
    ]  # fmt: skip
    note = "Further classes are in evidence.json." if len(labels) > _SHOWN_CLASSES else ""
    return table("classes", "Examples of each class", ["class", *map(plain, splits)], rows, note)


def environment(compared: "Compared") -> list[Block]:
    """Return the machine, the software and the command, and how to repeat the comparison."""
    keys = {"machine": "machine", "began": "began", "ended": "ended", "command": "command",
            "commit": "commit of frostlab", "code": "digest of frostlab's code",
            "plan": "digest of the plan", "data": "digest of the data",
            "source": "digest of the pretrained weights",
            "revision": "revision of the pretrained weights"}  # fmt: skip
    rows: list[Row] = [[title, compared.cell("made", key, format="text")]
                       for key, title in keys.items()]  # fmt: skip
    measured = {"gpu": ("GPU", "text"),
                "gpu_temp_start": ("GPU temperature at the start, °C", "number"),
                "gpu_temp_end": ("GPU temperature at the end, °C", "number")}  # fmt: skip
    rows += [[title, compared.records.cell(COMPARISON, "environment", key, format=form)]
             for key, (title, form) in measured.items()]  # fmt: skip
    rows += [[plain(name), compared.cell("made", "versions", name, format="text")]
             for name in compared.evidence.made.versions]  # fmt: skip
    rows.append(["runs at a time, at most", compared.cell("jobs", format="count")])
    rows = [row for row in rows if isinstance(row[1], Cell) and row[1].file is not None]
    note = "The machine, the software and the data are those of the first run."
    blocks: list[Block] = [
        table("environment", "Machine, software and command", ["fact", "value"], rows, note)
    ]
    if not compared.evidence.plan.runs:
        blocks.append(words("The command frostlab compare plan.json carries out the plan again, in "
                            "a new folder."))  # fmt: skip
    return blocks


def rules(compared: "Compared") -> list[Block]:
    """Return the rules of the verdicts, and the recipe that all arms share."""
    plan = compared.evidence.plan
    rows: list[Row] = [
        ["metric", compared.cell("plan", "rules", "metric", format="text")],
        ["better", "lower values" if plan.rules.lower_is_better else "higher values"],
        ["compared as", "ratio" if plan.rules.log else "difference"],
        ["alpha: accepted probability of a false alarm over all looks (analyses of the results)",
         compared.cell("plan", "rules", "alpha")],
        ["confidence of the statements about the metric", compared.cell(format="confidence")],
        ["margin: the largest cost that is acceptable",
         "not set" if plan.rules.margin is None else compared.cell(format="margin")],
        ["smallest effect of interest",
         "not set" if plan.rules.minimum_effect is None
         else compared.cell("plan", "rules", "minimum_effect")],
        ["planned looks", compared.cell("plan", "rules", "looks", format="count")],
        ["number of this look", compared.cell("look", format="count")],
        ["seeds", compared.cell("plan", "seeds", format="list")],
        ["allowed confounds", compared.cell("plan", "allow_confounds", format="list")],
        ["planted harm (the baseline with half its steps)", "yes" if plan.assay else "no"],
        ["further runs per arm, to be timed", compared.cell("plan", "rounds", format="count")],
    ]  # fmt: skip
    if plan.rules.timed:
        rows.append(["confidence of the statements about time",
                     compared.cell(format="time confidence")])  # fmt: skip
    if plan.clock is not None:
        rows.append(["time for measuring steps",
                     compared.cell("plan", "clock", "seconds", format="seconds")])  # fmt: skip
    for number, setting in enumerate(plan.tune):
        rows.append([f"grid of {plain(setting.key)}",
                     compared.cell("plan", "tune", number, "values", format="list")])  # fmt: skip
    settings: list[Row] = [[plain(".".join(map(str, keys))), compared.cell("plan", "recipe", *keys,
                                                                format="json")]
                for keys in _settings(plan.recipe)]  # fmt: skip
    return [
        table("rules", "Rules", ["rule", "value"], rows),
        table("settings", "The recipe that all arms share", ["setting", "value"], settings,
              "Settings without a value are left out."),
    ]  # fmt: skip


def _settings(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys of all settings that have a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _settings(value, (*above, key))
        elif value not in (None, "", [], {}, ()):
            yield (*above, key)


def runs(compared: "Compared") -> list[Block]:
    """Return a table of every run; a run that did not finish is red."""
    metric = compared.evidence.rules.metric
    rows: list[Row] = []
    for name in compared.arms:
        for number, run in enumerate(compared.evidence.arms[name].runs):
            keys, failed = ("arms", name, "runs", number), not run.finished
            rows.append([
                arm_name(compared, name),
                compared.cell(*keys, "seed", format="count", alarm=failed),
                compared.cell(*keys, "status", format="text", alarm=failed),
                compared.cell(*keys, "error", format="text", alarm=True),
                compared.cell(*keys, "attempts", format="count", alarm=run.attempts > 1),
                compared.cell(*keys, "steps", format="count"),
                compared.cell(*keys, "metrics", metric),
                compared.cell(*keys, "final_loss"),
                compared.cell(*keys, "total_seconds", format="hms"),
                compared.cell(*keys, "folder", format="text"),
            ])  # fmt: skip
    head = ["arm", "seed", "status", "error", "attempts", "steps", metric, "final loss", "time",
            "folder"]  # fmt: skip
    note = "Final loss: the loss in the last evaluation on the split that selects the checkpoint."
    return [table("runs", "Runs by arm and seed", head, rows, note)]


def notes(compared: "Compared") -> list[Block]:
    """Return the notes and tags that users gave to the comparison and to its runs."""
    folders = [("the comparison", "")]
    folders += [
        (f"{name}, {run.folder}", run.folder)
        for name in compared.arms
        for run in compared.evidence.arms[name].runs
    ]
    rows: list[Row] = []
    for title, place in folders:
        try:
            folder = path_inside(compared.folder, place)
            annotations = read_annotations(folder)
        except BadInput:  # the run is outside of the comparison's folder, or its notes are damaged
            continue
        file = f"{place}/{ANNOTATIONS}".lstrip("/")
        for number, _ in enumerate(annotations.notes):
            rows.append([
                plain(title), compared.records.cell(file, "notes", number, "at", format="day"),
                compared.records.cell(file, "notes", number, "text", format="text"), "",
            ])  # fmt: skip
        if annotations.tags:
            rows.append([plain(title), "", "",
                         compared.records.cell(file, "tags", format="list")])  # fmt: skip
    if not rows:
        return []
    return [table("notes", "What users noted", ["about", "day", "note", "tags"], rows)]


def methods(compared: "Compared") -> list[Block]:
    """Return a paragraph for a paper and an entry for its bibliography."""
    evidence, plan = compared.evidence, compared.evidence.plan
    metric, ratio = plain(evidence.rules.metric), evidence.rules.log
    other_models = any(key.partition(".")[0] == "model" for key in plan.vary)
    pieces: list[str | Cell] = [
        "We compared ", compared.cell("plan", "arms", format="length"), " arms of one recipe (",
        compared.records.cell(COMPARISON, "model", format="text"), " on ",
        compared.records.cell(COMPARISON, "dataset", format="text"), ") with ",
        compared.cell("plan", "seeds", format="length"),
        " seeds each; arms with the same seed see the same examples in the same order, and start "
        "from the same weights, except for those that a treatment changes",
        "; arms whose models differ start from different weights. " if other_models else ". ",
    ]  # fmt: skip
    for name in compared.arms:
        pieces += [f"In the arm {plain(name)}, the treatment is: ",
                   compared.cell("arms", name, "does", format="text"), ". "]  # fmt: skip
    for number, setting in enumerate(plan.tune):
        pieces += [f"{plain(setting.key)} was tuned for every arm on the same grid (",
                   compared.cell("tuning", number, "values", format="list"),
                   "); for each seed, the value with the best score over the other seeds "
                   "was used. "]  # fmt: skip
    mean = "geometric mean of the ratios to" if ratio else "mean of the differences from"
    pieces += [
        f"The effect on {metric} is the {mean} {compared.baseline}, paired by seed, with "
        "intervals that hold simultaneously for all statements (confidence ",
        compared.cell(format="confidence"), "). ",
    ]  # fmt: skip
    if evidence.timing is not None:
        pieces += [
            "Steps were timed in turns in one process, against further copies of the baseline as "
            "controls, on ", compared.cell("timing", "device", format="text"), ". ",
        ]  # fmt: skip
    fixed = "after the runs had ended" if plan.runs else "before the runs"
    pieces += [f"All rules were fixed {fixed}. The runs were trained on ",
               compared.cell("made", "machine", format="text"), " with PyTorch ",
               compared.cell("made", "versions", "torch", format="text"), " and frostlab ",
               compared.cell("made", "versions", "frostlab", format="text"), "."]  # fmt: skip
    commit: list[str | Cell] = []
    if evidence.made.commit is not None:
        commit = ["  note = {commit ", compared.cell("made", "commit", format="text"), "},\n"]
    entry = Listing((
        "@software{frostlab,\n  title = {frostlab: which weights of a transformer learn, and what "
        "difference does that make?},\n  author = {{The frostlab authors}},\n  version = {",
        compared.cell("made", "versions", "frostlab", format="text"), "},\n  year = {",
        compared.cell("made", "ended", format="year"), "},\n", *commit, "}",
    ))  # fmt: skip
    return [words(*pieces), entry]

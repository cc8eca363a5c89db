"""The report of several comparisons: every treatment on every data set, and the means over them.

The reported folder is a group's folder, or a folder of comparisons and groups. A number about one
comparison comes from the comparison's evidence.json. A mean over comparisons comes from means.json,
which is written with the report. A number about a group comes from the group's summary.json. In
the section of reported results, the sources are the published studies that a group repeats.
"""

from collections.abc import Sequence
from pathlib import Path

from frostlab.comparison.evidence import ArmVerdict
from frostlab.comparison.judging.verdict import JUDGED
from frostlab.experiments.collection import Member, read_groups, read_members
from frostlab.experiments.means import MEANS, By, Mean
from frostlab.experiments.summary import (
    MODELS,
    SUMMARY,
    ComparisonSummary,
    model_name,
)
from frostlab.pages.content import (
    Block,
    Cell,
    Document,
    Paragraph,
    Records,
    Section,
    Table,
    item,
    words,
)
from frostlab.pages.several.figures import Several, effect_figures, in_brackets, is_dense
from frostlab.text import NONE, plain

Row = tuple[str | Cell, ...]
_PAGE = "report.html"
_ITEMS = 12  # the first screen lists verdicts only if there are at most this many


# The page


def document(folder: Path, language: str) -> Document:
    """Return the report of several comparisons."""
    groups, problems = read_groups(folder)
    several = Several(
        folder, read_members(folder), groups, tuple(problems), Records(folder), language
    )
    sections = []
    for name, title, make in SECTIONS:
        if blocks := make(several):
            sections.append(Section(name, title, tuple(blocks)))
    own = several.groups.get("")
    cautions = dict.fromkeys(
        evidence.caution for _, evidence in several.finished if evidence.caution is not None
    )
    kind = ", with the published settings" if own is not None and own.as_published else ""
    title = f"Comparisons: {folder.resolve().name}" if own is None else own.group
    return Document(
        title=plain(f"{title}{kind}"),
        about=plain(own.about) if own else "What each treatment changed, on each data set.",
        first=tuple(_first_screen(several)),
        sections=tuple(sections),
        arms=several.arms,
        language=language,
        caution="; ".join(cautions) or None,
        problems=tuple(map(plain, several.problems)),
        records={MEANS: several.means.to_dict()},
    )


def _first_screen(several: Several) -> list[Block]:
    blocks: list[Block] = []
    means = [(number, mean) for number, mean in enumerate(several.means.means) if mean.by == "all"]
    if not several.finished:
        blocks.append(words("No comparison here is finished, so there is nothing to compare yet.",
                            alarm=True))  # fmt: skip
    for number, mean in means:
        blocks.append(item(
            f"{plain(mean.arm)} on {plain(mean.metric)}{in_brackets(mean.shortcomings)}: ",
            several.records.cell(MEANS, "means", number, "effect", format="effect"),
            ", the mean over ",
            several.records.cell(MEANS, "means", number, "comparisons", format="length"),
            " comparisons; verdicts: ",
            several.records.cell(MEANS, "means", number, "verdicts",
                                 format=f"verdict counts in {several.language}"), ".",
            alarm=bool(mean.shortcomings),
        ))  # fmt: skip
    if not means:
        effects = [(member, arm) for member, evidence in several.finished
                   for arm in evidence.verdicts]  # fmt: skip
        blocks += [
            item(f"{plain(member.name)}, {plain(arm)}: ",
                 several.cell(member, "verdicts", arm,
                              format=f"verdict in {several.language}"), ".")
            for member, arm in effects
            if len(effects) <= _ITEMS
        ]  # fmt: skip
    blocks += _doubts(several)
    return [*blocks, *effect_figures(several)]


def _doubts(several: Several) -> list[Paragraph]:
    """Return, in red, the comparisons that are unfinished or unreadable, and all warnings."""
    blocks = [
        item(f"{plain(member.name)}: {plain(member.problem)}.", alarm=True)
        for member in several.members
        if member.problem is not None
    ]
    cautions: dict[str, list[Member]] = {}
    confounded: dict[tuple[str, tuple[str, ...]], list[Member]] = {}
    for member, evidence in several.finished:
        if evidence.caution:
            cautions.setdefault(evidence.caution, []).append(member)
        for arm, confounds in evidence.confounds.items():
            if confounds:
                confounded.setdefault((arm, confounds), []).append(member)
    blocks += [
        item("Caution: ", several.cell(members[0], "caution", format="text"),
             f" ({_names(members)}).", alarm=True)
        for members in cautions.values()
    ]  # fmt: skip
    blocks += [
        item(f"{plain(arm)} is confounded by ",
             several.cell(members[0], "confounds", arm, format="list"), f" ({_names(members)}).",
             alarm=True)
        for (arm, _), members in confounded.items()
    ]  # fmt: skip
    quick = [member for member, evidence in several.finished if evidence.plan.quick]
    if quick:
        blocks.append(item(f"Quick, with shortened runs: {_names(quick)}.", alarm=True))
    return blocks


def _names(members: Sequence[Member]) -> str:
    return plain(", ".join(member.name for member in members))


# Sections


def _verdicts(several: Several) -> list[Block]:
    """Return a table of comparisons × arms or, if that is wide or sparse, with a row per effect."""
    effects = sum(len(evidence.verdicts) for _, evidence in several.finished)
    dense = is_dense(effects, len(several.finished), len(several.arms))
    rows: list[Row] = []
    for member in several.members:
        link = Cell(plain(member.name), link=f"{member.name}/{_PAGE}")
        if (evidence := member.evidence) is None:
            rest = [NONE] * (3 + (len(several.arms) if dense else 3))
            rows.append((link, Cell(plain(member.problem), alarm=True), *rest))
            continue
        facts = (
            link,
            several.cell(member, "plan", "recipe", "data", "name", format="text"),
            plain(model_name(evidence.plan.recipe["model"])),
            several.cell(member, "plan", "rules", "metric", format="text"),
            several.cell(member, "arms", evidence.baseline, "metrics", evidence.rules.metric,
                         format="summary"),
        )  # fmt: skip
        verdicts = evidence.verdicts
        if dense:
            cells = [_verdict_cell(several, member, verdicts.get(arm), arm) for arm in several.arms]
            rows.append((*facts, *cells))
        else:
            rows += [
                (*facts, plain(arm), several.cell(member, "verdicts", arm, "paired",
                                                  format="effect"),
                 several.cell(member, "verdicts", arm, "word",
                              format=f"word in {several.language}",
                              alarm=verdict.word not in JUDGED))
                for arm, verdict in verdicts.items()
            ]  # fmt: skip
    arms = several.arms if dense else ("arm", "effect", "verdict")
    head = ("comparison", "data", "model", "metric", "baseline", *map(plain, arms))
    note = (
        "The verdict, and the paired effect against the baseline with its interval: a difference, "
        "or a ratio (×) for metrics such as perplexity. The intervals of one comparison hold "
        "simultaneously. In red: arms that could not be judged. Each name links to the "
        "comparison's own report."
    )
    return [Table("verdicts", "Verdicts and effects", head, tuple(rows), note)]


def _verdict_cell(
    several: Several, member: Member, verdict: ArmVerdict | None, arm: str
) -> str | Cell:
    if verdict is None:
        return ""
    alarm = verdict.word not in JUDGED
    shown = f"verdict in {several.language}"
    return several.cell(member, "verdicts", arm, format=shown, alarm=alarm)


def _mean_rows(several: Several, by: By) -> list[tuple[int, Mean]]:
    return [(n, mean) for n, mean in enumerate(several.means.means) if mean.by == by]


def _mean_cells(several: Several, number: int) -> tuple[Cell, ...]:
    return tuple(
        several.records.cell(MEANS, "means", number, key, format=style)
        for key, style in (("effect", "effect"), ("retained", "percent"), ("comparisons", "length"),
                           ("verdicts", f"verdict counts in {several.language}"))
    )  # fmt: skip


_MEAN_HEAD = ("mean effect", "share of the baseline", "comparisons", "verdicts")
_MEAN_NOTE = (
    "Every comparison has the same weight. Each mean has its own 95 % interval (Welch's), which is "
    "about these comparisons and not about other data. Where a row has only one comparison, its "
    "effect and interval are those of its verdict. The share of the baseline is the geometric mean "
    "of the arm's metric divided by the baseline's (the inverse if lower values are better), so "
    "that more is better. Confounded comparisons, and reduced ones (scaled down, "
    "shortened, or with substitutes for missing data or models), have means of their own."
)


def _means(several: Several) -> list[Block]:
    rows: tuple[Row, ...] = tuple(
        (_arm_of(mean), plain(mean.metric),
         *_mean_cells(several, number))
        for number, mean in _mean_rows(several, "all")
    )  # fmt: skip
    if not rows:
        return []
    head = ("arm", "metric", *_MEAN_HEAD)
    return [Table("means", "Mean effects", head, rows, _MEAN_NOTE)]


def _models(several: Several) -> list[Block]:
    """Return the mean effects on BERT and GPT, of the arms that were compared on both."""
    means = _shared([(n, mean) for n, mean in _mean_rows(several, "model") if mean.value in MODELS])
    if not means:
        return []
    rows: list[Row] = [
        (_arm_of(mean), plain(mean.metric), mean.value,
         *_mean_cells(several, number))
        for number, mean in sorted(means, key=lambda pair: _order(several, pair[1]))
    ]  # fmt: skip
    head = ("arm", "metric", "model", *_MEAN_HEAD)
    blocks: list[Block] = [Table("models", "Mean effects by model", head, tuple(rows), _MEAN_NOTE)]
    for number, contrast in enumerate(several.means.contrasts):
        first, second = contrast.models
        what = "divided by" if contrast.effect.log else "minus"
        blocks.append(item(
            f"{plain(contrast.arm)} on {plain(contrast.metric)}"
            f"{in_brackets(contrast.shortcomings)}: the effect on {first} {what} that on "
            f"{second} is ",
            several.records.cell(MEANS, "contrasts", number, "effect", format="effect"), ".",
        ))  # fmt: skip
    if not several.means.contrasts:
        blocks.append(words("No arm has effects on the same metric, with the same shortcomings "
                            "(confounded, reduced), for both models, so the models are not "
                            "contrasted."))  # fmt: skip
    return blocks


def _arm_of(mean: Mean) -> str:
    return plain(mean.arm) + in_brackets(mean.shortcomings)


def _shared(means: Sequence[tuple[int, Mean]]) -> list[tuple[int, Mean]]:
    """Return the means of the arms that occur with several models or tasks."""
    values: dict[str, set[str]] = {}
    for _, mean in means:
        values.setdefault(mean.arm, set()).add(mean.value)
    return [(number, mean) for number, mean in means if len(values[mean.arm]) > 1]


def _order(several: Several, mean: Mean) -> tuple[int, str, str]:
    return several.arms.index(mean.arm), mean.metric, mean.value


def _tasks(several: Several) -> list[Block]:
    """Return the mean effects by task, of the arms that occur in several tasks."""
    means = _shared(_mean_rows(several, "task"))
    if not means:
        return []
    rows: tuple[Row, ...] = tuple(
        (_arm_of(mean), mean.value, plain(mean.metric),
         *_mean_cells(several, number))
        for number, mean in sorted(means, key=lambda pair: _order(several, pair[1]))
    )  # fmt: skip
    head = ("arm", "task", "metric", *_MEAN_HEAD)
    note = f"The tasks have different metrics, so compare the shares of the baseline. {_MEAN_NOTE}"
    return [Table("tasks", "Mean effects by task", head, rows, note)]


def _entry_of(several: Several, member: Member) -> tuple[int, ComparisonSummary] | None:
    """Return a comparison's place in its group's summary, and its entry there."""
    summary = several.groups.get(member.group) if member.group is not None else None
    if summary is None:
        return None
    own = Path(member.name).name
    entries = enumerate(summary.comparisons)
    return next(((number, entry) for number, entry in entries if entry.name == own), None)


def _reported(several: Several) -> list[Block]:
    """Return the results next to those that the sources reported."""
    rows: list[Row] = []
    for member, evidence in several.finished:
        placed = _entry_of(several, member)
        if placed is None or member.group is None:
            continue
        number, entry = placed
        file = str(Path(member.group) / SUMMARY)
        for place, arm in enumerate(entry.arms):
            for metric in arm.reported:
                if arm.arm not in evidence.arms:
                    continue
                at = ("comparisons", number, "arms", place)
                rows.append((
                    Cell(plain(member.name), link=f"{member.name}/{_PAGE}"), plain(arm.arm),
                    several.records.cell(file, *at, "experiment", format="text"), plain(metric),
                    _measured(several, member, arm.arm, metric),
                    several.records.cell(file, *at, "reported", metric,
                                         format="hms" if metric == "total_seconds" else "number"),
                ))  # fmt: skip
    if not rows:
        return []
    head = ("comparison", "arm", "experiment", "metric", "here", "reported")
    note = (
        "Here: mean ± standard deviation over the finished runs that can be paired, for times the "
        "mean alone. Reported: the "
        "number in the published studies (sources), mostly of one run on another machine."
    )
    return [Table("reported", "Results here and in the sources", head, tuple(rows), note)]


def _measured(several: Several, member: Member, arm: str, metric: str) -> Cell:
    if metric == "total_seconds":
        return several.cell(member, "arms", arm, "seconds", "mean", format="hms")
    return several.cell(member, "arms", arm, "metrics", metric, format="summary")


def _times(several: Several) -> list[Block]:
    """Return the step times relative to the baseline's."""
    rows: list[Row] = []
    for member, evidence in several.finished:
        if evidence.timing is None:
            continue
        alarm = not evidence.timing.proven
        rows.append((
            Cell(plain(member.name), link=f"{member.name}/{_PAGE}"),
            several.cell(member, "timing", "device", format="text"),
            Cell("unproven", alarm=True) if alarm else "proven",
            *(several.cell(member, "timing", "arms", arm, format="step ratio", alarm=alarm)
              if arm in evidence.verdicts else "" for arm in several.arms),
        ))  # fmt: skip
    if not rows:
        return []
    head = ("comparison", "device", "timing", *map(plain, several.arms))
    note = (
        "The time of a step divided by the baseline's, from steps that the arms took in turn. "
        "Unproven: the timing failed a check, so no verdict is drawn from these times."
    )
    return [
        Table("step-times", "Time of a step relative to the baseline's", head, tuple(rows), note)
    ]


def _answers(several: Several) -> list[Block]:
    """Return the answers about a whole group, and on how effects differ between comparisons."""
    blocks: list[Block] = []
    for group, summary in several.groups.items():
        file = str(Path(group) / SUMMARY)
        for key in ("questions", "interactions"):
            for number, answered in enumerate(getattr(summary, key)):
                blocks.append(words(f"{plain(f'{group}: ' if group else '')}",
                                    several.records.cell(file, key, number, "question",
                                                         format="text"), " ",
                                    several.records.cell(file, key, number, "answer",
                                                         format="text")))  # fmt: skip
                blocks += [
                    item(f"{plain(name)}: ",
                         several.records.cell(file, key, number, "by_comparison", name,
                                              format="text"))
                    for name in answered.by_comparison
                ]  # fmt: skip
    return blocks


def _further(several: Several) -> list[Block]:
    """Return the scores of the runs' best weights on further data."""
    rows: list[Row] = []
    for group, summary in several.groups.items():
        file = str(Path(group) / SUMMARY)
        for number, result in enumerate(summary.further):
            for arm in result.arms:
                at = ("further", number, "arms", arm)
                rows.append((
                    plain(str(Path(group) / result.comparison)), plain(result.data), plain(arm),
                    plain(result.metric), several.records.cell(file, *at, "summary",
                                                               format="summary"),
                    several.records.cell(file, *at, "gap", format="effect"),
                    several.records.cell(file, "further", number, "n", format="count"),
                    several.records.cell(file, "further", number, "caution", format="text"),
                ))  # fmt: skip
    if not rows:
        return []
    head = ("comparison", "data", "arm", "metric", "mean", "against the baseline", "examples",
            "caution")  # fmt: skip
    note = (
        "The best weights of each run on further data. In each comparison, the intervals of all "
        "these data and arms hold simultaneously. No verdict is drawn from these means."
    )
    return [Table("further", "Results on further data", head, tuple(rows), note)]


def _list(several: Several) -> list[Block]:
    """Return every comparison with its state."""
    rows: list[Row] = []
    for member in several.members:
        link = Cell(plain(member.name), link=f"{member.name}/{_PAGE}")
        if member.evidence is None:
            rows.append((link, Cell(plain(member.problem), alarm=True), NONE, NONE, NONE))
            continue
        bad = any(not run.finished for arm in member.evidence.arms.values() for run in arm.runs)
        rows.append((
            link, "finished",
            several.cell(member, "plan", "seeds", format="length"),
            several.cell(member, "arms", format="finished of all arms", alarm=bad),
            several.cell(member, "made", "ended", format="text"),
        ))  # fmt: skip
    begun = {(member.group, Path(member.name).name) for member in several.members}
    rows += [
        (plain(str(Path(group) / entry.name)), entry.status, NONE, NONE, NONE)
        for group, summary in several.groups.items()
        for entry in summary.comparisons
        if (group, entry.name) not in begun
    ]
    head = ("comparison", "state", "seeds", "runs that finished", "ended")
    return [Table("comparisons", "State of every comparison", head, tuple(rows))]


SECTIONS = (
    ("verdicts", "Data sets and treatments", _verdicts),
    ("means", "Means over the comparisons", _means),
    ("models", "BERT against GPT", _models),
    ("tasks", "Classification against generation", _tasks),
    ("reported", "What the sources reported", _reported),
    ("answers", "Questions", _answers),
    ("times", "Step times", _times),
    ("further", "Further data", _further),
    ("comparisons", "Comparisons", _list),
)

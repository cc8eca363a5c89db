"""The summary of a group as a Markdown page, and as text for the terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from frostlab.experiments.further import FurtherResult
from frostlab.experiments.plans import other_settings
from frostlab.experiments.summary import (
    Answered,
    ArmSummary,
    ComparisonSummary,
    GroupSummary,
    TimeGap,
    effect_text,
)
from frostlab.text import (
    NONE,
    Markdown,
    columns,
    counted,
    escaped,
    markdown,
    number,
    plain,
    wrapped,
)

_PUBLISHED = (
    "As published: the arms have the treatments, learning rates, splits and baseline of the "
    "published studies (the sources). An arm that differs from the baseline in more than its "
    "treatment is confounded: its difference may come from any of the settings that differ."
)
_FAIR = (
    "Fair: the arms of a comparison differ only in what is compared, and a tuned setting has the "
    "same grid for every arm."
)
_NOTE = (
    "Metric: mean ± standard deviation over the finished runs that can be paired. Gap: the paired "
    "effect against the baseline with its interval, a ratio for perplexity. Retained: the metric "
    "divided by the baseline's (the inverse if lower values are better), so more is better. "
    "Source: the number that a published study reported. Step time: relative to the baseline's, "
    "from steps that the arms took in turn; if the timing is unproven, it cannot be trusted, and "
    "the comparison's page says why."
)
_FURTHER = (
    "The best weights of each run, evaluated on further data. In each comparison, the intervals of "
    "all these data and arms hold simultaneously. If a setting was tuned, they do not include the "
    "uncertainty of which value is best. No verdict is drawn from them. n: the number of examples, "
    "tokens or subjects."
)
_INTERACTION = (
    "The effect of an arm in one comparison minus its effect in another (a ratio for perplexity), "
    "paired by seed. If a setting was tuned, the intervals do not include the uncertainty of which "
    "value is best."
)


def title(summary: GroupSummary) -> str:
    """Return the group's name, and whether its comparisons are as published or fair."""
    return f"{summary.group}, {'as published' if summary.as_published else 'fair'}"


def summary_page(summary: GroupSummary) -> str:
    """Return the whole summary in Markdown."""
    kind = _PUBLISHED if summary.as_published else _FAIR
    parts = [f"# {escaped(title(summary))}", escaped(summary.about), kind, _NOTE]
    parts += [_section(entry, summary.as_published) for entry in summary.comparisons]
    if summary.questions:
        parts.append(f"## The five questions of the OELM study\n\n{_numbered(summary.questions)}")
    if summary.interactions:
        text = _numbered(summary.interactions)
        parts.append(f"## Between the comparisons\n\n{_INTERACTION}\n\n{text}")
    if summary.further:
        tables = [
            f"### {escaped(name)}\n\n{markdown(*_further_table(rows))}"
            + "".join(f"\n\nCaution: {escaped(caution)}." for caution in _cautions(rows))
            for name, rows in _by_comparison(summary.further).items()
        ]
        parts.append("\n\n".join(["## Further data", _FURTHER, *tables]))
    return "\n\n".join(parts) + "\n"


def _section(comparison: ComparisonSummary, as_published: bool) -> str:
    """Return one comparison as a section of the page."""
    heading = f"## {escaped(comparison.name)}"
    if comparison.status != "finished":
        return f"{heading}\n\n{comparison.status.capitalize()}."
    head = ["arm", str(comparison.metric), "gap", "verdict", "retained", "source", "step time",
            "verdict on time", "confounded by"]  # fmt: skip
    rows = [
        [
            arm.arm,
            _spread(arm.mean, arm.std),
            "" if arm.gap is None else effect_text(arm.gap),
            arm.verdict or "",
            _share(arm.retained),
            _reported(arm, comparison.metric),
            _time(arm.time),
            _time_verdict(arm.time),
            ", ".join(arm.confounds),
        ]
        for arm in comparison.arms
    ]
    facts = f"{comparison.model} on {comparison.data}, {counted(comparison.seeds, 'seeds')}"
    page = f"{quote(comparison.name)}/comparison.md"
    lines = [
        f"{escaped(facts)}; [page]({page}).",
        *map(escaped, _remarks(comparison, as_published)),
    ]
    listed = [Markdown(f"- {escaped(arm.sentence)}") for arm in comparison.arms if arm.sentence]
    return "\n\n".join([heading, " ".join(lines), markdown(head, rows), "\n".join(listed)])


def _remarks(comparison: ComparisonSummary, as_published: bool) -> list[str]:
    """Return the sentences that qualify the numbers of a comparison."""
    reasons = [reason for reason in comparison.reduced if reason not in (comparison.caution or "")]
    lines = [f"Not the whole experiment: {reason}." for reason in reasons]
    if comparison.changed:
        lines.append(f"{other_settings(as_published)}: {', '.join(comparison.changed)}.")
    lines += [f"Caution: {comparison.caution}."] if comparison.caution else []
    if comparison.baseline_treated:
        lines.append(f"The baseline was changed, too: {comparison.baseline_treated}.")
    return lines


def show_summary(summary: GroupSummary, page: Path, width: int | None = 80) -> str:
    """Return the summary as text for the terminal; `page` is the path of the Markdown page."""
    lines = [f"{title(summary)}: {summary.about}"]
    for comparison in summary.comparisons:
        lines += ["", *_lines(comparison, summary.as_published, width)]
    for name, rows in _by_comparison(summary.further).items():
        head, body = _further_table(rows)
        lines += ["", f"{name} on further data", *columns([head, *body], {2, 3, 4}, width)]
        lines += [f"caution: {caution}" for caution in _cautions(rows)]
    for entry in (*summary.questions, *summary.interactions):
        lines += ["", f"{entry.question} {entry.answer}".rstrip()]
        lines += [f"  {name}: {answer}" for name, answer in entry.by_comparison.items()]
    text = [part for line in lines for part in wrapped(plain(line), width)]
    return "\n".join([*text, "", plain(f"page: {page}")])


def _lines(comparison: ComparisonSummary, as_published: bool, width: int | None) -> list[str]:
    """Return one comparison as lines: remarks, a table of its arms, a line for each verdict."""
    if comparison.status != "finished":
        return [f"{comparison.name}: {comparison.status}"]
    rows = [["arm", str(comparison.metric), "gap", "retained", "source"]]
    rows += [
        [arm.arm, _spread(arm.mean, arm.std), "" if arm.gap is None else effect_text(arm.gap),
         _share(arm.retained), _reported(arm, comparison.metric)]
        for arm in comparison.arms
    ]  # fmt: skip
    facts = f"{comparison.model} on {comparison.data}, {counted(comparison.seeds, 'seeds')}"
    lines = [f"{comparison.name}: {facts}", *_remarks(comparison, as_published)]
    lines += columns(rows, {1, 2, 3, 4}, width)
    for arm in comparison.arms:
        if arm.verdict is not None:
            by = f" by {', '.join(arm.confounds)}" if arm.confounds else ""
            time = f"; step time {_time(arm.time)}: {_time_verdict(arm.time)}" if arm.time else ""
            lines.append(f"{arm.arm}: {arm.verdict}{by}{time}")
    return lines


def _numbered(answers: Iterable[Answered]) -> str:
    lines = []
    for index, entry in enumerate(answers, 1):
        lines.append(f"{index}. **{escaped(entry.question)}** {escaped(entry.answer)}".rstrip())
        for name, answer in entry.by_comparison.items():
            lines.append(f"   - {escaped(f'{name}: {answer}')}")
    return "\n".join(lines)


def _by_comparison(results: Sequence[FurtherResult]) -> dict[str, list[FurtherResult]]:
    grouped: dict[str, list[FurtherResult]] = {}
    for result in results:
        grouped.setdefault(result.comparison, []).append(result)
    return grouped


def _further_table(results: Sequence[FurtherResult]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table by data and arm."""
    rows = []
    for entry in results:
        for index, (name, arm) in enumerate(entry.arms.items()):
            summary = arm.summary
            mean = NONE if summary is None else _spread(summary.mean, summary.std)
            gap = "" if arm.gap is None else effect_text(arm.gap)
            first = index == 0
            rows.append([entry.data * first, name, mean, gap, f"{entry.n:,}" * first])
    return ["data", "arm", results[0].metric, "gap", "n"], rows


def _cautions(results: Sequence[FurtherResult]) -> list[str]:
    """Return each caution with the data that it is about."""
    about: dict[str, list[str]] = {}
    for result in results:
        if result.caution:
            about.setdefault(result.caution, []).append(result.data)
    return [f"{', '.join(names)}: {caution}" for caution, names in about.items()]


def _spread(mean: float | None, std: float | None) -> str:
    if mean is None:
        return NONE
    return f"{mean:.4g}" + ("" if std is None else f" ± {std:.2g}")


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _reported(arm: ArmSummary, metric: str | None) -> str:
    """Format the source's number for the metric, or else its other numbers with their names."""
    if metric in arm.reported:
        return number(arm.reported[metric])
    return ", ".join(f"{name} {number(value)}" for name, value in arm.reported.items())


def _time(time: TimeGap | None) -> str:
    if time is None or time.ratio is None:
        return ""
    ends = "" if time.low is None or time.high is None else f" [{time.low:.3f}, {time.high:.3f}]"
    return f"{time.ratio:.3f} ×{ends}"


def _time_verdict(time: TimeGap | None) -> str:
    if time is None or time.verdict is None:
        return ""
    return time.verdict if time.proven else f"{time.verdict} (timing unproven)"

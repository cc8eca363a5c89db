"""Several comparisons with the means over them, and the figure of their effects."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from frostlab.charts import GREY, label, require_drawing
from frostlab.comparison.evidence import Effect, Evidence
from frostlab.experiments.collection import EVIDENCE, Member
from frostlab.experiments.means import MEANS, Means, means_of
from frostlab.experiments.summary import GroupSummary, reduced_by
from frostlab.pages.chart_parts import WIDTH, arm_colour, arm_shape, toggled
from frostlab.pages.content import Block, Cell, Figure, Records
from frostlab.text import plain

_MEAN = "mean"  # label of the row of means
_COLUMNS = 6  # most arms in a table of comparisons × arms


@dataclass(frozen=True)
class Several:
    """The comparisons of a folder, from which every section is made."""

    folder: Path
    members: tuple[Member, ...]
    groups: dict[str, GroupSummary]  # a group's path in the reported folder → its summary
    problems: tuple[str, ...]
    records: Records
    language: str = "en"
    means: Means = field(init=False)

    def __post_init__(self) -> None:
        means = means_of({member.name: evidence for member, evidence in self.finished})
        object.__setattr__(self, "means", means)
        self.records.add(MEANS, means.to_dict())

    @cached_property
    def finished(self) -> list[tuple[Member, Evidence]]:
        """The comparisons that have verdicts."""
        return [(member, member.evidence) for member in self.members if member.evidence is not None]

    @cached_property
    def arms(self) -> tuple[str, ...]:
        """Names of all arms but the baselines, in the order in which the comparisons have them."""
        return tuple(
            dict.fromkeys(arm for _, evidence in self.finished for arm in evidence.verdicts)
        )

    def cell(
        self, member: Member, *keys: str | int, format: str = "number", alarm: bool = False
    ) -> Cell:
        """Return the cell of a value in a comparison's evidence.json."""
        return self.records.cell(f"{member.name}/{EVIDENCE}", *keys, format=format, alarm=alarm)


def is_dense(effects: int, comparisons: int, arms: int) -> bool:
    """Return whether a table of comparisons × arms has at most 6 arms and is at least half full."""
    return arms <= _COLUMNS and 2 * effects >= comparisons * arms


def in_brackets(shortcomings: Sequence[str]) -> str:
    """Return a mean's shortcomings, `confounded` and `reduced`, as text to append to its name."""
    return f" ({', '.join(shortcomings)})" if shortcomings else ""


def effect_figures(several: Several) -> list[Block]:
    """Draw the effects of every comparison, one figure for each metric."""
    scales = dict.fromkeys(
        (evidence.rules.metric, evidence.rules.log, evidence.rules.lower_is_better)
        for _, evidence in several.finished
    )
    names: set[str] = set()
    figures: list[Block] = []
    for metric, ratio, lower in scales:
        rows = _effect_rows(several, metric, ratio)
        if not rows:
            continue
        better = "smaller is better" if lower else "larger is better"
        sign = "/" if ratio else "−"
        title = f"{metric} {sign} that of the baseline ({better})"
        caption = (
            "Each mark is the effect of one arm in one comparison, with the interval of its "
            "verdict; the dashed line marks no difference."
        )
        if any(row["doubtful"] for row in rows):
            caption += (
                " Hollow marks: the arm is confounded, or the runs were scaled down, shortened or "
                "made with stand-ins (substitutes for missing data or models)."
            )
        if any(row["file"] == MEANS for row in rows):
            caption += (
                " The last rows are means over the comparisons, which all have the same weight, "
                "with 95 % intervals."
            )
        name = _file_name(f"effects-{metric}", names)
        chart = effects_by_comparison(rows, several.arms, plain(title), ratio)
        files = tuple(sorted({row["file"] for row in rows}))
        figures.append(Figure(name, f"Effects on {plain(metric)}", chart, caption, rows, files))
    return figures


def _file_name(text: str, taken: set[str]) -> str:
    """Return a text as a file name that is not taken yet."""
    name = base = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]
    number = 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name


def _effect_rows(several: Several, metric: str, ratio: bool) -> list[dict[str, Any]]:
    rows = [
        _effect_row(member.name, arm, verdict.paired, verdict.word, f"{member.name}/{EVIDENCE}",
                    bool(evidence.confounds.get(arm) or reduced_by(evidence)))
        for member, evidence in several.finished
        if (evidence.rules.metric, evidence.rules.log) == (metric, ratio)
        for arm, verdict in evidence.verdicts.items()
        if verdict.paired is not None and verdict.paired.effect is not None
    ]  # fmt: skip
    rows += [
        _effect_row(f"{_MEAN}{in_brackets(mean.shortcomings)}", mean.arm, mean.effect, _MEAN,
                    MEANS, bool(mean.shortcomings))
        for mean in several.means.means
        if mean.by == "all" and (mean.metric, mean.effect.log) == (metric, ratio)
    ]  # fmt: skip
    return rows


def _effect_row(
    name: str, arm: str, effect: Effect, word: str, file: str, doubtful: bool
) -> dict[str, Any]:
    return {
        "comparison": name, "arm": arm, "effect": effect.effect, "low": effect.low,
        "high": effect.high, "text": str(effect), "verdict": word, "doubtful": doubtful,
        "file": file,
    }  # fmt: skip


def effects_by_comparison(
    rows: Sequence[dict[str, Any]], arms: Sequence[str], title: str, ratio: bool
) -> Any:
    """Draw the effect and the interval of every arm in every comparison.

    Rows have comparison, arm, effect, low, high, text, verdict and doubtful.
    """
    alt = require_drawing("a report")[0]
    names = [label(arm) for arm in arms]
    drawn = [{**row, "arm": label(row["arm"]), "comparison": label(row["comparison"])}
             for row in rows]  # fmt: skip
    present = [name for name in names if any(row["arm"] == name for row in drawn)]
    comparisons = len({row["comparison"] for row in drawn})
    side_by_side = is_dense(len(drawn), comparisons, len(present))
    for row in drawn:
        row["row"] = row["comparison"] + ("" if side_by_side else f" · {row['arm']}")
    order = list(dict.fromkeys(row["row"] for row in drawn))
    scale = alt.Scale(zero=False, nice=True, padding=12)
    base = alt.Chart(alt.Data(values=drawn)).encode(
        y=alt.Y("row:N", sort=order, title=None, axis=alt.Axis(labelLimit=320, grid=True)),
        color=arm_colour(names),
        tooltip=[alt.Tooltip("comparison:N"), alt.Tooltip("arm:N"),
                 alt.Tooltip("text:N", title="effect"), alt.Tooltip("verdict:N")],
    )  # fmt: skip
    if side_by_side and len(present) > 1:
        base = base.encode(yOffset=alt.YOffset("arm:N", sort=present,
                                               scale=alt.Scale(paddingOuter=0.6)))  # fmt: skip
        height = alt.Step(18, **{"for": "offset"})
    else:
        height = alt.Step(26)
    interval = base.mark_rule(strokeWidth=2.5).encode(
        x=alt.X("low:Q", title=title, scale=scale), x2="high:Q"
    )
    mark = {
        "x": alt.X("effect:Q", title=title, scale=scale),
        "shape": arm_shape(names),
        "size": alt.condition(f"datum.verdict == '{_MEAN}'", alt.value(170), alt.value(80)),
    }
    whole = base.transform_filter("!datum.doubtful").mark_point(filled=True, opacity=1)
    hollow = base.transform_filter("datum.doubtful").mark_point(strokeWidth=2, opacity=1)
    no_difference = alt.Chart(alt.Data(values=[{"at": 1.0 if ratio else 0.0}])).mark_rule(
        strokeDash=[5, 4], strokeWidth=1.5, stroke=GREY
    ).encode(x=alt.X("at:Q", title=title))  # fmt: skip
    layers = alt.layer(no_difference, interval, whole.encode(**mark), hollow.encode(**mark))
    return toggled(layers.properties(width=WIDTH, height=height))

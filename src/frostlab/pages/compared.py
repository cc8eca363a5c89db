"""The report of a comparison: what was found, how far to trust it, and every number behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from frostlab.comparison.evidence import ArmVerdict, Evidence, read_evidence
from frostlab.errors import BadInput
from frostlab.pages import figures
from frostlab.pages.content import (
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
from frostlab.text import NONE, plain

EVIDENCE = "evidence.json"


@dataclass(frozen=True)
class Compared:
    """A comparison's folder with its evidence, from which every section is made."""

    folder: Path
    evidence: Evidence
    records: Records
    language: str

    @cached_property
    def arms(self) -> tuple[str, ...]:
        """Names of all arms in the plan's order."""
        return tuple(self.evidence.arms)

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Names of all arms but the baseline."""
        return tuple(name for name in self.arms if name != self.evidence.baseline)

    def cell(self, *keys: str | int, format: str = "number", alarm: bool = False) -> Cell:
        """Return the cell of a value of evidence.json."""
        return self.records.cell(EVIDENCE, *keys, format=format, alarm=alarm)


def document(folder: Path, language: str) -> Document:
    """Return the report of a comparison."""
    evidence = read_evidence(folder / EVIDENCE)
    if evidence is None:
        raise BadInput(f"{folder} has no {EVIDENCE}: the comparison is not finished")
    compared = Compared(folder, evidence, Records(folder), language)
    sections = []
    for name, title, make in SECTIONS:
        if blocks := make(compared):
            sections.append(Section(name, title, tuple(blocks)))
    plan = compared.evidence.plan
    return Document(
        title=f"{plain(plan.name)}: {plain(', '.join(compared.arms))}",
        about=plain(plan.about or _question(compared)),
        first=tuple(_first_screen(compared)),
        sections=tuple(sections),
        arms=compared.arms,
        language=language,
    )


def _question(compared: Compared) -> str:
    evidence = compared.evidence
    return (
        f"What does {' or '.join(compared.others)} change, compared with {evidence.baseline}, "
        f"on {evidence.rules.metric}?"
    )


# The first screen


def _first_screen(compared: Compared) -> list[Block]:
    evidence = compared.evidence
    blocks: list[Block] = []
    if evidence.caution:
        blocks.append(words("Caution: ", compared.cell("caution", format="text"), alarm=True))
    if evidence.plan.quick:
        blocks.append(words("A quick comparison with short runs: it shows no more than whether a "
                            "full one is worthwhile.", alarm=True))  # fmt: skip
    for name in compared.others:
        blocks.append(item(
            f"{plain(name)}: ", compared.cell("verdicts", name, "word", format="text"), ", ",
            compared.cell("verdicts", name, "paired", format="effect"),
        ))  # fmt: skip
    blocks += _doubts(compared)
    if (figure := _paired_figure(compared)) is not None:
        blocks.append(figure)
    return blocks


def _doubts(compared: Compared) -> list[Paragraph]:
    """Return what is confounded or unproven, to show in red."""
    evidence = compared.evidence
    blocks = [
        item(f"{plain(name)} is confounded: it also differs in ",
             compared.cell("confounds", name, format="list"), ".", alarm=True)
        for name, confounds in evidence.confounds.items()
        if confounds
    ]  # fmt: skip
    blocks += [
        item(f"{plain(name)}: ", compared.cell("verdicts", name, "notes", number, format="text"),
             alarm=True)
        for name, verdict in evidence.verdicts.items()
        for number, _ in enumerate(verdict.notes)
    ]  # fmt: skip
    if evidence.timing is not None and not evidence.timing.proven:
        blocks.append(item("The times are unproven: ",
                           compared.cell("timing", "reasons", format="list"), ".",
                           alarm=True))  # fmt: skip
    return blocks


def _paired_figure(compared: Compared) -> Figure | None:
    """Draw each seed's paired difference from the baseline, with the interval of the verdict."""
    evidence, metric = compared.evidence, compared.evidence.rules.metric
    ratio = evidence.rules.log
    base = {run.seed: run.metrics.get(metric) for run in evidence.arms[evidence.baseline].finished}
    seeds, effects = [], []
    for name in compared.others:
        verdict = evidence.verdicts[name]
        for run in evidence.arms[name].finished:
            own, other = run.metrics.get(metric), base.get(run.seed)
            if own is None or other is None or (ratio and other == 0):
                continue
            value = own / other if ratio else own - other
            seeds.append({"arm": name, "seed": run.seed, "value": value, "text": f"{value:+.4g}"})
        effects.append({"arm": name, **_effect_row(verdict, ratio)})
    if not seeds:
        return None
    what = (
        f"{metric} / that of {evidence.baseline}"
        if ratio
        else f"{metric} − that of {evidence.baseline}"
    )
    better = "smaller is better" if evidence.rules.lower_is_better else "larger is better"
    chart = figures.paired_differences(
        seeds, effects, compared.arms, f"{plain(what)} ({better})", ratio
    )
    caption = (
        "Each dot is one seed's difference between an arm and the baseline, the thick line the "
        "interval of the verdict with the effect marked, the dashed line no difference. A true "
        "effect inside the grey bar would be missed in more than 2 of 10 such comparisons."
    )
    return Figure("paired-differences", "Difference from the baseline, seed by seed", chart,
                  caption, [*seeds, *effects], (EVIDENCE,))  # fmt: skip


def _effect_row(verdict: ArmVerdict, ratio: bool) -> dict[str, float | str | None]:
    paired, seen = verdict.paired, verdict.could_have_seen
    row: dict[str, float | str | None] = {
        "effect": paired.effect if paired else None,
        "low": paired.low if paired else None,
        "high": paired.high if paired else None,
        "text": str(paired) if paired else NONE,
    }
    if seen is not None:
        low, high = (1 / (1 + seen), 1 + seen) if ratio else (-seen, seen)
        row |= {"seen_low": low, "seen_high": high, "seen": f"{seen:.3g}"}
    return row


# Sections


def _performance(compared: Compared) -> list[Block]:
    evidence, metric = compared.evidence, compared.evidence.rules.metric
    rows = []
    for name in compared.arms:
        verdict = name in evidence.verdicts
        rows.append((
            plain(name),
            compared.cell("arms", name, "metrics", metric, format="summary"),
            compared.cell("verdicts", name, "paired", format="effect") if verdict else "",
            compared.cell("arms", name, "metrics", "loss", format="summary"),
            compared.cell("arms", name, "parameters", format="trainable share"),
            compared.cell("verdicts", name, "word", format="text") if verdict else "the baseline",
        ))  # fmt: skip
    head = ("arm", metric, "against the baseline", "loss", "trainable", "verdict")
    return [Table("performance", "Performance", head, tuple(rows))]


SECTIONS: tuple[tuple[str, str, Callable[[Compared], list[Block]]], ...] = (
    ("performance", "Performance", _performance),
)

"""The report of a comparison: what was found, how far to trust it, and every number behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from frostlab.comparison.evidence import Evidence, read_evidence
from frostlab.errors import BadInput
from frostlab.pages import compared_figures
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
from frostlab.pages.curves import Curve
from frostlab.text import plain

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

    @cached_property
    def curves(self) -> dict[str, list[Curve]]:
        """Curves of the finished runs by arm, read once from their events."""
        return compared_figures.read_curves(self)

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
    if (figure := compared_figures.paired_differences(compared)) is not None:
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
    table = Table("performance", "Performance", head, tuple(rows))
    return [*compared_figures.metric_bars(compared), table]


def _curves(compared: Compared) -> list[Block]:
    return [*compared_figures.training_curves(compared)]


def _time(compared: Compared) -> list[Block]:
    drawn = compared_figures
    return [*drawn.time_ratios(compared), *drawn.time_bars(compared), *drawn.step_times(compared)]


def _tuning(compared: Compared) -> list[Block]:
    return [*compared_figures.tuning(compared)]


def _cost(compared: Compared) -> list[Block]:
    return [*compared_figures.cost_curves(compared), *compared_figures.parameters(compared)]


def _gradient_flow(compared: Compared) -> list[Block]:
    return [*compared_figures.gradient_flow(compared)]


def _trained_share(compared: Compared) -> list[Block]:
    return [*compared_figures.trained_share(compared)]


SECTIONS: tuple[tuple[str, str, Callable[[Compared], list[Block]]], ...] = (
    ("performance", "Performance", _performance),
    ("curves", "Training curves", _curves),
    ("time", "Time", _time),
    ("tuning", "Tuned settings", _tuning),
    ("cost", "Cost", _cost),
    ("flow", "Gradient flow", _gradient_flow),
    ("share", "Trained share", _trained_share),
)

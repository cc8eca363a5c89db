"""report.md: a report as Markdown.

For a comparison it is a short record of four parts: configuration, results, key findings, and
problems and solutions. The published study from which the treatment `oelm` comes (the OELM study)
kept records in this form. Other reports are written whole.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from frostlab.comparison.evidence import CONVERGED
from frostlab.comparison.judging.verdict import DOUBTFUL
from frostlab.pages.content import (
    Block,
    Cell,
    Document,
    Figure,
    Listing,
    Paragraph,
    Section,
    Table,
    item,
    words,
)
from frostlab.pages.languages.sentences import in_its_language
from frostlab.pages.one_comparison import compared_facts as facts
from frostlab.pages.one_comparison.compared_tables import (
    COMPARISON,
    TIMING,
    Row,
    arm_name,
    table,
)
from frostlab.text import Markdown, escaped, plain
from frostlab.text import markdown as markdown_table

if TYPE_CHECKING:
    from frostlab.pages.one_comparison.compared import Compared


def markdown(document: Document) -> str:
    """Return report.md: a document's short record or, if it has none, the whole document."""
    document = in_its_language(document)
    parts = [f"# {escaped(document.title)}", str(escaped(document.about))]
    sections = document.record
    if not sections:
        parts += _blocks(document.first)
        sections = document.sections
    for section in sections:
        parts += [f"## {escaped(section.title)}", *_blocks(section.blocks)]
    parts += [f"**{escaped(problem)}**" for problem in document.problems]
    return "\n\n".join(part for part in parts if part) + "\n"


def _blocks(blocks: Sequence[Block]) -> list[str]:
    """Return blocks in Markdown; list items that follow each other form one list."""
    parts: list[str] = []
    in_list = False
    for block in blocks:
        is_item = isinstance(block, Paragraph) and block.item
        if is_item and in_list:
            parts[-1] += f"\n{_block(block)}"
        else:
            parts.append(_block(block))
        in_list = is_item
    return parts


def _block(block: Block) -> str:
    if isinstance(block, Paragraph):
        lead, text = escaped(_text([block.lead])), escaped(_text(block.pieces))
        start = f"**{lead}** " if lead else ""
        return f"{'- ' * block.item}{start}{f'**{text}**' if block.alarm and text else text}"
    if isinstance(block, Table):
        rows = [[_cell(cell) for cell in row] for row in block.rows]
        note = f"\n\n{escaped(block.note)}" if block.note else ""
        return f"{markdown_table(block.head, rows)}{note}"
    if isinstance(block, Listing):  # an indented block can hold any line
        return "\n".join(f"    {plain(line)}" for line in _text(block.pieces).split("\n"))
    return _figure(block)


def _figure(figure: Figure) -> str:
    return f"![{escaped(figure.title)}](figures/{figure.name}.svg)\n\n{escaped(figure.caption)}"


def _text(pieces: Sequence[str | Cell]) -> str:
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return cell
    if cell.link is not None:
        return Markdown(f"[{escaped(cell.text)}]({quote(cell.link)})")
    return Markdown(f"**{escaped(cell.text)}**") if cell.alarm else cell.text


def of_comparison(compared: "Compared") -> tuple[Section, ...]:
    """Return the four parts of a comparison's report.md."""
    parts = (
        ("configuration", "Configuration", _configuration(compared)),
        ("results", "Results", _results(compared)),
        ("findings", "Key findings", _findings(compared)),
        ("problems", "Problems and solutions", _problems(compared)),
    )
    return tuple(Section(name, title, tuple(blocks)) for name, title, blocks in parts)


def _configuration(compared: "Compared") -> list[Block]:
    plan = compared.evidence.plan
    rows: list[Row] = [
        ["data", compared.records.cell(COMPARISON, "dataset", format="text")],
        ["model", compared.records.cell(COMPARISON, "model", format="text")],
        ["metric", compared.cell("plan", "rules", "metric", format="text")],
        ["seeds", compared.cell("plan", "seeds", format="list")],
    ]
    for name in compared.arms:
        mark = " (the baseline)" if name == compared.evidence.baseline else ""
        does = compared.cell("arms", name, "does", format="text")
        rows.append([f"arm {plain(name)}{mark}", does])
    for keys in (("optim", "lr"), ("optim", "schedule"), ("optim", "warmup"), ("optim", "decay"),
                 ("optim", "clip"), ("train", "batch"), ("train", "epochs"), ("train", "steps"),
                 ("data", "length"), ("data", "splits"), ("scale",)):  # fmt: skip
        cell = compared.cell("plan", "recipe", *keys, format="json")
        if cell.file is not None:
            rows.append([".".join(keys), cell])
    for number, setting in enumerate(compared.evidence.tuning):
        rows.append([f"grid of {plain(setting.key)}",
                     compared.cell("tuning", number, "values", format="list")])  # fmt: skip
        rows += [[f"{plain(setting.key)} of {plain(name)}",
                  compared.cell("tuning", number, "best", name)]
                 for name in compared.arms]  # fmt: skip
    rows.append(["machine", compared.cell("made", "machine", format="text")])
    rows += [[plain(name), compared.cell("made", "versions", name, format="text")]
             for name in ("frostlab", "torch", "cuda")
             if name in compared.evidence.made.versions]  # fmt: skip
    rows.append(["began", compared.cell("made", "began", format="text")])
    rows.append(["ended", compared.cell("made", "ended", format="text")])
    blocks: list[Block] = [table("configuration", "Configuration", ["setting", "value"], rows)]
    if plan.quick:
        blocks.append(words("A quick comparison with short runs.", alarm=True))
    return blocks


def _results(compared: "Compared") -> list[Block]:
    """Return the table of results and times by arm, and the target of convergence."""
    metric = compared.evidence.rules.metric
    rows = []
    for name in compared.arms:
        timing = (TIMING, "timing", compared.key(name))
        rows.append([
            arm_name(compared, name),
            compared.cell("arms", name, "metrics", metric, format="summary"),
            compared.records.cell(*timing, "total_seconds", format="hms"),
            compared.records.cell(*timing, "per_epoch_avg", format="seconds"),
            compared.records.cell(*timing, "per_step_avg", format="seconds as ms"),
            compared.records.cell(*timing, "validation_total", format="seconds"),
            compared.of_arm(name, "performance", "while_training", "final_loss"),
            compared.cell("convergence", "arms", name, format="reached"),
            *(compared.cell("convergence", "arms", name, "spent", quantity, format="summary")
              for quantity in CONVERGED),
        ])  # fmt: skip
    head = ["arm", f"best {metric}", "total", "per epoch", "per step", "validation", "final loss",
            "reached the target",
            *(f"{quantity} to the target" for quantity in CONVERGED)]  # fmt: skip
    blocks: list[Block] = [table(
        "results", "Results", head, rows,
        "Means over the runs that finished and can be paired (± standard deviation); total is "
        "h:mm:ss; the time per step is that in whole runs, which cannot show which arm is faster.",
    )]  # fmt: skip
    if compared.evidence.convergence is not None:
        blocks.append(words("Convergence: the target is ",
                            compared.cell("convergence", "metric", format="text"), " ",
                            compared.cell("convergence", "target", format="exact"), ", ",
                            compared.cell("convergence", "place", format="text"),
                            "."))  # fmt: skip
    return blocks


def _findings(compared: "Compared") -> list[Block]:
    evidence = compared.evidence
    blocks: list[Block] = [
        item(*compared.sentence(verdict, "verdicts", name), alarm=verdict.word in DOUBTFUL)
        for name, verdict in evidence.verdicts.items()
    ]  # fmt: skip
    if evidence.timing is not None:
        blocks += [compared.time_of(name) for name in compared.others]
    blocks += [
        item(*compared.sentence(answer.verdict, "contrasts", number, "verdict"),
             alarm=answer.verdict.word in DOUBTFUL,
             lead=compared.cell("contrasts", number, "question", format="text"))
        for number, answer in enumerate(evidence.contrasts)
    ]  # fmt: skip
    return blocks


def _problems(compared: "Compared") -> list[Block]:
    """Return runs that did not finish or were tried again, other doubts, and the users' notes."""
    evidence = compared.evidence
    blocks: list[Block] = []
    if evidence.caution:
        blocks.append(item("Caution: ", compared.cell("caution", format="text"), ".", alarm=True))
    for name in compared.arms:
        for number, run in enumerate(evidence.arms[name].runs):
            keys = ("arms", name, "runs", number)
            seed = compared.cell(*keys, "seed", format="count")
            pieces: list[str | Cell] = [f"{plain(name)}, seed ", seed, ": ",
                                        compared.cell(*keys, "status", format="text")]  # fmt: skip
            if run.error is not None:
                pieces += [": ", compared.cell(*keys, "error", format="text")]
            if run.attempts > 1:
                pieces += [", attempt ", compared.cell(*keys, "attempts", format="count")]
            if not run.finished or run.attempts > 1:
                blocks.append(item(*pieces, ".", alarm=not run.finished))
    blocks += [
        item(f"the best {plain(setting.key)}, ", compared.cell("tuning", number, "best", name),
             ", is at an end of the grid; extend the grid.", alarm=True, lead=f"{plain(name)}:")
        for number, setting in enumerate(evidence.tuning)
        for name, on_edge in setting.on_edge.items()
        if on_edge
    ]  # fmt: skip
    blocks += facts.confounds(compared)
    blocks += facts.refused_pairs(compared)
    if evidence.timing is not None and not evidence.timing.proven:
        blocks.append(item("The times of steps are unproven: ",
                           compared.cell("timing", "reasons", format="list"), ".",
                           alarm=True))  # fmt: skip
    if evidence.data is not None:
        blocks += [item("Data: ", compared.cell("data", "notes", number, format="text"), ".")
                   for number, _ in enumerate(evidence.data.notes)]  # fmt: skip
    noted = facts.notes(compared)
    if not blocks and not noted:
        blocks.append(words("None: every run finished and could be paired with the baseline's."))
    return [*blocks, *noted]

"""report.md has the record's form, and says what the records say."""

import json
from pathlib import Path
from typing import Any

from comparing import changed
from frostlab.pages.content import Cell, Document, Listing, Section, Table, item, words
from frostlab.pages.one_comparison.compared import document
from frostlab.pages.record import markdown
from frostlab.text import hms
from fuzz.targets_pages import tokens

EVIL = "a|b <img src=x onerror=alert(1)> [x](javascript:alert(1)) `c` \x1b[31m\n# d"


def headings(text: str) -> list[str]:
    return [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of all tables by their first cell."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines}


def test_the_record_has_its_four_parts_and_their_numbers(tuned: Path) -> None:
    text = markdown(document(tuned, "en"))
    assert headings(text) == ["Configuration", "Results", "Key findings", "Problems and solutions"]
    evidence, timing = (
        json.loads((tuned / name).read_text()) for name in ("evidence.json", "timing.json")
    )
    own = timing["timing"]["oelm_freeze"]
    best = evidence["arms"]["oelm"]["metrics"]["accuracy"]
    assert rows(text)["oelm"][:5] == [
        f"{best['mean']:.4g} ± {best['std']:.2g}",
        hms(own["total_seconds"]),
        f"{own['per_epoch_avg']:.4g} s",
        f"{1e3 * own['per_step_avg']:.4g} ms",
        f"{own['validation_total']:.4g} s",
    ]
    assert rows(text)["grid of optim.lr"] == [", ".join(map(str, evidence["tuning"][0]["values"]))]
    assert f"accuracy {evidence['convergence']['target']:.6g}" in text
    for verdict in evidence["verdicts"].values():
        assert verdict["sentence"] in text.replace("\\", "")
    assert "**Time of a step, oelm:**" in text


def test_problems_are_listed_in_bold(tuned: Path, tmp_path: Path) -> None:
    def spoil(values: dict[str, Any]) -> None:
        values["arms"]["oelm"]["runs"][0].update(status="diverged", error="loss is nan", attempts=2)
        values["confounds"]["oelm"] = ["optim.decay 0 → 1"]
        values["tuning"][0]["on_edge"]["oelm"] = True

    text = markdown(document(changed(tuned, tmp_path, spoil), "en"))
    problems = text.partition("## Problems and solutions")[2]
    assert "- **oelm, seed 0: diverged: loss is nan, attempt 2.**" in problems
    assert (
        "- **oelm is confounded: it also differs from baseline in optim.decay 0 → 1.**" in problems
    )
    assert "is at an end of the grid; extend the grid.**" in problems


def test_a_record_without_problems_says_so(compared: Path) -> None:
    problems = markdown(document(compared, "en")).partition("## Problems and solutions")[2]
    assert problems == "\n\nNone: every run finished and could be paired with the baseline's.\n"


def test_hostile_texts_are_shown_not_obeyed() -> None:
    red = Cell(EVIL, alarm=True)
    blocks = (
        words(EVIL), item(EVIL, red, alarm=True, lead=EVIL), item(EVIL),
        Table("t", "T", (EVIL, "b"), ((EVIL, red),), EVIL), Listing((EVIL, "\n", EVIL)),
    )  # fmt: skip
    report = Document(EVIL, EVIL, (), (Section("s", EVIL, blocks),))
    text = markdown(report)
    assert "\x1b" not in text
    kinds = {token.type for token in tokens(text)}
    assert not {"html_inline", "html_block", "image", "link_open", "code_inline"} & kinds
    assert [token.tag for token in tokens(text) if token.type == "heading_open"] == ["h1", "h2"]


def test_a_document_without_a_record_becomes_all_its_sections() -> None:
    table = Table("t", "T", ("arm", "loss"), (("oelm", Cell("1.5", "a.json", "/b", "number")),))
    sections = (Section("a", "First", (item("x"), item("y"), table)), Section("b", "Second", ()))
    text = markdown(Document("Title", "About", (words("Found."),), sections))
    assert text == (
        "# Title\n\nAbout\n\nFound.\n\n## First\n\n- x\n- y\n\n"
        "| arm | loss |\n| --- | --- |\n| oelm | 1.5 |\n\n## Second\n"
    )

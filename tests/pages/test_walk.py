"""Every number of a report is in a record, and the page says where."""

import json
import re
import shutil
from pathlib import Path

import pytest

from frostlab.pages.write import PAGE, report
from walking import Walk, complaints

_CELL = re.compile(r'(<a class="n[^>]*>)(.*?)(</a>)', re.DOTALL)


def copied(folder: Path, target: Path) -> Path:
    """Return a copy of a folder with its report."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    report(target)
    return target


def names_of(folder: Path) -> list[str]:
    """Return the names of all arms, including the copies of the baseline that are timed."""
    evidence = json.loads((folder / "evidence.json").read_text())
    return [*evidence["arms"], *(evidence["timing"] or {"arms": {}})["arms"]]


@pytest.mark.parametrize(
    "which",
    [
        "compared", "tuned", "spoken",
        pytest.param("heard", marks=pytest.mark.slow),
        pytest.param("grown", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_number_is_in_a_record(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = copied(request.getfixturevalue(which), tmp_path)
    assert complaints(folder / PAGE, names_of(folder)) == []


def test_changing_any_number_of_the_page_is_noticed(reported: Path, tmp_path: Path) -> None:
    """The check of one cell does not depend on another, so each broken cell is one complaint."""
    text = (reported / PAGE).read_text(encoding="utf-8")
    cells = _CELL.findall(text)
    assert len(cells) == len(Walk(text).cells) > 10
    broken = _CELL.sub(lambda cell: f"{cell[1]}{cell[2]}0{cell[3]}", text)
    assert broken != text
    page = tmp_path / PAGE
    shutil.copytree(reported, tmp_path, dirs_exist_ok=True)
    page.write_text(broken, encoding="utf-8")
    assert len(complaints(page, names_of(reported))) == len(cells)


def test_changing_a_record_is_noticed(reported: Path, tmp_path: Path) -> None:
    shutil.copytree(reported, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "evidence.json"
    values = json.loads(path.read_text())
    values["verdicts"]["oelm"]["paired"]["effect"] += 1
    path.write_text(json.dumps(values))
    wrong = complaints(tmp_path / PAGE, names_of(reported))
    assert any("evidence.json/verdicts/oelm/paired" in complaint for complaint in wrong)


@pytest.mark.parametrize(
    "added",
    [
        "<p>The loss fell to 0.3.</p>",
        "<p>It took <b>2</b> h.</p>",
        '<a class="n" href="evidence.json#/look">1</a>',
        '<a class="n" href="evidence.json#/look" data-file="evidence.json" data-pointer="/nothing" '
        'data-format="number">1</a>',
        '<a class="n" href="../a.json#/b" data-file="../a.json" data-pointer="/b" '
        'data-format="number">1</a>',
        '<a class="n" href="other.json#/look" data-file="evidence.json" data-pointer="/look" '
        'data-format="number">1</a>',
    ],
)
def test_a_number_without_a_record_is_noticed(reported: Path, tmp_path: Path, added: str) -> None:
    shutil.copytree(reported, tmp_path, dirs_exist_ok=True)
    page = tmp_path / PAGE
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</main>", f"{added}</main>"), encoding="utf-8")
    assert len(complaints(page, names_of(reported))) == 1
    page.write_text(text, encoding="utf-8")
    assert complaints(page, names_of(reported)) == []

"""The report of several comparisons."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from comparing import plant
from frostlab.pages.write import PAGE, is_current, report
from walking import Walk, complaints

LARGE = shutil.ignore_patterns("checkpoints", "*.safetensors", "model", "tokenizer")
BERT = {"kind": "pretrained", "name": "bert-base-uncased"}


def edit(folder: Path, change: Any) -> None:
    """Change the values of evidence.json."""
    path = folder / "evidence.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def as_bert(values: dict[str, Any]) -> None:
    """Make evidence that of a BERT, with another effect."""
    values["plan"]["recipe"] |= {"model": BERT, "data": {"name": "docstrings"}}
    for number, verdict in enumerate(values["verdicts"].values()):
        verdict["word"] = "worse"
        verdict["paired"] |= {"effect": -0.2 - number, "low": -0.3 - number, "high": -0.1 - number,
                              "std": 0.1}  # fmt: skip


@pytest.fixture(scope="session")
def store(compared: Path, spoken: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of comparisons of two models, two tasks and one that is not finished; reported."""
    folder = tmp_path_factory.mktemp("store") / "store"
    for name, source in (("gpt-one", compared), ("gpt-two", compared), ("bert", compared),
                         ("stories", spoken), ("begun", spoken)):  # fmt: skip
        shutil.copytree(source, folder / name, ignore=LARGE)
    edit(folder / "bert", as_bert)
    (folder / "begun" / "evidence.json").unlink()
    report(folder)
    return folder


@pytest.fixture
def copied(store: Path, tmp_path: Path) -> Path:
    shutil.copytree(store, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def begun(store: Path, tmp_path: Path) -> Path:
    """The comparison that is not finished, with its report."""
    shutil.copytree(store / "begun", tmp_path / "begun")
    return tmp_path / "begun"


def cells(folder: Path) -> list[tuple[str, str, str]]:
    """File, pointer and text of every number."""
    walk = Walk((folder / PAGE).read_text())
    return [(str(c["data-file"]), str(c["data-pointer"]), text) for c, text in walk.cells]


def test_every_number_is_in_a_record(store: Path) -> None:
    names = [path.name for path in store.iterdir()]
    assert complaints(store / PAGE, names) == []
    files = {file for file, _, _ in cells(store)}
    assert files == {"means.json", *(f"{name}/evidence.json" for name in
                                     ("gpt-one", "gpt-two", "bert", "stories"))}  # fmt: skip


def test_it_has_every_treatment_on_every_data_set(store: Path) -> None:
    shown = {(file, pointer): text for file, pointer, text in cells(store)}
    assert shown["bert/evidence.json", "/verdicts/oelm"] == "worse: -0.2 [-0.3, -0.1]"
    assert shown["bert/evidence.json", "/verdicts/oelm-random"] == "worse: -1.2 [-1.3, -1.1]"
    assert ("stories/evidence.json", "/verdicts/oelm") in shown
    text = (store / PAGE).read_text()
    for title in ("BERT against GPT", "Classification against generation", "Means over"):
        assert title in text
    means = json.loads((store / "means.json").read_text())
    overall = next(mean for mean in means["means"] if mean["by"] == "all" and mean["arm"] == "oelm")
    assert overall["comparisons"] == ["bert", "gpt-one", "gpt-two"]
    own = json.loads((store / "gpt-one" / "evidence.json").read_text())["verdicts"]["oelm"]
    expected = (2 * own["paired"]["effect"] - 0.2) / 3
    assert overall["effect"]["effect"] == pytest.approx(expected)
    rows = (store / "tables" / "effects-accuracy.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 4  # three comparisons and the means, of two arms each


def test_each_comparison_has_its_own_report_and_a_link(store: Path) -> None:
    links = re.findall(r'<a class="other" href="([^"]+)"', (store / PAGE).read_text())
    names = {"gpt-one", "gpt-two", "bert", "stories", "begun"}
    assert set(links) == {f"{name}/{PAGE}" for name in names}
    assert all((store / link).is_file() for link in links)
    assert "begun: not finished." in (store / PAGE).read_text()
    assert "This comparison is not finished" in (store / "begun" / PAGE).read_text()


def test_a_second_report_is_the_same_and_leaves_current_reports_alone(copied: Path) -> None:
    def contents() -> dict[str, bytes]:
        paths = (path for path in copied.rglob("*") if path.is_file() and path.suffix != ".pdf")
        return {str(path.relative_to(copied)): path.read_bytes() for path in paths}

    before, changed = contents(), (copied / "bert" / PAGE).stat().st_mtime_ns
    report(copied)
    assert contents() == before
    assert (copied / "bert" / PAGE).stat().st_mtime_ns == changed
    kinds = {Path(name).suffix for name in before}
    assert kinds >= {".html", ".md", ".svg", ".png", ".csv", ".tex"}


def test_a_report_older_than_its_evidence_is_written_again(copied: Path) -> None:
    assert is_current(copied / "bert")
    assert not is_current(copied / "bert", "ja")
    edit(copied / "bert", lambda values: values["verdicts"]["oelm"]["paired"].update(effect=-0.25))
    assert not is_current(copied / "bert")
    assert not is_current(copied)
    report(copied)
    assert is_current(copied / "bert")
    assert "-0.25" in (copied / "bert" / PAGE).read_text()
    assert "worse: -0.25 [-0.3, -0.1]" in (copied / PAGE).read_text()


def test_a_comparison_of_another_schema_is_named_and_does_not_stop_the_others(
    copied: Path,
) -> None:
    plant(copied / "bert" / "evidence.json", schema=1)
    report(copied)
    text = (copied / PAGE).read_text()
    assert "bert: cannot be read" in text
    assert "has schema 1, and this frostlab reads" in text
    assert ("gpt-one/evidence.json", "/verdicts/oelm") in {pair[:2] for pair in cells(copied)}


def test_names_with_markup_are_text(copied: Path) -> None:
    evil = "a<script>alert(1)</script>#?%2e"[:40].replace("/", "\u2215")
    (copied / "bert").rename(copied / evil)
    (copied / "gpt-two").rename(copied / "javascript:alert(1)")
    report(copied)
    text = (copied / PAGE).read_text()
    assert "<script>alert" not in text
    assert 'href="javascript:' not in text
    assert 'href="javascript%3Aalert%281%29/report.html"' in text
    assert complaints(copied / PAGE, [path.name for path in copied.iterdir()]) == []


def test_nothing_is_written_through_a_link(copied: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (copied / "bert").rename(target)
    for name in ("figures", "tables"):
        shutil.rmtree(target / name)
    for name in (PAGE, "report.md", "report.json"):
        (target / name).unlink()
    (copied / "linked").symlink_to(target)
    report(copied)
    assert ("linked/evidence.json", "/verdicts/oelm") in {pair[:2] for pair in cells(copied)}
    assert not (target / PAGE).exists()


# A half-finished comparison


def test_the_runs_of_an_unfinished_comparison_have_their_state(begun: Path) -> None:
    failed, stopped, *_ = sorted(begun.glob("runs/*"))
    result = json.loads((failed / "result.json").read_text())
    plant(failed / "result.json", status="failed", error="out of <b>memory</b>")
    (stopped / "result.json").unlink()
    shutil.rmtree(begun / "runs" / "oelm-s1")
    report(begun)
    text = (begun / PAGE).read_text()
    assert re.search(rf'class="alarm">{failed.name}: failed: out of &lt;b&gt;memory', text)
    rows = (begun / "tables" / "runs.csv").read_text()
    assert f"{failed.name},failed,{result['steps']:,}," in rows
    assert f"{stopped.name},interrupted,–" in rows
    assert "oelm-s1,not begun," in rows
    assert complaints(begun / PAGE, [failed.name, stopped.name, "oelm-s1"]) == []


def test_an_unfinished_comparison_of_another_schema_is_refused(begun: Path) -> None:
    before = (begun / PAGE).read_bytes()
    plant(begun / "plan.json", schema=99)
    with pytest.raises(fl.BadInput, match="has schema 99, and this frostlab reads"):
        report(begun)
    assert (begun / PAGE).read_bytes() == before


# The exchange of reports


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the n-th rename of a report fail, as on a full disk."""
    left, replace = [0], os.replace

    def limited(source: Any, target: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("frostlab.pages.write.os.replace", limited)
    return left


@pytest.mark.parametrize("moment", range(1, 11))
def test_a_report_that_fails_leaves_the_old_one_whole(
    begun: Path, failing: list[int], moment: int
) -> None:
    shutil.rmtree(begun / "runs" / "oelm-s1")  # so that the report changes

    def files() -> dict[str, bytes]:
        return {str(path.relative_to(begun)): path.read_bytes() for path in begun.rglob("*")
                if path.is_file() and path.suffix != ".pdf"}  # fmt: skip

    before, failing[0] = files(), moment
    with pytest.raises(fl.BadInput, match="cannot be written: No space left on device"):
        report(begun)
    assert files() == before
    report(begun)
    assert "not begun" in (begun / PAGE).read_text()
    assert not list(begun.glob(".report*"))


def test_a_file_of_the_user_is_not_replaced(begun: Path) -> None:
    mine = begun / "tables" / "mine.csv"
    mine.write_text("1,2\n")
    with pytest.raises(fl.BadInput, match=r"mine\.csv was not written by a report; move it"):
        report(begun)
    assert mine.read_text() == "1,2\n"
    (begun / "report.json").unlink()
    mine.unlink()
    with pytest.raises(fl.BadInput, match="was not written by a report"):
        report(begun)

"""`frostlab report`, and the report at the end of `compare` and `judge`."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from comparing import compare, plant
from forked import Command
from tiny import tiny


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished comparison without a report."""
    return compare(tmp_path_factory.mktemp("report") / "judged").folder


@pytest.fixture
def folder(judged: Path, tmp_path: Path) -> Path:
    shutil.copytree(judged, tmp_path / "one")
    return tmp_path / "one"


def test_it_prints_the_page_and_verify_does_not_mind(
    folder: Path, in_this_process: Command
) -> None:
    done = in_this_process("report", str(folder))
    assert (done.returncode, done.stdout) == (0, f"{folder / 'report.html'}\n")
    assert {"report.html", "report.md", "report.json", "figures", "tables"} <= {
        path.name for path in folder.iterdir()
    }
    listed = json.loads((folder / "report.json").read_text())
    assert all((folder / name).is_file() for name in listed["files"])
    shown = json.loads(in_this_process("show", str(folder), "--json").stdout)["files"]
    figures = sum(name.startswith("figures/") for name in listed["files"])
    assert shown["figures/"] == f"{figures} files"
    assert list(listed["made_from"]) == ["evidence.json"]
    assert in_this_process("verify", str(folder)).returncode == 0
    (folder / "report.html").write_text("changed")  # derived, so not a record
    assert in_this_process("verify", str(folder)).returncode == 0
    left = folder / ".report.0123.tmp" / "new"  # by a killed process
    left.mkdir(parents=True)
    (left / "report.html").write_text("half")
    assert in_this_process("verify", str(folder)).returncode == 0
    assert in_this_process("report", str(folder)).returncode == 0
    assert not left.exists()
    (folder / "other.html").write_text("added")
    assert in_this_process("verify", str(folder)).returncode == 1


def test_the_report_of_several_is_verified_too(folder: Path, in_this_process: Command) -> None:
    done = in_this_process("report", str(folder.parent))
    assert (done.returncode, done.stdout) == (0, f"{folder.parent / 'report.html'}\n")
    verified = in_this_process("verify", str(folder.parent))
    assert verified.stdout == "runs and comparisons checked: 1; all files are unchanged\n"


@pytest.mark.slow
def test_a_second_report_is_the_same(folder: Path, in_this_process: Command) -> None:
    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in folder.rglob("*")
                if path.is_file() and path.suffix != ".pdf"}  # fmt: skip

    assert in_this_process("report", str(folder)).returncode == 0
    before = contents()
    assert in_this_process("report", str(folder)).returncode == 0
    assert contents() == before


def spoil_schema(folder: Path) -> None:
    plant(folder / "evidence.json", schema=1)


def spoil_json(folder: Path) -> None:
    (folder / "evidence.json").write_text("{")


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def only_runs(folder: Path) -> None:
    shutil.move(folder / "runs", folder.parent / "runs")
    shutil.rmtree(folder)
    shutil.move(folder.parent / "runs", folder)


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (empty, [], "holds no run and no comparison"),
        (shutil.rmtree, [], "no folder "),
        (only_runs, [], "holds single runs; report one of them, such as "),
        (spoil_schema, [], "has schema 1, and this frostlab reads "),
        (spoil_json, [], "is not valid JSON"),
        (None, ["--lang", "xx"], "language 'xx' is not one of en, zh, ja"),
        (None, ["--lang", "zh-cn"], "not one of en, zh, ja; did you mean `zh`?"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, in_this_process: Command, spoil: object, options: list[str], message: str
) -> None:
    if callable(spoil):
        spoil(folder)
    done = in_this_process("report", str(folder), *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_folder_that_cannot_be_written(
    folder: Path, in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    done = in_this_process("report", str(folder))
    assert done.returncode == 2
    line = f"frostlab: the report in {folder} cannot be written: Permission denied\n"
    assert done.stderr == line
    assert not list(folder.glob("report*"))


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_without_the_extra_it_says_how_to_get_it(
    folder: Path, in_this_process: Command, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    done = in_this_process("report", str(folder))
    assert done.returncode == 2
    needs = f"a report needs the package {package}: pip install 'frostlab[report]'"
    assert done.stderr == f"frostlab: {needs}\n"
    judged = in_this_process("judge", str(folder))
    assert judged.returncode == 0
    assert judged.stderr == f"frostlab: no report: {needs}\n"
    assert judged.stdout.endswith(f"page: {folder / 'comparison.md'}\n")
    (folder / "report.html").write_text("old")
    again = in_this_process("judge", str(folder))
    assert again.stderr.endswith(f"; {folder / 'report.html'} shows earlier results\n")


@pytest.mark.slow
def test_judge_ends_with_the_report(folder: Path, in_this_process: Command) -> None:
    done = in_this_process("judge", str(folder))
    assert done.returncode == 0, done.stderr
    page = folder / "comparison.md"
    assert done.stdout.endswith(f"page: {page}\nreport: {folder / 'report.html'}\n")
    as_json = in_this_process("judge", str(folder), "--json")
    assert json.loads(as_json.stdout)["schema"]
    assert in_this_process("verify", str(folder)).returncode == 0


def test_compare_ends_with_the_report(in_this_process: Command, tmp_path: Path) -> None:
    small = tiny(data__examples=48, train__steps=1, train__epochs=None, train__batch=16,
                 model__layers=1)  # fmt: skip
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"recipe": small, "arms": ["baseline", "oelm"], "clock": None}))
    out = tmp_path / "out"
    done = in_this_process("compare", str(path), "--seeds", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"comparison.md\nreport: {out / 'report.html'}\n")
    assert (out / "report.html").is_file()

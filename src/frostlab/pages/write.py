"""Writing of a report into the reported folder: page, Markdown, figures and tables."""

import csv
import io
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from frostlab.charts import figure_files, themed
from frostlab.errors import BadInput
from frostlab.pages import compared
from frostlab.pages.content import Cell, Document, Figure, Table
from frostlab.pages.document import page
from frostlab.pages.one_run import run_report
from frostlab.records.index import is_comparison, is_run
from frostlab.storage import path_inside, remove_temporary, whole_folder, write_whole

PAGE = "report.html"


def report(folder: str | Path, language: str = "en") -> Path:
    """Write the report of a run, of a comparison or of a folder of comparisons; return its page.

    It writes `report.html`, `report.md` and the folders `figures` and `tables` into the folder, and
    replaces an earlier report.
    """
    folder = Path(folder)
    document = _document(folder, language)
    _write(folder, document)
    return folder / PAGE


def _document(folder: Path, language: str) -> Document:
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder")
    kinds: tuple[tuple[Callable[[Path], bool], Callable[[Path, str], Document]], ...] = (
        (is_comparison, compared.document),
        (is_run, run_report.document),
    )
    for fits, make in kinds:
        if fits(folder):
            return make(folder, language)
    raise BadInput(f"{folder} holds no run and no comparison")


def _write(folder: Path, document: Document) -> None:
    text = page(document)  # before anything is written
    drawn = {figure.name: figure_files(themed(figure.chart, in_page=False))
             for figure in document.figures}  # fmt: skip
    try:
        for name, files in (("figures", _figure_files(drawn)), ("tables", _table_files(document))):
            target = path_inside(folder, name)
            remove_temporary(folder, name)
            with whole_folder(_beside(target)) as temporary:
                for file, data in files.items():
                    (temporary / file).write_bytes(data)
            if target.exists():
                shutil.rmtree(target)
            _beside(target).rename(target)
        write_whole(path_inside(folder, PAGE), text)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror or error}") from None


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}-new")


def _figure_files(drawn: dict[str, dict[str, bytes]]) -> dict[str, bytes]:
    return {
        f"{name}.{ending}": data for name, files in drawn.items() for ending, data in files.items()
    }


def _table_files(document: Document) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for figure in document.figures:
        files[f"{figure.name}.csv"] = _figure_csv(figure)
    for table in document.tables:
        files[f"{table.name}.csv"] = _table_csv(table)
    return files


def _figure_csv(figure: Figure) -> bytes:
    head = list(dict.fromkeys(key for row in figure.rows for key in row))
    rows = [[row.get(key, "") for key in head] for row in figure.rows]
    return _csv([head, *rows])


def _table_csv(table: Table) -> bytes:
    rows = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in table.rows]
    return _csv([list(table.head), *rows])


def _csv(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()

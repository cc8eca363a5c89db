"""Writing of a report into the reported folder: page, Markdown, figures and tables."""

import shutil
from collections.abc import Callable
from pathlib import Path

from frostlab.charts import figure_files, themed
from frostlab.errors import BadInput
from frostlab.pages import compared
from frostlab.pages.content import Document
from frostlab.pages.document import page
from frostlab.pages.record import markdown
from frostlab.pages.tables import table_files
from frostlab.records.index import is_comparison, is_run
from frostlab.storage import path_inside, remove_temporary, whole_folder, write_whole

PAGE, RECORD = "report.html", "report.md"


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
    )
    for fits, make in kinds:
        if fits(folder):
            return make(folder, language)
    if is_run(folder):
        raise BadInput(f"{folder} is a run, which has no report yet")
    raise BadInput(f"{folder} holds no run and no comparison")


def _write(folder: Path, document: Document) -> None:
    text, record = page(document), markdown(document)  # before anything is written
    drawn = {figure.name: figure_files(themed(figure.chart, in_page=False))
             for figure in document.figures}  # fmt: skip
    try:
        for name, files in (("figures", _figure_files(drawn)), ("tables", table_files(document))):
            target = path_inside(folder, name)
            remove_temporary(folder, name)
            with whole_folder(_beside(target)) as temporary:
                for file, data in files.items():
                    (temporary / file).write_bytes(data)
            if target.exists():
                shutil.rmtree(target)
            _beside(target).rename(target)
        write_whole(path_inside(folder, RECORD), record)
        write_whole(path_inside(folder, PAGE), text)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror or error}") from None


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}-new")


def _figure_files(drawn: dict[str, dict[str, bytes]]) -> dict[str, bytes]:
    return {
        f"{name}.{ending}": data for name, files in drawn.items() for ending, data in files.items()
    }

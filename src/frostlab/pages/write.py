"""Write a report into the reported folder: page, Markdown, figures and tables.

All files are made in a temporary folder and then exchanged for those of an earlier report, so that
a report that fails leaves the earlier one as it was. report.json lists the files of a report, with
the digests of the records from which the report was made. The digests show whether the report is
up to date. Only listed files are replaced: a file that no report has written is never touched.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from frostlab import __version__
from frostlab.charts import RED, figure_files, require_drawing, still, themed
from frostlab.drawing import Drawer
from frostlab.errors import BadInput, FrostlabError, nearest
from frostlab.fonts import require_fonts, with_fonts
from frostlab.pages.content import Document, Figure
from frostlab.pages.document import build_vega, page
from frostlab.pages.languages.phrases import LANGUAGES
from frostlab.pages.record import markdown
from frostlab.pages.tables import table_files
from frostlab.records.finding.index import is_comparison, is_run
from frostlab.storage import Lock, file_digest, read_json, remove_temporary
from frostlab.text import plain, wrapped
from frostlab.typed import check_schema

PAGE, RECORD, LISTING = "report.html", "report.md", "report.json"
_SCHEMA = 1  # version of report.json
_LINE = 90  # characters of a line below a figure's title
_TEMPORARY = "report"  # part of the temporary folder's name


def report(folder: str | Path, language: str = "en") -> Path:
    """Write the report of a run, of a comparison, or of several comparisons; return its page.

    It writes `report.html`, `report.md`, `report.json` and the folders `figures` and `tables` into
    the folder, and replaces an earlier report. If it fails, the earlier report stays as it was.

    Args:
        folder: folder of a run, a comparison, a group, or several comparisons. In a folder of
            several, every comparison and group also gets a report, unless that is up to date.
        language: en, zh or ja: language of verdicts, headings and captions, where they are
            translated; most texts of tables and all texts in charts are English.
    """
    folder = Path(folder)
    if language not in LANGUAGES:
        choices = ", ".join(LANGUAGES)
        raise BadInput(
            f"language {language!r:.40} is not one of {choices}{nearest(language, LANGUAGES)}"
        )
    require_drawing("a report")  # before anything is read
    require_fonts("a report")
    with Drawer() as drawer:
        drawer.later(build_vega, drawer.bundle)
        return _report(folder, language, drawer)


def _report(folder: Path, language: str, drawer: Drawer) -> Path:
    make, sources = _kind(folder)
    alone = is_comparison(folder) or is_run(folder)
    problems = [] if alone else _report_members(folder, language, drawer)
    made_from = _digests(folder, sources)
    document = make(folder, language)
    document = replace(document, problems=(*document.problems, *problems))
    _write(folder, _files(document, drawer), {"language": language, "made_from": made_from})
    return folder / PAGE


def is_current(folder: Path, language: str = "en") -> bool:
    """Return whether a folder has a report in this language that is up to date.

    It is up to date if this version of frostlab has made it from the present records, and all its
    files are there.
    """
    listing = _listing(folder)
    _, sources = _kind(folder)
    return (
        listing.get("frostlab") == __version__
        and listing.get("language") == language
        and listing.get("made_from") == (_digests(folder, sources) or None)
        and all((folder / name).is_file() for name in _listed_files(listing))
    )


Make = Callable[[Path, str], Document]


def _kind(folder: Path) -> tuple[Make, tuple[str, ...]]:
    """Return the function that makes a folder's report, and the records that it is made from.

    For an unfinished comparison or run, whose files change all the time, no records are returned,
    so that its report is never up to date. Only the modules of this kind of report are imported.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder" if folder.exists() else f"no folder {folder}")
    if is_comparison(folder):
        from frostlab.pages import unfinished
        from frostlab.pages.one_comparison import compared

        if (folder / compared.EVIDENCE).exists():
            return compared.document, (compared.EVIDENCE,)
        return unfinished.document, ()
    if is_run(folder):
        from frostlab.pages.one_run import run_report

        return run_report.document, run_report.sources(folder)
    from frostlab.experiments import collection
    from frostlab.pages.several import many

    if collection.is_several(folder):
        return many.document, collection.sources(folder)
    runs = sorted(path for path in folder.iterdir() if is_run(path))
    if runs:
        raise BadInput(f"{folder} holds single runs; report one of them, such as {runs[0]}")
    raise BadInput(f"{folder} holds no run and no comparison")


def _report_members(folder: Path, language: str, drawer: Drawer) -> list[str]:
    """Write the reports inside a folder that are missing or out of date; return the problems."""
    from frostlab.experiments import collection

    problems = []
    for path in collection.reported_folders(folder):
        try:
            if not is_current(path, language):
                _report(path, language, drawer)
        except FrostlabError as error:
            problems.append(f"{path.relative_to(folder)} has no report of its own: {error}")
    return problems


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: file_digest(folder / name) for name in names if (folder / name).is_file()}


# The files of a report


def _files(document: Document, drawer: Drawer) -> dict[str, bytes]:
    """Return the content of every file of a report, by its path in the folder."""
    drawn = {figure.name: drawer.later(still, figure.chart, drawer.svg)
             for figure in document.figures}  # fmt: skip
    separate = drawn  # the drawings in files of their own; they show the caution, too
    if (caution := document.caution) is not None:
        separate = {figure.name: drawer.later(still, _with_caution(figure, caution), drawer.svg)
                    for figure in document.figures}  # fmt: skip
    files = {RECORD: markdown(document).encode()}  # while the figures are drawn
    for name, data in table_files(document).items():
        files[f"tables/{name}"] = data
    for name, value in document.records.items():
        files[name] = (json.dumps(value, indent=1) + "\n").encode()
    drawings = {name: drawing.result() for name, drawing in drawn.items()}
    separate_drawings = {name: drawing.result() for name, drawing in separate.items()}
    drawer.stop()  # frees the memory of its process, most of what a report needs
    for name, drawing in separate_drawings.items():
        for ending, data in figure_files(drawing).items():
            files[f"figures/{name}.{ending}"] = data
    files |= with_fonts({name: data for name, data in files.items() if name.endswith(".svg")})
    files[PAGE] = page(document, drawings).encode()
    return files


def _with_caution(figure: Figure, caution: str) -> dict[str, Any]:
    """Return a chart with the caution below its title, because a figure can be used on its own."""
    spec = themed(figure.chart, in_page=False)
    own = spec.get("title") or figure.title
    own = dict(own) if isinstance(own, dict) else {"text": own}
    lines = wrapped(f"Caution: {plain(caution)}", _LINE, indent="")
    return spec | {"title": own | {"subtitle": lines, "subtitleColor": RED, "anchor": "start"}}


# The exchange of an earlier report for a new one


def _write(folder: Path, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
    """Replace the files of an earlier report; if that fails, all of them stay as they were."""
    try:
        with Lock(folder):
            remove_temporary(folder, _TEMPORARY)
            before = _listed_files(_listing(folder))
            _check_own(folder, files, before)
            temporary = Path(tempfile.mkdtemp(prefix=f".{_TEMPORARY}.", suffix=".tmp", dir=folder))
            try:
                _fill(temporary / "new", {**files, LISTING: _content(facts, files)})
                both = {*before, *files}
                _exchange(folder, temporary, both)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"the report in {folder} cannot be written: {reason}") from None


def _content(facts: Mapping[str, Any], files: Iterable[str]) -> bytes:
    """Return the content of report.json."""
    values = {"schema": _SCHEMA, "frostlab": __version__, **facts, "files": sorted(files)}
    return (json.dumps(values, indent=1) + "\n").encode()


def _listing(folder: Path) -> dict[str, Any]:
    """Return the content of report.json; empty if it is missing, damaged or of another schema."""
    path = folder / LISTING
    try:
        return check_schema(read_json(path), _SCHEMA, path)
    except (FileNotFoundError, BadInput):
        return {}


def _listed_files(listing: Mapping[str, Any]) -> list[str]:
    names = listing.get("files")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _check_own(folder: Path, files: Iterable[str], before: Sequence[str]) -> None:
    """Refuse to replace a file that no report has written."""
    own = {*before, LISTING} if before else set()
    for top in sorted({*(Path(name).parts[0] for name in files), LISTING}):
        path = folder / top
        inside = path.is_dir() and not path.is_symlink()
        present = path.rglob("*") if inside else [path] if os.path.lexists(path) else []
        for file in sorted(present):
            if str(file.relative_to(folder)) not in own:
                raise BadInput(f"{file} was not written by a report; move it to another folder")


def _fill(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _exchange(folder: Path, temporary: Path, files: Iterable[str]) -> None:
    """Move the old files and folders away and the new ones to their places, or undo it all.

    Until it is done, report.json lists the files of both reports, in case this process is killed.
    """
    (temporary / "old").mkdir()
    meanwhile = temporary / LISTING
    meanwhile.write_bytes(_content({"language": None, "made_from": None}, files))
    names = [LISTING, *sorted({Path(name).parts[0] for name in files}), LISTING]
    sources = [meanwhile, *(temporary / "new" / name for name in names[1:])]
    done: list[tuple[Path, Path | None]] = []  # each place, and where its former content is
    try:
        for number, (name, new) in enumerate(zip(names, sources, strict=True)):
            place, aside = folder / name, temporary / "old" / f"{number}"
            if os.path.lexists(place):
                os.replace(place, aside)
                done.append((place, aside))
            else:
                done.append((place, None))
            if new.exists():
                os.replace(new, place)
    except OSError:
        for number, (place, former) in enumerate(reversed(done)):
            if os.path.lexists(place):
                os.replace(place, temporary / f"undone-{number}")
            if former is not None:
                os.replace(former, place)
        raise

"""Writing of a report into the reported folder: page, Markdown, figures and tables.

All files are made in a temporary folder and then exchanged for those of an earlier report, so that
a report that fails leaves the earlier one as it was. report.json lists the files of a report and
has the digests of the records that it was made from. It shows whether a report is up to date, and
which files may be replaced: a file that no report has written is never touched.
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
from frostlab.charts import figure_files, require_drawing, still
from frostlab.errors import BadInput, FrostlabError, nearest
from frostlab.pages import compared, many, several, unfinished
from frostlab.pages.compared import EVIDENCE
from frostlab.pages.content import Document
from frostlab.pages.document import page
from frostlab.pages.languages import LANGUAGES
from frostlab.pages.record import markdown
from frostlab.pages.tables import table_files
from frostlab.records.index import is_comparison, is_run
from frostlab.storage import Lock, file_digest, read_json, remove_temporary, write_whole

PAGE, RECORD, LISTING = "report.html", "report.md", "report.json"
_SCHEMA = 1  # version of report.json
_TEMPORARY = "report"  # part of the temporary folder's name


def report(folder: str | Path, language: str = "en") -> Path:
    """Write the report of a run, of a comparison, or of several comparisons; return its page.

    It writes `report.html`, `report.md`, `report.json` and the folders `figures` and `tables` into
    the folder, and replaces an earlier report. If it fails, the earlier report stays as it was.

    Args:
        folder: folder of a run, a comparison, a group, or several comparisons. In a folder of
            several, every comparison also gets its own report, unless that is up to date.
        language: language of the verdicts: en, zh or ja.
    """
    folder = Path(folder)
    if language not in LANGUAGES:
        choices = ", ".join(LANGUAGES)
        raise BadInput(
            f"language {language!r:.40} is not one of {choices}{nearest(language, LANGUAGES)}"
        )
    require_drawing("a report")  # before anything is read
    make, sources = _kind(folder)
    problems = _report_members(folder, language) if make is many.document else []
    made_from = _digests(folder, sources)
    document = make(folder, language)
    document = replace(document, problems=(*document.problems, *problems))
    _write(folder, _files(document), {"language": language, "made_from": made_from})
    return folder / PAGE


def is_current(folder: Path, language: str = "en") -> bool:
    """Return whether a folder has a report in this language, made from its present records."""
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
    """Return how a folder is reported, and the records that show whether a report is current.

    A comparison that is not finished has none of these, because its runs change all the time.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder" if folder.exists() else f"no folder {folder}")
    if is_comparison(folder):
        if (folder / EVIDENCE).exists():
            return compared.document, (EVIDENCE,)
        return unfinished.document, ()
    if is_run(folder):
        raise BadInput(f"{folder} is a run, which has no report yet")
    if several.is_several(folder):
        return many.document, several.sources(folder)
    runs = sorted(path for path in folder.iterdir() if is_run(path))
    if runs:
        raise BadInput(f"{folder} holds single runs; report one of them, such as {runs[0]}")
    raise BadInput(f"{folder} holds no run and no comparison")


def _report_members(folder: Path, language: str) -> list[str]:
    """Write the reports inside a folder that are missing or out of date; return the problems."""
    problems = []
    for path in several.reported_folders(folder):
        try:
            if not is_current(path, language):
                report(path, language)
        except FrostlabError as error:
            problems.append(f"{path.relative_to(folder)} has no report of its own: {error}")
    return problems


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: file_digest(folder / name) for name in names if (folder / name).is_file()}


# The files of a report


def _files(document: Document) -> dict[str, bytes]:
    """Return the content of every file of a report, by its path in the folder."""
    drawings = {figure.name: still(figure.chart) for figure in document.figures}
    files = {PAGE: page(document, drawings).encode(), RECORD: markdown(document).encode()}
    for figure, drawing in drawings.items():
        for ending, data in figure_files(drawing).items():
            files[f"figures/{figure}.{ending}"] = data
    for name, data in table_files(document).items():
        files[f"tables/{name}"] = data
    for name, value in document.records.items():
        files[name] = (json.dumps(value, indent=1) + "\n").encode()
    return files


# The exchange of an earlier report for a new one


def _write(folder: Path, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
    """Replace the files of an earlier report; if that fails, all of them stay as they were."""
    try:
        with Lock(folder):
            remove_temporary(folder, _TEMPORARY)
            earlier = _listing(folder)
            before = _listed_files(earlier)
            _check_own(folder, files, before)
            temporary = Path(tempfile.mkdtemp(prefix=f".{_TEMPORARY}.", suffix=".tmp", dir=folder))
            try:
                _fill(temporary / "new", files)
                # if this process is killed in between, the files of both reports are listed
                both = sorted({*before, *files})
                _write_listing(folder, {"language": None, "made_from": None}, both)
                try:
                    _exchange(folder, temporary, {Path(name).parts[0] for name in both})
                except OSError:
                    if earlier:
                        write_whole(folder / LISTING, json.dumps(earlier, indent=1) + "\n")
                    raise
                _write_listing(folder, facts, sorted(files))
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"the report in {folder} cannot be written: {reason}") from None


def _write_listing(folder: Path, facts: Mapping[str, Any], files: Sequence[str]) -> None:
    values = {"schema": _SCHEMA, "frostlab": __version__, **facts, "files": files}
    write_whole(folder / LISTING, json.dumps(values, indent=1) + "\n")


def _listing(folder: Path) -> dict[str, Any]:
    """Return the content of report.json; empty if there is none that this version wrote."""
    try:
        values = read_json(folder / LISTING)
    except (FileNotFoundError, BadInput):
        return {}
    fits = isinstance(values, dict) and values.get("schema") == _SCHEMA
    return values if fits else {}


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


def _exchange(folder: Path, temporary: Path, names: Iterable[str]) -> None:
    """Move the old files and folders away and the new ones to their places, or undo it all."""
    (temporary / "old").mkdir()
    done: list[str] = []
    try:
        for name in sorted(names):
            done.append(name)
            if os.path.lexists(folder / name):
                os.replace(folder / name, temporary / "old" / name)
            if (temporary / "new" / name).exists():
                os.replace(temporary / "new" / name, folder / name)
    except OSError:
        for name in reversed(done):
            if (temporary / "old" / name).exists():
                if os.path.lexists(folder / name):
                    os.replace(folder / name, temporary / "new" / name)
                os.replace(temporary / "old" / name, folder / name)
        raise

"""`frostlab report`: write the report of a run, a comparison or several comparisons."""

from pathlib import Path
from typing import Annotated

import typer

from frostlab.cli.options import echo
from frostlab.errors import FrostlabError
from frostlab.text import plain


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder of a run, a comparison, a group or several comparisons."
        ),
    ],
    language: Annotated[
        str,
        typer.Option(
            "--lang",
            metavar="en|zh|ja",
            help="Language of the verdicts and, for one comparison, of headings and captions.",
        ),
    ] = "en",
) -> None:
    """Write a report: one page that needs no other file, and its figures and tables as files.

    The folder gets report.html, report.md, figures (SVG, PNG and PDF) and tables (CSV
    and LaTeX). An earlier report is replaced. In a folder of several comparisons, each
    comparison gets its own report, too, unless that is up to date.
    """
    from frostlab.pages.write import report as write_report

    echo(plain(str(write_report(folder, language))))


def report_at_end(folder: Path, show: bool) -> None:
    """Write the report of a comparison or group that has just been judged, and show its path.

    If that is not possible, one line says why; the comparison is finished all the same.
    """
    from frostlab.pages.write import PAGE
    from frostlab.pages.write import report as write_report

    try:
        page = write_report(folder)
    except FrostlabError as error:
        old = f"; {folder / PAGE} shows earlier results" if (folder / PAGE).exists() else ""
        echo(plain(f"frostlab: no report: {error}{old}"), err=True)
        return
    if show:
        echo(plain(f"report: {page}"))

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
            help="Language of the verdicts; in the report of one comparison, also of headings and "
            "captions.",
        ),
    ] = "en",
) -> None:
    """Write a report: a page, and its figures and tables as further files.

    The page, report.html, contains everything and can be sent alone. Next to it, the folder
    gets report.md, figures (SVG, PNG and PDF) and tables (CSV and LaTeX). An earlier report
    is replaced. In a folder of several comparisons, every comparison whose own report is not
    up to date gets a new one, too.
    """
    from frostlab.pages.write import report as write_report

    echo(plain(str(write_report(folder, language))))


def report_at_end(folder: Path, show: bool) -> None:
    """Write the report of a comparison or group that has just been judged, and show its path.

    If the report cannot be written, one line says why, and the command goes on.
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

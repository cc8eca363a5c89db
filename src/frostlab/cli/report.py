"""The command `report`."""

from pathlib import Path
from typing import Annotated

import typer

from frostlab.cli.options import echo
from frostlab.text import plain


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder of a run or a comparison, or of several."),
    ],
    language: Annotated[
        str,
        typer.Option("--lang", metavar="en|zh|ja", help="Language of the verdicts."),
    ] = "en",
) -> None:
    """Write a report: one page with figures that needs no other file, and its parts as files.

    The folder gets report.html, report.md, figures (SVG, PNG and PDF) and tables (CSV
    and LaTeX). An earlier report is replaced.
    """
    from frostlab.pages.write import report as write_report

    echo(plain(str(write_report(folder, language))))

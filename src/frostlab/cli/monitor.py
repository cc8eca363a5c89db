"""`frostlab status`, `stop` and `logs`: watch the runs of a matrix, and stop them."""

import gc
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frostlab.cli.options import AsJson, RunName, RunsFolder, echo
from frostlab.errors import BadInput, nearest
from frostlab.text import escaped, printable

if TYPE_CHECKING:
    from rich.console import Console

_MOST_ROWS = 40  # rows that are shown without --all
_LIVE_SECONDS = 1.0  # between two drawings
_FOLLOW_SECONDS = 0.3  # between two looks at a log


def status(
    matrix: Annotated[
        str | None,
        typer.Argument(
            metavar="MATRIX", help="Name of a matrix (default: the one that runs, or the newest)."
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Redraw the table every second, until Ctrl-C.")
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print an overview table in Markdown, to paste."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Show all runs, even if they are more than {_MOST_ROWS}.")
    ] = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show where the runs of a matrix stand: state, device, step, loss, speed, time left.

    Without a matrix, all runs in the folder are shown.
    """
    from frostlab.matrix.show import as_json as status_values
    from frostlab.matrix.show import cautions, ended, overview_rows, overview_table, terminal_table
    from frostlab.matrix.status import read_status

    if live and (as_json or markdown):
        raise BadInput("--live draws a table on a terminal; leave out --json and --markdown")
    if not live:
        gc.disable()  # with thousands of runs, looking for garbage takes a fifth of the time
    found = read_status(runs, matrix)
    if as_json:
        echo(json.dumps(status_values(found), indent=1))
        return
    if markdown:
        echo("\n\n".join([overview_table(overview_rows(found)), *map(escaped, cautions(found))]))
        return
    most = None if everything else _MOST_ROWS
    console = _console()
    if not live:
        console.print(terminal_table(found, most))
        return
    from rich.live import Live

    with Live(terminal_table(found, most), console=console, auto_refresh=False) as screen:
        try:
            while not ended(found):
                time.sleep(_LIVE_SECONDS)
                found = read_status(runs, matrix)
                screen.update(terminal_table(found, most), refresh=True)
        except KeyboardInterrupt:
            pass


def _console() -> "Console":
    from rich.console import Console

    # A pipe gets whole lines; a terminal its own width.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def stop(
    name: Annotated[
        str, typer.Argument(metavar="RUN|MATRIX", help="Name of a run or of the matrix that runs.")
    ],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Stop a run, or a whole matrix: runs end after a step, with a checkpoint.

    The same matrix command continues them later. Stopping a matrix twice ends it at once.
    """
    from frostlab.matrix.store import EVERYTHING, MatrixFolder, holder_of

    holder = holder_of(runs)
    if holder is None:
        raise BadInput(f"no matrix runs in {runs}, so nothing can be stopped")
    folder = MatrixFolder(runs, holder.name)
    if name == holder.name:
        folder.request(stop=EVERYTHING)
        echo(f"{name} stops; its runs write a checkpoint first")
        return
    names = [run.name for run in folder.plan().runs]
    matches = [known for known in names if known == name] or [
        known for known in names if known.startswith(name)
    ]
    if len(matches) != 1:
        problem = f"could be {', '.join(matches[:5])}" if matches else f"is no run of {folder.name}"
        hint = "" if matches else nearest(name, [folder.name, *names])
        raise BadInput(f"{name!r:.80} {problem}{hint}")
    folder.request(stop=matches[0])
    echo(f"{matches[0]} stops; it writes a checkpoint first")


def logs(
    run: RunName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on while the run writes, until Ctrl-C.")
    ] = False,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Print the output of a run of a matrix."""
    from frostlab.matrix.status import read_status
    from frostlab.matrix.store import find_log

    path = find_log(runs, run)
    with path.open("rb") as file:
        try:
            while True:
                if text := file.read().decode(errors="replace"):
                    sys.stdout.write(printable(text))
                    sys.stdout.flush()
                elif not follow:
                    return
                else:
                    states = {row.name: row.state for row in read_status(runs).runs}
                    if states.get(path.stem) not in ("running", "waiting"):
                        return
                    time.sleep(_FOLLOW_SECONDS)
        except KeyboardInterrupt:
            return

"""`frostlab status`, `stop` and `logs`: watch the runs of a matrix, and stop them."""

import gc
import json
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frostlab.cli.options import AsJson, RunsFolder, Wide, complete_run, echo, width_of
from frostlab.errors import BadInput, FrostlabError, nearest
from frostlab.text import escaped, printable

if TYPE_CHECKING:
    from rich.text import Text

    from frostlab.matrix.status import MatrixStatus
    from frostlab.matrix.store import Holder

_MOST_ROWS = 40  # rows that are shown without --all
_LIVE_SECONDS = 1.0  # time between two drawings
_FOLLOW_SECONDS = 0.3  # time between two checks of a log


def status(
    matrix: Annotated[
        str | None,
        typer.Argument(
            metavar="MATRIX", help="Name of a matrix (default: the one that runs, or the newest)."
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Redraw the table every second, until the runs end.")
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print a Markdown table with one row for each experiment."),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Show all runs, even if they are more than {_MOST_ROWS}.")
    ] = False,
    wide: Wide = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show where the runs of a matrix stand: state, step, loss, time left, device, speed.

    A matrix is all runs that one `frostlab matrix` command trains. If the folder has no
    matrix, all its runs are shown. A narrow terminal shows neither speed nor device, and
    shortens names. --live shows as many runs as the terminal has lines for, first those
    that run or failed.
    """
    from frostlab.matrix.show import as_json as status_values
    from frostlab.matrix.show import cautions, ended, overview_rows, overview_table, terminal_table
    from frostlab.matrix.status import read_status

    if live and (as_json or markdown):
        raise BadInput("--live draws a table on a terminal; leave out --json and --markdown")
    if not live:
        gc.disable()  # with thousands of runs, looking for garbage takes a fifth of the time
    status = read_status(runs, matrix)
    if as_json:
        echo(json.dumps(status_values(status), indent=1))
        return
    if markdown:
        echo("\n\n".join([overview_table(overview_rows(status)), *map(escaped, cautions(status))]))
        return
    from rich.console import Console

    most = None if everything else _MOST_ROWS
    console = Console(highlight=False)
    if not live:
        # In a pipe, nothing is shortened.
        width = width_of(wide or not sys.stdout.isatty())
        console.print(terminal_table(status, width, most=most), soft_wrap=True)
        return
    from rich.live import Live

    def screenful() -> "Text":
        # The last line is left for the cursor.
        return terminal_table(status, width_of(wide), height=console.height - 1)

    with Live(screenful(), console=console, auto_refresh=False) as screen:
        try:
            while not ended(status):
                time.sleep(_LIVE_SECONDS)
                status = read_status(runs, matrix)
                screen.update(screenful(), refresh=True)
        except KeyboardInterrupt:
            pass


def stop(
    name: Annotated[
        str, typer.Argument(metavar="RUN|MATRIX", help="Name of a run or of the matrix that runs.")
    ],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Stop a run of a matrix, or the whole matrix, after the current step.

    Each run writes a checkpoint. To continue from there later, repeat the command that
    started the matrix. A second `stop`, while the matrix is still stopping, ends it at once.
    """
    from frostlab.matrix.status import read_status
    from frostlab.matrix.store import EVERYTHING, MatrixFolder, holder_of

    holder = holder_of(runs)
    if holder is None:
        raise BadInput(f"no matrix runs in {runs}, so nothing can be stopped")
    folder = MatrixFolder(runs, holder.name)
    if name == holder.name:
        state = folder.state()
        again = state is not None and state.status == "stopping"
        try:
            folder.request(stop=EVERYTHING)
        except BadInput as error:
            from frostlab.matrix.task import disk_problem_in

            if disk_problem_in(error) is None or not _signal(holder):
                raise
        echo(
            f"{name} ends at once" if again else f"{name} stops; its runs write a checkpoint first"
        )
        return
    names = [run.name for run in folder.plan().runs]
    matches = [known for known in names if known == name] or [
        known for known in names if known.startswith(name)
    ]
    if len(matches) != 1:
        problem = f"could be {', '.join(matches[:5])}" if matches else f"is no run of {folder.name}"
        hint = "" if matches else nearest(name, [folder.name, *names])
        raise BadInput(f"{name!r:.80} {problem}{hint}")
    (run,) = matches
    states = {row.name: row.state for row in read_status(runs, folder.name).runs}
    if states[run] not in ("running", "pending", "waiting"):
        raise BadInput(f"{run} is {states[run]}; only a run that trains or waits can be stopped")
    folder.request(stop=run)
    begun = states[run] == "running"
    echo(f"{run} stops; it writes a checkpoint first" if begun else f"{run} will not be started")


def _signal(holder: "Holder") -> bool:
    """Ask a driver on this machine to stop by a signal; return whether that was possible."""
    import psutil  # type: ignore[import-untyped]

    if holder.host != socket.gethostname():
        return False
    try:
        process = psutil.Process(holder.pid)
        if not any("frostlab" in word for word in process.cmdline()):
            return False  # the number is that of another container's process
        process.terminate()
    except psutil.Error:
        return False
    return True


def logs(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Name of a run, or the beginning of its name.",
            autocompletion=complete_run,
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")
    ] = False,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Print the output of a run of a matrix."""
    from frostlab.matrix.status import read_status
    from frostlab.matrix.store import find_log

    path = find_log(runs, run, wait=follow)
    matrix = path.parent.parent.name
    while not path.exists():
        status = read_status(runs, matrix)
        if not _may_write(status, path.stem):
            raise FrostlabError(_why_no_log(status, path.stem))
        time.sleep(_FOLLOW_SECONDS)
    with path.open("rb") as file:
        try:
            while True:
                if text := file.read().decode(errors="replace"):
                    sys.stdout.write(printable(text))
                    sys.stdout.flush()
                elif not follow:
                    return
                else:
                    if not _may_write(read_status(runs, matrix), path.stem):
                        return
                    time.sleep(_FOLLOW_SECONDS)
        except KeyboardInterrupt:
            return


def _may_write(status: "MatrixStatus", name: str) -> bool:
    """Return whether a run writes to its log, or will."""
    states = {row.name: row.state for row in status.runs}
    return _is_live(status) and states.get(name) in ("running", "waiting", "pending")


def _is_live(status: "MatrixStatus") -> bool:
    return status.status in ("running", "waiting", "stopping")


def _why_no_log(status: "MatrixStatus", name: str) -> str:
    """Return why a run has no log."""
    (row,) = [row for row in status.runs if row.name == name]
    if row.state == "waiting":
        return (
            f"{name} has not begun, and {status.name} does not run now ({status.status}); repeat "
            "the `frostlab matrix` command that started it to continue"
        )
    reason = f" ({row.error})" if row.error else ""
    return f"{name} has written no log: it is {row.state}{reason}"

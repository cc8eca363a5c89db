"""The program `frostlab`: its commands, its one-line errors and its exit codes."""

import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from inspect import cleandoc
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from frostlab import __version__
from frostlab.cli import (
    bench,
    compare,
    diagnose,
    inspect,
    machine,
    matrix,
    monitor,
    needs,
    records,
    report,
    runs,
    use,
)
from frostlab.cli.options import echo
from frostlab.errors import BadInput, FrostlabError
from frostlab.launcher import check_variables, world_size
from frostlab.text import plain, printable


def _without_value(params: list[Any]) -> list[Any]:
    """Show a flag in --help as `--json`, not as `--json <bool>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _joined(text: str | None) -> str:
    """Join the lines of each paragraph; the width of the terminal decides where they break."""
    paragraphs = cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


class _Command(TyperCommand):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.help = _joined(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_value(super().get_params(ctx))


class _Group(TyperGroup):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.help = _joined(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_value(super().get_params(ctx))


app = typer.Typer(
    cls=_Group, add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"frostlab {__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Freeze or change parts of a transformer, train it, and measure what that changes.

    Exit codes: 0 success; 1 failure, or a problem found by check, diagnose, verify, data check,
    run --check or matrix --check; 2 bad input.
    """


_COMMANDS: dict[str, Callable[..., None]] = {  # in the order of --help
    "check": machine.check,
    "recipes": runs.recipes,
    "inspect": inspect.inspect,
    "run": runs.run,
    "matrix": matrix.matrix,
    "status": monitor.status,
    "stop": monitor.stop,
    "logs": monitor.logs,
    "runs": records.list_runs,
    "show": records.show,
    "diff": records.diff,
    "note": records.note,
    "tag": records.tag,
    "clean": records.clean,
    "diagnose": diagnose.diagnose,
    "compare": compare.compare,
    "judge": compare.judge,
    "report": report.report,
    "verify": records.verify,
    "evaluate": use.evaluate,
    "predict": use.predict,
    "generate": use.generate,
    "export": use.export,
    "exits": runs.exits,
    "envelopes": runs.envelopes,
    "bench": bench.bench,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=_Command)(_command)
_data = typer.Typer(cls=_Group, no_args_is_help=True)
_data.command("check", cls=_Command)(needs.check)
_data.command("fetch", cls=_Command)(needs.fetch)
app.add_typer(_data, name="data", help="Check or fetch the data sets and models that recipes need.")


def main() -> None:
    """Run a command; print a `FrostlabError` on one line, and exit with 2 (bad input) or 1."""
    _quiet_libraries()
    _escape_unprintable()
    try:
        check_variables()
        app()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except FrostlabError as error:
        echo(plain(f"frostlab: {error}"), err=True)
        _leave(2 if isinstance(error, BadInput) else 1)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(1)


def _quiet_libraries() -> None:
    """Turn off the warnings and progress bars of the Hugging Face libraries by default."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


_FORMAT_WARNING = warnings.formatwarning


def _format_warning(message: Any, category: Any, *place: Any, **more: Any) -> str:
    """Return a warning of frostlab as one line, and other warnings with their place in the code."""
    if category.__module__.startswith("frostlab."):
        return plain(f"frostlab: warning: {message}") + "\n"
    return printable(_FORMAT_WARNING(message, category, *place, **more))


def _escape_unprintable() -> None:
    """Escape characters that the terminal's encoding lacks, and control characters in warnings."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _format_warning


def _leave(code: int) -> NoReturn:
    """Exit; in a distributed run or after using a GPU, skip the interpreter's shutdown.

    DDP keeps gloo's threads alive after the process group is destroyed. If such a thread frees a
    tensor during shutdown, the process aborts, and torchrun reports the finished run as failed.
    Freeing a GPU's memory, and ending the processes that compiled code for it, takes seconds; the
    system does both when the process has ended.
    """
    distributed = False
    with suppress(BadInput):  # the command failed because of an invalid environment variable
        distributed = world_size() > 1
    torch = sys.modules.get("torch")
    if distributed or (torch is not None and torch.cuda.is_initialized()):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # a caller may have closed it
                stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""The commands; thin. torch is imported only by the commands that need it."""

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from frostlab import __version__
from frostlab.cli import bench, compare, diagnose, runs
from frostlab.errors import BadInput, FrostlabError


def _bare_flags(params: list[Any]) -> list[Any]:
    """Show `--json`, not `--json <bool>`: a flag takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _bare_flags(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _bare_flags(super().get_params(ctx))


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Which weights of a transformer learn, and what does it change?",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"frostlab {__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Which weights of a transformer learn, and what does it change?"""


def inspect(
    model: Annotated[
        str, typer.Argument(help="A model folder, an architecture such as gpt2, or a hub name.")
    ],
    freeze: Annotated[
        str, typer.Option(help="Selections to freeze, e.g. query,key or layers[0:3],!norm.")
    ] = "",
    length: Annotated[
        int, typer.Option(min=1, help="Sequence length for what freezing can save.")
    ] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show a model's anatomy, what is trainable, and what freezing could save at most.

    Nothing is downloaded but a config, and nothing is changed: --freeze is computed.
    """
    from frostlab.models.build import blueprint
    from frostlab.roles.read import anatomy
    from frostlab.timing.flops import describe_savings, savings

    built, source = blueprint(model)
    found = anatomy(built)
    if selections := [text for text in freeze.split(",") if text.strip()]:
        found = found.with_frozen(*selections)
    elif freeze:
        raise BadInput(f"--freeze {freeze!r} is empty; try --freeze query,key")
    if as_json:
        report: dict[str, Any] = {"source": source, **found.to_dict()}
        report["savings"] = savings(found, length).to_dict()
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(f"{model}: {source}\n{found.table()}")
    if selections:
        typer.echo("\nwhat freezing this can save at most")
        typer.echo("\n".join(describe_savings(found, length)))


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


_COMMANDS: dict[str, Callable[..., None]] = {
    "inspect": inspect,
    "bench": bench.bench,
    "compare": compare.compare,
    "diagnose": diagnose.diagnose,
    "envelopes": runs.envelopes,
    "exits": runs.exits,
    "recipes": runs.recipes,
    "run": runs.run,
    "runs": runs.list_runs,
    "show": runs.show_run,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=_Command)(_command)


def main() -> None:
    """Run a command; bad input is one line and exit code 2, failed work one line and 1."""
    _quiet_libraries()
    try:
        app()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    except FrostlabError as error:
        typer.echo(f"frostlab: {error}", err=True)
        _leave(2 if isinstance(error, BadInput) else 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(1)


def _leave(code: int) -> NoReturn:
    """Exit; one of several processes at once.

    DDP keeps gloo's threads alive after the process group is destroyed. One that frees a tensor
    while the interpreter shuts down aborts it, and torchrun then calls a finished run failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""What recipes need from outside: `frostlab data check`, `data fetch`."""

import json
from typing import Annotated

import typer

from frostlab.cli.options import AsJson, DataDir, Settings, check_data_dir, echo, width_of
from frostlab.errors import BadInput
from frostlab.text import NONE, columns, wrapped

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="A group, an experiment, another recipe, a YAML file, or a public data set.",
    ),
]


def check(
    names: Names, settings: Settings = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Show which data sets, tokenizers and weights are here, which are missing, and their size.

    Nothing is downloaded. The exit code is 1 if something is missing.
    """
    needs = _needs(names, settings, data_dir)
    if as_json:
        echo(json.dumps([need.to_dict() for need in needs], indent=1))
    else:
        echo("\n".join(_lines(needs)))
    if any(need.state == "missing" for need in needs):
        raise typer.Exit(1)


def fetch(names: Names, settings: Settings = None, data_dir: DataDir = None) -> None:
    """Download the missing data sets, tokenizers and weights into the Hugging Face cache.

    Later runs read them from there, with HF_HUB_OFFLINE=1 also without a network.
    """
    from frostlab.data.fetch import fetch as fetch_need

    needs = _needs(names, settings, data_dir)
    missing = [need for need in needs if need.state == "missing"]
    problems = []
    for need in missing:
        try:
            fetch_need(need)
        except BadInput as error:
            problems.append(f"{need.kind} {need.name}: {error}")
        else:
            echo(f"fetched {need.kind} {need.name}")
    if problems:
        raise BadInput("; ".join(problems))
    if not missing:
        echo("everything is here")


def _needs(names, settings, data_dir):
    raise NotImplementedError

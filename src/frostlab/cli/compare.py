"""`frostlab compare`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from frostlab.cli.runs import AsJson
from frostlab.errors import BadInput


def compare(
    source: Annotated[
        str, typer.Argument(metavar="COMPARISON", help="A recipe, or a comparison's YAML file.")
    ],
    arms: Annotated[
        str | None, typer.Option(help="Treatments, e.g. baseline,oelm,oelm-random.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many; more can be added to a finished one.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="What decides; none: the recipe's.")] = None,
    tune: Annotated[
        str | None, typer.Option(help="lr or decay: each arm's best, on an equal budget.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=0, help="Whole runs that alternate, for their time.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow-confound", help="A setting that may differ.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for every arm.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three seeds, little timing: is it worth a real run?")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at once, on a GPU with room for several.")
    ] = 1,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FROSTLAB_DATA", help="Data sets as NAME/SPLIT.jsonl …")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The comparison's own folder.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:2, mps.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train arms that differ in nothing but the treatment, and say what it changed.

    The same command again goes on where it was; with more seeds it adds them.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise BadInput(f"--data-dir {data_dir} is not a folder")
    asked = list(settings or [])
    if device is not None:
        asked.append(f"train.device={device}")
    from frostlab.comparison.load import make_plan

    changes: dict[str, Any] = {
        "arms": arms,
        "seeds": seeds,
        "metric": metric,
        "tune": tune,
        "rounds": rounds,
        "allow_confounds": allow or None,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    plan = make_plan(source, changes, settings=asked, quick=quick)
    from frostlab.comparison.page import show  # these import torch, the plan does without
    from frostlab.comparison.run import run_plan
    from frostlab.comparison.runner import Runner

    comparison = run_plan(
        plan, Runner(data_dir, lambda line: typer.echo(line, err=True), jobs), out
    )
    if as_json:
        typer.echo(json.dumps(comparison.evidence.to_dict(), indent=1))
    else:
        typer.echo(show(comparison.evidence, comparison.page))

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
    from frostlab.comparison.load import make_plan
    from frostlab.recipe.load import parse_settings

    asked = parse_settings(settings or [])
    if device is not None:
        asked["train.device"] = device

    given: dict[str, Any] = {
        "arms": arms,
        "seeds": seeds,
        "metric": metric,
        "tune": tune,
        "rounds": rounds,
        "allow_confounds": allow or None,
    }
    given = {key: value for key, value in given.items() if value is not None}
    make_plan(source, settings=asked, quick=quick, **given)  # what is wrong is said at once
    from frostlab.comparison.page import show
    from frostlab.comparison.run import compare as run_comparison

    made = run_comparison(
        source, settings=asked, quick=quick, data_dir=data_dir, out=out, jobs=jobs,
        say=lambda line: typer.echo(line, err=True), **given,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(made.evidence, indent=1))
    else:
        typer.echo(show(made.evidence, made.page))

"""Recipes and training: `frostlab recipes`, `run`, `exits`, `envelopes`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from frostlab.cli.options import (
    AsJson,
    DataDir,
    Device,
    RunName,
    RunsFolder,
    ScaleOption,
    Seed,
    Settings,
    StandIn,
    TrustRemoteCode,
    check_data_dir,
    echo,
    is_first_process,
    settings_from,
    width_of,
)
from frostlab.storage import read_text
from frostlab.text import plain, wrapped


def recipes(as_json: AsJson = False) -> None:
    """List the recipes and comparisons that ship with frostlab, one line each.

    With --json: a list of objects with the keys kind (recipe or comparison), name and about.
    """
    from frostlab.recipe.load import shipped_comparisons, shipped_recipes

    comparisons = {name: values["about"] for name, values in shipped_comparisons().items()}
    listed = [("recipe", name, about) for name, about in shipped_recipes().items()]
    listed += [("comparison", name, about) for name, about in comparisons.items()]
    if as_json:
        keys = ("kind", "name", "about")
        echo(json.dumps([dict(zip(keys, row, strict=True)) for row in listed], indent=1))
        return
    longest, width = max(len(name) for _, name, _ in listed), width_of()
    lines = {
        name: wrapped(f"{plain(name):{longest}}  {plain(about)}", width, " " * (longest + 2))
        for _, name, about in listed
    }
    first = next(iter(comparisons), None)
    for name, parts in lines.items():
        if name == first:
            echo("\ncomparisons, for `frostlab compare`:")
        echo("\n".join(parts))


def run(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="Name of a shipped recipe, or a YAML file of your own."
        ),
    ],
    settings: Settings = None,
    seed: Seed = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the newest unfinished run of this recipe."),
    ] = False,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for this run (default: a new one in --runs)."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write TensorBoard event files to this folder."),
    ] = None,
    device: Device = None,
    scale: ScaleOption = None,
    stand_in: StandIn = False,
    trust_remote_code: TrustRemoteCode = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Train a recipe, record every step, and show the result."""
    from frostlab.recipe.load import load_recipe, recipe_name

    loaded = load_recipe(recipe, settings_from(settings, device, scale), seed)
    check_data_dir(data_dir)
    from frostlab.records.show import show
    from frostlab.training.run import run as run_recipe

    record = run_recipe(
        loaded,
        name=recipe_name(recipe),
        out=out,
        runs=runs,
        data_dir=data_dir,
        resume=resume,
        tensorboard=tensorboard,
        stand_in=stand_in,
        progress=True,
    )
    if is_first_process():
        echo(
            json.dumps(asdict(record.result), indent=1)
            if as_json
            else show(record.folder, width_of())
        )


def exits(
    run: RunName,
    data_dir: DataDir = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:2 or mps (default: the run's)."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Measure the loss and the cost of a finished language model at every layer.

    Each layer is evaluated as if the model ended there, with the run's best
    weights and on the split of its reported result. The table is also written to
    exits.json in the run's folder.
    """
    from frostlab.records.index import find_run

    folder = find_run(runs, run)
    check_data_dir(data_dir)
    from frostlab.records.folder import RunRecord
    from frostlab.training.exits import early_exits, exits_table

    table = exits_table(early_exits(folder, data_dir=data_dir, device=device))
    if as_json:
        echo(read_text(folder / "exits.json").rstrip())
        return
    caution = RunRecord(folder).result.caution
    echo(table if caution is None else f"{table}\n\n{plain(caution)}")


def envelopes(run: RunName, data_dir: DataDir = None, runs: RunsFolder = Path("runs")) -> None:
    """Draw the results of a finished EEG run as a page with figures, in the run's folder.

    The page shows the scores, the correlation of every subject, decoded and heard
    envelopes, temporal kernels, and a scalp map of each electrode's importance.
    """
    from frostlab.records.index import find_run

    folder = find_run(runs, run)
    check_data_dir(data_dir)
    from frostlab.training.eeg_report import draw_run

    echo(plain(str(draw_run(folder, data_dir))))

"""`frostlab diagnose`."""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frostlab.cli.runs import AsJson, DataDir, RunsFolder, check_data_dir
from frostlab.errors import BadInput, FrostlabError, nearest

if TYPE_CHECKING:
    from frostlab.flow.diagnosis import Diagnosis
    from frostlab.recipe.recipe import Recipe


_STEPS = 200


def diagnose(
    source: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE", help="A watched run, or a recipe to try out.")
    ],
    steps: Annotated[
        int | None, typer.Option(help=f"To train a recipe for; {_STEPS} if not given.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value on top of a recipe.")
    ] = None,
    data_dir: DataDir = None,
    device: Annotated[str | None, typer.Option(help="For a recipe: cpu, cuda, cuda:2 …")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write event files for TensorBoard to this folder.")
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Say which parts of a model do not learn, and why; a recipe is trained a little first.

    Exit code 1: a part does not learn though nobody asked for that, or the run blew up.
    """
    from frostlab.flow.diagnosis import diagnose as read

    if steps is not None and steps < 1:
        raise BadInput(f"--steps is {steps}; a whole number of steps from 1 on, such as {_STEPS}")
    folder = _run_named(source, runs)
    if folder is not None:
        given = {"--steps": steps, "--set": settings, "--device": device}
        for option, value in given.items():
            if value:
                raise BadInput(f"{option} is for a recipe; {folder} is a run, which is only read")
    else:
        asked = [*(settings or []), *([] if device is None else [f"train.device={device}"])]
        check_data_dir(data_dir)
        folder = _train(source, _STEPS if steps is None else steps, asked, data_dir, runs)
        if os.environ.get("RANK", "0") != "0":
            return
    found = read(folder)
    if tensorboard is not None:
        from frostlab.integrations.tensorboard import export_run

        export_run(folder, tensorboard, found.flows.values())
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        _show(found)
    if found.healthy is False:
        raise typer.Exit(1)


def _run_named(source: str, runs: Path) -> Path | None:
    """The run that is meant, or None if it is a recipe; a run's whole name comes first."""
    from frostlab.recipe.load import shipped_recipes
    from frostlab.records.index import find_run, is_run

    recipes = shipped_recipes()
    for folder in (Path(source), runs / source):
        if source and is_run(folder):
            return folder
    if source.endswith((".yaml", ".yml")) or source in recipes:
        return None
    names = [path.name for path in runs.iterdir()] if runs.is_dir() else []
    if source and any(name.startswith(source) for name in names):
        return find_run(runs, source)
    hint = nearest(source, [*names, *recipes])
    raise BadInput(f"`{source}` is no run in {runs} and no recipe{hint}")


def _train(source: str, steps: int, asked: list[str], data_dir: Path | None, runs: Path) -> Path:
    """Train a recipe for a few steps, watched, into a run of its own."""
    from frostlab.recipe.load import load_recipe, parse_settings, recipe_name, short_run_settings

    for text in asked:
        if text.partition("=")[0].strip() in ("train.steps", "train.epochs"):
            raise BadInput(f"--set {text}: a diagnosis trains for --steps; say --steps N")
    settings = parse_settings(asked)
    short_run = short_run_settings(load_recipe(source, settings), steps)
    short = load_recipe(source, short_run | settings)
    return _run(short, f"diagnose-{recipe_name(source)}", data_dir, runs)


def _run(recipe: "Recipe", name: str, data_dir: Path | None, runs: Path) -> Path:
    from frostlab.cli.progress import display
    from frostlab.flow.measurements import flows_of
    from frostlab.records.folder import new_folder
    from frostlab.training.run import RunFailed
    from frostlab.training.run import run as run_recipe
    from frostlab.training.state import Silent

    if recipe.watch is None:
        raise BadInput("--set watch=null: a diagnosis watches; leave it out")
    folder = new_folder(runs, f"{name}-{recipe.treatment_name}-s{recipe.seed}")
    shown = display() if os.environ.get("RANK", "0") == "0" else Silent()
    try:
        return run_recipe(recipe, name=name, out=folder, data_dir=data_dir, display=shown).folder
    except RunFailed:
        if not any(flow.reports for flow in flows_of(folder).values()):
            raise
    return folder  # what it saw until then tells why


def _show(found: "Diagnosis") -> None:
    """The sentence, then a table and a heat map a stage, then where the pictures are."""
    from frostlab.flow.show import flow_map_text, flow_page

    for line in found.sentences:
        typer.echo(line)
    where = f"{found.folder}, {found.status}, step {found.step}"
    typer.echo(where if found.validation is None else f"{where}: {found.validation}")
    width, several = shutil.get_terminal_size((100, 24)).columns, len(found.flows) > 1
    for number, (name, flow) in enumerate(found.flows.items(), 1):
        typer.echo(f"\nstage {name}" if several else "")
        typer.echo(flow.table())
        if not flow.reports:
            continue
        typer.echo(f"\n{flow_map_text(flow, width)}")
        folder = found.folder / "flow" / str(number) if several else found.folder / "flow"
        try:
            pages = flow_page(flow, folder)
        except FrostlabError as error:  # what draws may not be installed
            typer.echo(f"\nno picture: {error}")
        else:
            typer.echo("\n" + "\n".join(map(str, pages)))

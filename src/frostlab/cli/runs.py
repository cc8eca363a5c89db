"""`frostlab recipes`, `run`, `runs`, `show`, `envelopes`, `exits`."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frostlab.errors import BadInput, nearest

if TYPE_CHECKING:
    from frostlab.recipe.recipe import Recipe


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
DataDir = Annotated[
    Path | None, typer.Option(envvar="FROSTLAB_DATA", help="Data sets as NAME/SPLIT.jsonl …")
]
RunsFolder = Annotated[
    Path, typer.Option("--runs", envvar="FROSTLAB_RUNS", help="Where runs live.")
]


def recipes(as_json: AsJson = False) -> None:
    """List the recipes and comparisons that ship, one line each."""
    from frostlab.recipe.load import shipped_comparisons, shipped_recipes

    found = shipped_recipes()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    compared = {name: values["about"] for name, values in shipped_comparisons().items()}
    width = max(map(len, (*found, *compared)))
    for name, about in found.items():
        typer.echo(f"{name:{width}}  {about}")
    typer.echo("\nfor `frostlab compare`:")
    for name, about in compared.items():
        typer.echo(f"{name:{width}}  {about}")


def run(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe, or a YAML file of your own.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value on top, e.g. optim.lr=1e-4.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Weights, order of examples, dropout.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest unfinished run of this recipe.")
    ] = False,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The run's own folder.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:2, mps.")] = None,
    stage: Annotated[
        str | None,
        typer.Option(help="trial: 50 epochs, watched, then judged by three targets (exit code 1)."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Train what a recipe says, and record everything about it."""
    from frostlab.recipe.load import load_recipe, recipe_name

    asked = list(settings or [])
    if device is not None:
        asked.append(f"train.device={device}")
    if stage is None:
        loaded = load_recipe(recipe, asked, seed)
    else:
        loaded = load_trial(stage, recipe, asked, seed)
    check_data_dir(data_dir)
    from frostlab.cli.progress import display
    from frostlab.records.show import show
    from frostlab.training.run import run as run_recipe
    from frostlab.training.state import Silent

    record = run_recipe(
        loaded,
        name=recipe_name(recipe),
        out=out,
        runs=runs,
        data_dir=data_dir,
        resume=resume,
        display=display() if os.environ.get("RANK", "0") == "0" else Silent(),
    )
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(asdict(record.result), indent=1) if as_json else show(record.folder))
        if stage is not None:
            judge(record.folder, as_json)


def check_data_dir(data_dir: Path | None) -> None:
    """Refuse a folder of data that is not there."""
    if data_dir is not None and not data_dir.is_dir():
        raise BadInput(f"--data-dir {data_dir} is not a folder")


def list_runs(runs: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """List every run: what it was, how far it came, what it gave."""
    from frostlab.records.index import list_runs as read_runs
    from frostlab.records.show import runs_table

    found = read_runs(runs)
    if as_json:
        typer.echo(json.dumps([asdict(summary) for summary in found], indent=1, default=str))
    else:
        typer.echo(runs_table(found))


def show_run(
    run: Annotated[str, typer.Argument(help="A run's name, the beginning of one, or its folder.")],
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show one run: configuration, results, clocks, environment."""
    from frostlab.records.index import find_run
    from frostlab.records.show import show, show_json

    folder = find_run(runs, run)
    typer.echo(json.dumps(show_json(folder), indent=1) if as_json else show(folder))


def envelopes(
    run: Annotated[str, typer.Argument(help="A run's name, the beginning of one, or its folder.")],
    data_dir: DataDir = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Draw what a finished decoder of speech envelopes does, into the run's folder.

    Scores, r of every subject, decoded against heard, temporal kernels, electrodes on a scalp.
    """
    from frostlab.records.index import find_run

    folder = find_run(runs, run)
    check_data_dir(data_dir)
    from frostlab.training.eeg_report import draw_run

    typer.echo(draw_run(folder, data_dir))


def exits(
    run: Annotated[str, typer.Argument(help="A run's name, the beginning of one, or its folder.")],
    data_dir: DataDir = None,
    device: Annotated[str | None, typer.Option(help="Another than the run's: cpu, cuda …")] = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Measure a finished language model's best weights at every layer, and what each costs.

    One pass over the split that was reported; also written to the run's folder, as exits.json.
    """
    from frostlab.records.index import find_run

    folder = find_run(runs, run)
    check_data_dir(data_dir)
    from frostlab.training.evaluate import early_exits, exits_table

    found = early_exits(folder, data_dir=data_dir, device=device)
    text = (folder / "exits.json").read_text("utf-8") if as_json else exits_table(found)
    typer.echo(text.rstrip())


_EPOCHS = 50
_TRIALS = ("trial",)


def load_trial(stage: str, name: str, asked: list[str], seed: int | None) -> "Recipe":
    """A recipe as a trial trains it; what the user sets comes on top."""
    from frostlab.recipe.load import load_recipe

    settings = _settings(stage, load_recipe(name, asked, seed))
    loaded = load_recipe(name, [*settings, *asked], seed)
    if loaded.watch is None:
        raise BadInput("--stage trial is judged by what watch measures; leave out watch = null")
    return loaded


def _settings(stage: str, recipe: "Recipe") -> list[str]:
    if stage not in _TRIALS:
        raise BadInput(f"--stage {stage} is none{nearest(stage, _TRIALS)}; there is trial")
    if recipe.metric != "pearson":
        raise BadInput(f"--stage trial is judged by pearson; this recipe has {recipe.metric}")
    own = next((i for i, s in enumerate(recipe.stages) if s.epochs or s.steps), None)
    if own is not None:
        raise BadInput(f"--stage trial: stages.{own} says itself how long it trains")
    watched = [] if recipe.watch is not None else ["watch.every=10"]
    return [f"train.epochs={_EPOCHS}", *watched]


def judge(folder: Path, as_json: bool) -> None:
    """Say pass or fail on every target, and keep it beside the run; exit code 1 for fail."""
    from frostlab.flow.diagnosis import diagnose, targets_of, targets_table
    from frostlab.records.folder import RunFolder

    found = diagnose(folder)
    targets = targets_of(found)
    passed = all(target.reached for target in targets)
    said = {"passed": passed, "targets": [t.to_dict() for t in targets], "said": found.sentences}
    RunFolder(folder).write("trial.json", said)
    typer.echo("\n".join(["", *found.sentences, targets_table(targets)]), err=as_json)
    if not passed:
        raise typer.Exit(1)

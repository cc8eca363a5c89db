"""`frostlab diagnose`: report which parts of a model do not learn, for a run or a recipe.

A part is all tensors of one role, such as query, in one layer or outside the layers. A flow holds
the measurements of one stage (phase) of a run.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frostlab.cli.options import (
    AsJson,
    DataDir,
    Device,
    RunsFolder,
    Seed,
    Settings,
    Wide,
    check_data_dir,
    echo,
    is_first_process,
    settings_from,
    width_of,
)
from frostlab.errors import BadInput, FrostlabError, nearest
from frostlab.storage import path_inside
from frostlab.text import plain, wrapped

if TYPE_CHECKING:
    from frostlab.flow.diagnosis import Diagnosis, Target
    from frostlab.flow.eeg_hints import EEGHints
    from frostlab.recipe.recipe import Recipe

_STEPS = 200  # default number of steps to train a recipe


def diagnose(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RECIPE",
            help="A run that was trained with --set watch.every_n_steps=N, or a recipe, which is "
            "trained first.",
        ),
    ],
    epochs: Annotated[
        int | None,
        typer.Option(metavar="N", help="For a recipe: epochs to train, in all stages together."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"For a recipe: steps to train, in all stages together (default: {_STEPS}).",
        ),
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="For a recipe: folder for its run (default: a new one in --runs).",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write TensorBoard event files to this folder."),
    ] = None,
    wide: Wide = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Report which parts of a model do not learn, and why.

    In this command, a part is all tensors of one role, such as query, in one layer or
    outside the layers. For a run, diagnose reads the run's records and trains nothing.

    A recipe is trained first, for --epochs or --steps. If the recipe has stages (phases
    that train different weights), they share these epochs or steps. The result is then
    compared with targets, if there are any. The target of the metric on the tune
    (validation) split is the recipe's evaluate.target or, for EEG by default, a correlation
    of 0.3. For EEG, a published study has two more targets: one for the gradient of the
    first layers relative to the head's, and one for the change of the first layers'
    weights. For EEG, diagnose also shows how steady the norm of the whole model's gradient
    was, and the study's advice if something is wrong.

    The exit code is 1 if the run diverged, if a frozen part changed, if a recipe missed
    a target, or if a part that is not frozen explodes, does not learn, or changes
    without a gradient.
    """
    folder = _find_run(source, runs)
    recipe_options = {"--epochs": epochs, "--steps": steps, "--set": settings, "--seed": seed,
                      "--device": device, "--out": out}  # fmt: skip
    if folder is not None:
        for option, value in recipe_options.items():
            if value is not None and value != []:
                raise BadInput(f"{option} is for a recipe; {folder} is a run, which is only read")
        diagnosis, targets = _read(folder), None
    else:
        changes = settings_from(settings, device)
        recipe, name = _shortened(source, epochs, steps, changes, seed)
        check_data_dir(data_dir)
        folder = _train(recipe, name, data_dir, runs, out)
        if not is_first_process():
            return
        diagnosis = _read(folder)
        targets = _judge(diagnosis)
    if tensorboard is not None:
        from frostlab.integrations.tensorboard import export_run

        export_run(folder, tensorboard)
    _show(diagnosis, targets, as_json, width_of(wide))
    if diagnosis.healthy is False or not all(target.reached for target in targets or ()):
        raise typer.Exit(1)


def _read(folder: Path) -> "Diagnosis":
    from frostlab.flow.diagnosis import diagnose as read_diagnosis

    return read_diagnosis(folder)


def _find_run(source: str, runs: Path) -> Path | None:
    """Return the run that `source` names, or None for a recipe.

    `source` is tried as the folder or full name of a run, as a recipe, and as the beginning of a
    run's name.
    """
    from frostlab.recipe.load import shipped_recipes
    from frostlab.records.finding.index import find_run, is_run

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
    raise BadInput(f"`{source}` is neither a run in {runs} nor a recipe{hint}")


def _shortened(
    source: str,
    epochs: int | None,
    steps: int | None,
    changes: dict[str, Any],
    seed: int | None,
) -> tuple["Recipe", str]:
    """Return the recipe, shortened and with gradient flow measured, and a name for its run."""
    from frostlab.recipe.load import load_recipe, recipe_name, short_run_settings

    for option, value in (("--epochs", epochs), ("--steps", steps)):
        if value is not None and value < 1:
            raise BadInput(f"{option} {value}: must be at least 1")
    if epochs is not None and steps is not None:
        raise BadInput("--epochs and --steps exclude each other")
    for key in ("train.steps", "train.epochs"):
        if key in changes:
            raise BadInput(f"--set {key}: set the duration with --epochs or --steps instead")
    full_recipe = load_recipe(source, changes, seed)
    if epochs is None:
        steps = steps or _STEPS
    duration = short_run_settings(full_recipe, steps=steps, epochs=epochs)
    recipe = load_recipe(source, duration | changes, seed)
    if recipe.watch is None:
        raise BadInput("--set watch=null: leave this out; a diagnosis needs the measurements")
    return recipe, f"diagnose-{recipe_name(source)}"


def _train(
    recipe: "Recipe", name: str, data_dir: Path | None, runs: Path, out: Path | None
) -> Path:
    """Train a recipe and return the run's folder, also if the run failed but has measurements."""
    from frostlab.flow.measurements import flows_of
    from frostlab.records.folder import new_folder
    from frostlab.training.run import RunFailed
    from frostlab.training.run import run as run_recipe

    full_name = f"{name}{recipe.marks}-{recipe.treatment_name}-s{recipe.seed}"
    folder = out or new_folder(runs, full_name)
    try:
        return run_recipe(recipe, name=name, out=folder, data_dir=data_dir, progress=True).folder
    except RunFailed:
        if not any(flow.reports for flow in flows_of(folder).values()):
            raise
    return folder  # the measurements may show why the run failed


def _judge(diagnosis: "Diagnosis") -> tuple["Target", ...]:
    """Compare a recipe's run with its targets, and store the outcome in targets.json."""
    from frostlab.flow.diagnosis import targets_of
    from frostlab.records.folder import RunFolder

    targets = targets_of(diagnosis)
    outcome: dict[str, Any] = {
        "caution": diagnosis.caution,
        "passed": all(target.reached for target in targets),
        "targets": [target.to_dict() for target in targets],
        "verdict": diagnosis.sentences,
    }
    if (hints := _hints(diagnosis)) is not None:
        outcome["eeg"] = hints.to_dict()
    RunFolder(diagnosis.folder).write("targets.json", outcome)
    return targets


def _hints(diagnosis: "Diagnosis") -> "EEGHints | None":
    from frostlab.flow.eeg_hints import eeg_hints

    return eeg_hints(diagnosis)


def _show(
    diagnosis: "Diagnosis",
    targets: tuple["Target", ...] | None,
    as_json: bool,
    width: int | None,
) -> None:
    hints = _hints(diagnosis)
    if as_json:
        values: dict[str, Any] = diagnosis.to_dict()
        if targets is not None:
            values["targets"] = [target.to_dict() for target in targets]
        if hints is not None:
            values["eeg"] = hints.to_dict()
        echo(json.dumps(values, indent=1))
        return
    from frostlab.flow.diagnosis import targets_table

    _show_flows(diagnosis, width)
    if targets:
        echo(f"\n{targets_table(targets)}")
    if hints is not None and hints.lines:
        echo("\nrules of thumb of the published EEG study, which do not decide the outcome:")
        for line in hints.lines:
            echo("\n".join(wrapped(plain(f"  {line}"), width)))


def _show_flows(diagnosis: "Diagnosis", width: int | None) -> None:
    """Print the findings and, for every stage, a table and, if there are measurements, a heat map.

    The heat map is also written as flow.html and flow.png, whose paths are printed.
    """
    from frostlab.flow.show import flow_map_text, flow_page

    where = f"{diagnosis.folder}, {diagnosis.status}, step {diagnosis.step}"
    where = where if diagnosis.validation is None else f"{where}: {diagnosis.validation}"
    for line in (*diagnosis.sentences, where):
        echo("\n".join(wrapped(plain(line), width)))
    several = len(diagnosis.flows) > 1
    for number, (name, flow) in enumerate(diagnosis.flows.items(), 1):
        echo(f"\nstage {plain(name)}" if several else "")
        echo(flow.table(width))
        if not flow.reports:
            continue
        echo(f"\n{flow_map_text(flow, width or width_of() or 80)}")
        parts = ["flow", str(number)] if several else ["flow"]
        try:
            pages = flow_page(flow, path_inside(diagnosis.folder, *parts))
        except FrostlabError as error:  # altair may be missing
            echo(f"\nno picture: {plain(str(error))}")
        else:
            echo("\n" + "\n".join(plain(str(page)) for page in pages))

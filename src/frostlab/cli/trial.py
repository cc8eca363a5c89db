"""`frostlab run --stage trial`: a short watched run, judged before the long one."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from frostlab.errors import BadInput, nearest

if TYPE_CHECKING:
    from frostlab.recipe import Recipe

_EPOCHS = 50
_TRIALS = ("trial",)


def load_trial(stage: str, name: str, asked: list[str], seed: int | None) -> "Recipe":
    """A recipe as a trial trains it; what the user sets comes on top."""
    from frostlab.recipe.loading import load_recipe

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
    from frostlab.flow.diagnosis import diagnose
    from frostlab.flow.targets import targets_of, targets_table
    from frostlab.records.folder import RunFolder

    found = diagnose(folder)
    targets = targets_of(found)
    passed = all(target.reached for target in targets)
    said = {"passed": passed, "targets": [t.to_dict() for t in targets], "said": found.sentences}
    RunFolder(folder).write("trial.json", said)
    typer.echo("\n".join(["", *found.sentences, targets_table(targets)]), err=as_json)
    if not passed:
        raise typer.Exit(1)

"""`frostlab inspect`: show the parts of a model, given directly or by a recipe.

A part is a parameter, or the rows of a fused parameter that have one role, such as query. A
model's anatomy is the list of its parts.
"""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frostlab.cli.options import (
    AsJson,
    Settings,
    TrustRemoteCode,
    Wide,
    echo,
    settings_from,
    width_of,
)
from frostlab.errors import BadInput, nearest
from frostlab.text import plain, wrapped

if TYPE_CHECKING:
    from frostlab.roles.snapshot import Anatomy

_LENGTH = 128  # default sequence length, in tokens


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, an architecture such as gpt2, the name of a model on the Hugging "
            "Face hub, a recipe, or FILE.py:FUNCTION, a function of yours that returns a model "
            "(or a model and a small batch).",
        ),
    ],
    freeze: Annotated[
        str,
        typer.Option(
            metavar="SELECTIONS",
            help="Show these parts as frozen, e.g. query,key. Another example: layers[0:3],!norm "
            "selects the first three layers without their norms (default: the parts that the "
            "recipe freezes).",
        ),
    ] = "",
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Sequence length for which the savings are computed (default: the recipe's; for a "
            f"model, {_LENGTH}).",
        ),
    ] = None,
    settings: Settings = None,
    trust_remote_code: TrustRemoteCode = False,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Show a model's parts, which of them are trainable, and how much freezing can save at most.

    In this command, a part is a parameter or, if query, key and value are fused in one
    parameter, the rows of one of them. No weights and no data are read. For a model on the
    Hugging Face hub, only its config is downloaded and, with --trust-remote-code, its code.

    frostlab has tables of the parts of common architectures. For any other model, a small
    forward pass shows which weights each attention head uses, and a test checks the result.
    The line `how` of the output says how the parts were found.
    """
    selections = [text for text in freeze.split(",") if text.strip()]
    if freeze and not selections:
        raise BadInput(f"--freeze {freeze!r} is empty; try --freeze query,key")
    from frostlab.recipe.load import shipped_recipes
    from frostlab.timing.flops import describe_savings, savings

    recipes = shipped_recipes()
    with redirect_stdout(sys.stderr):  # what the user's own code prints is no result
        if model in recipes or model.endswith((".yaml", ".yml")):
            anatomy, source, recipe_length = _recipe_anatomy(model, settings or [])
            length = length or recipe_length
        elif ".py:" in model or model.endswith(".py"):
            anatomy, source = _written_anatomy(model)
        elif settings:
            raise BadInput(
                f"--set is for a recipe; {model} is not one{nearest(model, recipes, 0.8)}"
            )
        else:
            anatomy, source = _model_anatomy(model, list(recipes))
    if selections:
        anatomy = anatomy.with_frozen(*selections)
    length = length or _LENGTH
    if as_json:
        report: dict[str, Any] = {"source": source, **anatomy.to_dict()}
        report["savings"] = savings(anatomy, length).to_dict()
        echo(json.dumps(report, indent=1))
        return
    echo("\n".join(wrapped(plain(f"{model}: {source}"), width_of(wide))))
    table = anatomy.table(width_of(wide))
    echo(table)
    if table != anatomy.table():
        echo("--wide shows whole names, tied weights, and the layout of fused weights")
    echo("\n".join(wrapped(f"how         {anatomy.evidence}", width_of(wide), " " * 12)))
    if anatomy.count("frozen"):
        echo("\nfreezing saves at most")
        for line in describe_savings(anatomy, length):
            echo("\n".join(wrapped(line, width_of(wide), " " * 16)))


def _model_anatomy(name: str, recipes: list[str]) -> tuple["Anatomy", str]:
    """Return a model's parts and the source of its config; suggest a recipe for an unknown name."""
    from frostlab.models.build import blueprint
    from frostlab.roles.read import anatomy

    try:
        model, source = blueprint(name)
    except BadInput as error:
        hint = "" if "/" in name else nearest(name, recipes, 0.8)
        path, _, function = name.rpartition(":")
        if Path(f"{path}.py").is_file():
            hint = f"; did you mean `{path}.py:{function}`?"
        problem = str(error).partition("; did you mean")[0] if hint else str(error)
        raise BadInput(f"{problem}{hint}") from None
    return anatomy(model), source


def _written_anatomy(name: str) -> tuple["Anatomy", str]:
    """Return the parts of the model that a function in a Python file returns."""
    from frostlab.models.written import written_model
    from frostlab.roles.read import anatomy

    model, batch = written_model(name)
    return anatomy(model, batch), "built by this function"


def _recipe_anatomy(name: str, settings: list[str]) -> tuple["Anatomy", str, int]:
    """Return the parts of a recipe's model, a description of it, and the length of the examples.

    The adapters of the recipe are added, and the parts that it freezes are marked as frozen.
    """
    from frostlab.models.build import recipe_blueprint
    from frostlab.recipe.load import load_recipe
    from frostlab.training.treatment import treated_parts

    recipe = load_recipe(name, settings_from(settings))
    model, source = recipe_blueprint(recipe)
    if recipe.surgery.frozen:
        source += f"; treatment {recipe.treatment_name}"
    return treated_parts(model, recipe), source, recipe.data.length

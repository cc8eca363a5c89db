"""`frostlab compare`: compare arms (a recipe with several treatments), trained here or before."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frostlab.cli.options import (
    AsJson,
    DataDir,
    Device,
    ScaleOption,
    Settings,
    StandIn,
    check_data_dir,
    echo,
    settings_from,
)
from frostlab.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from frostlab.comparison.run import Comparison
    from frostlab.recipe.recipe import Recipe

_WITH_RUNS = ("sources", "runs", "metric", "allow", "out", "as_json")  # options that --runs allows


def compare(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="COMPARISON",
            help="Name of a shipped comparison or recipe, a YAML file of either, or the plan.json "
            "of a comparison to carry out again. With --runs: for each arm a run, a folder of "
            "runs, or a pattern in quotes, such as 'runs/a-*'; the first is the baseline.",
        ),
    ],
    runs: Annotated[
        bool,
        typer.Option(
            "--runs", help="Compare runs that have ended, paired by seed; nothing is trained."
        ),
    ] = False,
    arms: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Treatments to compare, e.g. baseline,oelm (orthogonal, frozen query and key).",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of seeds; a later call with more seeds adds the missing runs."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Metric that decides the verdict (default: the recipe's)."
        ),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING",
            help="Tune lr or weight decay (decay) for each arm: 1/3, 1 and 3 × its value, "
            "each with every seed.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Number of extra complete runs of every arm, only to time them.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-confound",
            metavar="KEY",
            help="Setting that may differ between arms besides the treatment; can be repeated.",
        ),
    ] = None,
    assay: Annotated[
        bool,
        typer.Option(
            "--assay",
            help="Also train the baseline with half its steps, a harm that must be found.",
        ),
    ] = False,
    settings: Settings = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Try it: three seeds (too few for a verdict), short runs, little timing.",
        ),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of runs to train at the same time; they must fit in memory together.",
        ),
    ] = 1,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for this comparison (default: one in comparisons/)."
        ),
    ] = None,
    device: Device = None,
    scale: ScaleOption = None,
    stand_in: StandIn = False,
    as_json: AsJson = False,
) -> None:
    """Train variants of a recipe (arms) that differ in a treatment, and report what it changed.

    Run the same command again to continue an interrupted comparison.
    """  # fmt: skip
    if runs:
        _refuse_training_options(context)
        _show(_compare_runs(sources, metric, allow, out), as_json)
        return
    if len(sources) > 1:
        raise BadInput(
            f"{sources[1]}: a comparison has one source; add --runs to compare finished runs"
        )
    (source,) = sources
    check_data_dir(data_dir)
    changes = settings_from(settings, device, scale)
    from frostlab.comparison.load import is_stored_plan, make_plan

    options: dict[str, Any] = {
        "arms": arms,
        "seeds": seeds,
        "metric": metric,
        "tune": tune,
        "rounds": rounds,
        "allow_confounds": allow or None,
        "assay": assay or None,
    }
    rules = {key: value for key, value in options.items() if value is not None}
    given = rules | changes | ({"stand-in": True} if stand_in else {})
    again = is_stored_plan(source, given, quick)
    replace_missing = stand_ins_from(data_dir) if stand_in else None
    plan = (
        None
        if again
        else make_plan(source, rules, settings=changes, quick=quick, stand_in=replace_missing)
    )
    from frostlab.comparison.run import reproduce, run_plan  # imports torch, unlike the plan
    from frostlab.comparison.runner import Runner
    from frostlab.training.progress import choose_screen

    runner = Runner(data_dir, choose_screen(True), jobs)
    if plan is None:
        comparison = reproduce(Path(source), runner, out)
    else:
        comparison = run_plan(plan, runner, out)
    _show(comparison, as_json)


def stand_ins_from(data_dir: Path | None) -> "Callable[[Recipe], Recipe]":
    """Return the function that replaces what a recipe lacks by stand-ins."""
    from frostlab.models.stand_in import with_stand_ins  # imports torch, unlike a plan

    return partial(with_stand_ins, data_dir=data_dir)


def _refuse_training_options(context: typer.Context) -> None:
    """Refuse options that only training uses; an environment variable is not an option."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in _WITH_RUNS and source is not None and source.name == "COMMANDLINE":
            raise BadInput(f"--runs trains nothing, so {parameter.opts[0]} has no meaning with it")


def _compare_runs(
    patterns: list[str], metric: str | None, allow: list[str] | None, out: Path | None
) -> "Comparison":
    from frostlab.comparison.load import plan_of_runs

    rules = {"metric": metric} if metric is not None else {}
    plan = plan_of_runs(patterns, {**rules, "allow_confounds": allow})
    from frostlab.comparison.run import judge_runs  # imports torch; the plan does not need it

    return judge_runs(plan, out)


def _show(comparison: "Comparison", as_json: bool) -> None:
    if as_json:
        echo(json.dumps(comparison.evidence.to_dict(), indent=1))
        return
    from frostlab.comparison.page import show

    echo(show(comparison.evidence, comparison.page))


def judge(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a finished comparison.")
    ],
    as_json: AsJson = False,
) -> None:
    """Judge a finished comparison again from its runs, without training.

    This replaces its evidence.json and its page.
    """
    from frostlab.comparison.run import judge_again

    _show(judge_again(folder), as_json)

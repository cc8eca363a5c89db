"""`frostlab compare`: train a recipe with several treatments (the arms), and compare the arms."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from frostlab.cli.options import (
    AsJson,
    DataDir,
    Device,
    Settings,
    check_data_dir,
    echo,
    settings_from,
)


def compare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="COMPARISON",
            help="Name of a shipped comparison or recipe, a YAML file of either, or the plan.json "
            "of a comparison to carry out again.",
        ),
    ],
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
    as_json: AsJson = False,
) -> None:
    """Train variants of a recipe (arms) that differ in a treatment, and report what it changed.

    Run the same command again to continue an interrupted comparison.
    """  # fmt: skip
    check_data_dir(data_dir)
    changes = settings_from(settings, device)
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
    again = is_stored_plan(source, rules | changes, quick)
    plan = None if again else make_plan(source, rules, settings=changes, quick=quick)
    from frostlab.comparison.page import show  # these import torch; the plan does not need it
    from frostlab.comparison.run import reproduce, run_plan
    from frostlab.comparison.runner import Runner
    from frostlab.training.progress import choose_screen

    runner = Runner(data_dir, choose_screen(True), jobs)
    if plan is None:
        comparison = reproduce(Path(source), runner, out)
    else:
        comparison = run_plan(plan, runner, out)
    if as_json:
        echo(json.dumps(comparison.evidence.to_dict(), indent=1))
    else:
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
    from frostlab.comparison.page import show
    from frostlab.comparison.run import judge_again

    comparison = judge_again(folder)
    if as_json:
        echo(json.dumps(comparison.evidence.to_dict(), indent=1))
    else:
        echo(show(comparison.evidence, comparison.page))

"""`frostlab compare` and `judge`: train and compare arms (variants of a recipe), or compare runs.

A group has several comparisons, which are carried out one after another.
"""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frostlab.cli.options import (
    AsJson,
    DataDir,
    Device,
    PerDevice,
    Ray,
    ScaleOption,
    Settings,
    Slurm,
    StandIn,
    check_data_dir,
    echo,
    settings_from,
    width_of,
)
from frostlab.cli.report import report_at_end
from frostlab.errors import BadInput, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from frostlab.comparison.run import Comparison
    from frostlab.comparison.runner import Runner
    from frostlab.experiments.run import GroupResult
    from frostlab.matrix.places import Places
    from frostlab.recipe.recipe import Recipe

_WITH_RUNS = ("sources", "runs", "metric", "allow", "out", "as_json")  # allowed with --runs
_FOR_GROUPS = ("as_published", "only")  # allowed only with a group
_WITH_GROUPS = (  # allowed with a group
    "sources", *_FOR_GROUPS, "seeds", "rounds", "settings", "quick", "jobs", "devices",
    "per_device", "ray", "slurm", "data_dir", "out", "device", "scale", "stand_in", "as_json",
)  # fmt: skip


def compare(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="COMPARISON",
            help="Name or YAML file of a comparison, group or recipe, or the plan.json of a "
            "comparison to carry out again. With the flag --runs, give finished runs instead, with "
            "one argument for each arm: a run, a folder of runs, or a pattern in quotes, e.g. "
            "'runs/a-*'; the first arm is the baseline.",
        ),
    ],
    runs: Annotated[
        bool,
        typer.Option(
            "--runs", help="Compare runs that have ended, paired by seed; nothing is trained."
        ),
    ] = False,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="Carry out the comparisons of a group with the settings of the published studies. "
            "The arms may then differ in more than the treatment.",
        ),
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Comparisons of a group to carry out, e.g. sst2,mnli (default: all).",
        ),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Treatments to compare, e.g. baseline,oelm. baseline: change nothing; oelm: make "
            "query and key orthogonal and freeze them.",
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
            help="Tune lr or decay (weight decay) for each arm: train with 1/3, 1 and 3 times the "
            "recipe's value, each with every seed, and choose the best value by the scores on the "
            "tune (validation) split.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Number of further runs of every arm; they only measure the time of a whole run.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-confound",
            metavar="KEY",
            help="Allow the arms to differ in this setting, which is not compared; the verdict is "
            "then confounded. Can be repeated.",
        ),
    ] = None,
    assay: Annotated[
        bool,
        typer.Option(
            "--assay",
            help="Also train the baseline for half its steps. This should come out worse; if it "
            "does not, the comparison is too insensitive.",
        ),
    ] = False,
    settings: Settings = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Only try the comparison: train short runs. Unless you set other values, "
            "three seeds are used (too few for a verdict), and steps are timed for 20 s.",
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
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICES",
            help="Devices to train on, e.g. cuda:0,cuda:1; replaces --device and --jobs.",
        ),
    ] = None,
    per_device: PerDevice = "1",
    ray: Ray = None,
    slurm: Slurm = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for this comparison or group (default: one in comparisons/).",
        ),
    ] = None,
    device: Device = None,
    scale: ScaleOption = None,
    stand_in: StandIn = False,
    as_json: AsJson = False,
) -> None:
    """Train variants (arms) of a recipe with different treatments, and report what these change.

    A treatment sets or freezes some of the weights. Every arm is trained with the same
    seeds, and runs with the same seed are compared in pairs. The verdict on an arm says
    whether it is better or worse than the baseline arm. The verdict is confounded
    if the arms differ in something else, such as the learning rate: that could be the
    cause.

    A group has several comparisons, which are carried out one after another. To continue
    an interrupted comparison or group, run the same command again.
    """
    if runs:
        _refuse_options(context, _WITH_RUNS, "--runs trains nothing")
        _show(_compare_runs(sources, metric, allow, out), as_json)
        return
    if len(sources) > 1:
        raise BadInput(
            f"{sources[1]}: a comparison has one source; add --runs to compare finished runs"
        )
    (source,) = sources
    check_data_dir(data_dir)
    from frostlab.matrix.places import Places

    make_runner = _runner_of(
        Places(devices, per_device, ray=ray, slurm=slurm), jobs, device, data_dir
    )
    changes = settings_from(settings, device, scale)
    from frostlab.experiments.plans import is_group_source

    if is_group_source(source):
        _refuse_options(context, _WITH_GROUPS, f"{source} is a group of several comparisons")
        rules = {"seeds": seeds, "rounds": rounds}
        rules = {key: value for key, value in rules.items() if value is not None}
        _show_group(
            _compare_group(
                source,
                as_published,
                only,
                rules,
                changes,
                quick,
                stand_ins_from(data_dir) if stand_in else None,
                make_runner,
                out,
            ),
            as_json,
        )
        return
    _refuse_group_options(context, source)
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

    runner = make_runner()
    if plan is None:
        comparison = reproduce(Path(source), runner, out)
    else:
        comparison = run_plan(plan, runner, out)
    _show(comparison, as_json)


def _runner_of(
    places: "Places", jobs: int, device: str | None, data_dir: Path | None
) -> "Callable[[], Runner]":
    """Return a function that makes the `Runner`, which trains the runs of a comparison.

    Options that exclude each other are refused.
    """
    chosen = places != type(places)()  # not the default
    if chosen and (jobs > 1 or device is not None):
        other = "--jobs" if jobs > 1 else "--device"
        raise BadInput(
            f"{other} has no meaning with --devices, --per-device, --ray or --slurm, which replace "
            "it"
        )
    if chosen:
        places.check()

    def make() -> "Runner":
        from frostlab.comparison.runner import Runner  # imports torch, unlike a plan
        from frostlab.training.progress import choose_screen

        return Runner(data_dir, choose_screen(True), jobs, places if chosen else None)

    return make


def stand_ins_from(data_dir: Path | None) -> "Callable[[Recipe], Recipe]":
    """Return a function that replaces missing data, tokenizers and weights by stand-ins."""
    from frostlab.models.stand_in import with_stand_ins  # imports torch, unlike a plan

    return partial(with_stand_ins, data_dir=data_dir)


def _refuse_options(context: typer.Context, allowed: tuple[str, ...], reason: str) -> None:
    """Refuse options that are not allowed, unless only an environment variable sets them."""
    for parameter in context.command.params:
        if parameter.name not in allowed and _is_given(context, str(parameter.name)):
            raise BadInput(f"{reason}, so {parameter.opts[0]} has no meaning with it")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_group_options(context: typer.Context, source: str) -> None:
    """Refuse options that only groups have, and suggest a group with a name like `source`."""
    for parameter in context.command.params:
        if parameter.name in _FOR_GROUPS and _is_given(context, str(parameter.name)):
            from frostlab.recipe.groups import group_names

            hint = nearest(source, group_names()) or f"; there are {', '.join(group_names())}"
            raise BadInput(f"{parameter.opts[0]} is for groups, and {source} is not a group{hint}")


def _compare_group(
    source: str,
    as_published: bool,
    only: str | None,
    rules: dict[str, Any],
    settings: dict[str, Any],
    quick: bool,
    stand_in: "Callable[[Recipe], Recipe] | None",
    make_runner: "Callable[[], Runner]",
    out: Path | None,
) -> "GroupResult":
    from frostlab.experiments.plans import group_plans, names_in
    from frostlab.recipe.groups import load_group

    group = load_group(source)
    plans = group_plans(
        group, as_published=as_published, only=names_in(only), changes=rules, settings=settings,
        quick=quick, stand_in=stand_in,
    )  # fmt: skip
    from frostlab.experiments.run import run_group  # imports torch, unlike the plans

    return run_group(group, as_published, plans, make_runner(), out)


def _show_group(group: "GroupResult", as_json: bool) -> None:
    if as_json:
        echo(json.dumps(group.summary.to_dict(), indent=1))
    else:
        from frostlab.experiments.show import show_summary

        echo(show_summary(group.summary, group.page, width_of()))
    report_at_end(group.folder, show=not as_json)


def _compare_runs(
    patterns: list[str], metric: str | None, allow: list[str] | None, out: Path | None
) -> "Comparison":
    from frostlab.comparison.chosen_runs import plan_of_runs

    rules = {"metric": metric} if metric is not None else {}
    plan = plan_of_runs(patterns, {**rules, "allow_confounds": allow})
    from frostlab.comparison.run import judge_runs  # imports torch; the plan does not need it

    return judge_runs(plan, out)


def _show(comparison: "Comparison", as_json: bool) -> None:
    if as_json:
        echo(json.dumps(comparison.evidence.to_dict(), indent=1))
    else:
        from frostlab.comparison.page import show

        echo(show(comparison.evidence, comparison.page))
    report_at_end(comparison.folder, show=not as_json)


def judge(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a finished comparison or a group.")
    ],
    as_json: AsJson = False,
) -> None:
    """Compute the verdicts of a finished comparison, or of a group, again from its runs.

    Nothing is trained. In a group, all finished comparisons are judged. The files
    evidence.json, comparison.json, timing.json and comparison.md and the report
    (report.html and the files of its figures and tables) are replaced; for a group,
    also summary.json and summary.md.
    """
    from frostlab.records.finding.index import is_group

    if is_group(folder):
        from frostlab.experiments.run import judge_group

        _show_group(judge_group(folder), as_json)
        return
    from frostlab.comparison.run import judge_again

    _show(judge_again(folder), as_json)

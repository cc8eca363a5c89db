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
    WideCheck,
    check_data_dir,
    echo,
    is_first_process,
    settings_from,
    width_of,
)
from frostlab.errors import BadInput
from frostlab.storage import read_text
from frostlab.text import plain, wrapped

_HEADINGS = {
    "comparison": "comparisons, for `frostlab compare`:",
    "group": "groups of experiments, for `frostlab compare` and `frostlab recipes --group`:",
}


def recipes(
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="GROUP",
            help="List the experiments and comparisons of this group (its name, or a YAML file).",
        ),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Print each experiment's parameters, tokens, FLOPs, time and memory, as Markdown.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes, comparisons and groups that ship with frostlab.

    A recipe describes one training run. A comparison trains variants of a recipe. A
    group holds experiments, mostly of published studies, and comparisons of these
    experiments. Each experiment is a recipe, too.

    --group lists the experiments of one group, with their data, method, learning rate,
    and the result and the time that the studies reported. --details shows the size and
    the cost of these experiments or, without --group, of all experiments.

    --json prints a list of objects with the keys kind (recipe, experiment, comparison or
    group), name and about; with --group, the group as one object; and with --details, a
    list of experiments with their sizes and costs.
    """
    if details:
        _show_details(group, as_json)
        return
    if group is not None:
        _list_group(group, as_json)
        return
    from frostlab.recipe.load import (
        shipped_comparisons,
        shipped_experiments,
        shipped_groups,
        shipped_recipes,
    )

    experiments = shipped_experiments()
    listed = [
        ("experiment" if name in experiments else "recipe", name, about)
        for name, about in shipped_recipes().items()
    ]
    for kind, shipped in (("comparison", shipped_comparisons()), ("group", shipped_groups())):
        listed += [(kind, name, values["about"]) for name, values in shipped.items()]
    if as_json:
        keys = ("kind", "name", "about")
        echo(json.dumps([dict(zip(keys, row, strict=True)) for row in listed], indent=1))
        return
    shown = [row for row in listed if row[0] != "experiment"]  # --group lists the experiments
    longest, width, last = max(len(name) for _, name, _ in shown), width_of(), "recipe"
    for kind, name, about in shown:
        if kind != last:
            echo(f"\n{_HEADINGS[kind]}")
        last, line = kind, f"{plain(name):{longest}}  {plain(about)}"
        echo("\n".join(wrapped(line, width, " " * (longest + 2))))


def _show_details(name: str | None, as_json: bool) -> None:
    """Print the sizes and costs of a group's experiments or, without a name, of all."""
    from frostlab.recipe.groups import group_names, load_group

    groups = [load_group(group) for group in (group_names() if name is None else [name])]
    if not any(group.experiments for group in groups):
        raise BadInput(f"group {name} has no experiments of its own, so --details has none to show")
    from frostlab.experiments.costs import catalogue_page, catalogue_values

    values = catalogue_values(groups) if as_json else None
    echo(catalogue_page(groups).rstrip() if values is None else json.dumps(values, indent=1))


def _list_group(name: str, as_json: bool) -> None:
    """Print the experiments and comparisons of a group."""
    from frostlab.recipe.groups import group_table, load_group

    group, width = load_group(name), width_of()
    if as_json:
        echo(json.dumps(group.to_dict(), indent=1))
        return
    echo("\n".join(wrapped(f"{group.name}: {plain(group.about)}", width)))
    table = group_table(group, width)
    for line in ("", *table, *([""] if table else [])):
        echo(line)
    command = f"frostlab compare {name}"
    for comparisons, text in (
        (group.published, f"comparisons as published, `{command} --as-published`"),
        (group.fair, f"comparisons whose arms differ only in what is compared, `{command}`"),
        (group.further, "every model is also evaluated on"),
    ):
        if comparisons:
            echo("\n".join(wrapped(f"{text}: {', '.join(map(plain, comparisons))}", width)))


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
        typer.Option(
            "--resume",
            help="Continue the newest unfinished run of this recipe, or the run in --out. "
            "If the recipe has no run yet, start one.",
        ),
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
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Find the data, build the model, and time a few steps and evaluations, to "
            "estimate time, memory and disk; no run is started.",
        ),
    ] = False,
    scale: ScaleOption = None,
    stand_in: StandIn = False,
    trust_remote_code: TrustRemoteCode = False,
    wide: WideCheck = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Train the model that a recipe describes, record every step, and show the result."""
    from frostlab.recipe.load import load_recipe, recipe_name

    loaded = load_recipe(recipe, settings_from(settings, device, scale), seed)
    check_data_dir(data_dir)
    if check:
        from frostlab.cli.matrix import show_check

        if stand_in:
            from frostlab.models.stand_in import with_stand_ins

            loaded = with_stand_ins(loaded, data_dir)
        folder = runs if out is None else out.parent
        show_check([(recipe_name(recipe), loaded, 1)], folder, data_dir, ["auto"], wide, as_json)
        return
    from frostlab.devices import find_device, start_device

    # The device starts in a thread, while the modules of training are imported.
    start_device(find_device(loaded.train.device))
    from frostlab.records.finding.show import show
    from frostlab.timing.clock import process_began
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
        began=process_began(),
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
    device: Device = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Measure the loss and the cost (FLOPs) of a finished language model at every layer.

    For each layer, the model is evaluated as if it ended there, with the run's best
    weights, on the report split (the split that the run's result comes from). The losses
    and costs are also written to exits.json in the run's folder.
    """
    from frostlab.records.finding.index import find_run

    folder = find_run(runs, run)
    check_data_dir(data_dir)
    from frostlab.records.folder import RunRecord
    from frostlab.use.exits import early_exits, exits_table

    table = exits_table(early_exits(folder, data_dir=data_dir, device=device))
    if as_json:
        echo(read_text(folder / "exits.json").rstrip())
        return
    caution = RunRecord(folder).result.caution
    echo(table if caution is None else f"{table}\n\n{plain(caution)}")


def envelopes(run: RunName, data_dir: DataDir = None, runs: RunsFolder = Path("runs")) -> None:
    """Write a page with figures of the results of a finished EEG run, in the run's folder.

    An EEG run decodes envelopes: an envelope is the loudness of speech over time. The
    page shows the scores, the correlation of decoded and heard envelopes for every
    subject, examples of both envelopes, the model's temporal kernels, and a scalp map of
    the importance of each electrode.
    """
    from frostlab.records.finding.index import find_run

    folder = find_run(runs, run)
    check_data_dir(data_dir)
    from frostlab.training.eeg_report import draw_run

    echo(plain(str(draw_run(folder, data_dir))))

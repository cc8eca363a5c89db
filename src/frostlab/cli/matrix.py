"""`frostlab matrix`: many runs in one command, on one or more devices."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frostlab.cli.options import (
    AsJson,
    DataDir,
    Devices,
    PerDevice,
    Ray,
    RunsFolder,
    ScaleOption,
    Settings,
    Slurm,
    StandIn,
    TrustRemoteCode,
    WhenIdle,
    WideCheck,
    check_data_dir,
    echo,
    settings_from,
    width_of,
)
from frostlab.errors import BadInput, FrostlabError
from frostlab.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frostlab.matrix.places import Places
    from frostlab.matrix.store import MatrixFolder, MatrixPlan
    from frostlab.recipe.recipe import Recipe

_START_SECONDS = 60.0  # longest wait for the driver (the process in the background) to begin


def matrix(
    source: Annotated[
        str,
        typer.Argument(
            metavar="GROUP|FILE",
            help="Name of a shipped group of experiments, or a YAML file that lists recipes, "
            "treatments, settings and seeds.",
        ),
    ],
    only: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="Experiments to run, e.g. gpt-01,gpt-02 (default: all)."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of seeds (default: the file's, or one)."),
    ] = None,
    settings: Settings = None,
    devices: Devices = None,
    per_device: PerDevice = "1",
    when_idle: WhenIdle = False,
    ray: Ray = None,
    slurm: Slurm = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait for all runs to end; do not train in the background."),
    ] = False,
    add: Annotated[
        bool,
        typer.Option("--add", help="Add these runs to the matrix that is running in --runs."),
    ] = False,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Command to start when a run fails or diverges, and when the matrix ends, e.g. "
            "'notify-send {name} {status}'. {name} and {status} are replaced by those of the run "
            "or matrix.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Find the data, build every model, and time a few steps and evaluations, to "
            "estimate time, memory and disk; no run is started.",
        ),
    ] = False,
    data_dir: DataDir = None,
    scale: ScaleOption = None,
    stand_in: StandIn = False,
    trust_remote_code: TrustRemoteCode = False,
    wide: WideCheck = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Train many runs: the experiments of a group, or all combinations that a file asks for.

    A file lists recipes, treatments, settings and seeds, and every combination is a run. The
    runs together are called a matrix.

    On a terminal, the runs train in the background: `frostlab status` shows them, and
    `frostlab stop` stops them. To continue after an interruption, run the same command
    again; finished runs are not repeated.
    """
    from frostlab.matrix.drive import check_notify
    from frostlab.matrix.places import Places
    from frostlab.matrix.plan import matrix_plan
    from frostlab.matrix.store import MatrixFolder, holder_of

    check_data_dir(data_dir)
    check_notify(notify)
    holder = holder_of(runs)  # the driver that is at work in this folder, if there is one
    if holder is not None and add and data_dir is None:
        used = MatrixFolder(runs, holder.name).plan().data_dir
        data_dir = None if used is None else Path(used)
    places = Places(devices, per_device, when_idle, ray, slurm)
    stand_ins = None
    if stand_in:
        from frostlab.cli.compare import stand_ins_from

        stand_ins = stand_ins_from(data_dir)
    plan = matrix_plan(
        source,
        seeds=None if seeds is None else list(range(seeds)),
        settings=settings_from(settings, None, scale),
        only=[] if only is None else _names(only),
        stand_in=stand_ins,
        data_dir=data_dir,
    )
    if check:
        if add or wait or notify is not None:
            raise BadInput("--check starts no run; leave out --add, --wait and --notify")
        _check(plan, places, runs, wide, as_json)
        return
    if as_json:
        raise BadInput("--json is for --check; `frostlab status --json` shows the runs")
    holder = holder_of(runs)  # again, because planning may have taken long
    if holder is not None and (add or holder.name == plan.name):
        _add(plan, MatrixFolder(runs, holder.name))
        if notify is not None or places != Places():
            echo(f"{holder.name} keeps the devices and the --notify of the command that started it")
        return
    if add:
        raise BadInput(f"--add: no matrix runs in {runs}; start one without --add")
    folder = MatrixFolder(runs, plan.name)
    places.check()
    if wait or not sys.stdout.isatty():
        _drive(plan, folder, places, notify)
    else:
        _detach(plan, folder)


def _names(only: str) -> list[str]:
    """Return the names in `gpt-01,gpt-02`."""
    names = [part.strip() for part in only.split(",") if part.strip()]
    if not names:
        raise BadInput(f"--only {only!r:.40} names no experiment")
    return names


def _check(plan: "MatrixPlan", places: "Places", runs: Path, wide: bool, as_json: bool) -> None:
    """Check every recipe of a plan once, and show what its runs that are not done need."""
    from dataclasses import replace

    from frostlab.matrix.drive import prepare_matrix
    from frostlab.matrix.plan import recipes_of
    from frostlab.matrix.slots import parse_devices
    from frostlab.matrix.store import MatrixFolder

    places.check()
    devices = parse_devices(places.devices)
    data_dir = None if plan.data_dir is None else Path(plan.data_dir)
    left = {task.path.name for task in prepare_matrix(plan, MatrixFolder(runs, plan.name)).left}
    undone = [run for run in plan.runs if run.name in left or run.missing is not None]
    if (done := len(plan.runs) - len(undone)) and not as_json:
        echo(f"{done} of {len(plan.runs)} runs are done already")
    show_check(recipes_of(replace(plan, runs=undone)), runs, data_dir, devices, wide, as_json)


def show_check(
    recipes: "Sequence[tuple[str, Recipe, int]]",
    runs: Path,
    data_dir: Path | None,
    devices: "Sequence[str]",
    wide: bool,
    as_json: bool,
) -> None:
    """Check recipes, and print what they need; exit with 1 if one of them cannot run."""
    from frostlab.matrix.check import check_recipes, check_table
    from frostlab.training.progress import choose_screen

    say = choose_screen(True).line if len(recipes) > 1 else lambda line: None
    verdict = check_recipes(recipes, runs, data_dir=data_dir, devices=devices, say=say)
    if as_json:
        echo(json.dumps(verdict.to_dict(), indent=1))
    else:
        echo("\n".join(check_table(verdict, width_of(wide))))
    if verdict.problems:
        raise typer.Exit(1)


def _add(plan: "MatrixPlan", folder: "MatrixFolder") -> None:
    """Add runs to a live matrix."""
    from frostlab.matrix.drive import add_to_live

    new = add_to_live(plan, folder)
    if new:
        echo(f"{counted(new, 'runs')} will be added to {folder.name}, which is running")
    else:
        echo(f"{folder.name} is running, and has all of these runs; see `frostlab status`")


def _drive(
    plan: "MatrixPlan", folder: "MatrixFolder", places: "Places", notify: str | None
) -> None:
    """Start all runs that are left, and wait until they end; exit with 1 if some failed."""
    from frostlab.matrix.drive import drive
    from frostlab.training.progress import choose_screen

    memory = None  # what the largest run needs
    if places.per_device == "auto":
        from frostlab.matrix.check import estimate_memory
        from frostlab.matrix.plan import recipes_of

        needs = [estimate_memory(recipe) for _, recipe, _ in recipes_of(plan)]
        memory = max((need for need in needs if need is not None), default=None)
    say = choose_screen(True).line
    ends = drive(plan, folder, places, notify=notify, memory=memory, say=say)
    if ends.status != "finished":
        raise typer.Exit(1)


def _detach(plan: "MatrixPlan", folder: "MatrixFolder") -> None:
    """Start the driver, which is this command without a terminal, and wait until it has begun."""
    from frostlab.matrix.drive import prepare_matrix
    from frostlab.matrix.store import holder_of
    from frostlab.matrix.task import disk_problem

    prepared = prepare_matrix(plan, folder)  # refuses what the driver would refuse
    for run in prepared.plan.runs:
        if run.missing is not None:
            echo(f"{run.name} cannot run (missing: {run.missing}); the other runs go on")
    problem = disk_problem(folder.path)  # a driver that cannot write its log could not report it
    if problem is not None:
        raise BadInput(f"{folder.path} cannot be written ({problem})")
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        log = folder.log.open("ab")
    except OSError as error:
        raise BadInput(f"{folder.path} cannot be written ({error.strerror})") from None
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)  # after it, there are no options
    command = [sys.executable, "-m", "frostlab", *words[:place], "--wait", *words[place:]]
    with log:
        begins = log.tell()
        driver = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=os.environ,
        )  # fmt: skip
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        holder = holder_of(folder.runs)
        if holder is not None and holder.pid == driver.pid:
            break
        if driver.poll() is not None:
            text = folder.log.read_bytes()[begins:].decode(errors="replace").strip()
            if driver.returncode != 2:
                echo(text or f"{plan.name} ended with exit code {driver.returncode}")
                raise typer.Exit(driver.returncode)
            lines = text.splitlines() or [f"exit code {driver.returncode}"]
            errors = (line for line in reversed(lines) if line.startswith("frostlab: "))
            raise BadInput(next(errors, lines[-1]).removeprefix("frostlab: "))
        try:
            time.sleep(0.1)
        except KeyboardInterrupt:
            echo(f"{plan.name} begins in the background; `frostlab stop {plan.name}` stops it")
            raise
    else:
        raise FrostlabError(
            f"{plan.name} has not begun after {_START_SECONDS:.0f} s; process {driver.pid} may "
            f"still begin it: see `frostlab status` and {folder.log}"
        )
    echo(
        f"{plan.name}: {counted(len(prepared.left), 'runs')} to train in the background (process "
        f"{driver.pid}); `frostlab status` shows them, `frostlab stop {plan.name}` stops them"
    )

"""Arguments and options that several commands share, each with one name and one help text."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from frostlab.errors import BadInput, nearest
from frostlab.launcher import rank
from frostlab.text import plain, printable, short

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", envvar="FROSTLAB_DATA",
        help="Folder to look in for data sets first, e.g. for sst2/train.jsonl; other formats "
        "are possible, too.",
    ),
]  # fmt: skip
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE",  # without the name, typer 0.27 calls the option --DEVICE
        help="Device to use: auto, cpu, cuda, cuda:2 or mps (default: the recipe's)."
    ),
]  # fmt: skip


Devices = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="DEVICES",
        help="Devices to train on, e.g. cuda:0,cuda:1 (default: every free GPU, or the CPU).",
    ),
]  # fmt: skip
PerDevice = Annotated[
    str,
    typer.Option(
        "--per-device", metavar="N|auto",
        help="Number of runs that share a device; their times cannot be compared then. auto: as "
        "many as memory and CPU cores allow, but at most 7 on a GPU with CUDA MPS, 3 on a GPU "
        "without it, and 1 on the CPU. Of these, at most 5, 1 and 1 train at the same time; the "
        "others load data, write results or wait.",
    ),
]  # fmt: skip
WhenIdle = Annotated[
    bool, typer.Option("--when-idle", help="Wait until no other program uses the devices.")
]

Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="HEAD:PORT", help="Train on the Ray cluster at this address."),
]

Slurm = Annotated[
    str | None,
    typer.Option(
        "--slurm", metavar="OPTIONS",
        help="Train through Slurm, with options of sbatch, e.g. partition=gpu,time=4:00:00.",
    ),
]  # fmt: skip


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names in the folder of runs that begin with the text before the cursor."""
    try:
        entries = sorted(os.listdir(ctx.params.get("runs") or os.environ.get(RUNS) or "runs"))
    except OSError:
        return []
    return [name for name in entries if name.startswith(incomplete) and not name.startswith(".")]


RUNS = "FROSTLAB_RUNS"  # environment variable that replaces the default of --runs
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Name of a run, the beginning of its name, or its folder.",
        autocompletion=complete_run,
    ),
]  # fmt: skip
RunOrComparison = Annotated[
    str,
    typer.Argument(
        metavar="RUN|COMPARISON",
        help="Name of a run or a comparison, the beginning of its name, or its folder.",
        autocompletion=complete_run,
    ),
]  # fmt: skip
RunsFolder = Annotated[
    Path,
    typer.Option("--runs", metavar="FOLDER", envvar=RUNS, help="Folder that holds the runs."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Seed for weights, data order and dropout (default: the recipe's)."
    ),
]
ScaleOption = Annotated[
    str | None,
    typer.Option(
        "--scale", metavar="tiny|small|full",
        help="tiny, small: make the run smaller, with fewer examples and steps and, unless the "
        "model is pretrained, narrower layers. On 2 CPU cores, tiny takes seconds, and "
        "small takes minutes. full: the recipe's own sizes.",
    ),
]  # fmt: skip
StandIn = Annotated[
    bool,
    typer.Option(
        "--stand-in",
        help="If data, a tokenizer or pretrained weights are missing, use stand-ins: built-in "
        "data, a newly trained tokenizer, random weights.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE",
        help="Change a setting of the recipe, e.g. optim.lr=1e-4; can be repeated.",
    ),
]  # fmt: skip


def _trust(wanted: bool) -> None:
    """Allow models to run code; processes that this one starts inherit the permission."""
    if wanted:
        os.environ["FROSTLAB_TRUST_REMOTE_CODE"] = "1"


TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", callback=_trust, expose_value=False,
        help="Allow the Python code that comes with the model to run; read this code first.",
    ),
]  # fmt: skip


Wide = Annotated[
    bool, typer.Option("--wide", help="Show everything, even if it is wider than the terminal.")
]
WideCheck = Annotated[
    bool,
    typer.Option(
        "--wide", help="With --check, show everything, even if it is wider than the terminal."
    ),
]


def width_of(wide: bool = False) -> int | None:
    """Return the width of the terminal, or 80 if it is unknown; None with --wide."""
    return None if wide else shutil.get_terminal_size((80, 24)).columns


def echo(text: object = "", err: bool = False) -> None:
    """Print text with control characters escaped."""
    typer.echo(printable(str(text)), err=err)


def settings_from(
    settings: Iterable[str] | None, device: str | None = None, scale: str | None = None
) -> dict[str, Any]:
    """Return the recipe settings of --set, --device and --scale; --device and --scale win."""
    from frostlab.recipe.load import parse_settings
    from frostlab.recipe.scale import ORDER

    if scale is not None and scale not in ORDER:
        hint = nearest(scale, ORDER) or f"; choose from {', '.join(ORDER)}"
        raise BadInput(f"--scale {plain(short(scale, 40))} is not a scale{hint}")
    options = {"train.device": device, "scale": scale}
    given = {key: value for key, value in options.items() if value is not None}
    return parse_settings(settings or ()) | given


def check_data_dir(data_dir: Path | None) -> None:
    """Refuse a data folder that does not exist."""
    if data_dir is not None and not data_dir.expanduser().is_dir():
        raise BadInput(f"--data-dir {data_dir} is not a folder")


def is_first_process() -> bool:
    """Return whether this process prints; with torchrun, only rank 0 does."""
    return rank() == 0

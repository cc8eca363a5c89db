"""Trained runs in use: `frostlab generate`, `export`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from frostlab.cli.options import AsJson, RunName, RunsFolder, echo
from frostlab.text import plain

UseDevice = Annotated[
    str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:2 or mps (default: auto).")
]


def generate(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Names of runs, beginnings of their names, or their folders."
        ),
    ],
    prompts: Annotated[
        list[str],
        typer.Option(
            "--prompt", metavar="TEXT", help='Text to continue; can be repeated; "" begins a text.'
        ),
    ],
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Samples of each run and prompt (default: 5; 1 at temperature 0)."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 always takes the most probable token.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", help="Draw from the most probable tokens that sum to P; 1: from all."
        ),
    ] = 0.95,
    tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens of a sample.")] = 100,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the samples.")] = 0,
    device: UseDevice = "auto",
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Continue prompts with the language models of one or several runs.

    Sample 1 of every run and prompt is drawn with the same random numbers, and so is
    sample 2. A sample ends at the end token [end], after --tokens tokens [length],
    or at the model's last position [positions].
    """
    from frostlab.records.index import find_run

    folders = [find_run(runs, name) for name in names]
    from frostlab.use.generate import Sampling, generate, samples_text
    from frostlab.use.run import load_run

    sampling = Sampling(tokens, temperature, top_p, seed)
    count = samples if samples is not None else 5 if temperature else 1
    distinct = len({folder.name for folder in folders}) == len(folders)
    shown = [
        (folder.name if distinct else str(folder), sample)
        for folder in dict.fromkeys(folders)
        for sample in generate(
            load_run(folder), list(dict.fromkeys(prompts)), sampling, samples=count, device=device
        )
    ]
    if as_json:
        listed = [{"run": name, **asdict(sample)} for name, sample in shown]
        echo(json.dumps(listed, indent=1))
    else:
        echo(samples_text(shown))


def export(
    run: RunName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Write a run as a Hugging Face folder, which transformers loads without frostlab.

    The folder holds the config, the best weights, the tokenizer, the names of the
    classes, and a model card with the run's data, training and results.
    """
    from frostlab.records.index import find_run

    source = find_run(runs, run)
    from frostlab.use.run import load_run

    echo(plain(str(load_run(source).export(folder))))

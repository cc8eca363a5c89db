"""`frostlab bench`: time frostlab's training steps against other training loops."""

from pathlib import Path
from typing import Annotated

import typer

from frostlab.bench.catalogue import Scale, chosen
from frostlab.cli.options import DataDir, check_data_dir, echo
from frostlab.errors import BadInput, FrostlabError
from frostlab.text import columns, plain


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Benchmarks to run (default: all that can run here)."),
    ] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="List the benchmarks and exit.")
    ] = False,
    scale: Annotated[
        Scale,
        typer.Option(
            help="full: the sizes that --list describes; small: much smaller models and batches."
        ),
    ] = "full",
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of rounds; in each, every loop is timed once (default: the benchmark's).",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Start no further round after S seconds, but take at least three (or as many as "
            "--rounds says, if fewer). A benchmark with several results has S seconds for each.",
        ),
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append every result to this file, as a line of JSON."),
    ] = None,
) -> None:
    """Time frostlab's training steps against other training loops and the device's peak speed."""
    benchmarks = chosen(names or [])
    if only_list:
        rows = [
            (benchmark.name, f"{benchmark.work}; against {benchmark.against}; {benchmark.targets}")
            for benchmark in benchmarks
        ]
        echo("\n".join(columns(rows)))
        return
    check_data_dir(data_dir)
    if out is not None:
        try:
            out.open("a").close()
        except OSError as error:
            raise BadInput(f"--out {out} cannot be written: {error.strerror}") from None
    from frostlab.bench.runner import append, run_benchmarks, show

    results = []
    for result in run_benchmarks(
        benchmarks, scale=scale, rounds=rounds, seconds=seconds, data_dir=data_dir,
        say=lambda line: echo(plain(line), err=True),
    ):  # fmt: skip
        results.append(result)
        if out is not None:
            append(out, result)
    show(results)
    failed = [result["benchmark"] for result in results if result["status"] == "failed"]
    skipped = [result["benchmark"] for result in results if result["status"] == "skipped"]
    if failed or (names and skipped):
        raise FrostlabError(f"not measured: {', '.join(failed + skipped)}")

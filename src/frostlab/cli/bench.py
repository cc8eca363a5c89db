"""`frostlab bench`."""

from pathlib import Path
from typing import Annotated

import typer

from frostlab.bench.catalogue import Scale, chosen
from frostlab.errors import BadInput, FrostlabError


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", help="Which; none: all that can run.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Turns of each side; none: as many as fit the work.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FROSTLAB_DATA", help="Data sets as NAME/SPLIT.jsonl …")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Append each result to this file, one a line.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Seconds of timed rounds a result at most.")
    ] = None,
    scale: Annotated[
        Scale, typer.Option(help="full: what is to be reached; small: seconds, also on a CPU.")
    ] = "full",
    listed: Annotated[bool, typer.Option("--list", help="Say what there is, and stop.")] = False,
) -> None:
    """Measure training steps against other ways to take them, with the ceiling beside."""
    wanted = chosen(names or [])
    if listed:
        width = max(len(one.name) for one in wanted)
        for one in wanted:
            typer.echo(f"{one.name:{width}}  {one.work}; against {one.against}; {one.target}")
        return
    if data_dir is not None and not data_dir.is_dir():
        raise BadInput(f"--data-dir {data_dir} is not a folder")
    if json_file is not None:
        try:
            json_file.open("a").close()
        except OSError as error:
            raise BadInput(f"--json {json_file} cannot be written: {error.strerror}") from None
    from frostlab.bench.runner import append, run_benchmarks, show

    results = []
    for result in run_benchmarks(
        wanted, scale=scale, rounds=rounds, seconds=seconds, data_dir=data_dir,
        say=lambda line: typer.echo(line, err=True),
    ):  # fmt: skip
        results.append(result)
        if json_file is not None:
            append(json_file, result)
    show(results)
    failed = [result["benchmark"] for result in results if result["status"] == "failed"]
    absent = [result["benchmark"] for result in results if result["status"] == "skipped"]
    if failed or (names and absent):
        raise FrostlabError(f"not measured: {', '.join(failed + absent)}")

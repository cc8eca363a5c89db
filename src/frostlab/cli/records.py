"""Commands on existing runs: `frostlab runs`, `show`, `diff`, `note`, `tag`, `clean`, `verify`."""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frostlab.cli.options import RUNS, AsJson, RunOrComparison, RunsFolder, Wide, echo, width_of
from frostlab.errors import BadInput, nearest
from frostlab.text import columns, plain, size_text, wrapped

if TYPE_CHECKING:
    from frostlab.records.finding.index import Summary

_COMPARISONS = Path("comparisons")  # where `frostlab compare` puts them
# The last condition in a list: what comes before it, a minus, its key, its sign and its value.
_LAST_KEY = re.compile(r"(.*,)?\s*(-?)([^,=!<>~]*)(?:(!=|<=|>=|=|<|>|~)([^,]*))?", re.DOTALL)


# Completion in the shell


def _known_runs(ctx: typer.Context) -> "list[Summary]":
    from frostlab.records.finding.index import list_runs as read_runs

    try:
        return read_runs(Path(ctx.params.get("runs") or os.environ.get(RUNS) or "runs"))
    except BadInput:
        return []


def complete_keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the last key of a list such as `optim.lr,train.batch`."""
    from frostlab.records.finding.query import keys_of

    before, comma, last = incomplete.rpartition(",")
    sign = "-" if last.startswith("-") else ""
    keys = keys_of(_known_runs(ctx))
    return [f"{before}{comma}{sign}{key}" for key in keys if key.startswith(last[len(sign) :])]


def complete_where(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a filter: with keys or, after a sign such as =, with values that runs have."""
    from frostlab.records.finding.query import keys_of, value_of

    runs, match = _known_runs(ctx), _LAST_KEY.fullmatch(incomplete)
    if match is None:
        return []
    before, _, key, sign, start = match.groups(default="")
    if not sign:
        return [f"{before}{known}" for known in keys_of(runs) if known.startswith(key)]
    values: dict[str, None] = {}
    for run in runs:
        value = value_of(run, key)
        known = value if isinstance(value, tuple) else ("null" if value is None else value,)
        values |= dict.fromkeys(map(plain, known))
    return [f"{before}{key}{sign}{value}" for value in values if value.startswith(start)]


# Commands


def list_runs(
    context: typer.Context,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITIONS", autocompletion=complete_where,
            help="Show only the runs that fit, e.g. 'treatment=oelm,optim.lr>1e-4'; the signs are "
            "= != < <= > >= and ~ (contains).",
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="KEYS", autocompletion=complete_keys,
            help="Sort by these keys; with a minus, e.g. -accuracy, the largest come first "
            "(default: the oldest run first).",
        ),
    ] = "",
    keys: Annotated[
        str | None,
        typer.Option(
            "--columns", metavar="KEYS", autocompletion=complete_keys,
            help="Settings and metrics to show, e.g. optim.lr,loss (default: the settings that "
            "differ between the runs shown). With --group: the numbers to average.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="KEYS", autocompletion=complete_keys,
            help="Show one row, with means, for all runs that have the same values of these keys. "
            "--group -seed means all keys except the seed: one row for runs that differ only in "
            "the seed.",
        ),
    ] = None,
    wide: Wide = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """List runs, with their status, settings, results and times.

    The options take keys. A key is a fact of the run, such as status, treatment, seed, best,
    step_ms, total_seconds or tag (docs/runs.md lists all), a reported metric such as
    accuracy, or a setting such as optim.lr.
    """
    from frostlab.records.finding.index import list_runs as read_runs
    from frostlab.records.finding.listing import groups_table, runs_table
    from frostlab.records.finding.query import check_key, group_keys, grouped, listed, select

    source = context.get_parameter_source("runs")
    # Without --runs, the folder may be missing, because there may be no runs yet.
    may_be_missing = source is None or source.name != "COMMANDLINE"
    every_run = [] if may_be_missing and not runs.exists() else read_runs(runs)
    chosen = select(every_run, ",".join(where or ()), "" if group else sort)
    shown = None if keys is None else listed(keys)
    if chosen and group is not None:
        from frostlab.comparison.judging.statistics import t_critical

        groups = grouped(chosen, group_keys(chosen, group), shown or (), t_critical, sort)
        if as_json:
            echo(json.dumps([entry.to_dict() for entry in groups], indent=1))
        else:
            echo(groups_table(groups, width_of(wide)))
        return
    for key in shown or () if every_run else ():
        check_key(key, every_run, f"--columns {key}")
    if as_json:
        echo(json.dumps([vars(run) for run in chosen], indent=1, default=str))
    elif chosen:
        echo(runs_table(chosen, shown, width_of(wide)))
    else:
        echo(f"none of {len(every_run)} runs fits --where" if every_run else "no runs yet")


def show(
    run: RunOrComparison,
    wide: Wide = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show a run (recipe, results, times, environment) or a comparison (conclusions, arms, files).

    For a group (several comparisons of a study), show its summary.
    """
    from frostlab.records.finding.index import is_comparison, is_group

    folder = _find(run, runs)
    if is_group(folder):
        _show_group(folder, width_of(wide), as_json)
        return
    if is_comparison(folder):
        _show_comparison(folder, width_of(wide), as_json)
        return
    from frostlab.records.finding.show import show as show_run
    from frostlab.records.finding.show import show_json

    echo(json.dumps(show_json(folder), indent=1) if as_json else show_run(folder, width_of(wide)))


def _find(text: str, runs: Path) -> Path:
    """Return the folder of the run, comparison or group that a text names."""
    from frostlab.records.finding.index import find_run, is_comparison, is_group, is_run

    for folder in (Path(text), runs / text, _COMPARISONS / text):
        if text and (is_comparison(folder) or is_run(folder) or is_group(folder)):
            return folder
    paths = [path for path in _COMPARISONS.glob("*") if is_comparison(path) or is_group(path)]
    comparisons = [path.name for path in paths]
    matches = [name for name in comparisons if text and name.startswith(text)]
    try:
        run = find_run(runs, text) if runs.is_dir() else None
    except BadInput as error:
        if len(matches) == 1:
            return _COMPARISONS / matches[0]
        hint = "" if "did you mean" in str(error) else nearest(text, comparisons)
        raise BadInput(f"{error}{hint}") from None
    if run is None and len(matches) == 1:
        return _COMPARISONS / matches[0]
    if run is None:
        raise BadInput(f"no run {text!r:.80}: {runs} is not a folder{nearest(text, comparisons)}")
    if matches:
        raise BadInput(f"{text!r:.80} could be the run {run} or {_COMPARISONS / matches[0]}")
    return run


def _show_group(folder: Path, width: int | None, as_json: bool) -> None:
    """Print the summary and the notes of a group of comparisons."""
    from frostlab.experiments.show import show_summary
    from frostlab.experiments.summary import read_summary
    from frostlab.records.finding.annotations import read_annotations

    summary, annotations = read_summary(folder), read_annotations(folder)
    if as_json:
        values = {"folder": str(folder), **asdict(annotations), "summary": summary.to_dict()}
        echo(json.dumps(values, indent=1))
        return
    lines = [f"tags: {', '.join(annotations.tags)}", ""] if annotations.tags else []
    lines += [show_summary(summary, folder / "summary.md", width)]
    lines += ["", "notes"] * bool(annotations.notes)
    lines += [plain(f"  {note.text}") for note in annotations.notes]
    echo("\n".join(lines))


def _show_comparison(folder: Path, width: int | None, as_json: bool) -> None:
    """Print the tags, conclusions, arms, files and notes of a comparison."""
    from frostlab.comparison.evidence import read_evidence
    from frostlab.comparison.page import show as conclusions
    from frostlab.records.finding.annotations import read_annotations

    evidence, page = read_evidence(folder / "evidence.json"), folder / "comparison.md"
    annotations, files = read_annotations(folder), _files(folder)
    if as_json:
        values = {"folder": str(folder), "files": files, **asdict(annotations)}
        echo(json.dumps({**values, "evidence": evidence and evidence.to_dict()}, indent=1))
        return
    if annotations.tags:
        echo(f"tags: {', '.join(annotations.tags)}\n")
    lines: list[str] = []
    if evidence is None:
        lines += [f"comparison {folder.name} is not finished: it has no evidence.json", ""]
    else:
        echo(conclusions(evidence, page, width))
        lines += ["", "arms"]
        for name, arm in evidence.arms.items():
            seeds = ", ".join(str(run.seed) for run in arm.runs)
            runs = f"{len(arm.finished)} of {len(arm.runs)} runs finished"
            lines.append(f"  {name}: {arm.does}; {runs}, seeds {seeds}")
        lines.append("")
    lines += ["files", *(f"  {name}" for name in columns([*files.items()]))]
    lines += ["", "notes"] * bool(annotations.notes)
    lines += [f"  {note.text}" for note in annotations.notes]
    echo("\n".join(part for line in lines for part in wrapped(plain(line), width)))


def _files(folder: Path) -> dict[str, str]:
    """Map each file of a comparison to its size, each folder to its number of runs or files."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            inside = list(path.iterdir())
            runs = sum(child.is_dir() for child in inside)
            count, kind = (runs, "run") if runs or not inside else (len(inside), "file")
            files[f"{path.name}/"] = f"{count} {kind}{'s' * (count != 1)}"
        elif path.is_file() and not path.name.startswith(".") and path.suffix != ".lock":
            files[path.name] = size_text(path.stat().st_size)
    return files


def diff(
    first: RunOrComparison,
    second: RunOrComparison,
    wide: Wide = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show how two runs differ: settings, data, code, environment, metrics, losses.

    For two comparisons, show how their plans and metrics differ.
    """
    from frostlab.records.finding.index import is_comparison, is_group

    folders = (_find(first, runs), _find(second, runs))
    if groups := [str(folder) for folder in folders if is_group(folder)]:
        raise BadInput(f"{groups[0]} is a group; give two runs, or two of its comparisons")
    if any(map(is_comparison, folders)):
        if not all(map(is_comparison, folders)):
            raise BadInput(f"{first} and {second}: give two runs, or two comparisons")
        _diff_comparisons(folders, width_of(wide), as_json)
        return
    from frostlab.records.finding.diff import difference

    result = difference(*folders)
    echo(json.dumps(result.to_dict(), indent=1) if as_json else result.text(width_of(wide)))


def _diff_comparisons(folders: tuple[Path, Path], width: int | None, as_json: bool) -> None:
    """Print the settings in which two plans differ, and how far the metrics agree."""
    from frostlab.comparison.judging.pairing import unlike
    from frostlab.comparison.run import load_comparison
    from frostlab.recipe.recipe import differences

    left, right = (load_comparison(folder).evidence for folder in folders)
    keys = differences(left.plan.model_dump(mode="json"), right.plan.model_dump(mode="json"))
    lines, cautions = unlike(left, right), [left.caution, right.caution]
    if as_json:
        echo(json.dumps({"plan": keys, "metrics": lines, "cautions": cautions}, indent=1))
        return
    text = [f"plan: differs in {', '.join(keys)}" if keys else "plan: equal", *lines]
    named = zip(folders, cautions, strict=True)
    text += [f"caution: {folder.name}: {caution}" for folder, caution in named if caution]
    echo("\n".join(part for line in text for part in wrapped(plain(line), width)))


def note(
    run: RunOrComparison,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The note, in quotes.")],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Add a note to a run or a comparison.

    `frostlab show` lists all notes of a run or a comparison; `frostlab runs` lists only the
    last note of each run.
    """
    from frostlab.records.finding.annotations import add_note

    folder = _find(run, runs)
    count = len(add_note(folder, text).notes)
    echo(plain(f"{folder.name}: {count} note{'s' * (count != 1)}"))


def tag(
    run: RunOrComparison,
    name: Annotated[str, typer.Argument(metavar="TAG", help="One word, e.g. keep.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag instead.")] = False,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Tag a run or a comparison.

    `frostlab runs --where tag=TAG` lists the runs with a tag. `frostlab clean` keeps all
    tagged runs or, with --keep, the runs with one of the given tags.
    """
    from frostlab.records.finding.annotations import add_tag, remove_tag

    folder = _find(run, runs)
    tags = (remove_tag if remove else add_tag)(folder, name).tags
    echo(plain(f"{folder.name}: {', '.join(tags) if tags else 'no tags'}"))


def clean(
    older: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Remove runs that are older than this, e.g. 30d, 12h or 2w."
        ),
    ],
    keep: Annotated[
        str,
        typer.Option(
            metavar="TAGS",
            help="Keep runs that have one of these tags, e.g. paper,best; `tagged` keeps every run "
            "that has a tag.",
        ),
    ] = "tagged",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    comparisons: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder of comparisons; the runs that they refer to are kept."
        ),
    ] = _COMPARISONS,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Remove old runs, except those with a tag.

    Also kept are runs in progress, runs that a comparison uses, symbolic links,
    and runs whose records or tags cannot be read. For each old run that is kept, clean
    prints a line with the reason. The age of an unfinished run is the time since it last
    recorded something.
    """
    from frostlab.records.finding.clean import duration, old_runs, remove_run

    seconds = duration(older)
    removed, kept = old_runs(runs, seconds, keep, [comparisons])
    for run in kept:
        echo(plain(f"{run.folder.name} is kept: {run.reason}"))
    rows = [
        [entry.folder.name, f"{entry.age / 86_400:.1f} days old", size_text(entry.size)]
        for entry in removed
    ]
    if not rows:
        echo(f"nothing to remove: no run is older than {older}, except those kept")
        return
    total = size_text(sum(entry.size for entry in removed))
    echo("\n".join(columns(rows, right={1, 2}, width=width_of())))
    runs_text = f"{len(rows)} run{'s' * (len(rows) != 1)} ({total})"
    if dry_run:
        echo(f"{runs_text} would be removed")
        return
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("clean: add --yes to remove these runs, or --dry-run to look only")
        typer.confirm(f"remove {runs_text}?", abort=True)
    for entry in removed:
        remove_run(entry.folder)
    echo(f"{runs_text} removed")


def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder of a run, of a comparison, or of several of them."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Check that the files of finished runs and comparisons have not changed.

    A finished run or comparison has a manifest: a file with the checksums of its other
    files. verify prints one line for every file that was changed, added or removed, and
    one for every run or comparison without a manifest. If several files of one
    checkpoint differ, only the first is named. If a line is printed, the exit code is 1.
    """
    from frostlab.records.manifest import verify as verify_folder

    count, problems = verify_folder(folder)
    if as_json:
        listed = [{"path": problem.path, "problem": problem.problem} for problem in problems]
        echo(json.dumps({"checked": count, "problems": listed}, indent=1))
    elif problems:
        echo("\n".join(plain(str(problem)) for problem in problems))
    else:
        echo(f"runs and comparisons checked: {count}; all files are unchanged")
    if problems:
        raise typer.Exit(1)

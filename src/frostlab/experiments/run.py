"""`fl.compare_group`: carry out the comparisons of a group one after another, and summarize them.

Each comparison has a folder inside the group's folder. Calling `fl.compare_group` again continues
where the last call stopped. The group's folder also holds its definition (group.json), the summary
(summary.json, summary.md), checksums of these files (manifest.json) and, if the group names further
data to evaluate the runs on, the scores on them (further.json).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from frostlab.comparison.evidence import read_evidence
from frostlab.comparison.plan import Plan
from frostlab.comparison.run import Comparison, judge_again, run_plan
from frostlab.comparison.runner import Runner
from frostlab.data.encode import recipe_split
from frostlab.data.prepare import prepare
from frostlab.data.sources import plan_splits
from frostlab.data.tokenizers import load_pretrained, tokenizer_settings
from frostlab.errors import BadInput, FrostlabError
from frostlab.experiments.further import (
    check_further,
    evaluate_further,
    further_results,
    pending_runs,
    read_scores_of,
)
from frostlab.experiments.plans import comparison_names, folder_name, group_plans, names_in
from frostlab.experiments.show import summary_page
from frostlab.experiments.summary import SUMMARY, GroupSummary, read_summary, summarize
from frostlab.models.stand_in import with_stand_ins
from frostlab.recipe.data import EEGData, Generated, PretrainedTokenizer
from frostlab.recipe.groups import Group, group_from, load_group
from frostlab.recipe.recipe import Recipe, Scale
from frostlab.records.finding.index import GROUP
from frostlab.records.manifest import MANIFEST, write_manifest
from frostlab.storage import cache_folder, finite, read_json, write_whole
from frostlab.text import plain
from frostlab.training.progress import choose_screen
from frostlab.typed import check_schema, read

_SCHEMA = 1  # version of group.json
_DEFAULT_PARENT = Path("comparisons")
_PAGE = "summary.md"


@dataclass(frozen=True, repr=False)
class GroupResult:
    """The comparisons of a group and their summary, read from the group's folder."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # a str is accepted too

    def __repr__(self) -> str:
        try:
            states = [f"{entry.name} {entry.status}" for entry in self.summary.comparisons]
        except (OSError, FrostlabError):
            states = ["no summary yet"]
        return plain(f"GroupResult({self.folder}: {', '.join(states)})")

    @cached_property
    def summary(self) -> GroupSummary:
        """The results of every comparison and arm, with those of the published studies."""
        return read_summary(self.folder)

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """The finished comparisons by name."""
        return {
            entry.name: Comparison(self.folder / entry.name)
            for entry in self.summary.comparisons
            if entry.status == "finished"
        }

    @property
    def page(self) -> Path:
        """The path of the summary, a Markdown file."""
        return self.folder / _PAGE


def compare_group(
    source: str | Path,
    *,
    as_published: bool = False,
    only: str | Iterable[str] | None = None,
    seeds: int | Iterable[int] | None = None,
    rounds: int | None = None,
    settings: Mapping[str, Any] | None = None,
    quick: bool = False,
    scale: Scale | None = None,
    stand_in: bool = False,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    jobs: int = 1,
    progress: bool | None = None,
) -> GroupResult:
    """Carry out the comparisons of a group, each in its own folder, and summarize them.

    Args:
        source: the name of a shipped group, or its YAML file.
        as_published: compare the experiments as the published studies ran them, each with its own
            settings, so that verdicts may be confounded; by default the comparisons are fair, that
            is, their arms (variants of a recipe) differ only in what is compared.
        only: names of the comparisons to carry out, separated by commas or as a list; by default
            all of them.
        seeds: the number of seeds, or a list, for every comparison.
        rounds: number of extra whole runs per arm, which alternate between arms for timing.
        settings: settings of the recipe for every arm of every comparison.
        quick: plan short runs, and by default fewer seeds and shorter step timing.
        scale: tiny, small or full; at tiny and small, every arm has fewer and shorter examples,
            fewer steps and (unless it is pretrained) narrower layers. None: the recipes' scale.
        stand_in: use built-in data, a learned tokenizer or random weights in place of missing ones.
        out: the group's folder; by default `comparisons/GROUP`, with `-as-published`, the scale and
            `-quick` added to the name where they apply.
        data_dir: folder of the data sets.
        jobs: number of parallel runs.
        progress: whether to show the progress; None: on a terminal or in a notebook.
    """
    group = load_group(str(source))
    changes = {"seeds": seeds, "rounds": rounds}
    plans = group_plans(
        group,
        as_published=as_published,
        only=names_in(only),
        changes={key: value for key, value in changes.items() if value is not None},
        settings=dict(settings or {}) | ({} if scale is None else {"scale": scale}),
        quick=quick,
        stand_in=partial(with_stand_ins, data_dir=data_dir) if stand_in else None,
    )
    runner = Runner(None if data_dir is None else Path(data_dir), choose_screen(progress), jobs)
    return run_group(group, as_published, plans, runner, None if out is None else Path(out))


def run_group(
    group: Group,
    as_published: bool,
    plans: Mapping[str, Plan],
    runner: Runner,
    out: Path | None = None,
) -> GroupResult:
    """Carry out, or continue, checked plans of a group's comparisons in the folder `out`."""
    quick = any(plan.quick for plan in plans.values())
    scale = next(iter(plans.values())).recipe["scale"]
    name = folder_name(group, as_published, quick, scale)
    path = _DEFAULT_PARENT / name if out is None else out
    folder = path.resolve()
    _check_folder(folder, group, as_published)
    further = _further(group)
    check_further(further, group.name)
    _check_data(group, plans, further, folder, runner.data_dir)
    _open(folder, group, as_published)
    for number, (name, plan) in enumerate(plans.items(), 1):
        runner.say(f"comparison {number} of {len(plans)}: {name}")
        try:
            run_plan(plan, runner, folder / name)
            if further:
                evaluate_further(folder, name, further, runner.data_dir, runner.say)
        except BadInput as error:
            raise BadInput(f"{group.name}, {name}: {error}") from None
        _write_summary(folder, group, as_published)
    return GroupResult(path)


# The group's folder


@dataclass(frozen=True)
class _Stored:
    """The content of group.json."""

    schema: int  # `_SCHEMA` when it was written
    name: str  # name of the group
    as_published: bool  # whether the settings are those of the published studies
    group: dict[str, Any]  # the keys of the group's file
    folder: str | None  # absolute path of the file's folder; None if the group is shipped


def _stored(folder: Path) -> _Stored | None:
    """Return the content of group.json; None if it does not exist."""
    path = folder / GROUP
    try:
        values = read_json(path)
    except FileNotFoundError:
        return None
    return read(_Stored, check_schema(values, _SCHEMA, path), path)


def _check_folder(folder: Path, group: Group, as_published: bool) -> None:
    """Refuse a folder that holds anything but this group."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; choose another folder with --out")
    stored = _stored(folder)
    if stored is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise BadInput(
                f"{folder} is not empty and holds no group; choose another folder with --out"
            )
    elif (stored.name, stored.as_published) != (group.name, as_published):
        kind = f"{stored.name}{' as published' * stored.as_published}"
        raise BadInput(f"{folder} holds the group {kind}; choose another folder with --out")


def _open(folder: Path, group: Group, as_published: bool) -> None:
    """Write group.json, and delete the manifest of an earlier call, which no longer holds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        place = None if group.folder is None else str(group.folder.resolve())
        values = group.model_dump(mode="json", exclude_defaults=True)
        stored = _Stored(_SCHEMA, group.name, as_published, values, place)
        write_whole(folder / GROUP, json.dumps(asdict(stored), indent=1) + "\n")
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror})") from None


def _write_summary(folder: Path, group: Group, as_published: bool) -> None:
    """Write the summary of the comparisons so far, and the group's manifest."""
    scores, further = read_scores_of(folder), []
    for name in comparison_names(group, as_published):
        evidence = read_evidence(folder / name / "evidence.json")
        if evidence is not None:
            further += further_results(scores, name, evidence)
    summary = summarize(group, as_published, folder, further)
    (folder / MANIFEST).unlink(missing_ok=True)
    write_whole(folder / SUMMARY, json.dumps(finite(summary.to_dict()), indent=1) + "\n")
    write_whole(folder / _PAGE, summary_page(summary))
    write_manifest(folder)


def judge_group(folder: str | Path) -> GroupResult:
    """Judge the finished comparisons of a group again, without training, and summarize them."""
    path = Path(folder)
    stored = _stored(path)
    if stored is None:
        raise BadInput(f"{path} is not the folder of a group: it has no {GROUP}")
    place = None if stored.folder is None else Path(stored.folder)
    group = group_from(stored.group, stored.name, str(path / GROUP), place)
    for name in comparison_names(group, stored.as_published):
        if (path / name / "evidence.json").exists():
            judge_again(path / name)
    _write_summary(path.resolve(), group, stored.as_published)
    return GroupResult(path)


# Data


def _further(group: Group) -> dict[str, dict[str, Any]]:
    """Return the settings of further evaluations, with absolute paths.

    In the group's file, a relative path starts at the folder of the file.
    """
    further = {}
    for name, settings in group.further.items():
        path = settings.get("data.path")
        if group.folder is not None and isinstance(path, str):
            settings = {**settings, "data.path": str((group.folder / path).resolve())}
        further[name] = dict(settings)
    return further


def _check_data(
    group: Group,
    plans: Mapping[str, Plan],
    further: Mapping[str, Mapping[str, Any]],
    folder: Path,
    data_dir: Path | None,
) -> None:
    """Raise BadInput if a comparison lacks data; the message also names those that can run.

    A comparison needs no data if it has results for all seeds, and if its finished runs have
    already been evaluated on the further data.
    """
    missing = {}
    for name, plan in plans.items():
        if _is_done(folder, name, plan, further):
            continue
        recipe = plan.recipe_of(plan.baseline, plan.seeds[0])
        try:
            _find_data(recipe, further, data_dir)
        except BadInput as error:
            missing[name] = str(error).partition("; ")[0]  # the rest says how to get the data
    if not missing:
        return
    reasons = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
    left = ",".join(name for name in plans if name not in missing)
    fetch = f" with `frostlab data fetch {group.name}`" if group.folder is None else ""
    raise BadInput(
        f"{group.name}: {len(missing)} of {len(plans)} comparisons cannot run: {reasons}; get the "
        f"data{fetch}{f', or carry out only the others with --only {left}' if left else ''}"
    )


def _is_done(folder: Path, name: str, plan: Plan, further: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a comparison has all seeds, and its finished runs have all further scores."""
    evidence = read_evidence(folder / name / "evidence.json")
    if evidence is None or not set(plan.seeds) <= set(evidence.plan.seeds):
        return False
    return not pending_runs(folder, name, evidence, further)


def _find_data(
    recipe: Recipe, further: Mapping[str, Mapping[str, Any]], data_dir: Path | None
) -> None:
    """Find the files of a recipe's data, tokenizer and further data, or raise BadInput.

    Generated and EEG data are prepared, not only looked for; further EEG data are not looked for.
    """
    data, cache = recipe.data, cache_folder(None)
    if isinstance(data, Generated) and further:
        raise BadInput(
            f"data.name {data.name}: models trained on generated data cannot be evaluated on "
            "further data"
        )
    if isinstance(data, Generated | EEGData):
        prepare(recipe, data_dir)
        return
    plan_splits(data, data_dir, cache)
    tokenizer = tokenizer_settings(recipe)
    if isinstance(tokenizer, PretrainedTokenizer):
        load_pretrained(tokenizer.name)
    for settings in further.values():
        if "data.path" in settings:
            if not Path(settings["data.path"]).exists():
                raise BadInput(f"data.path {settings['data.path']} does not exist")
        elif "data.report" in settings or "data.language" in settings:
            report = settings.get("data.report", data.report)
            chosen = data.model_copy(update={"report": report})
            recipe_split(chosen, "report", settings.get("data.language"), data_dir, cache)

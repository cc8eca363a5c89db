"""Plans that compare runs that have ended.

The plan is made from the runs' recipes: each group of runs is an arm, named after its differences
from the others.
"""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostlab.comparison.load import (
    as_list,
    differing_keys,
    rules_of,
    settings_of,
    validated_plan,
)
from frostlab.comparison.plan import Plan
from frostlab.errors import BadInput, nearest
from frostlab.recipe.bounded_yaml import shown, shown_key
from frostlab.recipe.load import recipe_name, shipped_comparisons, shipped_recipes
from frostlab.records.finding.index import is_run
from frostlab.records.folder import RunRecord
from frostlab.text import short

_LONG_PATH = 300  # most characters of a path in an error message

RunsOf = str | Path | RunRecord | Iterable[str | Path | RunRecord]  # the runs of one arm


def plan_of_runs(groups: Sequence[RunsOf], changes: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan that compares groups of runs, each of which becomes an arm.

    The first group is the baseline. Arms are named after their treatments and the settings that
    differ. The paths of the runs in the plan are absolute.

    Args:
        groups: for each arm a run's folder, a folder of runs, a pattern such as `runs/a-*`, or a
            list of these.
        changes: values of the rules (`metric`, `alpha`, …), and `allow_confounds`.
    """
    changes = changes or {}
    if len(groups) < 2:
        listed = ", ".join(str(name) for group in groups for name in _names(group)) or "nothing"
        raise BadInput(
            f"{listed}: a comparison needs the runs of two arms, such as 'runs/a-*' 'runs/b-*'; "
            "the first is the baseline"
        )
    baseline, *others = arms = [_ChosenRuns.of(group) for group in groups]
    _check_distinct(arms)
    for arm in others:
        _check_pairable(baseline, arm)
    first = baseline.first.recipe
    if changes.get("metric") is None:
        for arm in others:
            if arm.first.recipe.metric != first.metric:
                raise BadInput(
                    f"checkpoints of {baseline.label} were selected by {first.metric}, and those "
                    f"of {arm.label} by {arm.first.recipe.metric}; choose a metric with --metric"
                )
    rules = rules_of(dict(changes), first)
    for arm in arms:
        arm.check_metric(rules["metric"])
    settings = [dict(differing_keys(baseline.settings, arm.settings)) for arm in arms]
    names = _arm_names(arms, settings)
    plan_values = {
        "name": _name_of(arms),
        # each arm has its treatment, and each run its seed
        "recipe": first.to_dict() | {"treatment": "none", "seed": 0},
        "arms": [
            {
                "name": name,
                "treatment": arm.first.recipe.to_dict()["treatment"],
                "set": changed,
            }
            for name, arm, changed in zip(names, arms, settings, strict=True)
        ],
        "seeds": sorted({seed for arm in arms for seed in arm.runs}),
        "rules": rules,
        "allow_confounds": as_list(changes.get("allow_confounds")),
        "vary": _compared_settings(arms, settings),
        "clock": None,
        "runs": {
            name: {seed: str(run.folder) for seed, run in arm.runs.items()}
            for name, arm in zip(names, arms, strict=True)
        },
    }
    plan = validated_plan(plan_values, "runs")
    plan.check()
    from frostlab.comparison.oelm_json import check_names  # imported here because it loads scipy

    check_names(plan)
    return plan


@dataclass(frozen=True)
class _ChosenRuns:
    """The runs of one arm by seed; they share the treatment and all settings."""

    label: str  # the user's text, for error messages
    runs: dict[int, RunRecord]

    @classmethod
    def of(cls, group: RunsOf) -> "_ChosenRuns":
        """Read the runs of a group; refuse runs that do not make one arm."""
        names = _names(group)
        label = ", ".join(map(str, names))
        folders = dict.fromkeys(folder for name in names for folder in _folders(name))
        if not folders:
            raise BadInput("an arm has no runs: the list is empty")
        first, *others = records = [RunRecord(folder) for folder in folders]
        for run in others:
            keys = ["treatment"] * (run.recipe.surgery != first.recipe.surgery)
            keys += [
                key for key, _ in differing_keys(settings_of(first.recipe), settings_of(run.recipe))
            ]
            if keys:
                raise BadInput(
                    f"{label}: the runs of an arm may differ only in the seed, but {run.folder} "
                    f"differs from {first.folder} in {', '.join(keys)}"
                )
        runs: dict[int, RunRecord] = {}
        for run in records:
            same = runs.setdefault(run.start.seed, run)
            if same is not run:
                raise BadInput(
                    f"{label}: {same.folder} and {run.folder} both have seed {run.start.seed}; "
                    "leave one of them out"
                )
        if not any(map(_has_ended, records)):
            listed = ", ".join(run.folder.name for run in records[:5])
            raise BadInput(f"{label}: no run has ended; finish {listed} with frostlab run --resume")
        return cls(label, dict(sorted(runs.items())))

    @property
    def first(self) -> RunRecord:
        """The run with the smallest seed."""
        return next(iter(self.runs.values()))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the runs share."""
        return settings_of(self.first.recipe)

    @property
    def data(self) -> set[str]:
        """The digests of the runs' data; one, unless files were changed between two runs."""
        return {run.digests.data for run in self.runs.values()}

    def check_metric(self, metric: str) -> None:
        """Refuse a finished run that does not report the metric."""
        for run in self.runs.values():
            if _has_ended(run) and run.status == "finished" and metric not in run.metrics:
                hint = nearest(metric, run.metrics)
                raise BadInput(f"{run.folder} reports no {shown_key(metric)}{hint}")


def _has_ended(run: RunRecord) -> bool:
    return (run.folder / "result.json").exists()


def _name_of(arms: Sequence[_ChosenRuns]) -> str:
    """Return the name that the arms' runs share, else the names of their data and model.

    A run is named after its recipe or, in a planned comparison, after its arm.
    """
    first, names = arms[0].first, {arm.first.start.name for arm in arms}
    if len(names) > 1:
        return recipe_name(f"{first.recipe.data.name}-{first.recipe.model.kind}")
    return recipe_name(first.start.name)


def _names(group: RunsOf) -> list[str | Path]:
    """Return the folders and patterns that name the runs of an arm."""
    if isinstance(group, RunRecord):
        return [group.folder]
    if isinstance(group, str | Path):
        return [group]
    if not isinstance(group, Iterable):
        raise BadInput(f"{group!r:.80} is not a run, a folder of runs or a pattern")
    return [name for item in group for name in _names(item)]


def _folders(name: str | Path) -> list[Path]:
    """Return the folder of a run, of all runs in a folder, or of all runs that match a pattern."""
    text, path = str(name), Path(name)
    if not text:
        raise BadInput("an arm has no runs: the name of a run or the pattern is empty")
    if os.path.exists(path / "plan.json"):
        raise BadInput(f"{text} is a comparison; name an arm's runs, such as {path}/runs/oelm-*")
    pattern = os.path.join(glob.escape(text), "*") if os.path.isdir(text) else text
    single = os.path.isdir(text) and is_run(path)
    matches = [text] if single else list(filter(os.path.isdir, glob.glob(pattern)))
    if not matches:
        raise BadInput(_no_match(text))
    for match in matches:
        if not is_run(Path(match)):
            raise BadInput(f"{text}: {match} is not a run; choose a pattern that matches only runs")
    return [Path(match).resolve() for match in sorted(matches)]


def _no_match(text: str) -> str:
    """Return the error message for a name or pattern without runs, with the nearest run's name."""
    if text in {*shipped_recipes(), *shipped_comparisons()} or text.endswith((".yaml", ".json")):
        return f"{text} is not a run: --runs compares runs that have ended, and trains no recipe"
    parent = Path(text) if os.path.isdir(text) else Path(text).parent
    text = short(text, _LONG_PATH)
    if not os.path.isdir(parent):
        return f"no run matches {text}: {short(str(parent), _LONG_PATH)} is not a folder"
    paths = map(Path, glob.glob(os.path.join(glob.escape(str(parent)), "*")))
    names = [path.name for path in paths if is_run(path)]
    if not names:
        return f"no run matches {text}: {parent} has no runs"
    hint = nearest(Path(text).name, names) or f"; there is `{min(names)}`"
    return f"no run matches {text}{hint}"


def _check_distinct(arms: Sequence[_ChosenRuns]) -> None:
    """Refuse a run that is in two arms, and two arms that were trained in the same way."""
    for i, arm in enumerate(arms):
        for other in arms[:i]:
            own = {run.folder for run in arm.runs.values()}
            if both := sorted(own & {run.folder for run in other.runs.values()}):
                raise BadInput(f"{both[0]} is in two arms, {other.label} and {arm.label}")
            same = arm.first.recipe.surgery == other.first.recipe.surgery
            if same and not list(differing_keys(other.settings, arm.settings)):
                raise BadInput(
                    f"{other.label} and {arm.label} were trained in the same way, so they are one "
                    "arm; if the shell split a pattern, put it in quotes: 'runs/a-*'"
                )


def _check_pairable(baseline: _ChosenRuns, arm: _ChosenRuns) -> None:
    """Refuse an arm whose task, scale or data are not the baseline's, or that shares no seed."""
    tasks = [either.first.recipe.data.task for either in (baseline, arm)]
    if tasks[0] != tasks[1]:
        raise BadInput(
            f"the task of {baseline.label} is {tasks[0]}, and that of {arm.label} is {tasks[1]}"
        )
    scales = dict.fromkeys(either.first.recipe.scale for either in (baseline, arm))
    if len(scales) > 1:
        listed = " and ".join(scales)
        raise BadInput(f"{baseline.label} and {arm.label} differ in scale ({listed})")
    for key, value in differing_keys(baseline.settings["data"], arm.settings["data"], "data"):
        values = f"{shown(_value(baseline.settings, key))} and {shown(value)}"
        raise BadInput(
            f"{baseline.label} and {arm.label} differ in {key} ({values}): arms must see the same "
            "data"
        )
    if not baseline.data & arm.data:
        digests = " and ".join(min(either.data) for either in (baseline, arm))
        raise BadInput(
            f"{baseline.label} and {arm.label} were trained on different data (digests {digests})"
        )
    if not baseline.runs.keys() & arm.runs.keys():
        a, b = (", ".join(map(str, either.runs)) for either in (baseline, arm))
        raise BadInput(f"no seed in common: {baseline.label} has {a}, and {arm.label} has {b}")


def _compared_settings(
    arms: Sequence[_ChosenRuns], settings: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the settings that are compared like treatments.

    A setting is compared if it is the only difference between an arm and the baseline. If it
    differs together with the treatment or another setting in any arm, it is a confound instead.
    """
    compared, together = list[str](), set[str]()
    for arm, changed in zip(arms, settings, strict=True):
        if len(changed) == 1 and arm.first.recipe.surgery == arms[0].first.recipe.surgery:
            compared += changed
        else:
            together |= set(changed)
    return [key for key in dict.fromkeys(compared) if key not in together]


def _arm_names(arms: Sequence[_ChosenRuns], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each arm by its treatment, if treatments differ, and by the settings that differ."""
    keys = list(dict.fromkeys(key for changed in settings for key in changed))
    surgeries = [arm.first.recipe.surgery for arm in arms]
    names: list[str] = []
    for i, arm in enumerate(arms):
        parts = []
        if any(surgery != surgeries[0] for surgery in surgeries):
            treatment = arm.first.recipe.treatment_name
            # A plan takes the arm named baseline as its baseline, so only the first gets this name.
            is_plain = treatment in ("none", "baseline")
            parts.append(("none" if i else "baseline") if is_plain else treatment)
        for key in keys:
            value = settings[i].get(key, _value(arms[0].settings, key))
            parts.append(f"{key.rpartition('.')[2]}-{_value_text(value)}".rstrip("-"))
        name = unique = recipe_name("-".join(parts))[:90]
        number = 2
        while unique in names:
            unique, number = f"{name}-{number}", number + 1
        names.append(unique)
    return names


def _value(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value[part]
    return value


def _value_text(value: Any) -> str:
    """Return a short text for a setting's value: a mapping's `kind`, or a list's length."""
    if isinstance(value, dict):
        return str(value.get("kind", ""))
    if isinstance(value, list):
        return str(len(value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()

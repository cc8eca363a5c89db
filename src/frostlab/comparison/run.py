"""`fl.compare`: a plan in, verdicts out; interrupted, it goes on where it was."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from frostlab.comparison.evidence import gather
from frostlab.comparison.load import make_plan
from frostlab.comparison.oelm_json import comparison_json, timing_json
from frostlab.comparison.page import page
from frostlab.comparison.plan import Plan
from frostlab.comparison.runner import ComparisonFolder, Runner, Say, result_tasks, round_tasks
from frostlab.comparison.tuning import chosen, tune_all
from frostlab.data.prepare import prepare
from frostlab.errors import FrostlabError
from frostlab.recipe.load import watch_interval
from frostlab.recipe.recipe import Recipe
from frostlab.storage import write_whole
from frostlab.training.stages import total_steps

_QUICK_SECONDS, _QUICK_LEAST = 60.0, 10  # of training in all; steps a run


@dataclass(frozen=True)
class Comparison:
    """A finished comparison, read from its folder."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # a str will do

    @property
    def evidence(self) -> dict[str, Any]:
        """Everything that was found."""
        found = ComparisonFolder(self.folder).read("evidence.json")
        if found is None:
            raise FrostlabError(f"{self.folder} has no verdicts yet")
        return dict(found)

    @property
    def verdicts(self) -> dict[str, dict[str, Any]]:
        """For the metric it was made for: every arm's verdict, with its numbers."""
        evidence = self.evidence
        return dict(evidence["verdicts"][evidence["plan"]["rules"]["metric"]])

    @property
    def page(self) -> Path:
        """Path of the page, a Markdown file."""
        return self.folder / "comparison.md"

    def to_frame(self) -> Any:
        """One row a run, as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise FrostlabError("to_frame needs pandas: pip install pandas") from None
        rows = [
            {"arm": name, "seed": run["seed"], "status": run["status"], **(run["metrics"] or {}),
             "total_seconds": run["clocks"]["total_seconds"], "folder": run["folder"]}
            for name, arm in self.evidence["arms"].items()
            for run in arm["runs"]
        ]  # fmt: skip
        return pandas.DataFrame(rows)


def compare(
    source: str | Path | dict[str, Any] | Recipe,
    *,
    arms: Iterable[Any] | str | None = None,
    seeds: int | Iterable[int] | None = None,
    out: str | Path | None = None,
    comparisons: str | Path = "comparisons",
    data_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    quick: bool = False,
    jobs: int = 1,
    say: Say = lambda line: None,
    **rules: Any,
) -> Comparison:
    """Compare arms of one recipe that differ in nothing but the treatment.

    Args:
        source: a recipe (a shipped name, a YAML file, values), or a comparison's YAML file.
        arms: treatments by name, or `{name, treatment, set}`; `baseline` trains everything.
        seeds: how many, or which; more can be added to a finished comparison.
        out: the comparison's own folder; by default one under `comparisons`.
        jobs: runs at once, for a GPU with room for several; steps are timed alone all the same.
        rules: metric, alpha, minimum_effect, noninferior, tune, allow_confounds, rounds, clock.
    """
    given = {"arms": arms, "seeds": seeds}
    given = {key: value for key, value in given.items() if value is not None}
    plan = make_plan(source, settings=settings, quick=quick, **given, **rules)
    where = Path(out) if out is not None else Path(comparisons) / _folder_name(plan)
    if not where.exists():  # data that are not there are refused before anything is written
        prepare(
            plan.recipe_of(plan.baseline, plan.seeds[0]),
            None if data_dir is None else Path(data_dir),
        )
    folder = ComparisonFolder(where.resolve())
    with folder.open(plan) as agreed:
        runner = Runner(None if data_dir is None else Path(data_dir), say, jobs)
        _work(agreed, folder, runner, say)
    return Comparison(folder.path)


def _folder_name(plan: Plan) -> str:
    arms = "-vs-".join(arm.name for arm in plan.arms)
    name = f"{plan.name}-{arms}"
    return (name if len(name) <= 100 else plan.name) + ("-quick" if plan.quick else "")


def _work(plan: Plan, folder: ComparisonFolder, runner: Runner, say: Say) -> None:
    timing = _timing(plan, folder, runner.data_dir, say)
    whole = plan
    if plan.quick:
        plan = _shortened(plan, folder, timing, runner.data_dir)
    tuning = folder.read("tuning.json")  # what was chosen once stays
    if tuning is None:
        tuning = tune_all(plan, folder.path, runner)
        if tuning:
            folder.write("tuning.json", tuning)
    tuned = chosen(plan, tuning)
    records = runner.run_all(result_tasks(plan, folder.path, tuned))
    rounds = runner.run_all(round_tasks(plan, folder.path, tuned), alone=True)
    evidence = gather(
        plan, folder.path, records, look=folder.look(whole), tuning=tuning, timing=timing,
        rounds=rounds, jobs=runner.jobs,
    )  # fmt: skip
    folder.write("evidence.json", evidence)
    evidence = folder.read("evidence.json")  # as it is kept: without NaN
    folder.write("comparison.json", comparison_json(evidence, records, plan))
    folder.write("timing.json", timing_json(evidence))
    write_whole(folder.path / "comparison.md", page(evidence))


def _timing(
    plan: Plan, folder: ComparisonFolder, data_dir: Path | None, say: Say
) -> dict[str, Any] | None:
    """Time the arms' steps against each other, once; None if the plan does not want it.

    What is tuned does not change a step's time.
    """
    if plan.clock is None:
        return None
    if any(plan.recipe_of(arm, plan.seeds[0]).stages for arm in plan.arms):
        say("steps are not timed against each other: those of every stage are others")
        return None
    known = folder.read("steps.json")
    if known is not None:
        return dict(known)
    from frostlab.comparison.timed_arms import time_steps

    try:
        found = time_steps(plan, data_dir, say)
    except torch.OutOfMemoryError:
        raise FrostlabError(
            "out of memory while all arms are timed at once; a lower train.batch, or clock: null"
        ) from None
    folder.write("steps.json", found)
    return found


def _shortened(
    plan: Plan, folder: ComparisonFolder, timing: dict[str, Any] | None, data_dir: Path | None
) -> Plan:
    """A plan whose runs take a minute together, evaluations aside; none longer than it was."""
    recipe = plan.recipe_of(plan.baseline, plan.seeds[0])
    known = folder.read("quick.json")
    if known is None:
        slowest = max(arm["ms"] for arm in timing["arms"].values()) if timing else 1e3
        tried = sum(len(tune.values) * tune.seeds for tune in plan.tune)
        share = _QUICK_SECONDS * 1e3 / slowest / (len(plan.arms) * (len(plan.seeds) + tried))
        whole = total_steps(recipe.train, len(prepare(recipe, data_dir).splits["train"]))
        known = {"steps": min(whole, max(_QUICK_LEAST, int(share))), "of": whole}
        folder.write("quick.json", known)
    values = copy.deepcopy(plan.recipe)
    values["train"] |= {"steps": known["steps"], "epochs": None}
    if known["steps"] < known["of"]:
        values["evaluate"]["every"] = known["steps"]
        if recipe.watch is not None:
            values["watch"]["every"] = min(recipe.watch.every, watch_interval(known["steps"]))
    return plan.model_copy(update={"recipe": values})

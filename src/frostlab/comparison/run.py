"""`fl.compare`: plan a comparison of arms, carry it out in a folder, and read the result.

An arm is a variant of one recipe. Calling `fl.compare` again with the same plan continues where
the last call stopped; finished runs are not repeated. `fl.compare_runs` trains nothing: it compares
runs that have ended.
"""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from frostlab.comparison.chosen_runs import RunsOf, plan_of_runs
from frostlab.comparison.evidence import (
    ArmVerdict,
    Evidence,
    StepTiming,
    TunedSetting,
    check_tuned,
    read_evidence,
)
from frostlab.comparison.gather import AssayRuns, Trained, gather, results_of
from frostlab.comparison.judging.pairing import check_records, first_run, how_made, unlike
from frostlab.comparison.load import Source, is_stored_plan, make_plan
from frostlab.comparison.oelm_json import comparison_json, timing_json
from frostlab.comparison.page import page
from frostlab.comparison.plan import Plan
from frostlab.comparison.runner import (
    ComparisonFolder,
    Finished,
    Runner,
    plan_in,
    round_tasks,
    stored_plan,
)
from frostlab.comparison.tuning import Trials, chosen_trials, run_trials, trial_task
from frostlab.data.prepare import find_path, prepare
from frostlab.errors import BadInput, FrostlabError, require
from frostlab.html import fragment
from frostlab.models.stand_in import suggesting_stand_in, with_stand_ins
from frostlab.recipe.load import watch_interval
from frostlab.recipe.recipe import Scale
from frostlab.records.folder import RunRecord
from frostlab.records.manifest import write_manifest
from frostlab.storage import check_name, write_whole
from frostlab.text import NONE, plain
from frostlab.training.progress import choose_screen
from frostlab.training.stages import total_steps
from frostlab.typed import read

_QUICK_SECONDS = 60.0  # training time of all runs of a quick comparison together
_QUICK_LEAST = 10  # fewest steps of a run in a quick comparison
_DEFAULT_PARENT = Path("comparisons")


@dataclass(frozen=True, repr=False)
class Comparison:
    """A finished comparison, read from its folder; its evidence is read once, when first needed."""

    folder: Path

    def __repr__(self) -> str:
        try:
            verdicts = [f"{arm} {verdict.word}" for arm, verdict in self.verdicts.items()]
        except (OSError, FrostlabError):
            verdicts = ["no verdicts yet"]
        return plain(f"Comparison({self.folder}: {', '.join(verdicts)})")

    def _repr_html_(self) -> str:
        """Return the verdicts as HTML, which notebooks show."""
        try:
            evidence = self.evidence
        except (OSError, FrostlabError):
            return fragment(str(self.folder), "no verdicts yet")
        metric, rows = evidence.rules.metric, []
        for name, arm in evidence.arms.items():
            verdict = evidence.verdicts.get(name)
            paired = verdict and verdict.paired
            rows.append((
                name,
                str(arm.metrics[metric]) if metric in arm.metrics else NONE,
                str(paired) if paired else NONE if verdict else "",
                verdict.word if verdict else "the baseline",
            ))  # fmt: skip
        head = ("arm", metric, f"against {evidence.baseline}", "verdict")
        notes = [f"{name}: {note}" for name, verdict in evidence.verdicts.items()
                 for note in verdict.notes]  # fmt: skip
        caution = [evidence.caution] if evidence.caution else []
        return fragment(str(self.folder), evidence.plan.about or "", head, rows,
                        [*caution, *notes])  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # a str is accepted too

    @cached_property
    def evidence(self) -> Evidence:
        """Everything that was measured and decided."""
        evidence = read_evidence(self.folder / "evidence.json")
        if evidence is None:
            raise FrostlabError(f"{self.folder} has no verdicts yet (evidence.json is missing)")
        return evidence

    @property
    def verdicts(self) -> dict[str, ArmVerdict]:
        """The verdict on every arm but the baseline for the plan's metric, with its numbers."""
        return self.evidence.verdicts

    @property
    def page(self) -> Path:
        """The path of the comparison's page, comparison.md."""
        return self.folder / "comparison.md"

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per arm and seed."""
        pandas = require("pandas", "data", "Comparison.to_frame")
        rows = [
            {"arm": name, "seed": run.seed, "status": run.status, **run.metrics,
             "total_seconds": run.total_seconds, "folder": run.folder}
            for name, arm in self.evidence.arms.items()
            for run in arm.runs
        ]  # fmt: skip
        return pandas.DataFrame(rows)


def load_comparison(folder: str | Path) -> Comparison:
    """Load the finished comparison in a folder."""
    path = Path(folder)
    if not path.is_dir() or ComparisonFolder(path).read("evidence.json") is None:
        problem = "it has no evidence.json" if path.is_dir() else "it is not a folder"
        raise BadInput(f"{path} does not hold a finished comparison: {problem}")
    comparison = Comparison(path)
    comparison.evidence  # noqa: B018  (raises if the file does not match the schema)
    return comparison


def compare(
    source: Source,
    *,
    arms: str | Iterable[str | Mapping[str, Any]] | None = None,
    seeds: int | Iterable[int] | None = None,
    metric: str | None = None,
    alpha: float | None = None,
    minimum_effect: float | None = None,
    margin: float | None = None,
    tune: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    allow_confounds: str | Iterable[str] | None = None,
    rounds: int | None = None,
    clock: Mapping[str, float] | Literal[False] | None = None,
    assay: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    quick: bool = False,
    scale: Scale | None = None,
    stand_in: bool = False,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    jobs: int = 1,
    progress: bool | None = None,
) -> Comparison:
    """Compare arms: variants of one recipe that differ in the treatment, or in chosen settings.

    An argument of None keeps the value in the source, or the default. The keys `vary` (settings to
    compare), `contrasts` (questions) and `looks` have no argument: set them in the source.

    Args:
        source: a recipe or a comparison: a shipped name, a YAML file, a dict or a `Recipe`. The
            plan.json of a comparison is carried out again in another folder, without any changes.
        arms: names of treatments, or mappings `{name, treatment, set}`; the treatment `baseline`
            trains everything.
        seeds: the number of seeds, or a list; seeds can be added to a finished comparison.
        metric: the metric that decides the verdicts; by default the recipe's metric.
        alpha: the allowed rate of false alarms, over all arms.
        minimum_effect: the smallest effect of interest; verdicts say if an effect is below it.
        margin: the largest acceptable cost against the baseline; verdicts say whether a larger cost
            is excluded. It is a factor for perplexity and error rates, else a difference.
        tune: the settings to tune for each arm: `lr`, `decay`, `{key, values}`, or a list of such
            mappings. Every value is trained with every seed.
        allow_confounds: settings that may differ between arms; the verdict is then "confounded".
        rounds: number of extra whole runs per arm, which alternate between arms for timing.
        clock: `{seconds, width}`, the time limit of step timing and the target width of its
            intervals; False turns it off.
        assay: also train the baseline for half its steps, which the comparison must find worse.
        settings: settings of the recipe for every arm, such as `{"optim.lr": 1e-4}`.
        quick: shorten runs and timing and use fewer seeds, to see whether a full comparison is
            worthwhile.
        scale: tiny, small or full; at tiny and small, every arm has fewer examples, fewer steps and
            (unless it is pretrained) narrower layers. None: the recipe's scale.
        stand_in: use built-in data, a new tokenizer or random weights in place of missing ones.
        out: the comparison's folder; by default a folder under `comparisons`.
        data_dir: folder of the data sets.
        jobs: number of runs to train at the same time; they must fit in memory together. Steps and
            rounds are timed without parallel runs.
        progress: whether to show the progress; None: on a terminal or in a notebook.
    """
    changes = {
        "arms": arms, "seeds": seeds, "metric": metric, "alpha": alpha,
        "minimum_effect": minimum_effect, "margin": margin, "tune": tune,
        "allow_confounds": allow_confounds, "rounds": rounds, "clock": clock,
        "assay": assay,
    }  # fmt: skip
    changes = {key: value for key, value in changes.items() if value is not None}
    screen = choose_screen(progress)
    runner = Runner(None if data_dir is None else Path(data_dir), screen, jobs)
    folder = None if out is None else Path(out)
    settings = dict(settings or {}) | ({} if scale is None else {"scale": scale})
    if is_stored_plan(source, changes | settings | ({"stand_in": True} if stand_in else {}), quick):
        return reproduce(Path(str(source)), runner, folder)
    replace_missing = partial(with_stand_ins, data_dir=data_dir) if stand_in else None
    plan = make_plan(source, changes, settings=settings, quick=quick, stand_in=replace_missing)
    return run_plan(plan, runner, folder)


def compare_runs(
    *arms: RunsOf,
    metric: str | None = None,
    alpha: float | None = None,
    minimum_effect: float | None = None,
    margin: float | None = None,
    allow_confounds: str | Iterable[str] | None = None,
    out: str | Path | None = None,
) -> Comparison:
    """Compare runs that have ended, paired by seed; nothing is trained.

    The verdicts say that the runs were chosen after the fact. The runs are not copied: the
    comparison has their paths. See `compare` for the arguments that are not listed here.

    Args:
        arms: for each arm, the folder of a run, a folder of runs, a pattern such as `runs/a-*`, or
            a list of these or of `RunRecord`s; the first arm is the baseline.
        out: the comparison's folder; by default one under `comparisons`.
    """
    changes = {
        "metric": metric, "alpha": alpha, "minimum_effect": minimum_effect, "margin": margin,
        "allow_confounds": allow_confounds,
    }  # fmt: skip
    changes = {key: value for key, value in changes.items() if value is not None}
    return judge_runs(plan_of_runs(arms, changes), None if out is None else Path(out))


def judge_runs(plan: Plan, out: Path | None = None) -> Comparison:
    """Judge the runs that a plan lists by absolute path, and write the results to the folder `out`.

    By default, `out` is a new folder, or the folder in which these runs were judged before.
    """
    path = _folder_of_runs(plan) if out is None else out
    folder = ComparisonFolder(path.resolve())
    # Refuse edited runs before anything is written.
    check_records(chosen_trials(plan, folder.path).records.values())
    with folder.open(_relative(plan, folder.path)) as relative:
        _carry_out(relative, folder, Finished())
    return Comparison(folder.path)


def _folder_of_runs(plan: Plan) -> Path:
    """Return the first folder NAME-runs, NAME-runs-2, … that is absent or has the same plan."""
    name, number = f"{_folder_name(plan)}-runs", 2
    path = _DEFAULT_PARENT / check_name(name, "the comparison's name")
    while path.exists() and not _holds(path.resolve(), plan):
        path, number = path.with_name(f"{name}-{number}"), number + 1
    return path


def _holds(folder: Path, plan: Plan) -> bool:
    """Return whether a folder holds the comparison of the same runs."""
    try:
        return ComparisonFolder(folder).plan().digest == _relative(plan, folder).digest
    except BadInput:
        return False


def _relative(plan: Plan, folder: Path) -> Plan:
    """Return the plan with paths of runs that are relative to a folder."""
    runs = {
        arm: {seed: os.path.relpath(path, folder) for seed, path in by_seed.items()}
        for arm, by_seed in plan.runs.items()
    }
    return plan.model_copy(update={"runs": runs})


def run_plan(plan: Plan, runner: Runner, out: Path | None = None) -> Comparison:
    """Carry out a checked plan in the folder `out`, or continue what an earlier call began."""
    path = _DEFAULT_PARENT / _folder_name(plan) if out is None else out
    if not path.exists():  # refuse missing data before anything is written
        with suggesting_stand_in():
            prepare(plan.recipe_of(plan.baseline, plan.seeds[0]), runner.data_dir)
    folder = ComparisonFolder(path.resolve())
    with folder.open(plan) as plan_with_seeds:
        kept = [seed for seed in plan_with_seeds.seeds if seed not in plan.seeds]
        if kept:
            runner.say(
                f"{path} already has {', '.join(map(str, kept))} as further seeds; they count too, "
                f"so {len(plan_with_seeds.seeds)} seeds are compared"
            )
        _carry_out(plan_with_seeds, folder, runner)
    return Comparison(folder.path)


def reproduce(source: Path, runner: Runner, out: Path | None = None) -> Comparison:
    """Carry out the plan of another comparison again, in another folder.

    If the data are not at the plan's path, they are searched for by the digest that the
    comparison's runs recorded. If the original has evidence, the runner says at the end whether all
    metrics are the same.
    """
    stored = stored_plan(source)
    if stored is None:
        raise BadInput(f"{source} does not exist")
    plan = plan_in(stored, source)
    plan.check()
    original = source.resolve().parent
    if plan.runs:
        raise BadInput(
            f"{source} compares runs that had ended before, so there is nothing to carry out; "
            f"judge them again with frostlab judge {source.parent}"
        )
    ComparisonFolder(original).check_inputs()
    path = _new_folder(plan, original) if out is None else out
    if path.resolve() == original:
        raise BadInput(f"{path} is the folder of the plan; choose another folder with --out")
    plan = _with_data_found(plan, original, runner)
    folder = ComparisonFolder(path.resolve())
    with folder.open(plan, stored.looks) as plan_with_seeds:
        quick = _stored_steps(ComparisonFolder(original), "quick.json") if plan.quick else None
        if quick is not None and _stored_steps(folder, "quick.json") is None:
            folder.write("quick.json", asdict(quick))  # else this machine's speed would decide
        _carry_out(plan_with_seeds, folder, runner)
    again = Comparison(folder.path)
    first = read_evidence(original / "evidence.json")
    if first is not None:
        for line in unlike(first, again.evidence):
            runner.say(line)
    return again


def _new_folder(plan: Plan, original: Path) -> Path:
    """Return the default folder of a reproduction, always the same, so that it can be continued."""
    path = _DEFAULT_PARENT / check_name(f"{_folder_name(plan)}-again", "the plan's name")
    return path.with_name(f"{path.name}-again") if path.resolve() == original else path


def _with_data_found(plan: Plan, original: Path, runner: Runner) -> Plan:
    """Return the plan with the path at which this machine has the data of the original's runs."""
    runs = sorted(original.glob("runs/*/digests.json"))
    recipe = plan.recipe_of(plan.baseline, plan.seeds[0])
    if not runs:
        prepare(recipe, runner.data_dir)  # refuse missing data before anything is written
        return plan
    path = find_path(recipe, RunRecord(runs[0].parent).digests.data, runner.data_dir)
    if path is None or path == plan.recipe["data"]["path"]:
        return plan
    runner.say(f"the data were found at {path}")
    data = {**plan.recipe["data"], "path": path}
    return plan.model_copy(update={"recipe": {**plan.recipe, "data": data}})


def _folder_name(plan: Plan) -> str:
    arms = "-vs-".join(arm.name for arm in plan.arms)
    name = f"{plan.name}-{arms}"
    marks = plan.recipe_of(plan.baseline, 0).marks + "-quick" * plan.quick
    return (name if len(name) <= 100 else plan.name) + marks


def judge_again(folder: str | Path) -> Comparison:
    """Judge a finished comparison again from its runs, and replace its evidence and page.

    Nothing is trained. If the results have not changed, this is not another look at them.
    """
    path = Path(folder)
    if not path.is_dir():
        raise BadInput(f"{path} is not the folder of a comparison")
    stored = ComparisonFolder(path.resolve())
    plan = stored.plan()
    plan.check()
    with stored.open(plan) as plan_with_seeds:
        _carry_out(plan_with_seeds, stored, Finished())
    return Comparison(stored.path)


def _carry_out(plan: Plan, folder: ComparisonFolder, runner: Runner | Finished) -> None:
    """Time steps and train all runs, unless that was done; write the evidence and the page."""
    timing = _time_steps(plan, folder, runner)
    short = _shortened(plan, folder, timing, runner) if plan.quick else plan
    trials = _run_trials(short, folder, runner)
    repeat = None if plan.quick or plan.runs else _repeat(short, folder, runner, trials)
    assay = _run_assay(short, folder, runner, trials) if plan.assay else None
    tuned = {arm: dict(trial) for arm, trial in trials.best.items()}
    rounds = runner.run_all(round_tasks(short, folder.path, tuned), alone=True)
    trained = Trained(trials, rounds, repeat, assay)
    check_records(trained.records)
    evidence = gather(
        short,
        folder.path,
        trained,
        looks=folder.look(short, results_of(short, trials)),
        jobs=_jobs(folder, runner, trials),
        timing=timing,
        made=how_made(plan, trials),
    )
    folder.write("evidence.json", evidence.to_dict())
    folder.write("comparison.json", comparison_json(evidence, first_run(plan, trials)))
    folder.write("timing.json", timing_json(evidence))
    write_whole(folder.path / "comparison.md", page(evidence))
    elsewhere = [path for by_seed in plan.runs.values() for path in by_seed.values()]
    write_manifest(folder.path, elsewhere=elsewhere)


def _jobs(folder: ComparisonFolder, runner: Runner | Finished, trials: Trials) -> int:
    """Return the most runs that were trained in parallel, in this call or before."""
    try:
        earlier = read_evidence(folder.path / "evidence.json")
    except BadInput:  # evidence of another version, which this call replaces
        earlier = None
    shared = [
        record.result.runs_at_once
        for record in trials.records.values()
        if record.ending is not None
    ]
    return max(runner.jobs, earlier.jobs if earlier else 1, *shared)


def _run_trials(plan: Plan, folder: ComparisonFolder, runner: Runner | Finished) -> Trials:
    """Train every arm with every seed and tuned value, or read the runs that the plan lists."""
    if plan.runs:
        return chosen_trials(plan, folder.path)
    values = folder.read("tuning.json")
    grids = {}
    if values is not None:
        for setting in _stored_tuning(values, plan, folder.path / "tuning.json"):
            grids[setting.key] = setting.values
    trials = run_trials(plan, folder.path, runner, grids)
    if trials.settings:
        folder.write("tuning.json", [asdict(setting) for setting in trials.settings])
    return trials


def _repeat(
    plan: Plan, folder: ComparisonFolder, runner: Runner | Finished, trials: Trials
) -> RunRecord:
    """Train the baseline's first seed a second time: both runs should end with the same metric."""
    arm, seed = plan.baseline, plan.seeds[0]
    first = trial_task(plan, folder.path, arm, trials.chosen[arm.name][seed], seed)
    path, about = folder.path / "repeat" / first.path.name, f"{first.about} again"
    task = replace(first, path=path, about=about)
    (record,) = runner.run_all([task]).values()
    return record


def _run_assay(
    plan: Plan, folder: ComparisonFolder, runner: Runner | Finished, trials: Trials
) -> AssayRuns:
    """Train the baseline with half its steps and every seed: a harm that must be found."""
    arm = plan.baseline
    steps, whole = _assay_steps(plan, folder, runner)
    harm = {"train.steps": steps, "train.epochs": None}
    harmed = arm.model_copy(update={"set": arm.set | harm})
    tasks = []
    for seed in plan.seeds:
        task = trial_task(plan, folder.path, harmed, trials.chosen[arm.name][seed], seed)
        path, about = folder.path / "assay" / f"s{seed}", f"planted harm, seed {seed}"
        tasks.append(replace(task, path=path, about=about))
    runner.run_all(tasks)
    return AssayRuns({task.number: RunRecord(task.path) for task in tasks}, steps, whole)


@dataclass(frozen=True)
class _Steps:
    """The content of quick.json and of assay.json."""

    steps: int  # of each shortened run
    of: int  # steps of a run that is not shortened


def _stored_steps(folder: ComparisonFolder, name: str) -> _Steps | None:
    """Return the content of quick.json or assay.json; None if it does not exist."""
    values = folder.read(name)
    if values is None:
        return None
    stored = read(_Steps, values, folder.path / name)
    if not 1 <= stored.steps <= stored.of:
        raise BadInput(f"{folder.path / name}: steps should be from 1 to {stored.of}")
    return stored


def _assay_steps(
    plan: Plan, folder: ComparisonFolder, runner: Runner | Finished
) -> tuple[int, int]:
    """Return the steps of a shortened run of the baseline, and of a whole run."""
    stored = _stored_steps(folder, "assay.json")
    if stored is None:
        runner.must_train(folder.path / "assay.json")
        recipe = plan.recipe_of(plan.baseline, plan.seeds[0])
        whole = total_steps(recipe.train, len(prepare(recipe, runner.data_dir).splits["train"]))
        stored = _Steps(max(1, whole // 2), whole)
        folder.write("assay.json", asdict(stored))
    return stored.steps, stored.of


@dataclass(frozen=True)
class _Tuning:
    """The content of tuning.json, which is a list."""

    settings: list[TunedSetting]


def _stored_tuning(values: object, plan: Plan, path: Path) -> list[TunedSetting]:
    """Return the content of tuning.json; refuse it if it does not fit the plan."""
    tuning = read(_Tuning, {"settings": values}, path).settings
    if [setting.key for setting in tuning] != [tune.key for tune in plan.tune]:
        raise BadInput(f"{path}: its settings are not those of the plan")
    for setting, tune in zip(tuning, plan.tune, strict=True):
        check_tuned(setting, plan, path)
        grid = list(setting.values)
        if grid != sorted(set(grid)) or not set(tune.values) <= set(grid):
            raise BadInput(f"{path}: the values of {setting.key:.80} are not the plan's grid")
        if len(grid) > len(tune.values) + 2:
            raise BadInput(f"{path}: {setting.key:.80} has more than two values beyond the grid")
    return tuning


def _time_steps(
    plan: Plan, folder: ComparisonFolder, runner: Runner | Finished
) -> StepTiming | None:
    """Time the steps of all arms, or read the stored timing; return None if they are not timed.

    Timing comes before tuning, because a quick comparison uses it to choose the length of its runs.
    Steps are timed with the recipe's values of tuned settings, such as the learning rate.
    """
    if plan.clock is None:
        return None
    if plan.has_stages:
        runner.say("step timing is skipped, because steps differ between stages")
        return None
    values = folder.read("steps.json")
    if values is None:
        runner.must_train(folder.path / "steps.json")
        if runner.on_cluster:
            runner.say("steps are timed here, not on the cluster; clock: false turns this off")
        from frostlab.comparison.timed_arms import time_steps

        try:
            timed = time_steps(plan, runner.data_dir, runner.say, runner.device)
            folder.write("steps.json", timed)
        except torch.OutOfMemoryError:
            raise FrostlabError(
                "out of memory: step timing holds the models of all arms at once; lower "
                "train.batch, or set clock: false"
            ) from None
        values = folder.read("steps.json")
    timing = read(StepTiming, values, folder.path / "steps.json")
    if not all(arm.name in timing.arms and timing.arms[arm.name].ms > 0 for arm in plan.arms):
        raise BadInput(f"{folder.path / 'steps.json'}: an arm of the plan has no time")
    return timing


def _shortened(
    plan: Plan, folder: ComparisonFolder, timing: StepTiming | None, runner: Runner | Finished
) -> Plan:
    """Return the plan with fewer steps per run: all runs together train for about one minute.

    A run has at least `_QUICK_LEAST` steps, but never more than planned. The number of steps is
    stored, so that later calls reuse it.
    """
    recipe = plan.recipe_of(plan.baseline, plan.seeds[0])
    quick = _stored_steps(folder, "quick.json")
    if quick is None:
        runner.must_train(folder.path / "quick.json")
        # Without timing, assume one second per step.
        slowest_ms = max(arm.ms for arm in timing.arms.values()) if timing else 1e3
        runs = len(plan.arms) * len(plan.seeds) * plan.settings_tried
        affordable = _QUICK_SECONDS * 1e3 / slowest_ms / runs
        full = total_steps(recipe.train, len(prepare(recipe, runner.data_dir).splits["train"]))
        quick = _Steps(int(min(full, max(_QUICK_LEAST, affordable))), full)
        folder.write("quick.json", asdict(quick))
    values = copy.deepcopy(plan.recipe)
    values["train"] |= {"steps": quick.steps, "epochs": None}
    if quick.steps < quick.of:
        values["evaluate"]["every"] = quick.steps
        if recipe.watch is not None:
            every_n_steps = min(recipe.watch.every_n_steps, watch_interval(quick.steps))
            values["watch"]["every_n_steps"] = every_n_steps
    return plan.model_copy(update={"recipe": values})

"""The schema of evidence.json, from which comparison.md (the page), reports and tables are made.

Arms are variants of one recipe, trained with the same seeds. Runs of two arms (usually one is the
baseline) are paired if they have the same seed and differ only as the plan allows.

`read_evidence` turns the file into these dataclasses, and raises a one-line error with the name of
the key if the file does not match them. A number that is not finite is null in the file and None
here. Increase `SCHEMA` by 1 when a key is added, removed or renamed.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from frostlab.comparison.judging.statistics import spread
from frostlab.comparison.judging.verdict import Word
from frostlab.comparison.plan import MOST_LOOKS, Plan, Rules
from frostlab.errors import BadInput
from frostlab.recipe.bounded_yaml import check_plain, shown_key
from frostlab.records.schema import DataRecord, TelemetrySummary
from frostlab.storage import finite, read_json
from frostlab.text import NONE
from frostlab.typed import check_schema, read

SCHEMA = 6  # version of evidence.json
CONVERGED = ("steps", "epochs", "seconds")  # what a run spent until it reached a target
# Gradient flow in the first two layers of the model (measures/gradients.py).
QUANTITIES = ("front_ratio", "weight_change", "update")
# On EEG segments of 60 s: r, the correlation of decoded and true envelope, as mean and std over
# subjects (seen: trained on; unseen: not trained on), and the Auditory EEG Challenge's score.
SEGMENTS = ("seen", "seen_std", "unseen", "unseen_std", "score")
_MOST_VALUES = 10**7  # numbers and texts in evidence.json
Schema = TypeVar("Schema")


@dataclass(frozen=True)
class Effect:
    """A difference or ratio of paired values, mostly of two arms (`statistics.Paired`)."""

    n: int  # pairs
    log: bool  # whether the effect is a ratio, computed on the log scale
    alpha: float  # the interval has confidence 1 − alpha
    effect: float | None  # mean difference, or ratio of geometric means
    low: float | None  # lower end of the interval; None: unbounded, or no interval
    high: float | None  # upper end, likewise
    p: float | None  # largest alpha for which the interval includes 0, or the ratio 1
    std: float | None  # standard deviation of the differences, or of the log ratios

    def __str__(self) -> str:
        """Return the effect, with its interval if it has one."""
        if self.effect is None:
            return NONE
        sign, unit = ("", " ×") if self.log else ("+", "")
        has_interval = self.low is not None or self.high is not None
        interval = f" {interval_text(self.low, self.high, self.log)}" if has_interval else ""
        return f"{self.effect:{sign}.4g}{interval}{unit}"


def interval_text(low: float | None, high: float | None, log: bool) -> str:
    """Format an interval; an end that is None is unbounded, and only differences have signs."""
    sign = "" if log else "+"
    lower = "−∞" if low is None else f"{low:{sign}.4g}"
    upper = "∞" if high is None else f"{high:{sign}.4g}"
    return f"[{lower}, {upper}]"


@dataclass(frozen=True)
class Limit:
    """The margin (the largest acceptable cost), and whether the interval stays within it."""

    # yes: the arm is within the margin; no: it is worse by more; not shown: neither is shown
    answer: Literal["yes", "no", "not shown"]
    limit: float  # the margin as in `Rules.margin`, such as a factor of the error rate
    cost: float | None  # the margin as a difference or ratio, like the effect
    largest: float | None  # the largest cost in the interval; None: unbounded
    probability_above: float | None  # posterior probability of a cost above the margin


@dataclass(frozen=True)
class ArmVerdict:
    """The verdict on two arms for one metric (`verdict.Verdict`)."""

    arm: str  # the arm that is judged
    baseline: str  # the arm that this one is compared with
    metric: str  # the metric on which both arms are compared
    word: Word  # the verdict, such as better
    sentence: str  # the word and its numbers in a sentence
    family: int  # number of statements, whose intervals hold simultaneously
    paired: Effect | None  # None if there is no pair of values
    could_have_seen: float | None  # smallest effect that is found in 8 of 10 such comparisons
    margin: Limit | None  # None if the plan has no margin, or if too few runs finished
    anytime: tuple[float | None, float | None] | None  # interval valid for any number of analyses
    improvement: float | None  # how often a run of the arm beats a run of `baseline`
    population: Effect | None  # effect for other test examples; only for accuracy
    skewed: float | None  # skewness of the differences, if it is high enough for a warning
    missing: dict[str, int]  # arm → how many of its paired runs have no finite value
    # what differs on purpose (the treatment, settings), if more than one thing (`Plan.together`)
    together: tuple[str, ...]
    notes: tuple[str, ...]  # remarks, such as why a run has no value

    @property
    def text(self) -> str:
        """The sentence, followed by the notes."""
        return " ".join([self.sentence, *(f"Note: {note}." for note in self.notes)])

    def qualified(self, shortcomings: Mapping[str, str]) -> "ArmVerdict":
        """Return the verdict with shortcomings named in the sentence and explained in notes."""
        if not shortcomings:
            return self
        sentence = f"{self.sentence.removesuffix('.')}; {', '.join(shortcomings)}."
        notes = (f"{words}: {reason}" for words, reason in shortcomings.items())
        return replace(self, sentence=sentence, notes=(*self.notes, *notes))


@dataclass(frozen=True)
class Answer:
    """One question of the plan about two arms, and the verdict that answers it."""

    question: str  # as in the plan
    of: Literal["value", "gain"]  # the metric, or its improvement from the first stage to the last
    verdict: ArmVerdict  # on the arms of the question


@dataclass(frozen=True)
class Summary:
    """The spread of one arm's values over its seeds (`statistics.Spread`)."""

    n: int  # number of values
    mean: float | None  # None if it is not finite
    std: float | None  # None for a single value
    cv: float | None  # std / |mean|
    low: float | None  # smallest value
    high: float | None  # largest value

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Summarize at least one value."""
        return stored(cls, spread(values))

    def __str__(self) -> str:
        """Return the mean, with the standard deviation if there are at least two values."""
        if self.mean is None:
            return NONE
        return f"{self.mean:.4g}" + ("" if self.std is None else f" ± {self.std:.2g}")


@dataclass(frozen=True)
class StageSummary:
    """One stage of a run."""

    name: str  # the stage's name in the recipe, or its number
    metric: str  # the metric that selects the checkpoint
    best: float | None  # best value on the split that selects it: tune or, without tune, report
    epoch: float | None  # epoch of the best value
    seconds: float  # s spent in the stage
    trainable: int  # number of trainable parameters
    total: int  # number of all parameters


@dataclass(frozen=True)
class Parameters:
    """The numbers of all and of trainable parameters of a model."""

    total: int  # number of all parameters
    trainable: int  # number of those that are trained


@dataclass(frozen=True)
class RunSummary:
    """The facts of one run that a comparison uses."""

    seed: int  # the seed of its recipe
    folder: str  # relative to the comparison's folder
    status: str  # finished, stopped, failed, diverged, or unfinished (no result yet)
    error: str | None  # why it did not finish, in one line; None: it finished, or goes on
    attempts: int  # 1 + earlier attempts that failed or were stopped
    metrics: dict[str, float | None]  # on the report split; empty if the run did not finish
    best: float | None  # best value of the last stage, as in `StageSummary`
    final_loss: float | None  # at the last evaluation on the split that selects the checkpoint
    steps: int  # optimizer steps done
    epochs: float  # over all stages; below 1 for a run shorter than an epoch
    stages: tuple[StageSummary, ...]  # in order; empty without a result
    parameters: Parameters | None  # None without a result
    total_seconds: float  # s of training, evaluations and checkpoints
    train_seconds: float  # s of training alone
    validation_seconds: float  # s of evaluations that select the checkpoint
    evaluation_seconds: tuple[float, ...]  # of each evaluation in validation_seconds
    epoch_seconds: tuple[float, ...]  # training alone; empty for a run shorter than an epoch
    step_ms: float | None  # mean time of a step after warm-up
    gpu_utilisation: float | None  # mean percentage during the run; None without a GPU
    clipped_steps: int | None  # steps whose gradient was clipped; None without clipping
    weights_digest: str | None  # of the weights that `metrics` are about: the best checkpoint's
    recipe_digest: str  # digest of the recipe's values
    caution: str | None  # a warning to show with every number: small scale, stand-ins, odd data

    @property
    def finished(self) -> bool:
        """Whether the run finished."""
        return self.status == "finished"


@dataclass(frozen=True)
class ArmEvidence:
    """The runs of one arm and their summaries."""

    does: str  # what the arm's treatment does to the model, in one line
    runs: tuple[RunSummary, ...]  # one per seed; with `compare --runs`, some may be missing
    metrics: dict[str, Summary]  # metric → summary of the finished runs that can be paired
    parameters: Parameters | None  # of the first of those runs; None without such a run
    seconds: Summary | None  # total time of those runs; None without such a run

    @property
    def finished(self) -> list[RunSummary]:
        """The runs that finished."""
        return [run for run in self.runs if run.finished]


@dataclass(frozen=True)
class RefusedPair:
    """A run that cannot be paired with the baseline's run of the same seed."""

    arm: str  # name of the run's arm
    seed: int  # seed of the run
    reason: str  # in words

    def __str__(self) -> str:
        return f"{self.arm} seed {self.seed} is not paired: {self.reason}"


@dataclass(frozen=True)
class VariedFact:
    """A fact about the machine, the libraries or frostlab's code that is not the same in all runs.

    Two runs of one seed are not paired if the fact differs; between seeds, it may differ.
    """

    name: str  # such as torch
    seeds: dict[str, tuple[int, ...]]  # value → seeds of the runs that had this value

    def __str__(self) -> str:
        values = "; ".join(
            f"{value} (seed {', '.join(map(str, seeds))})" for value, seeds in self.seeds.items()
        )
        return f"{self.name} is not the same in all runs: {values}"


@dataclass(frozen=True)
class ComparedOrder:
    """Two runs of one seed whose order of examples could be compared for some steps only."""

    arm: str  # name of one arm
    against: str  # the other arm
    seed: int  # seed of both runs
    steps: int  # steps that both runs took
    compared: int  # the order was compared up to this step


@dataclass(frozen=True)
class PredictionTest:
    """McNemar's test on the predictions of one pair of runs (`statistics.McNemar`)."""

    seed: int  # seed of both runs
    both: int  # examples that both models predicted correctly
    arm_only: int  # examples that only the arm's model predicted correctly
    base_only: int  # examples that only the baseline's model predicted correctly
    neither: int  # examples that no model predicted correctly
    p: float  # null hypothesis: both models are right equally often


@dataclass(frozen=True)
class SubjectTest:
    """The test of an arm against the baseline, paired by EEG subject.

    r is the correlation of the decoded and the true speech envelope, and z is Fisher's z of r.
    """

    n: int  # subjects
    seeds: int  # number of seeds over which each subject's z is averaged
    better: int  # subjects that the arm decodes better than the baseline
    r: float | None  # difference of the mean r, which is the mean z turned back into an r
    z: Effect  # difference of the mean z
    p: float | None  # p of the paired t test on z
    p_signed: float | None  # p of Wilcoxon's signed-rank test on r
    p_adjusted: float | None  # p after Holm's correction over the arms


@dataclass(frozen=True)
class SplitTests:
    """The tests on one split of the EEG recordings."""

    subjects: dict[str, SubjectTest]  # arm → its test against the baseline
    ridge: dict[str, Effect]  # arm → mean r minus ridge's (a linear decoder), paired by seed


@dataclass(frozen=True)
class Quantity:
    """A quantity of gradient flow (`QUANTITIES`) or EEG (`SEGMENTS`), over an arm's seeds."""

    summary: Summary | None  # None if no run has the quantity
    against: Effect | None  # ratio (flow) or difference (EEG) to the baseline


@dataclass(frozen=True)
class ArmConvergence:
    """What an arm's runs had spent when they first reached the target; keys are `CONVERGED`.

    Ratios to the baseline are paired by seed, over the seeds with which both arms reached the
    target. If the arm missed the target more often than the baseline, the interval has no upper
    end; if the baseline missed it more often, the interval has no lower end.
    """

    runs: int  # runs that finished or diverged
    reached: int  # those of them that finished and reached the target
    spent: dict[str, Summary]  # over the runs that reached the target; empty if none did
    ratios: dict[str, Effect]  # to the baseline; empty without pairs, and for the baseline


@dataclass(frozen=True)
class Convergence:
    """How soon each arm reached a target on the split that selects the checkpoint."""

    metric: str  # the metric that should reach the target
    target: float  # the value to reach
    place: str  # where the target comes from, in words
    evaluations: int  # the smallest number of evaluations in a finished run of the baseline
    arms: dict[str, ArmConvergence]  # arm → when its runs reached the target


@dataclass(frozen=True)
class TuningPoint:
    """The scores that an arm reached with one value of a tuned setting."""

    value: float  # value of the setting
    mean: float | None  # mean score over the seeds; None if a run has no finite score
    low: float | None  # lower end of the mean's 95 % interval
    high: float | None  # upper end of this interval
    scores: tuple[float | None, ...]  # per seed: best value on the split that selects checkpoints
    results: tuple[float | None, ...]  # per seed: the reported value of the metric
    # number of seeds whose result is of this value; the other seeds choose the value for a seed
    chosen: int


@dataclass(frozen=True)
class TunedSetting:
    """The tuning of one setting, on the same grid for every arm."""

    key: str  # such as optim.lr
    values: tuple[float, ...]  # the grid
    extended: bool  # whether the grid was extended at an end
    best: dict[str, float]  # arm → the value with the best mean over all seeds
    on_edge: dict[str, bool]  # arm → `best` is at an end of the grid, and a value beyond is valid
    curves: dict[str, tuple[TuningPoint, ...]]  # arm → a point for each value


@dataclass(frozen=True)
class TimedArm:
    """The step times of one arm, measured against the baseline."""

    ms: float  # ms per step, median
    ms_mean: float  # ms per step, mean
    ratio: float | None  # to the baseline's time; None for the baseline
    low: float | None  # lower end of the ratio's interval; all arms' intervals hold at once
    high: float | None  # upper end of this interval
    ceiling: float | None  # lowest ratio that the saved FLOPs allow; None if unknown
    # FLOPs and bytes of a step, of this arm and (keys that end in `_all`) of the baseline, and the
    # speed-up that they allow (`timing.flops.StepSavings`)
    limits: dict[str, Any] | None
    flag: str | None  # likely reason for a gain that is larger than the saved FLOPs allow
    word: Word | None  # verdict on the time; None for the baseline
    sentence: str | None  # the word and its numbers in a sentence
    step: str  # kind of step: eager, compiled or captured
    peak_bytes: int | None  # peak memory; None on other devices than CUDA
    optimizer_bytes: int  # size of the optimizer's state
    checkpoint_bytes: int  # size of the trainable parameters
    trainable: int  # number of trainable parameters
    blocks: tuple[float, ...]  # seconds of each block of steps


@dataclass(frozen=True)
class MachineLoad:
    """The load of the machine while steps were timed (`records.telemetry.Watched`)."""

    cores: int  # number of logical cores
    cores_of_others: float | None  # mean number of cores busy with other processes; None: unknown
    others_on_gpu: int | None  # other processes on the GPU; None: no GPU, or unknown
    telemetry: TelemetrySummary  # as in result.json


@dataclass(frozen=True)
class StepTiming:
    """The step timing of all arms; steps.json has the same keys."""

    baseline: str  # name of the arm
    arms: dict[str, TimedArm]  # including the controls, which are copies of the baseline
    control: TimedArm  # the control that differs most from the other copies
    proven: bool  # whether the timing can be trusted
    reasons: tuple[str, ...]  # why it cannot be trusted; empty if proven
    notes: tuple[str, ...]  # drift of the baseline, and load by other processes
    steps_per_block: int  # number of steps in a block of an arm
    batches: int  # distinct batches that were timed
    builds: int  # how often every arm was built and timed
    rounds: int  # in each round, every arm takes one block of steps
    seconds: float  # duration of the rounds and of building the arms again
    stopped_by: str  # `width` (every interval was narrow enough) or `time` (limit reached)
    width: float  # target width of every ratio's 95 % interval, as a share of the ratio
    device: str  # torch's name of the device, such as cuda:0
    drift: dict[str, float | None]  # change of the baseline's time (`timing.interleave.Drift`)
    watched: MachineLoad  # during the timing


@dataclass(frozen=True)
class RoundTimes:
    """The times of one arm's whole runs, which alternated with runs of the other arms."""

    seconds: tuple[float, ...]  # per round: total time of the arm's run
    cv: float | None  # coefficient of variation over the rounds; None with fewer than two
    paired: Effect | None  # ratio to the baseline's time; None for the baseline, or without pairs
    finished: bool  # whether every run finished


@dataclass(frozen=True)
class Repeat:
    """A run of the baseline that was trained twice with the same seed, as a control."""

    seed: int  # seed of both runs
    folder: str  # of the second run, relative to the comparison's folder
    status: str  # of the second run
    metrics: dict[str, tuple[float | None, float | None]]  # metric → (first, second) run's value
    same_weights: bool  # whether the best weights of both runs are equal


@dataclass(frozen=True)
class Assay:
    """A test of the comparison: the baseline with half its steps, which must be found worse."""

    steps: int  # of each shortened run of the baseline
    of: int  # steps of a whole run
    verdict: ArmVerdict  # on the shortened runs against the whole ones

    @property
    def found(self) -> bool:
        """Whether the shortened baseline was found to be worse."""
        return self.verdict.word == "worse"


@dataclass(frozen=True)
class Made:
    """How a comparison was made; the machine, the software and the data are the first run's."""

    plan: str  # digest of the plan without its seeds
    data: str  # digest of the prepared data
    source: str | None  # digest of the files of pretrained weights; None if weights are drawn
    revision: str | None  # the hub's commit of these files
    began: str  # ISO 8601, UTC: start of the first run
    ended: str  # end of the last run
    machine: str  # GPU, CPU and system in one line
    versions: dict[str, str]  # library → version
    commit: str | None  # of frostlab's git checkout; None for an installed package
    code: str | None  # digest of frostlab's code
    command: str  # the command that started the first run


@dataclass(frozen=True)
class EarlierLook:
    """An earlier look (analysis of results) at the same question, in this folder or another."""

    at: float  # seconds since 1970
    folder: str  # path of the comparison's folder
    metric: str  # metric of the verdicts
    seeds: int  # number of seeds
    spent: float  # the part of alpha that it spent (`plan.alpha_spent`)


@dataclass(frozen=True)
class Evidence:
    """Everything a comparison measured and decided."""

    schema: int  # `SCHEMA` when it was written
    plan: Plan  # with the seeds of all `compare` calls so far; if quick, with shortened runs
    made: Made  # where the results come from
    baseline: str  # name of the arm
    look: int  # number of this analysis of results for the same question, from 1 (`looks.py`)
    earlier_looks: tuple[EarlierLook, ...]  # in any folder
    jobs: int  # largest number of parallel runs
    caution: str | None  # a warning to show with every number: scale, data, or choice of runs
    data: DataRecord | None  # of the first run; None if it cannot be read
    pairs: int  # number of finished runs that were paired with a finished run of the baseline
    confounds: dict[str, tuple[str, ...]]  # arm → settings that differ, but are not compared
    tuning: tuple[TunedSetting, ...]  # in the plan's order; empty without tuning
    arms: dict[str, ArmEvidence]  # arm → its runs
    refused_pairs: tuple[RefusedPair, ...]  # runs that could not be paired
    partly_compared: tuple[ComparedOrder, ...]  # pairs whose examples were compared in part
    varied_facts: tuple[VariedFact, ...]  # about the environment; empty if it is always the same
    verdicts: dict[str, ArmVerdict]  # arm → verdict on the plan's metric
    secondary: dict[str, dict[str, Effect | None]]  # other metric → arm → effect
    contrasts: tuple[Answer, ...]  # answers to the plan's questions, in its order
    oelm: str | None  # arm that orthogonalizes and freezes query and key weights (`oelm_arm`)
    orthogonality: ArmVerdict | None  # orthogonal against random frozen query and key weights
    equal_norms: bool  # whether each head has the same norm in both arms of `orthogonality`
    assay: Assay | None  # None unless the plan has `assay`
    repeat: Repeat | None  # None if the comparison is quick or trains nothing
    mcnemar: dict[str, tuple[PredictionTest, ...]]  # arm → tests; for information only
    subjects: dict[str, SplitTests]  # split → tests; empty without EEG
    segments: dict[str, dict[str, Quantity]]  # arm → key in `SEGMENTS` → value; empty without EEG
    flow: dict[str, dict[str, Quantity]]  # arm → key in `QUANTITIES` → value; empty without `watch`
    convergence: Convergence | None  # None if no finished run of the baseline has a value
    timing: StepTiming | None  # None if steps were not timed
    rounds: dict[str, RoundTimes]  # arm → times; empty without rounds

    @property
    def rules(self) -> Rules:
        """The plan's rules, with the number of this look and the alpha that earlier looks spent."""
        spent = sum(look.spent for look in self.earlier_looks)
        return self.plan.rules.model_copy(update={"look": self.look, "spent": spent})

    def to_dict(self) -> dict[str, Any]:
        """Return the values of evidence.json."""
        return asdict(self) | {"plan": self.plan.model_dump(mode="json")}


def shown(value: Effect | Summary | None) -> str:
    """Format an effect or a summary; None becomes a dash."""
    return NONE if value is None else str(value)


def stored(schema: type[Schema], value: Any) -> Schema:
    """Convert a computed dataclass to `schema`, with None for numbers that are not finite."""
    return read(schema, finite(asdict(value)), schema.__name__)


def read_evidence(path: Path) -> Evidence | None:
    """Read evidence.json; return None if it does not exist yet."""
    try:
        values = read_json(path)
    except FileNotFoundError:
        return None
    check_plain(values, str(path), _MOST_VALUES)
    advice = f"; write it again with frostlab judge {path.parent}"
    values = check_schema(values, SCHEMA, path, advice)
    evidence = read(Evidence, values | {"plan": read_plan(values.get("plan"), path)}, path)
    _check_names(evidence, path)
    return evidence


def _check_names(evidence: Evidence, path: Path) -> None:
    """Refuse evidence whose parts name other arms than its plan, or unknown quantities."""
    plan = evidence.plan
    arms, others = [arm.name for arm in plan.arms], [arm.name for arm in plan.others]
    expected: dict[str, tuple[Collection[str], Collection[str]]] = {
        "baseline": ([evidence.baseline], [plan.baseline.name]),
        "arms": (evidence.arms, arms),
        "confounds": (evidence.confounds, others),
        "verdicts": (evidence.verdicts, others),
    }
    if evidence.timing is not None:
        expected["timing.arms"] = (set(evidence.timing.arms) & set(arms), arms)
    if (convergence := evidence.convergence) is not None:
        expected["convergence.arms"] = (convergence.arms, arms)
        for arm, reached in convergence.arms.items():
            own_keys = set(reached.spent) | set(reached.ratios)
            expected[f"convergence.arms.{arm}"] = (own_keys | set(CONVERGED), CONVERGED)
    for arm, flow in evidence.flow.items():
        expected[f"flow.{arm}"] = (flow, QUANTITIES)
    for arm, segments in evidence.segments.items():
        expected[f"segments.{arm}"] = (segments, SEGMENTS)
    for setting in evidence.tuning:
        check_tuned(setting, plan, path)
    for key, (names, wanted) in expected.items():
        if sorted(names) != sorted(wanted):
            raise BadInput(f"{path}: {key} should name {', '.join(wanted)}")
    if evidence.oelm is not None and evidence.oelm not in others:
        raise BadInput(f"{path}: oelm should be one of {', '.join(others)}, or null")
    if not 1 <= evidence.look <= MOST_LOOKS:
        raise BadInput(f"{path}: look {evidence.look} should be from 1 to {MOST_LOOKS}")


def check_tuned(setting: TunedSetting, plan: Plan, path: Path) -> None:
    """Refuse a tuned setting whose arms are not those of the plan."""
    arms = {arm.name for arm in plan.arms}
    if not arms == setting.best.keys() == setting.curves.keys() == setting.on_edge.keys():
        raise BadInput(f"{path}: the arms of the tuned {setting.key:.80} are not those of the plan")


def read_plan(values: object, path: Path) -> Plan:
    """Return a stored plan; the error for an invalid one names the file and the key."""
    check_plain(values, f"{path}: plan")
    try:
        plan = Plan.model_validate_json(json.dumps(values))
    except ValidationError as error:
        key = ".".join(map(str, ("plan", *error.errors()[0]["loc"])))
        raise BadInput(f"{path}: {shown_key(key)}: {error.errors()[0]['msg']}") from None
    if not plan.arms or not plan.seeds:
        raise BadInput(f"{path}: plan: it has no arms or no seeds")
    return plan

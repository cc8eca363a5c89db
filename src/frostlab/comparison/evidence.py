"""The schema of evidence.json, from which verdicts, tables and pages are made.

`read_evidence` turns the file into these dataclasses. If the file does not match them, it raises a
one-line error that names the key. A number that is not finite is null in the file and None here.
Raise `SCHEMA` when a key is added, removed or renamed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from frostlab.comparison.plan import Plan, Rules
from frostlab.comparison.verdict import Word
from frostlab.errors import BadInput
from frostlab.records.schema import read
from frostlab.storage import finite

SCHEMA = 2  # version of evidence.json
Schema = TypeVar("Schema")


@dataclass(frozen=True)
class Effect:
    """The effect of one arm against another, paired by seed or subject (`statistics.Paired`)."""

    n: int  # pairs
    log: bool  # whether the effect is a ratio, computed on the log scale
    alpha: float  # the interval has confidence 1 − alpha
    effect: float | None  # mean difference, or ratio of geometric means
    low: float | None  # ends of the interval
    high: float | None
    p: float | None  # paired t test
    p_flip: float | None  # sign-flip test; None with fewer than 6 pairs
    std: float | None  # of the differences, or of the log ratios
    smallest_seen: float | None  # effect that the t test detects with 80 % power


@dataclass(frozen=True)
class Limit:
    """The test whether an arm is at most `limit` times as bad (`statistics.NonInferiority`)."""

    answer: Literal["yes", "no", "not shown"]
    limit: float
    n: int  # pairs
    ratio: float | None
    low: float | None  # ends of the ratio's interval
    high: float | None
    reason: str | None  # why the answer is "not shown"


@dataclass(frozen=True)
class ArmVerdict:
    """The verdict on one arm for one metric (`verdict.Verdict`)."""

    arm: str
    baseline: str  # the arm that this one is compared with
    metric: str
    word: Word
    sentence: str  # the word and its numbers in a sentence
    paired: Effect | None  # None if there is no pair of values
    p_adjusted: float | None  # after Holm's correction over all arms or contrasts judged together
    could_have_seen: float | None  # effect that t test and sign-flip test detect with 80 % power
    noninferior: Limit | None  # None if the rules set no limit
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The question of one contrast of the plan, and its verdict."""

    question: str
    of: Literal["value", "gain"]
    verdict: ArmVerdict


@dataclass(frozen=True)
class Summary:
    """The spread of one arm's values over its seeds (`statistics.Spread`)."""

    n: int
    mean: float | None
    std: float | None  # None for a single value
    cv: float | None  # std / |mean|
    low: float | None  # smallest value
    high: float | None  # largest value


@dataclass(frozen=True)
class StageSummary:
    """One stage of a run."""

    name: str
    metric: str  # the metric that selects the best weights
    best: float | None  # its best value on the tune split
    epoch: float | None  # epoch of the best value
    seconds: float
    trainable: int  # parameters
    total: int


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    total: int
    trainable: int


@dataclass(frozen=True)
class RunSummary:
    """The facts of one run that a comparison uses."""

    seed: int
    folder: str  # relative to the comparison's folder
    status: str  # finished, stopped, failed or diverged
    error: str | None
    attempts: int  # 1 + failed attempts
    metrics: dict[str, float | None]  # reported metrics; empty for a run that did not finish
    best: float | None  # best value of the selecting metric on the tune split
    final_loss: float | None  # on the tune split, at the last evaluation
    steps: int
    stages: tuple[StageSummary, ...]
    parameters: Parameters | None
    total_seconds: float
    train_seconds: float
    validation_seconds: float
    epoch_seconds: tuple[float, ...]
    step_ms: float | None  # mean
    weights_digest: str | None  # of the final weights
    recipe_digest: str
    caution: str | None  # about the data's splits

    @property
    def finished(self) -> bool:
        """Whether the run finished."""
        return self.status == "finished"


@dataclass(frozen=True)
class ArmEvidence:
    """The runs of one arm and their summaries."""

    runs: tuple[RunSummary, ...]  # in the order of the plan's seeds
    metrics: dict[str, Summary]  # over finished runs
    parameters: Parameters | None  # None if no run finished
    seconds: Summary | None  # of whole runs

    @property
    def finished(self) -> list[RunSummary]:
        """The runs that finished."""
        return [run for run in self.runs if run.finished]


@dataclass(frozen=True)
class RefusedPair:
    """A run that cannot be paired with the baseline's run of the same seed."""

    arm: str
    seed: int
    reason: str


@dataclass(frozen=True)
class PredictionTest:
    """McNemar's test on the predictions of one pair of runs (`statistics.McNemar`)."""

    seed: int
    both: int  # examples that both models predicted correctly
    arm_only: int
    base_only: int
    neither: int
    p: float


@dataclass(frozen=True)
class SubjectTest:
    """The test of an arm against the baseline, paired by subject."""

    n: int  # subjects
    seeds: int  # each subject's value is the mean over these seeds
    better: int  # subjects that the arm decodes better than the baseline
    r: float | None  # difference of the mean correlations
    z: Effect  # difference of Fisher's z
    p: float | None  # paired t test on z
    p_signed: float | None  # Wilcoxon's signed-rank test on r
    p_adjusted: float | None  # p after Holm's correction over the arms


@dataclass(frozen=True)
class SplitTests:
    """The tests on one split of recordings, by arm."""

    subjects: dict[str, SubjectTest]  # against the baseline
    ridge: dict[str, Effect]  # against the ridge decoder, over seeds


@dataclass(frozen=True)
class Quantity:
    """One quantity of gradient flow, summarized over an arm's seeds."""

    summary: Summary | None
    against: Effect | None  # ratio to the baseline; None for the baseline itself


@dataclass(frozen=True)
class TuningPoint:
    """The score of one value of a tuned setting."""

    value: float
    mean: float | None  # over the tuning seeds; None if a run failed
    scores: tuple[float | None, ...]  # by tuning seed


@dataclass(frozen=True)
class TunedSetting:
    """The tuning of one setting, on the same grid for every arm."""

    key: str  # such as optim.lr
    values: tuple[float, ...]  # the grid
    extended: bool  # whether the grid was extended at an edge
    best: dict[str, float]  # by arm
    on_edge: dict[str, bool]  # by arm: whether the best value is at an end of the grid
    curves: dict[str, tuple[TuningPoint, ...]]  # by arm


@dataclass(frozen=True)
class TimedArm:
    """The step times of one arm, measured against the baseline."""

    ms: float  # per step, median
    ms_mean: float
    ratio: float | None  # to the baseline's time; None for the baseline
    low: float | None  # ends of the ratio's 95 % interval
    high: float | None
    ceiling: float | None  # smallest ratio that the saved FLOPs explain
    limits: dict[str, Any] | None  # FLOPs and bytes from which the ceiling follows
    flag: str | None  # a gain beyond the ceiling, with its likely reason
    word: Word | None
    sentence: str | None
    step: str  # kind of step: eager, compiled or captured
    peak_bytes: int | None  # on CUDA
    optimizer_bytes: int
    checkpoint_bytes: int  # of the trainable parameters
    trainable: int  # parameters
    blocks: tuple[float, ...]  # seconds of each block of steps


@dataclass(frozen=True)
class StepTiming:
    """The step timing of all arms; steps.json has the same keys."""

    baseline: str
    arms: dict[str, TimedArm]  # including the control
    control: TimedArm  # a second copy of the baseline
    proven: bool  # whether the timing can be trusted
    reasons: tuple[str, ...]  # why it cannot be trusted; empty if proven
    steps_per_block: int
    batches: int  # distinct batches that were timed
    builds: int  # how often every arm was built
    rounds: int
    seconds: float
    stopped_by: str  # width or time
    width: float  # target width of every interval, relative to the ratio
    device: str
    drift: dict[str, float | None]  # of the baseline during the measurement
    watched: dict[str, Any]  # load of the machine by other processes


@dataclass(frozen=True)
class RoundTimes:
    """The times of one arm's whole runs, which alternated with runs of the other arms."""

    seconds: tuple[float, ...]  # of each round
    paired: Effect | None  # ratio to the baseline's time; None for the baseline
    finished: bool  # whether every run finished


@dataclass(frozen=True)
class Evidence:
    """Everything a comparison measured and decided."""

    schema: int
    plan: Plan  # with all seeds so far; a quick plan in its shortened form
    baseline: str  # name of the arm
    look: int  # number of this look at the results
    jobs: int  # runs in parallel
    caution: str | None  # about the data's splits
    pairs: int  # pairs of finished runs, over all arms
    confounds: dict[str, tuple[str, ...]]  # by arm
    tuning: tuple[TunedSetting, ...]
    arms: dict[str, ArmEvidence]
    refused_pairs: tuple[RefusedPair, ...]
    verdicts: dict[str, dict[str, ArmVerdict]]  # by metric (the plan's first) and arm
    contrasts: tuple[Answer, ...]
    orthogonality: ArmVerdict | None  # OELM against random weights; None without these arms
    mcnemar: dict[str, tuple[PredictionTest, ...]]  # by arm; for information only
    subjects: dict[str, SplitTests]  # by split; empty without recordings
    flow: dict[str, dict[str, Quantity]]  # by arm and quantity; empty if not watched
    timing: StepTiming | None  # None if steps were not timed
    rounds: dict[str, RoundTimes]  # by arm; empty without rounds

    @property
    def rules(self) -> Rules:
        """The plan's rules at this look."""
        return self.plan.rules.model_copy(update={"look": self.look})

    @property
    def primary(self) -> dict[str, ArmVerdict]:
        """The verdict on every arm for the plan's metric."""
        return self.verdicts[self.plan.rules.metric]

    def to_dict(self) -> dict[str, Any]:
        """Return the values of evidence.json."""
        return asdict(self) | {"plan": self.plan.model_dump(mode="json")}


def stored(schema: type[Schema], value: Any) -> Schema:
    """Convert a computed dataclass to its schema, with None for numbers that are not finite."""
    return read(schema, finite(asdict(value)), schema.__name__)


def read_evidence(path: Path) -> Evidence | None:
    """Read evidence.json; return None if it does not exist yet."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BadInput(f"{path} is damaged ({error})") from None
    version = values.get("schema") if isinstance(values, dict) else None
    if version != SCHEMA:
        raise BadInput(f"{path} has schema {version}, and this frostlab reads {SCHEMA}")
    try:
        plan = Plan.model_validate_json(json.dumps(values.get("plan")))
    except ValidationError as error:
        key = ".".join(map(str, ("plan", *error.errors()[0]["loc"])))
        raise BadInput(f"{path}: {key}: {error.errors()[0]['msg']}") from None
    return read(Evidence, values | {"plan": plan}, path)

"""The schema of a run's records: every key of its JSON files and of its events.

The files are result.json, digests.json, data.json, predictions.json, samples.json and events.jsonl.
`read_result`, `read_event` and `typed.read_object` parse their text into the dataclasses of this
module; an invalid file is refused with one line that names the key. If you add, remove or rename a
key, update docs/runs.md, which a test checks, and raise `SCHEMA`. A key with a default is written
only by some runs. In comments, `null` is Python's None, `s` seconds and `ms` milliseconds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from frostlab.data.split_record import Label, SplitRecord, splits_markdown
from frostlab.errors import BadInput
from frostlab.records import SCHEMA
from frostlab.typed import check_schema, parse, read

Ending = Literal["finished", "stopped", "failed", "diverged"]
ENDINGS: tuple[Ending, ...] = get_args(Ending)

LayerMetrics = dict[str, dict[str, float | None]]  # layer (the first is "1") → metric → value
Metrics = dict[str, float | LayerMetrics | None]  # metric → value; `layers` → LayerMetrics


@dataclass(frozen=True)
class Best:
    """The best evaluation on the split that selects the checkpoint."""

    metric: str  # the metric that selects the best checkpoint
    value: float | None  # the metric's best value; null before the first finite value
    step: int | None  # optimizer steps done at this evaluation


@dataclass(frozen=True)
class StageBest(Best):
    """The best evaluation of one stage."""

    epoch: float | None  # epochs done in the stage at this evaluation


@dataclass(frozen=True)
class Stage:
    """The outcome of one stage, a period with its own trainable weights."""

    name: str  # the stage's name in the recipe, or its number
    steps: int  # optimizer steps done in the stage
    epochs: float  # epochs done in the stage
    stopped_early: bool  # whether patience ended it
    best: StageBest  # the best evaluation; the next stage starts from its weights
    metrics: Metrics  # all metrics of that evaluation
    seconds: float  # s of `clocks.total_seconds` spent in the stage
    trainable: int  # number of trainable parameters
    total: int  # number of parameters of the model


@dataclass(frozen=True)
class Target:
    """When `evaluate.target` was reached."""

    step: int  # optimizer steps done
    epoch: float  # epochs done
    seconds: float  # s of `clocks.total_seconds` until the evaluation that reached it


@dataclass(frozen=True)
class StepTimes:
    """Times of the steps after warm-up."""

    count: int  # number of steps
    median: float  # ms
    mean: float  # ms
    p95: float  # ms, 95th percentile
    cv: float  # standard deviation divided by the mean


@dataclass(frozen=True)
class WallClock:
    """How the run's last process spent its time; the other keys add up to `total`."""

    total: float  # s from the start of the program, or of `fl.run`, to the end of the run
    starting: float  # s before the run: Python, imports and the recipe; 0 for `fl.run`
    data: float  # s of preparing data and the prefix cache, and of waiting for batches
    building: float  # s of starting the device, building the model and creating the run's folder
    setup: float  # s of building steps, compiling them for the first batch, and loading kernels
    first_steps: float  # s of the first step of each stage
    new_shapes: float  # s of later steps that compiled or captured a new batch shape
    steps: float  # s of all other steps
    validation: float  # s of evaluations that select the best weights
    checkpoints: float  # s of copying tensors, waiting for writes, and stage changes
    report: float  # s of evaluating the best weights, and of waiting for the last checkpoint
    other: float  # s of the rest
    turn: float  # s of waiting until another run of the queue had ended its training


@dataclass(frozen=True)
class Clocks:
    """The time that a run spent on each activity."""

    total_seconds: float  # s of training, evaluations and checkpoints, without set-up and report
    # s of the total less validation, checkpoints, TensorBoard's histograms and waits for data
    train_seconds: float
    validation_seconds: float  # s of evaluations that select the best weights
    evaluation_seconds: list[float]  # s of each of these evaluations
    data_seconds: float  # s of preparing batches on the host and building the prefix cache
    data_overlapped_seconds: float  # s that are in both `data_seconds` and `train_seconds`
    checkpoint_seconds: float  # s of copying tensors, waiting for writes, and stage changes
    setup_seconds: float  # s of building and compiling the training step; not part of the total
    epoch_seconds: list[float]  # s of training alone, one number per complete epoch
    step_ms: StepTimes | None  # null if no step came after warm-up
    warmup_ms: list[float]  # ms of each warm-up step
    tokens: int  # real tokens (EEG: samples) that were trained on
    tokens_per_second: float | None  # `tokens` per second of `train_seconds`
    examples_per_second: float | None  # examples per second of `train_seconds`
    padding_share: float | None  # fraction of the model's input that is padding
    packing_efficiency: float | None  # 1 - padding_share; null if nothing was packed
    wall: WallClock  # how the run's last process spent its time


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the model in the last stage; a tied tensor counts once."""

    total: int  # all parameters
    trainable: int  # trainable parameters
    frozen: int  # parameters that are not trainable


@dataclass(frozen=True)
class GpuState:
    """State of the GPU at one moment; a value is null if it cannot be read."""

    temperature_c: float | None  # degrees Celsius
    sm_clock_mhz: float | None  # MHz of the streaming multiprocessors
    memory_clock_mhz: float | None  # MHz of the memory
    power_watts: float | None  # W
    utilisation_percent: float | None  # % of the last sample period in which a kernel ran
    memory_used_bytes: int | None  # bytes that all processes use


@dataclass(frozen=True)
class Series:
    """Statistics of one quantity over a run; null if there is no sample."""

    n: int  # number of samples
    mean: float | None  # arithmetic mean
    min: float | None  # smallest
    p50: float | None  # median
    max: float | None  # largest


@dataclass(frozen=True)
class TelemetrySummary:
    """Load of the host and the GPU, sampled during the run."""

    interval_seconds: float  # s between two samples
    seconds: float  # s from the start to the end of sampling
    samples: int  # number of samples
    errors: int  # number of times that a quantity could not be read
    last_error: str | None  # the latest of these errors
    gpu_reason: str | None  # why no GPU was sampled; null if one was
    gpu_energy_joules: float | None  # J, the integral of the sampled power
    host_peak_bytes: int  # peak memory of this process since it began, in bytes
    sampling_cpu_seconds: float  # s of CPU time that sampling took
    load_1min: Series  # the host's load average over one minute
    process_rss_bytes: Series  # bytes of memory of this process
    process_cpu_percent: Series  # % of one core
    system_cpu_percent: Series  # % of all cores
    gpu_utilisation_percent: Series | None = None  # % of the time in which a kernel ran
    gpu_power_watts: Series | None = None  # W
    gpu_temperature_c: Series | None = None  # degrees Celsius
    gpu_sm_clock_mhz: Series | None = None  # MHz


@dataclass(frozen=True)
class Chance:
    """Null distribution: a decoder's mean correlations with mismatched speech envelopes."""

    low: float  # 5th percentile
    median: float  # median
    high: float  # 95th percentile
    p: float  # (1 + number of mismatched means >= the true mean) / (1 + number of mismatched means)


@dataclass(frozen=True)
class Decisions:
    """Decisions on which of two speech envelopes fits a window of EEG better."""

    right: float  # number of right decisions; a tie counts half
    decisions: int  # number of decisions
    windows: int  # number of windows; one window can take part in several decisions


@dataclass(frozen=True)
class Scores:
    """Correlations r of one decoder on the recordings of one split, each subject counting once."""

    subjects: int  # number of subjects
    recordings: int  # number of recordings
    mean: float  # mean r of the subjects, averaged as Fisher's z
    low: float | None  # lower end of its 95 % t interval; null for one subject
    high: float | None  # upper end of its 95 % t interval; null for one subject
    median: float  # median r of the subjects
    std: float | None  # standard deviation of the subjects' r; null for one subject
    quartiles: list[float]  # 25th and 75th percentile of the subjects' r
    mean_other: float | None  # mean r with the speech that was not attended
    above: int  # number of subjects whose own r is above chance, with p <= 0.05
    null: Chance  # distribution of the mean r by chance
    match: Decisions  # choices between a window's own envelope and a mismatched one
    attended: Decisions | None  # choices between both speakers; null with one speaker
    digest: str  # digest of this decoder's scores for this split in scores.json


@dataclass(frozen=True)
class Result:
    """result.json: the outcome of a run, written when it ends; a resumed run writes it again."""

    schema: int  # `SCHEMA` when it was written
    status: Ending  # how the run ended
    error: str | None  # why the run did not finish, in one line
    name: str  # the recipe's name
    recipe_digest: str  # digest of the recipe's values
    seed: int  # the recipe's seed
    treatment: str  # the treatment's name
    started: str  # ISO 8601, UTC: when the folder was made
    ended: str  # ISO 8601, UTC
    steps: int  # optimizer steps done
    clipped_steps: int | None  # steps whose gradient was clipped; null if `optim.clip` is null
    stopped_early: bool  # whether patience ended the last stage
    best: Best  # best evaluation of the last stage
    report: Metrics | None  # metrics of the best weights on the report split; null if unfinished
    caution: str | None  # a warning about the reported numbers
    last: Metrics | None  # metrics of the last evaluation that selects a checkpoint
    target: Target | None  # null if no target was set or reached
    stepping: "list[SteppingEvent]"  # kinds of training steps, in order of use
    clocks: Clocks  # time spent on each activity
    parameters: Parameters  # sizes of the model
    stages: list[Stage]  # in order; at least one
    checkpoint: str | None  # folder of the best weights, within the run's folder
    gpu_before: GpuState | None  # before training; null without a GPU
    gpu_after: GpuState | None  # after the report; null without a GPU
    telemetry: TelemetrySummary  # load of the machine during the run
    device_memory_peak: int | None  # bytes, peak CUDA memory of this run alone; null without CUDA
    weights_digest: str | None  # digest of the reported weights; null if unfinished
    order_digest: str  # digest of the examples of all steps, in order
    runs_at_once: int  # most runs that could share the device; above 1, do not compare times
    scores: dict[str, dict[str, Scores]] | None = None  # EEG: split → decoder → scores


@dataclass(frozen=True)
class Digests:
    """digests.json: digests of a run's initial state, after the treatment, to compare two runs."""

    data: str  # digest of the prepared data
    source: str | None  # digest of the files of pretrained weights; null if weights are drawn
    revision: str | None  # the hub's commit of these files; null if they are not from the hub
    weights: dict[str, str]  # part (a tensor, or its rows of one role) → digest
    touched: list[str]  # the keys of `weights` that the treatment changed or added
    frozen: dict[str, str]  # part or buffer that is frozen in the first stage → digest


@dataclass(frozen=True)
class DataRecord:
    """data.json: the data that a run is trained and evaluated on."""

    task: str  # classification, language or envelope
    digest: str  # digest of the prepared data, as in digests.json
    labels: list[Label] | None  # the classes in order; null for language and EEG
    splits: dict[str, SplitRecord]  # train, report, tune and unseen, if the run has these splits
    notes: list[str]  # remarks about possible mistakes, such as unused files and empty texts

    def markdown(self) -> str:
        """Return a table of the splits in Markdown, with the notes below it."""
        return splits_markdown(self.splits, self.labels, self.notes)


@dataclass(frozen=True)
class Predictions:
    """predictions.json: the class of every example of the report split, and the predicted one."""

    split: str  # report
    labels: list[int]  # the class of each example
    classes: list[int]  # the predicted class of each example
    caution: str | None = None  # a warning about the predictions


@dataclass(frozen=True)
class GeneratedText:
    """A text that the best weights of a language model generated."""

    prompt: str  # the beginning of a text of the report split; empty: the model began a new text
    text: str  # the continuation of the prompt
    ended: Literal["end", "length", "positions"]  # by end token, `max_tokens`, last position


@dataclass(frozen=True)
class Samples:
    """samples.json: texts that a language model generated at the end of its run."""

    samples: list[GeneratedText]  # one per prompt
    max_tokens: int  # the most tokens of a sample
    temperature: float  # of the softmax over the next token
    top_p: float  # total probability of the likeliest tokens, from which the next one is drawn
    seed: int  # of the random numbers
    caution: str | None = None  # a warning about the samples


# events.jsonl


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl; the key `kind` names its class."""

    kind: ClassVar[str]

    at: float  # s since 1970
    step: int  # optimizer steps done


@dataclass(frozen=True)
class _Conditions:
    """Conditions other than the recipe that change a result's exact bits, or its times."""

    device: str  # torch's name of the device, such as cuda:0
    precision: str  # float32 or bfloat16
    processes: int  # number of processes among which a batch is divided
    threads: int  # number of CPU threads of torch
    runs_at_once: int  # most runs that could share the device


@dataclass(frozen=True)
class StartEvent(_Conditions, Event):
    """The first line of every events.jsonl."""

    kind = "start"

    schema: int  # `SCHEMA` when it was written
    name: str  # the recipe's name
    recipe_digest: str  # digest of the recipe's values
    seed: int  # the recipe's seed
    treatment: str  # the treatment's name
    data: str  # `data.name` of the recipe
    model: str  # `model.kind` of the recipe
    origin: dict[str, str]  # split → its source, and the examples that were held out or dropped
    caution: str | None  # a warning about the reported numbers
    known: dict[str, float | None]  # name → reference value, such as chance, or a bound on r


@dataclass(frozen=True)
class ResumeEvent(_Conditions, Event):
    """A run continues from the checkpoint at `step`; lines above with a later step do not count."""

    kind = "resume"


@dataclass(frozen=True)
class Supervised:
    """The layers of a language model that have their own loss."""

    layers: list[int]  # counted from 1
    weights: list[float]  # the factor of each layer's loss
    left_out: list[int]  # requested layers without a loss: nothing at or below them is trainable


@dataclass(frozen=True)
class StageEvent(Event):
    """A stage begins."""

    kind = "stage"

    name: str  # the stage's name in the recipe, or its number
    steps: int  # maximum number of optimizer steps
    patience: int | None  # number of evaluations without improvement that end the stage
    train: list[str] | None  # selections of trainable parts; null: all that are not frozen
    freeze: list[str]  # selections that the treatment freezes
    changed: list[str]  # existing tensors whose values changed when layers were added
    added: list[str]  # paths of the layers that the stage adds, such as blocks.6
    trainable: int  # number of trainable parameters
    total: int  # number of parameters of the model
    lr: float | dict[str, float]  # learning rate, or selection → learning rate
    best_before: StageBest | None  # best evaluation of the previous stage
    supervise: Supervised | None  # null: only the last layer has a loss


@dataclass(frozen=True)
class SteppingEvent(Event):
    """The way in which training steps are executed from here on."""

    kind = "stepping"

    how: str  # eager, compiled or captured
    reason: str  # why steps are executed this way
    packed: bool  # whether several examples are packed into one row


@dataclass(frozen=True)
class PrefixEvent(Event):
    """The outputs of the frozen first layers were computed once for all examples."""

    kind = "prefix"

    where: str  # memory or disk
    reused: bool  # whether the outputs were already on disk
    depth: int  # number of these layers
    bytes: int  # size of the stored outputs


@dataclass(frozen=True)
class StepEvent(Event):
    """A block of steps from `first` to `step`."""

    kind = "step"

    first: int  # number of its first step, counted from 1
    loss: list[float | None]  # loss of each step; null: not finite
    norm: list[float | None]  # gradient norm of each step before clipping; null: not finite
    ms: list[float]  # ms of each step
    rate: float  # learning rate of the last step
    tokens: int  # number of real tokens (EEG: samples) in the block
    padded: int  # number of tokens in the block, including padding
    examples: int  # number of examples in the block
    warmup: int  # number of its first steps that step times exclude as warm-up
    clipped: int  # number of its steps whose gradient was clipped
    order: str  # digest of the examples of all steps of the run up to `step`, in order


@dataclass(frozen=True)
class EpochEvent(Event):
    """An epoch ended."""

    kind = "epoch"

    epoch: int  # number within the stage, counted from 0
    order: str  # digest of the examples of all steps of the run so far, in order
    seconds: float  # s of training alone


@dataclass(frozen=True)
class EvaluationEvent(Event):
    """The model was evaluated: to select weights, or for the report at the end."""

    kind = "evaluation"

    split: str  # tune or report; with `splits: published`, report also selects the checkpoint
    metrics: Metrics  # the metric that selects the best checkpoint comes first
    frozen_verified: int  # number of frozen parts and buffers that were verified as unchanged
    epoch: float  # epochs done, over all stages
    seconds: float  # s that this evaluation took
    total_seconds: float  # s of `clocks.total_seconds` until this evaluation
    best: bool | None = None  # whether it is the best of its stage so far; null for the report
    checkpoint: int | None = None  # for the report only: step of the reported weights


@dataclass(frozen=True)
class CheckpointEvent(Event):
    """A checkpoint was taken; a thread writes it while training goes on."""

    kind = "checkpoint"

    best: int | None  # step of the best checkpoint of this stage


@dataclass(frozen=True)
class EndEvent(Event):
    """The run ended."""

    kind = "end"

    status: Ending  # how the run ended
    error: str | None  # why it did not finish, in one line


@dataclass(frozen=True)
class FlowPart:
    """A part of a watched model: tensors of one role in a layer or outside, or of one module."""

    name: str  # such as layers[0].query
    peers: str  # a label that all parts of the same role share
    stack: str  # stack of layers, such as the encoder; "" if the model has only one
    layer: int | None  # number in the stack, counted from 0; null if in no layer or in several
    state: str  # trainable, frozen, or fixed (never trained in this architecture)
    tensors: list[str]  # names of its tensors
    learning: list[str]  # tensors that require a gradient
    missing: list[str]  # trainable tensors that the optimizer does not hold
    groups: list[int]  # indices of the optimizer's groups that hold its tensors
    dtype: str  # data type of the weights
    elements: int  # number of trainable elements


@dataclass(frozen=True)
class FlowGroup:
    """One parameter group of the optimizer of a watched run."""

    decay: float  # weight decay
    momentum: float  # momentum; 0 if the optimizer has no momentum
    eps: float  # epsilon; 0 if the optimizer has no epsilon
    coupled: bool  # whether weight decay is added to the gradient (L2)


@dataclass(frozen=True)
class FlowPartsEvent(Event):
    """The parts of a watched model; written when a stage begins or a run resumes."""

    kind = "flow_parts"

    stage: str  # the stage's name
    model: str  # class of the model
    optimizer: str  # class of the optimizer
    every: int  # number of steps from one measured step to the next
    groups: list[FlowGroup]  # parameter groups of the optimizer
    parts: list[FlowPart]  # parts of the model
    front: list[str]  # trainable tensors of the first two layers, as in `FlowEvent.ranges`


@dataclass(frozen=True)
class FlowEvent(Event):
    """One measured step.

    Norms, distances and cosines have one number per trainable part, in the order of `parts` in the
    latest flow_parts event. Front is the first two layers, back the last two, output the head. A
    head's entropy is divided by the entropy of uniform attention, and averaged over the queries.
    """

    kind = "flow"

    rates: list[float | None]  # learning rate of each group
    ends: list[float | None]  # mean over tensors of max |gradient|, in front, back and output
    ranges: list[float | None]  # max - min of the weights in each front tensor
    gradient: list[float | None] | None = None  # norm of the gradient, after clipping
    before_clip: list[float | None] | None = None  # norm of the gradient before clipping
    weight: list[float | None] | None = None  # norm of the weights before the step
    update: list[float | None] | None = None  # norm of the change that the step made
    distance: list[float | None] | None = None  # |weights - initial| / |initial|
    weight_cosine: list[float | None] | None = None  # cosine with the initial weights
    gradient_cosine: list[float | None] | None = None  # cosine with the previous event's gradient
    unreached: list[str] = field(default_factory=list)  # trainable tensors without a gradient
    broken: list[int] = field(default_factory=list)  # indices of parts with NaN or infinity
    dead: dict[str, float | None] = field(default_factory=dict)  # module → fraction of dead units
    # module → fraction of saturated activations
    saturated: dict[str, float | None] = field(default_factory=dict)
    entropy: dict[str, list[float | None]] = field(default_factory=dict)  # attention call → by head


@dataclass(frozen=True)
class NoteEvent(Event):
    """A remark, shown with the run."""

    kind = "note"

    text: str  # the remark


EVENTS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        StartEvent, ResumeEvent, StageEvent, SteppingEvent, PrefixEvent, StepEvent, EpochEvent,
        EvaluationEvent, CheckpointEvent, EndEvent, FlowPartsEvent, FlowEvent, NoteEvent,
    )
}  # fmt: skip


# the name of a checkpoint's folder: steps done, and the stage if it is not the first
CHECKPOINT_NAME = re.compile(r"step-([0-9]{9,18})(?:-stage-([0-9]{1,6}))?")


def read_result(text: bytes | str, where: object) -> Result:
    """Parse the text of result.json, or refuse it with a one-line error."""
    result = read(Result, check_schema(parse(text), SCHEMA, where), where)
    if (checkpoint := result.checkpoint) is not None:
        folder, _, name = checkpoint.partition("/")
        if folder != "checkpoints" or not CHECKPOINT_NAME.fullmatch(name):
            raise BadInput(
                f"{where}: checkpoint should be checkpoints/step-NNNNNNNNN, "
                f"but is {checkpoint!r:.80}"
            )
    return result


def read_event(line: bytes | str, where: object) -> Event | None:
    """Parse a line as an event; return None for a truncated line, which is not a JSON object."""
    values = parse(line)
    return None if values is None else event_of(values, where)


def event_of(values: Mapping[str, Any], where: object) -> Event:
    """Convert the values of a line to an event, or refuse them with a one-line error."""
    kind = values.get("kind")
    if kind == "start":
        check_schema(values, SCHEMA, where)
    if not isinstance(kind, str) or kind not in EVENTS:
        raise BadInput(f"{where}: kind should be one of {', '.join(EVENTS)}, but is {kind!r:.60}")
    return read(EVENTS[kind], {key: values[key] for key in values if key != "kind"}, where)

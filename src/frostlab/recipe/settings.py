"""The sections optim, train, supervise, watch and evaluate of a recipe."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from frostlab.recipe.treatment import MOST_LISTED, Layers, Positive, Strict, one_of

Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], Field(min_length=1, max_length=MOST_LISTED)]
StepKind = Literal["auto", "eager", "compiled", "captured"]


@dataclass(frozen=True)
class MetricFacts:
    """Facts about a metric, for runs, comparisons and pages."""

    lower_is_better: bool = False
    # how an arm is compared with the baseline: by the difference; by the ratio, on the log scale;
    # or by the difference, with a margin that is a factor of the error rate, 1 − metric
    compared_by: Literal["difference", "ratio", "error rate"] = "difference"
    # default margin of a comparison: the largest disadvantage against the baseline that it accepts
    margin: float | None = None
    bounds: tuple[float, float] = (-math.inf, math.inf)  # the least and the largest possible value
    form: Literal["number", "percent", "r"] = "number"  # how pages show it; r: correlation
    target: float | None = None  # what `frostlab diagnose` asks for, if evaluate.target is null

    @property
    def spans_decades(self) -> bool:
        """Whether its values are never negative and have no upper bound, like those of a loss."""
        return self.bounds[0] >= 0 and self.bounds[1] == math.inf


_LOSS = MetricFacts(lower_is_better=True, bounds=(0.0, math.inf))
_SHARE = MetricFacts(compared_by="error rate", margin=1.10, bounds=(0.0, 1.0), form="percent")
METRICS = {  # metrics of each task, the default first; training/evaluate.py computes them
    "classification": {"accuracy": _SHARE, "macro_f1": _SHARE, "loss": _LOSS},
    "language": {
        "perplexity": MetricFacts(
            lower_is_better=True, compared_by="ratio", margin=1.05, bounds=(1.0, math.inf)
        ),
        "token_accuracy": _SHARE,
        "loss": _LOSS,
    },
    "envelope": {
        "pearson": MetricFacts(margin=0.01, bounds=(-1.0, 1.0), form="r", target=0.3),
        "loss": _LOSS,
    },
}


def all_metrics() -> dict[str, MetricFacts]:
    """Return the facts about every metric, in the order of the tasks."""
    return {name: facts for metrics in METRICS.values() for name, facts in metrics.items()}


def metric_facts(name: str) -> MetricFacts:
    """Return the facts about a metric; the defaults if it is unknown."""
    return all_metrics().get(name, MetricFacts())


def _known_metric(name: Any) -> Any:
    return one_of(name, all_metrics())


Metric = Annotated[str, BeforeValidator(_known_metric)]


def _check_every(every: int | str) -> int | str:
    """Refuse anything but a number of steps, `epoch` or `N epochs`."""
    if every == "epoch" or (isinstance(every, int) and 0 < every <= 10**12):
        return every
    if isinstance(every, str) and re.fullmatch(r"[1-9][0-9]{0,11} epochs", every):
        return every
    raise ValueError(f"{every!r:.40} should be a number of steps, `epoch`, or e.g. `10 epochs`")


Every = Annotated[int | str, AfterValidator(_check_every)]


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer, for estimates of memory and time and verdicts on gradient flow."""

    moments: int  # tensors of a parameter's size that it keeps, with torch's default settings
    normalises: bool = False  # its updates do not scale with the gradient
    # adds weight decay to the gradient; ignored if its parameter groups, like Adam's, state it with
    # the key `decoupled_weight_decay`
    coupled: bool = False

    @property
    def state_bytes(self) -> int:
        """The bytes of its moments per trainable parameter, in float32."""
        return 4 * self.moments

    @property
    def traffic_bytes(self) -> int:
        """The bytes that a step moves per trainable parameter, in float32.

        Weight and moments are read and written, the gradient is read.
        """
        return 4 * (2 * (1 + self.moments) + 1)


_ADAMW = OptimizerFacts(2, normalises=True)
OPTIMIZERS = {  # class → facts; recipes use AdamW, and `fl.watch` measures any of them
    "AdamW": _ADAMW,
    "KernelAdamW": _ADAMW,
    "Adam": OptimizerFacts(2, normalises=True),
    "NAdam": OptimizerFacts(2, normalises=True),
    "RAdam": OptimizerFacts(2, normalises=True),
    "Adamax": OptimizerFacts(2, normalises=True, coupled=True),
    "RMSprop": OptimizerFacts(1, normalises=True, coupled=True),
    "Adagrad": OptimizerFacts(1, normalises=True, coupled=True),
    "Adafactor": OptimizerFacts(0, normalises=True),
    "Lion": OptimizerFacts(1, normalises=True),
    "Muon": OptimizerFacts(1, normalises=True),
    "SGD": OptimizerFacts(0, coupled=True),
    "ASGD": OptimizerFacts(1, coupled=True),
    "Adadelta": OptimizerFacts(2, coupled=True),
}


class StepDecay(Strict):
    """Schedule that multiplies the learning rate by `factor` at a fixed interval."""

    every: Every
    factor: Annotated[float, Field(gt=0, lt=1)]


class Optim(Strict):
    """AdamW and its schedule; vectors, such as biases, have no weight decay."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    decay: Annotated[float, Field(ge=0)] = 0.01
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    warmup: Annotated[float, Field(ge=0)] = 0.1  # number of steps; below 1: share of the stage
    schedule: Literal["linear", "cosine", "constant"] | StepDecay = "linear"

    @property
    def facts(self) -> OptimizerFacts:
        """The facts about the optimizer that `training.step.optimizer` builds."""
        return OPTIMIZERS["AdamW"]

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise ValueError(f"warmup {self.warmup} is neither a share below 1 nor a whole number")
        return self


class Train(Strict):
    """Duration, batches, kind of step, precision and devices of training."""

    batch: Positive = 32  # examples per step, over all processes and micro-batches
    accumulate: Positive = 1  # micro-batches per step
    drop_last: bool = False  # leave out the examples of an epoch that do not fill a batch
    epochs: Positive | None = None
    steps: Positive | None = None
    # padded: to the longest example of a batch; bucketed: the same, with examples of similar length
    # in a batch; fixed: to data.length; packed: the examples of a micro-batch share one row
    batching: Literal["bucketed", "packed", "padded", "fixed"] = "bucketed"
    # captured: replayed as CUDA graphs, and compiled first if that saves time; auto: captured, or
    # eager with several processes. A kind that cannot work in a run, such as captured on a CPU,
    # becomes eager.
    step: StepKind = "auto"
    # where to cache the outputs of the frozen first layers; null: not at all
    cache_prefix: Literal["memory", "disk"] | None = None
    cache_gb: Annotated[float, Field(gt=0, le=1e6)] = 16.0  # maximum size of that cache, in GB
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: bf16 on CUDA, else float32
    device: str = "auto"
    # CPU threads; null: torch's default
    threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    processes: Positive | None = None  # required number of processes; null: any
    parallel: Literal["ddp", "fsdp"] = "ddp"
    # steps between checkpoints; null: after every evaluation. An evaluation that is the best so far
    # is always followed by a checkpoint.
    checkpoint: Positive | None = None
    # weights in every checkpoint; trainable: the frozen ones are stored once per stage
    checkpoint_what: Literal["trainable", "all"] = "trainable"

    @model_validator(mode="before")
    @classmethod
    def _default_duration(cls, value: Any) -> Any:
        """Train for 3 epochs if neither epochs nor steps are given."""
        if isinstance(value, dict) and value.get("steps") is None and value.get("epochs") is None:
            return value | {"epochs": 3}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs {self.epochs} and steps {self.steps} both set the duration; "
                "set one of them to null"
            )
        if self.cache_prefix is not None and self.parallel == "fsdp":
            raise ValueError(
                "cache_prefix skips layers, which parallel fsdp cannot do; set parallel: ddp"
            )
        if self.batch % (self.accumulate * (self.processes or 1)):
            raise ValueError(
                f"batch {self.batch} is not a multiple of accumulate {self.accumulate} × "
                f"processes {self.processes or 1}"
            )
        return self


class Supervise(Strict):
    """Layers that get a loss through the model's head, and the weights of these losses."""

    layers: Literal["last", "all"] | Listed[Layers] = "last"
    # null: equal weights that sum to 1
    weights: Listed[Annotated[float, Field(gt=0)]] | None = None
    # true: also use the losses of layers at or below which no weight is trainable; they train only
    # the head
    frozen: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.layers == "last" and self.frozen:
            raise ValueError("frozen is for losses below the last layer, but layers is last")
        if isinstance(self.layers, str):
            return self
        if twice := [n for n in self.layers if self.layers.count(n) > 1]:
            raise ValueError(f"layers has {twice[0]} twice")
        if self.weights is not None and len(self.weights) != len(self.layers):
            raise ValueError(f"{len(self.weights)} weights for {len(self.layers)} layers")
        return self


class Watch(Strict):
    """Measurement of gradient flow: its interval, and quantities to measure besides the norms."""

    every_n_steps: Positive = 10
    distance: bool = False  # from the stage's initial weights, which are kept in memory
    gradient_cosine: bool = False  # of successive gradients, which are kept in memory
    dead_units: bool = False  # dead and saturated units; requires eager steps
    attention_entropy: bool = False  # per attention head; requires eager steps

    @property
    def inside(self) -> bool:
        """Whether to read activations inside the forward pass, which needs eager steps."""
        return self.dead_units or self.attention_entropy


class Evaluate(Strict):
    """Evaluation: its interval and metric, and the criterion for early stopping."""

    every: Every = "epoch"
    metric: Metric | None = None  # null: accuracy, perplexity for language, pearson for envelopes
    patience: Positive | None = None  # evaluations without improvement before stopping
    # value of the metric; the result records the steps and seconds until it was reached
    target: float | None = None
    # examples in the first batch, which has the longest examples; batches of shorter examples have
    # about as many tokens, so more examples. null: train.batch / train.accumulate; for a
    # classifier, this number times the number of layers with trainable weights
    batch: Positive | None = None

"""What a recipe can say about its stages: what learns when, and what is added before it does."""

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from frostlab.recipe.data import (
    BPE,
    EEG,
    PAIRS,
    TEXT_ONLY,
    ChallengeEEG,
    Docstrings,
    EEGData,
    MatlabEEG,
    MneEEG,
    Named,
    Own,
    PretrainedTokenizer,
    SimulatedEEG,
    Synthetic,
    Task,
    Words,
    data_kind,
)
from frostlab.recipe.model import (
    SCALES,
    ConformerModel,
    DecoderModel,
    EnvelopeLoss,
    GPTModel,
    PretrainedModel,
)
from frostlab.recipe.settings import Evaluate, Metric, Optim, Supervise, Train, Watch
from frostlab.recipe.treatment import SAME, TREATMENTS, Positive, Selections, Strict, Treatment

Rate = Annotated[float, Field(gt=0)]
WORDS = ("new", "old")  # what a stage's rates can name beside selections


class Add(Strict):
    """Layers to add before a stage, where, and what they start as."""

    layers: Positive = 1
    at: Literal["top", "bottom"] | Annotated[int, Field(ge=0)] = "top"
    init: Literal["identity", "random", "copy"] = "random"


class StageSettings(Strict):
    """One stage; what it does not say is as the run has it."""

    name: str | None = None  # null: its number
    train: Selections | None = None  # what learns; null: all that the treatment leaves
    add: Add | None = None
    lr: Rate | Annotated[dict[str, Rate], Field(min_length=1)] | None = None  # null: optim.lr
    epochs: Positive | None = None  # null: as long as `train` says
    steps: Positive | None = None
    patience: Positive | None = None  # null: evaluate.patience
    supervise: Supervise | None = None  # null: the run's
    keep_state: bool = True  # of the optimizer, for what learned in the stage before too

    @model_validator(mode="after")
    def _one_duration(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs {self.epochs} and steps {self.steps} both say how long")
        return self


def stage_names(stages: tuple[StageSettings, ...]) -> tuple[str, ...]:
    """What the stages are called, by default by their numbers; a run of one trains."""
    return tuple(stage.name or str(number) for number, stage in enumerate(stages, 1)) or ("train",)


METRICS: dict[Task, tuple[Metric, ...]] = {
    "classification": ("accuracy", "macro_f1", "loss"),
    "language": ("perplexity", "token_accuracy", "loss"),
    "envelope": ("pearson", "loss"),
}


def _impossible_data(recipe: "Recipe") -> Iterator[str]:
    data, metric = recipe.data, recipe.evaluate.metric
    metrics = METRICS[data.task]
    if metric is not None and metric not in metrics:
        listed = ", ".join(metrics)
        yield f"evaluate.metric {metric} does not exist for {data.task}; there are {listed}"
    if recipe.loss is not None and data.task != "envelope":
        yield f"loss is that of envelopes; data.task {data.task} has cross-entropy: set it to null"
    if isinstance(data, Synthetic | EEGData):
        if recipe.tokenizer is not None:
            made = "tokens" if isinstance(data, Synthetic) else "signals"
            yield f"data.name {data.name} is made of {made}; tokenizer must be null"
        return
    if isinstance(data, Named) and data.name != "xnli" and data.language != "en":
        yield f"data.language {data.language} is given, but only xnli has languages"
    if data.splits == "published" and data.tune is not None:
        yield "data.tune is given, but splits: published selects on the reporting split"
    if data.name in TEXT_ONLY and data.task != "language":
        yield f"data.name {data.name} has no labels; set data.task to language"
    if data.name in (*PAIRS, "sst2") and data.task != "classification":
        yield f"data.name {data.name} is for classification, not {data.task}"
    if data.stride is not None and data.task != "language":
        yield f"data.stride {data.stride} is for running text; data.task is {data.task}"
    if data.stride is not None and data.stride < data.length:
        yield f"data.stride {data.stride} would count tokens twice; data.length is {data.length}"
    leaks = recipe.tokenizer.also if isinstance(recipe.tokenizer, Words) else ()
    if "tune" in leaks and data.splits == "published":
        yield "tokenizer.also names tune, but splits: published has train and report only"
    if isinstance(data, Own) and not 1 <= len(data.text) <= 2:
        yield f"data.text names {len(data.text)} columns; one, or two for pairs"


def _impossible_model(recipe: "Recipe") -> Iterator[str]:
    model, data = recipe.model, recipe.data
    if isinstance(model, ConformerModel) or isinstance(data, EEGData):
        yield from _impossible_signals(recipe)
        return
    if isinstance(model, PretrainedModel):
        if isinstance(data, Synthetic) and model.weights:
            yield f"data.name {data.name} has tokens of its own; set model.weights to false"
        return
    if model.width % model.heads:
        yield f"model.width {model.width} is not a multiple of model.heads {model.heads}"
    if isinstance(model, DecoderModel):
        if data.task == "classification":
            yield "model.kind decoder is a language model; use gpt for classification"
        if model.width % (2 * model.heads):
            yield f"model.width {model.width} gives {model.heads} heads of odd size"
        return
    if data.task == "language" and model.causal is False:
        yield "model.causal false would see the tokens it is to predict; data.task is language"
    if (model.positions or data.length) < data.length:
        yield f"model.positions {model.positions} is less than data.length {data.length}"


def _impossible_signals(recipe: "Recipe") -> Iterator[str]:
    model, data, train = recipe.model, recipe.data, recipe.train
    if not isinstance(model, ConformerModel):
        yield f"model.kind {model.kind} reads tokens; data.name {data.name} needs conformer"
    if not isinstance(data, EEGData):
        yield f"model.kind conformer reads EEG, not {data.name}; there are {', '.join(EEG)}"
    if recipe.loss is not None and recipe.loss.kind == "multiscale":
        largest = max(recipe.loss.scales or SCALES)
        if data.length < 2 * largest:
            yield (
                f"loss.scales has {largest}, which leaves no two samples of data.length "
                f"{data.length}; the largest that fits is {data.length // 2}"
            )
    if train.batching == "packed":
        yield "train.batching packed is for text; windows of signals are all of one length"
    if train.cache_prefix is not None:
        yield "train.cache_prefix is for text; windows of signals are drawn anew each epoch"


def _impossible_supervision(recipe: "Recipe") -> Iterator[str]:
    if recipe.supervise == Supervise():
        return
    if recipe.data.task != "language":
        yield f"supervise.layers are those of a language model; data.task is {recipe.data.task}"
    if recipe.supervise.frozen and recipe.train.cache_prefix is not None:
        yield (
            "supervise.frozen needs the layers that train.cache_prefix leaves out; "
            "set one of them to its default"
        )


def _impossible_stages(recipe: "Recipe") -> Iterator[str]:
    stages, names = recipe.stages, stage_names(recipe.stages)
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"stages.{index}.name {name} is the name of stages.{names.index(name)} too"
    if stages and not stages[0].keep_state:
        yield "stages.0.keep_state is given, but there is no state before the first stage"
    for index, stage in enumerate(stages):
        if stage.add is not None and recipe.surgery.peft is not None:
            yield f"stages.{index}.add cannot be with treatment.peft: new layers would be frozen"


class Recipe(Strict):
    """One run, whole: equal recipes make equal runs."""

    about: str = ""
    data: Annotated[
        Annotated[Docstrings, Tag("docstrings")]
        | Annotated[Synthetic, Tag("synthetic")]
        | Annotated[Named, Tag("named")]
        | Annotated[Own, Tag("own")]
        | Annotated[SimulatedEEG, Tag("eeg-simulated")]
        | Annotated[ChallengeEEG, Tag("eeg-challenge")]
        | Annotated[MatlabEEG, Tag("eeg-matlab")]
        | Annotated[MneEEG, Tag("eeg-mne")],
        Discriminator(data_kind),
    ] = Docstrings()
    tokenizer: Annotated[BPE | Words | PretrainedTokenizer, Field(discriminator="kind")] | None = (
        None  # null: the pretrained model's own, else BPE
    )
    model: Annotated[
        GPTModel | DecoderModel | PretrainedModel | ConformerModel, Field(discriminator="kind")
    ] = GPTModel(kind="gpt")
    loss: EnvelopeLoss | None = None  # null: cross-entropy; for envelopes the published one
    treatment: Literal[tuple(TREATMENTS)] | Treatment = "none"  # type: ignore[valid-type]
    optim: Optim = Optim()
    train: Train = Train(epochs=3)
    supervise: Supervise = Supervise()
    evaluate: Evaluate = Evaluate()
    watch: Watch | None = None  # null: gradient flow is not measured
    stages: tuple[StageSettings, ...] = ()  # none: the whole run is one
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        checks = (_impossible_data, _impossible_model, _impossible_supervision, _impossible_stages)
        for reason in (reason for check in checks for reason in check(self)):
            raise ValueError(reason)
        return self

    @property
    def metric(self) -> Metric:
        """What chooses the best checkpoint."""
        return self.evaluate.metric or METRICS[self.data.task][0]

    @property
    def surgery(self) -> Treatment:
        """What the treatment does, spelled out."""
        known = self.treatment
        return known if isinstance(known, Treatment) else TREATMENTS[known]

    @property
    def treatment_name(self) -> str:
        """The treatment's name; of one that is spelled out PEFT's method, or `explicit`."""
        if not isinstance(self.treatment, Treatment):
            return str(self.treatment)
        return "explicit" if self.treatment.peft is None else self.treatment.peft.method

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON, every default spelled out."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """A stable name for what this recipe does: its description plays no part."""
        values = self.model_dump(mode="json", exclude={"about"})
        if isinstance(self.treatment, str):
            values["treatment"] = SAME.get(self.treatment, self.treatment)
        elif self.treatment.peft is None:  # stored runs are from before there were such keys
            del values["treatment"]["peft"]
        if self.supervise == Supervise():  # the same
            del values["supervise"]
        if not self.stages:
            del values["stages"]
        if self.loss is None:
            del values["loss"]
        if self.watch is None:
            del values["watch"]
        if values["data"].get("stride", 0) is None:
            del values["data"]["stride"]
        if isinstance(self.tokenizer, Words):
            values["tokenizer"] = self.tokenizer.spelled()
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

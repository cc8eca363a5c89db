"""Model sections of a recipe, and the loss of models that decode envelopes.

Each model class defines the tasks that it supports, and checks that its settings fit the data.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from frostlab.recipe.data import Data, Task
from frostlab.recipe.treatment import Positive, Strict

# Presets of the Conformer; validation replaces a preset with its values.
PRESETS: dict[str, dict[str, Any]] = {
    "v1": {"residual": "none", "head": "linear", "gradient_scale": 1.0},
    "full": {"residual": "gated", "head": "mlp", "gradient_scale": 2.0},
    "conservative": {"residual": "plain", "head": "mlp", "gradient_scale": 1.5},  # small data
    "aggressive": {"residual": "gated", "head": "mlp", "gradient_scale": 3.0},  # > 10 layers
}
SCALES = (1, 2, 4, 8)  # default scales of the multiscale loss: number of samples to average


class ModelSettings(Strict):
    """Base class of all kinds of models."""

    tasks: ClassVar[tuple[Task, ...]]  # supported tasks

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each of these settings that does not fit the data."""
        yield from ()


class GPTModel(ModelSettings):
    """frostlab's GPT, trained from scratch."""

    tasks = ("classification", "language")
    kind: Literal["gpt"]
    width: Positive = 512
    layers: Positive = 6
    heads: Positive = 8
    hidden: Positive | None = None  # null: four times the width
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    bias: bool = True
    causal: bool | None = None  # null: causal for language, bidirectional for classification
    positions: Positive | None = None  # null: the data's length

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each of these settings that does not fit the data."""
        if self.width % self.heads:
            yield f"model.width {self.width} is not a multiple of model.heads {self.heads}"
        if data.task == "language" and self.causal is False:
            yield "model.causal false would see the tokens it is to predict; data.task is language"
        if (self.positions or data.length) < data.length:
            yield f"model.positions {self.positions} is less than data.length {data.length}"


class DecoderModel(ModelSettings):
    """frostlab's decoder, trained from scratch: rotary positions, RMSNorm, gated feed-forward."""

    tasks = ("language",)
    kind: Literal["decoder"]
    width: Positive = 64
    layers: Positive = 4
    heads: Positive = 4
    hidden: Positive | None = None
    norm: Literal["before", "after"] = "after"
    final_norm: bool = False

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each of these settings that does not fit the data."""
        if self.width % self.heads:
            yield f"model.width {self.width} is not a multiple of model.heads {self.heads}"
        if self.width % (2 * self.heads):
            yield f"model.width {self.width} gives {self.heads} heads of odd size"


class PretrainedModel(ModelSettings):
    """A Hugging Face model by folder, hub name or architecture."""

    tasks = ("classification", "language")
    kind: Literal["pretrained"]
    name: str
    weights: bool = True  # false: load only the configuration; draw weights with the seed
    config: dict[str, Any] = Field(default_factory=dict)  # changes to the configuration

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each of these settings that does not fit the data."""
        if data.form == "tokens" and self.weights:
            yield f"data.name {data.name} has tokens of its own; set model.weights to false"


class ConformerModel(ModelSettings):
    """frostlab's Conformer, trained from scratch, from EEG to envelope; defaults of version 2."""

    tasks = ("envelope",)
    kind: Literal["conformer"]
    preset: Literal[tuple(PRESETS)] | None = Field(default=None, exclude=True)  # type: ignore[valid-type]
    width: Positive = 256
    layers: Positive = 8
    heads: Positive = 4
    hidden: Positive | None = None  # null: four times the width
    kernel: Positive = 31  # size of the depthwise convolution, in samples
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    residual: Literal["none", "plain", "gated"] = "gated"  # residual around the whole stack
    gate_bias: float = 0.0  # initial bias of the gate: 0 is half open, 4 nearly all stack
    gradient_scale: Annotated[float, Field(gt=0)] = (
        2.0  # factor of gradients that flow back into the stack
    )
    head: Literal["linear", "mlp"] = "mlp"
    norm: Literal["batch", "layer", "group"] = "batch"  # in the convolution module
    attention: Literal["plain", "relative"] = "plain"
    unseen: Literal["mean", "none"] = "mean"  # embedding of subjects in no training split

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        """Replace a preset with its values; explicit settings win."""
        preset = PRESETS.get(str(value.get("preset"))) if isinstance(value, dict) else None
        return value if preset is None else preset | value | {"preset": None}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd; try {self.width + 1}")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel} is even; try {self.kernel + 1}")
        if self.gate_bias and self.residual != "gated":
            raise ValueError(
                f"gate_bias {self.gate_bias} is given, but residual is {self.residual}, not gated"
            )
        return self


class EnvelopeLoss(Strict):
    """Loss per window of a decoded envelope; r is Pearson's correlation.

    - pearson: −r
    - pearson-l1: −r + weight·L1
    - mse-pearson: MSE + weight·(1 − r)², as published
    - multiscale: the mean of −r over average-pooled scales
    """

    tasks: ClassVar[tuple[Task, ...]] = ("envelope",)

    kind: Literal["pearson", "pearson-l1", "mse-pearson", "multiscale"] = "mse-pearson"
    weight: Annotated[float, Field(gt=0)] | None = None  # null: 1 for losses with two terms
    scales: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None  # null: 1, 2, 4, 8

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.weight is not None and self.kind in ("pearson", "multiscale"):
            raise ValueError(f"weight {self.weight} is given, but {self.kind} has one term only")
        if self.scales is not None and self.kind != "multiscale":
            raise ValueError(f"scales are given, but kind is {self.kind}, not multiscale")
        if twice := [s for s in self.scales or () if (self.scales or ()).count(s) > 1]:
            raise ValueError(f"scales has {twice[0]} twice")
        return self

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each of these settings that does not fit the data."""
        largest = max(self.scales or SCALES)
        if self.kind == "multiscale" and data.length < 2 * largest:
            yield (
                f"loss.scales has {largest}, which leaves no two samples of data.length "
                f"{data.length}; the largest that fits is {data.length // 2}"
            )


Model = Annotated[
    GPTModel | DecoderModel | PretrainedModel | ConformerModel, Field(discriminator="kind")
]

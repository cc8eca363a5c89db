"""Model sections of a recipe, and the loss section of models that decode speech envelopes.

Each class lists the tasks that it supports, and checks that its settings fit the data.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from frostlab.recipe.data import Data, StandsFor, Task
from frostlab.recipe.treatment import MOST_LISTED, Layers, Length, Strict, Width

# Presets of the Conformer; the checked recipe has a preset's values instead of its name.
PRESETS: dict[str, dict[str, Any]] = {
    "v1": {"residual": "none", "head": "linear", "gradient_scale": 1.0},
    "full": {"residual": "gated", "head": "mlp", "gradient_scale": 2.0},
    "conservative": {"residual": "plain", "head": "mlp", "gradient_scale": 1.5},  # for little data
    "aggressive": {"residual": "gated", "head": "mlp", "gradient_scale": 3.0},  # for over 10 layers
}
LONGEST = 1000  # most samples in a window of the published Conformer
SCALES = (1, 2, 4, 8)  # default scales of the multiscale loss: numbers of samples averaged into one


class ModelSettings(Strict):
    """Base class of the model sections; `kind` chooses one of them."""

    tasks: ClassVar[tuple[Task, ...]]  # tasks that the model supports

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each contradiction within these settings or with the data."""
        yield from ()


class GPTModel(ModelSettings):
    """frostlab's GPT, trained from scratch."""

    tasks = ("classification", "language")
    kind: Literal["gpt"]
    width: Width = 512
    layers: Layers = 6
    heads: Width = 8
    hidden: Width | None = None  # null: four times the width
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    # feed-forward: biases in feed-forward networks and norms, but not in attention
    bias: bool | Literal["feed-forward"] = True
    pooling: Literal["mean", "last"] = "mean"  # what a classifier's head reads: mean or last token
    causal: bool | None = None  # null: causal for language, bidirectional for classification
    positions: Length | None = None  # null: the data's length
    qk_norm: bool = False  # RMSNorm of every head's queries and keys, with learned gains

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each contradiction within these settings or with the data."""
        if self.width % self.heads:
            yield f"model.width {self.width} is not a multiple of model.heads {self.heads}"
        if data.task == "language" and self.causal is False:
            yield "model.causal false shows the model the tokens to predict; data.task is language"
        if (self.positions or data.length) < data.length:
            yield f"model.positions {self.positions} is less than data.length {data.length}"
        if data.task != "classification" and self.pooling != "mean":
            yield f"model.pooling {self.pooling} is for classification; data.task is {data.task}"


class DecoderModel(ModelSettings):
    """frostlab's decoder, trained from scratch: rotary positions, RMSNorm, gated feed-forward."""

    tasks = ("language",)
    kind: Literal["decoder"]
    width: Width = 64
    layers: Layers = 4
    heads: Width = 4
    hidden: Width | None = None  # null: four times the width
    norm: Literal["before", "after"] = "after"  # before each sublayer, or after its residual sum
    final_norm: bool = False  # a norm between the last layer and the head
    qk_norm: bool = False  # RMSNorm of every head's queries and keys, with learned gains

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each contradiction within these settings or with the data."""
        if self.width % self.heads:
            yield f"model.width {self.width} is not a multiple of model.heads {self.heads}"
        if self.width % (2 * self.heads):
            yield (
                f"model.width {self.width} gives heads of odd size, but rotary positions need an "
                f"even size; set model.width to a multiple of {2 * self.heads}"
            )


class PretrainedModel(ModelSettings):
    """A Hugging Face model, given by folder, hub name or architecture."""

    tasks = ("classification", "language")
    kind: Literal["pretrained"]
    name: str
    weights: bool = True  # false: load the configuration only, and draw random weights
    config: dict[str, Any] = Field(default_factory=dict)  # values that replace the configuration's
    stands_for: StandsFor = None

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each of these settings that does not fit the data."""
        if data.form == "tokens" and self.weights:
            yield (
                f"data.name {data.name} has tokens that no pretrained model knows; set "
                "model.weights to false"
            )


class ConformerModel(ModelSettings):
    """frostlab's Conformer, which decodes a speech envelope from EEG.

    The preset v1 is its first version; the defaults, and the preset full, are its second (v2).
    """

    tasks = ("envelope",)
    kind: Literal["conformer"]
    preset: Literal[tuple(PRESETS)] | None = Field(default=None, exclude=True)  # type: ignore[valid-type]
    width: Width = 256
    layers: Layers = 8
    heads: Width = 4
    hidden: Width | None = None  # null: four times the width
    kernel: Length = 31  # size of the depthwise convolution, in samples
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    residual: Literal["none", "plain", "gated"] = "gated"  # connection around all layers
    # initial bias of the gate: 0 mixes layers and residual about equally, 4 is almost only layers
    gate_bias: float = 0.0
    # factor on the gradient that flows back into the layers
    gradient_scale: Annotated[float, Field(gt=0)] = 2.0
    head: Literal["linear", "mlp"] = "mlp"
    norm: Literal["batch", "layer", "group"] = "batch"  # norm in the convolution module
    attention: Literal["plain", "relative"] = "plain"  # relative: with relative positions
    # embedding of an unseen subject: the mean over the subjects trained on, or zeros
    unseen: Literal["mean", "none"] = "mean"
    # published: layers, channel attention and initial weights of the authors' code
    variant: Literal["frostlab", "published"] = "frostlab"

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
        if self.variant == "published" and self.attention != "plain":
            raise ValueError(
                f"attention {self.attention} is given, but variant published has its own "
                "attention; set attention: plain"
            )
        return self

    def problems(self, data: Data) -> Iterator[str]:
        """Yield a line for each of these settings that does not fit the data."""
        if self.variant == "published" and data.length > LONGEST:
            yield (
                f"data.length {data.length} is longer than {LONGEST} samples, the longest window "
                "of model.variant published"
            )


class EnvelopeLoss(Strict):
    """Loss per window of a decoded envelope; r is its Pearson correlation with the heard one.

    - pearson: −r
    - pearson-l1: −r + weight·L1
    - mse-pearson: MSE + weight·(1 − r)², the loss of the Conformer's authors
    - multiscale: the mean of −r over several scales of average pooling
    """

    tasks: ClassVar[tuple[Task, ...]] = ("envelope",)

    kind: Literal["pearson", "pearson-l1", "mse-pearson", "multiscale"] = "mse-pearson"
    # factor of the second term; null: 1 for losses with two terms
    weight: Annotated[float, Field(gt=0)] | None = None
    scales: (  # null: 1, 2, 4, 8
        Annotated[tuple[Length, ...], Field(min_length=1, max_length=MOST_LISTED)] | None
    ) = None

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
                f"loss.scales has {largest}, which leaves fewer than two samples of data.length "
                f"{data.length}; the largest that fits is {data.length // 2}"
            )


Model = Annotated[
    GPTModel | DecoderModel | PretrainedModel | ConformerModel, Field(discriminator="kind")
]

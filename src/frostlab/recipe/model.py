"""What a recipe can say about a Conformer and about the loss of an envelope."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from frostlab.recipe.treatment import Positive, Strict

# What v2 adds to v1: a shorthand, spelled out as soon as it is read.
PRESETS: dict[str, dict[str, Any]] = {
    "v1": {"residual": "none", "head": "linear", "gradient_scale": 1.0},
    "full": {"residual": "gated", "head": "mlp", "gradient_scale": 2.0},
    "conservative": {"residual": "plain", "head": "mlp", "gradient_scale": 1.5},  # small data
    "aggressive": {"residual": "gated", "head": "mlp", "gradient_scale": 3.0},  # > 10 layers
}

SCALES = (1, 2, 4, 8)  # samples that are averaged into one, where none are given


class ConformerModel(Strict):
    """frostlab's Conformer, from scratch: EEG to a speech envelope; the defaults are v2's."""

    kind: Literal["conformer"]
    preset: Literal[tuple(PRESETS)] | None = Field(default=None, exclude=True)  # type: ignore[valid-type]
    width: Positive = 256
    layers: Positive = 8
    heads: Positive = 4
    hidden: Positive | None = None  # null: four times the width
    kernel: Positive = 31  # of the depthwise convolution, in samples
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    residual: Literal["none", "plain", "gated"] = "gated"  # around the whole stack
    gate_bias: float = 0.0  # where the gate starts: 0 is half open, 4 nearly all stack
    gradient_scale: Annotated[float, Field(gt=0)] = 2.0  # of what flows back into the stack
    head: Literal["linear", "mlp"] = "mlp"
    norm: Literal["batch", "layer", "group"] = "batch"  # in the convolution module
    attention: Literal["plain", "relative"] = "plain"
    unseen: Literal["mean", "none"] = "mean"  # the embedding of subjects not trained on

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        """Put a preset's values in its place; what is given beside it wins."""
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
    """What an envelope that was decoded costs, a window: r is Pearson's correlation.

    pearson −r · pearson-l1 −r + weight·L1 · mse-pearson MSE + weight·(1 − r)² (the published
    one) · multiscale the mean of −r over average-pooled scales.
    """

    kind: Literal["pearson", "pearson-l1", "mse-pearson", "multiscale"] = "mse-pearson"
    weight: Annotated[float, Field(gt=0)] | None = None  # null: 1, where there are two terms
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


class GPTModel(Strict):
    """frostlab's GPT, from scratch."""

    kind: Literal["gpt"]
    width: Positive = 512
    layers: Positive = 6
    heads: Positive = 8
    hidden: Positive | None = None  # null: four times the width
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    bias: bool = True
    causal: bool | None = None  # null: causal for language, bidirectional for classification
    positions: Positive | None = None  # null: the data's length


class DecoderModel(Strict):
    """frostlab's decoder, from scratch: rotary positions, RMSNorm, gated feed-forward."""

    kind: Literal["decoder"]
    width: Positive = 64
    layers: Positive = 4
    heads: Positive = 4
    hidden: Positive | None = None
    norm: Literal["before", "after"] = "after"
    final_norm: bool = False


class PretrainedModel(Strict):
    """A Hugging Face model by folder, hub name or architecture."""

    kind: Literal["pretrained"]
    name: str
    weights: bool = True  # false: the config only, weights drawn from the seed
    config: dict[str, Any] = Field(default_factory=dict)  # what to change in its config

"""Treatments: changes of a model before training (new values, frozen weights or adapters)."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# The upper limits of settings are generous: they only refuse what no machine can do.
MOST_LISTED = 1000  # items of a list in a recipe
Positive = Annotated[int, Field(gt=0, le=10**12)]
Length = Annotated[int, Field(gt=0, le=2**20)]  # of an example or a window
Width = Annotated[int, Field(gt=0, le=2**18)]  # of a layer
Layers = Annotated[int, Field(gt=0, le=1000)]
# Names of model parts, such as query or layers[0:3]; a leading ! takes parts out again.
Selections = Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_LISTED)]


class Strict(BaseModel):
    """Base class of all sections: immutable; refuses unknown keys and converts no types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Orthogonalize(Strict):
    """Replacement of weights with orthonormal rows, in each head or in the whole matrix."""

    method: Literal["orthogonalize"]
    select: Selections
    scope: Literal["head", "matrix"] = "head"
    source: Literal["weights", "gaussian"] = "weights"  # the matrix to orthogonalize


class Randomize(Strict):
    """Replacement of weights with random normal values of a standard deviation or a norm.

    `match` keeps the norm of the weights; `orthonormal` gives each head the norm that it has after
    `orthogonalize`.
    """

    method: Literal["randomize"]
    select: Selections
    std: Annotated[float, Field(gt=0)] | Literal["match", "orthonormal"] = 0.02


class RegisteredChange(Strict):
    """Change of weights by the function of `fl.register_treatment` with this name."""

    method: Literal["registered"]
    name: str


class LowRank(Strict):
    """LoRA: a trainable low-rank product added to each projection; DoRA also trains magnitudes."""

    method: Literal["lora", "dora"]
    select: Selections = ("query", "value")
    r: Width = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Scales(Strict):
    """IA³: a trainable factor per output of a projection, or per input of a down-projection."""

    method: Literal["ia3"]
    select: Selections = ("key", "value", "down")


def _all_but(learns: str) -> tuple[str, ...]:
    """Return selections that freeze all but `learns` and an untied head."""
    return ("all", "embedding", f"!{learns}", "!head")


class Treatment(Strict):
    """Weights to change (`init`) and then weights to freeze; or PEFT adapters instead."""

    init: tuple[
        Annotated[Orthogonalize | Randomize | RegisteredChange, Field(discriminator="method")], ...
    ] = Field(default=(), max_length=MOST_LISTED)
    freeze: tuple[str, ...] = Field(default=(), max_length=MOST_LISTED)
    peft: Annotated[LowRank | Scales, Field(discriminator="method")] | None = None

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.freeze and all(selection.startswith("!") for selection in self.freeze):
            raise ValueError("freeze has only exceptions; add parts to freeze: [all, '!head']")
        if self.peft is not None and (self.init or self.freeze):
            other = "init" if self.init else "freeze"
            raise ValueError(
                f"peft and {other} exclude each other: peft freezes all weights but the adapters "
                "and the head, unchanged"
            )
        return self

    @property
    def frozen(self) -> tuple[str, ...]:
        """The selections that the treatment freezes."""
        return self.freeze if self.peft is None else _all_but("adapter")


def _orthogonal(*roles: str, scope: str = "head", source: str = "weights") -> Orthogonalize:
    return Orthogonalize.model_validate(
        {"method": "orthogonalize", "select": roles, "scope": scope, "source": source}
    )


_QK = ("query", "key")

TREATMENTS = {
    "none": Treatment(),
    "oelm": Treatment(init=(_orthogonal(*_QK),), freeze=_QK),
    "oelm-gaussian": Treatment(init=(_orthogonal(*_QK, source="gaussian"),), freeze=_QK),
    "oelm-k": Treatment(init=(_orthogonal("key"),), freeze=("key",)),
    "oelm-q": Treatment(init=(_orthogonal("query"),), freeze=("query",)),
    "oelm-global": Treatment(init=(_orthogonal(*_QK, scope="matrix"),), freeze=_QK),
    "oelm-random": Treatment(init=(Randomize(method="randomize", select=_QK),), freeze=_QK),
    "oelm-random-matched": Treatment(
        init=(Randomize(method="randomize", select=_QK, std="orthonormal"),), freeze=_QK
    ),
    "frozen-qk": Treatment(freeze=_QK),
    "orthogonal-trainable": Treatment(init=(_orthogonal(*_QK),)),
    "baseline": Treatment(),
    "frozen-embedding": Treatment(freeze=("embedding",)),
    "head": Treatment(freeze=("all", "!head")),
    "norms": Treatment(freeze=_all_but("norm")),
    "bitfit": Treatment(freeze=_all_but("bias")),
}
SAME = {"baseline": "none"}  # other names of a treatment → its name in digests


def one_of(value: Any, names: Iterable[str]) -> Any:
    """Refuse an unknown name with the error that pydantic raises for a Literal.

    A Literal cannot list these names, because users may register more.
    """
    names = tuple(names)
    if isinstance(value, str) and value in names:
        return value
    expected = ", ".join(f"'{name}'" for name in names)
    raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


TreatmentName = Annotated[str, BeforeValidator(lambda value: one_of(value, TREATMENTS))]

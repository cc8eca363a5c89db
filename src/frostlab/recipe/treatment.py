"""Treatments: changes of a model before training (new values, frozen weights or adapters)."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from frostlab.text import enumerated

# The upper limits of settings are far above any sensible value.
MOST_LISTED = 1000  # items of a list in a recipe
Positive = Annotated[int, Field(gt=0, le=10**12)]
Length = Annotated[int, Field(gt=0, le=2**20)]  # of an example or a window
Width = Annotated[int, Field(gt=0, le=2**18)]  # of a layer
Layers = Annotated[int, Field(gt=0, le=1000)]
# Names of model parts, such as query or layers[0:3]; a leading ! removes parts from the selection.
Selections = Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_LISTED)]


class Strict(BaseModel):
    """Base class of all sections: immutable; refuses unknown keys and converts no types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Orthogonalize(Strict):
    """Replacement of weights with orthonormal rows, in each head or in the whole matrix.

    In a head or matrix with more rows than columns, the columns are orthonormal instead.
    """

    method: Literal["orthogonalize"]
    select: Selections
    scope: Literal["head", "matrix"] = "head"
    source: Literal["weights", "gaussian"] = "weights"  # matrix that is made orthonormal

    @property
    def description(self) -> str:
        """The text that follows the selection when an arm is described."""
        scope = "of every head" if self.scope == "head" else "as whole matrices"
        drawn = ", from a Gaussian draw" if self.source == "gaussian" else ""
        return f" {scope}: orthogonal{drawn}"


class Randomize(Strict):
    """Replacement of weights with random normal values of a given standard deviation or norm.

    `match` keeps the norm of each matrix; `orthonormal` gives each head the norm that it would have
    after `orthogonalize`.
    """

    method: Literal["randomize"]
    select: Selections
    std: Annotated[float, Field(gt=0)] | Literal["match", "orthonormal"] = 0.02

    @property
    def description(self) -> str:
        """The text that follows the selection when an arm is described."""
        if self.std == "orthonormal":
            return " of every head: random normal, with the norm of orthonormal rows"
        if self.std == "match":
            return ": random normal, with the norm that each matrix had before"
        return f": random normal, with standard deviation {self.std:g}"


class Identity(Strict):
    """Replacement of weights with rows of the identity, which are orthonormal; nothing is drawn.

    The rows of a weight, in order, become the rows of the identity. A weight with more rows than
    columns goes on with the first row of the identity (scope head) or with rows of zeros (scope
    matrix). Heads with more rows than columns each become the identity with rows of zeros below it.
    """

    method: Literal["identity"]
    select: Selections
    scope: Literal["head", "matrix"] = "head"

    @property
    def description(self) -> str:
        """The text that follows the selection when an arm is described."""
        scope = "of every head" if self.scope == "head" else "as whole matrices"
        return f" {scope}: rows of the identity"


class RegisteredChange(Strict):
    """Change of weights by the function that `fl.register_treatment` registered under this name."""

    method: Literal["registered"]
    name: str


class LowRank(Strict):
    """LoRA: a trainable low-rank product added to projections; DoRA also trains magnitudes."""

    method: Literal["lora", "dora"]
    select: Selections = ("query", "value")
    r: Width = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Scales(Strict):
    """IA³: a trainable factor per output of a selected projection, or per input of `down`."""

    method: Literal["ia3"]
    select: Selections = ("key", "value", "down")


def _all_but(learns: str) -> tuple[str, ...]:
    """Return selections that freeze all but `learns` and an untied head.

    `embedding` is named, so that a head that is tied to it is frozen in spite of `!head`.
    """
    return ("all", "embedding", f"!{learns}", "!head")


KnownChange = Orthogonalize | Randomize | Identity


class Treatment(Strict):
    """Weights to change (`init`) and then weights to freeze; or PEFT adapters instead.

    With adapters, `freeze` is optional; if given, it has `all`, and exceptions for what learns.
    """

    init: tuple[Annotated[KnownChange | RegisteredChange, Field(discriminator="method")], ...] = (
        Field(default=(), max_length=MOST_LISTED)
    )
    freeze: tuple[str, ...] = Field(default=(), max_length=MOST_LISTED)
    peft: Annotated[LowRank | Scales, Field(discriminator="method")] | None = None

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.freeze and all(selection.startswith("!") for selection in self.freeze):
            raise ValueError("freeze has only exceptions; add parts to freeze, e.g. [all, '!head']")
        if self.peft is not None and self.init:
            raise ValueError(
                "peft and init exclude each other: peft freezes all weights but the adapters "
                "and an untied head"
            )
        if self.peft is not None and self.freeze and "all" not in self.freeze:
            raise ValueError(
                "peft and freeze exclude each other, unless freeze is all with exceptions for what "
                "learns, e.g. [all, '!adapter', '!head', '!layers[-1]']"
            )
        return self

    @property
    def frozen(self) -> tuple[str, ...]:
        """The selections that the treatment freezes."""
        return _all_but("adapter") if self.peft is not None and not self.freeze else self.freeze

    @property
    def description(self) -> str:
        """One line that says what the treatment does to the model."""
        if self.peft is not None:
            trains = "only the adapters and an untied head train"
            if self.freeze:
                trains = f"{_listed(self.freeze)}: frozen; the rest trains"
            return f"{self.peft.method} adapters at {_listed(self.peft.select)}; {trains}"
        has_exceptions = any(selection.startswith("!") for selection in self.freeze)
        surely_frozen = set[str]() if has_exceptions else set(self.freeze)
        lines, described = list[str](), set[str]()
        for change in self.init:
            if isinstance(change, RegisteredChange):
                lines.append(f"changed by the registered function {change.name}")
                continue
            line = f"{_listed(change.select)}{change.description}"
            if set(change.select) <= surely_frozen:
                line, described = f"{line}, frozen", described | set(change.select)
            lines.append(line)
        others = [selection for selection in self.freeze if selection not in described]
        lines += [f"{_listed(others)}: frozen"] if others else []
        return "; ".join([*lines, "the rest trains" if self.freeze else "everything trains"])


def _listed(selections: Sequence[str]) -> str:
    """Return selections as a text: query and key; all but head."""
    parts = [text for text in selections if not text.startswith("!")] or ["all"]
    left_out = [text.removeprefix("!") for text in selections if text.startswith("!")]
    but = f" but {enumerated(left_out)}" if left_out else ""
    return f"{enumerated(parts)}{but}"


def _orthogonal(*roles: str, scope: str = "head", source: str = "weights") -> Orthogonalize:
    return Orthogonalize.model_validate(
        {"method": "orthogonalize", "select": roles, "scope": scope, "source": source}
    )


_QK = ("query", "key")

TREATMENTS = {  # by name
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
    "oelm-frozen-embedding": Treatment(init=(_orthogonal(*_QK),), freeze=(*_QK, "embedding")),
    "frozen-qk": Treatment(freeze=_QK),
    "frozen-q": Treatment(freeze=("query",)),
    "frozen-k": Treatment(freeze=("key",)),
    "frozen-v": Treatment(freeze=("value",)),
    "frozen-up-gate": Treatment(freeze=("up", "gate")),
    "orthogonal-trainable": Treatment(init=(_orthogonal(*_QK),)),
    "random-trainable": Treatment(init=(Randomize(method="randomize", select=_QK),)),
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

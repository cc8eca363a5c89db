"""The memory of a training step (an estimate and a lower bound), and of a run on a GPU (its peak).

All three count weights, gradients, the optimizer's moments, and the values that a transformer's
layers keep for the backward pass. The estimate also counts a language model's logits. The bound
counts only values that every step has to keep if it recomputes nothing in the backward pass. The
peak of a run also counts the logits of evaluations, and the workspaces of cuBLAS.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from frostlab.recipe.settings import OptimizerFacts
from frostlab.roles.parts import Part
from frostlab.roles.snapshot import Anatomy, Layer

_WEIGHT_BYTES = 4  # of a float32 weight, per parameter
# Values that a transformer layer keeps for its backward pass, per token and unit of the width, and
# bytes of dropout masks; attention kernels keep no scores (Korthikanti et al. 2022).
_KEPT_VALUES, _MASK_BYTES = 16, 2
# Values, per token and unit of the width, that a layer has to keep in any case: the queries, keys
# and values, and three inputs of matmuls: those for the queries, keys and values, for the output of
# the attention, and for the hidden units. `least_memory` adds the hidden units, a fourth input.
_LEAST_VALUES = 6
# cuBLAS has a workspace of 32 MiB on an H200 for each of the two streams on which steps and
# evaluations run; older GPUs have smaller ones.
_WORKSPACES = 2 * 2**25
_FLOAT_BYTES = 4  # evaluations compute the loss in float32


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a training step: without its batch, and per token of the batch."""

    state: int  # weights, gradients and moments
    per_token: int

    def of(self, tokens: float) -> float:
        """Return the bytes of a step over this many tokens at once."""
        return self.state + tokens * self.per_token

    def tokens_in(self, size: float) -> float:
        """Return how many tokens fit into this many bytes; negative if the state does not fit."""
        return (size - self.state) / self.per_token


def estimated_memory(
    parts: Anatomy, value_bytes: int, language: bool, optimizer: OptimizerFacts
) -> StepMemory:
    """Estimate the memory of a training step of a model, given its parts.

    `value_bytes` is the size of a value of the forward pass. `language` says whether the model is a
    language model, which keeps its logits.
    """
    kept = sum(map(_width, parts.layers)) * (_KEPT_VALUES * value_bytes + _MASK_BYTES)
    logits = _vocabulary(parts) * value_bytes if language else 0
    return StepMemory(_state(parts, _WEIGHT_BYTES, optimizer), kept + logits)


def estimated_peak(
    parts: Anatomy,
    value_bytes: int,
    language: bool,
    tokens: float,
    evaluated: float,
    optimizer: OptimizerFacts,
) -> float:
    """Estimate the peak of the memory that torch allocates on a GPU in a run.

    It is the peak of a training step over `tokens` tokens or, if larger, of an evaluation over
    `evaluated` tokens at once. A language model's evaluation keeps logits, their log-probabilities
    and, if the logits are not float32, a float32 copy of the logits.
    """
    step = estimated_memory(parts, value_bytes, language, optimizer)
    copies = _FLOAT_BYTES * (2 if value_bytes < _FLOAT_BYTES else 1)
    logits = _vocabulary(parts) * (value_bytes + copies) if language else 0
    return _WORKSPACES + max(step.of(tokens), step.state + evaluated * logits)


def _vocabulary(parts: Anatomy) -> int:
    sizes = (part.shape[0] for part in parts.parts if part.role == "embedding" and part.shape)
    return max(sizes, default=0)


def least_memory(parts: Anatomy, value_bytes: int, optimizer: OptimizerFacts) -> StepMemory:
    """Return a lower bound on a step's memory; layers below all trainable parts keep nothing."""
    kept = 0
    learns = any(
        part.state == "trainable" and part.role not in ("head", "norm")
        for part in parts.parts
        if not part.layers
    )
    for layer in parts.layers:
        learns = learns or any(part.state == "trainable" for part in layer.parts)
        if learns and (width := _width(layer)):
            kept += (_LEAST_VALUES * width + _hidden(layer.parts)) * value_bytes
    return StepMemory(_state(parts, value_bytes, optimizer), kept)


def _state(parts: Anatomy, gradient_bytes: int, optimizer: OptimizerFacts) -> int:
    trained = optimizer.state_bytes + gradient_bytes
    return _WEIGHT_BYTES * parts.count() + trained * parts.count("trainable")


def _width(layer: Layer) -> int:
    """Return the size of the vectors from which a layer computes queries; 0 without queries."""
    return next((part.shape[1 - part.axis] for part in layer.parts if part.role == "query"), 0)


def _hidden(parts: Sequence[Part]) -> int:
    """Return the number of hidden units: the largest input size of a layer's weight matrices."""
    maps = (part for part in parts if part.matmul and part.kind == "weight")
    return max((part.shape[1 - part.axis] for part in maps if len(part.shape) == 2), default=0)

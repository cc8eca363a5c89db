"""Deep supervision: which layers of a model get a loss of their own, and what it counts."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from frostlab.errors import BadInput
from frostlab.models.stack import Stack, take_apart
from frostlab.recipe.settings import Supervise
from frostlab.training.prefix import prefix_depth

_KNOWN = "gpt, decoder, and Hugging Face's BERT, GPT-2 and Llama for language, without hooks"


@dataclass(frozen=True)
class Supervision:
    """The layers of one model that have a loss, counted from 1, and the weight of each."""

    layers: tuple[int, ...]  # ascending
    weights: tuple[float, ...]
    left_out: tuple[int, ...] = ()  # asked for, but their loss could only move the head

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def language_stack(model: nn.Module, asked: str) -> Stack:
    """The pieces of a language model whose head can read every layer; `asked` names who asks."""
    stack = take_apart(model)
    if stack is None or stack.classifies or type(stack.head) is not nn.Linear:
        raise BadInput(f"{asked} does not know {type(model).__name__}; it knows {_KNOWN}")
    return stack


def resolve(supervise: Supervise, model: nn.Module) -> Supervision | None:
    """What a recipe's `supervise` means for a model as it is frozen now; None for the default.

    A layer's loss is left out where nothing that learns lies at or below it, unless `frozen` asks
    for it; the last layer's is the model's own and stays. Weights that are not given are equal
    over the layers that stay; given ones are used as they are.
    """
    if supervise == Supervise():
        return None
    stack = language_stack(model, "supervise.layers")
    count = len(stack.layers)
    weights = _weights(supervise, _asked(supervise, count))
    depth = 0 if supervise.frozen else prefix_depth(model)
    kept = {
        number: weight for number, weight in weights.items() if depth < number or number == count
    }
    if not kept:
        raise BadInput(
            f"supervise.layers {list(weights)} lie above nothing that learns: their losses could "
            f"only move the head; add {count}, or set supervise.frozen to true"
        )
    top = max(kept)
    if any(p.requires_grad for layer in stack.layers[top:] for p in layer.parameters()):
        raise BadInput(
            f"supervise.layers end at {top}, and layers above it learn, from nothing; "
            f"add {count}, or freeze them"
        )
    given = [kept[number] for number in sorted(kept)]
    shares = [1 / len(given) if weight is None else weight for weight in given]
    left_out = sorted(set(weights) - set(kept))
    return Supervision(tuple(sorted(kept)), tuple(shares), tuple(left_out))


def _asked(supervise: Supervise, count: int) -> tuple[int, ...]:
    """The layers a recipe names, all of which there must be."""
    if supervise.layers == "last":
        return (count,)
    if supervise.layers == "all":
        return tuple(range(1, count + 1))
    if missing := [number for number in supervise.layers if number > count]:
        raise BadInput(
            f"supervise.layers: there is no layer {missing[0]}; the model has 1 to {count}"
        )
    return supervise.layers


def _weights(supervise: Supervise, layers: tuple[int, ...]) -> dict[int, float | None]:
    if supervise.weights is None:
        return dict.fromkeys(layers)
    if len(supervise.weights) != len(layers):
        raise BadInput(
            f"supervise.weights has {len(supervise.weights)} values for {len(layers)} layers"
        )
    return dict(zip(layers, supervise.weights, strict=True))

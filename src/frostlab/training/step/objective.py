"""A model and its loss: what a step differentiates and an evaluation reads."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.data.eeg.recordings import Material, text_of
from frostlab.errors import BadInput
from frostlab.models.stack import Stack, take_apart
from frostlab.recipe.settings import Supervise
from frostlab.training.batches.batch import IGNORED, Batch, collate
from frostlab.training.batches.packing import pack
from frostlab.training.batches.prefix import Prefix, prefix_depth
from frostlab.training.step.head_loss import head_loss

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


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Call a model; Hugging Face ones answer with more than logits."""
    answer: Any = model(**inputs)
    return answer if isinstance(answer, Tensor) else answer.logits


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, in float32 at least, summed over what is scored."""
    flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Exits:
    """Layers below the last, counted from 1; `see` gets the logits of one after the other."""

    layers: Sequence[int]
    see: Callable[[int, Tensor], None]


class Objective(nn.Module):
    """Calls a model in the way a batch asks for: as it is, packed, or without its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.prefix: Prefix | None = None
        self.supervision: Supervision | None = None

    @property
    def supervised(self) -> tuple[int, ...]:
        """The layers that have a loss of their own, if not the last one alone."""
        return () if self.supervision is None else self.supervision.layers

    @property
    def depth(self) -> int:
        """How many layers the head can read."""
        return len(language_stack(self.model, "an early exit").layers)

    def forward(self, batch: Batch, want: Literal["loss", "logits"] | Exits = "loss") -> Tensor:
        """The loss, summed over what is scored, or the logits; `Exits` see others before."""
        if isinstance(want, Exits):
            return self._visit(batch, want)
        if want == "loss" and self.supervision is not None:
            return self.supervised_loss(batch, self.supervision)
        stack = take_apart(self.model)
        head = None if stack is None else stack.head
        if want == "loss" and batch.targets.ndim == 2 and stack and type(head) is nn.Linear:
            (vectors,) = self.vectors(stack, batch, [len(stack.layers)])
            return head_loss(
                vectors, head.weight, batch.targets, bias=head.bias, ignore=IGNORED
            )[0]  # fmt: skip
        if stack is not None and "attention_mask" not in batch.inputs:
            (vectors,) = self.vectors(stack, batch, [len(stack.layers)])
            logits = stack.head(vectors)
        else:
            assert batch.packing is None, "only models that can be taken apart are packed"
            logits = logits_of(self.model, batch.inputs)
        return logits if want == "logits" else summed_loss(logits, batch.targets)

    def supervised_loss(self, batch: Batch, supervision: Supervision) -> Tensor:
        """Every supervised layer's loss times its weight, added up."""
        stack = language_stack(self.model, "supervise.layers")
        vectors, head = self.vectors(stack, batch, supervision.layers), stack.head
        return head_loss(
            vectors, head.weight, batch.targets, bias=head.bias, weights=supervision.weights,
            ignore=IGNORED,
        )[0]  # fmt: skip

    def _visit(self, batch: Batch, exits: Exits) -> Tensor:
        """Show the logits of layers, of which one layer's exist at a time; return the last's."""
        stack = language_stack(self.model, "an early exit")
        after = [*exits.layers, len(stack.layers)]
        *below, last = self.vectors(stack, batch, after)
        for number, vectors in zip(exits.layers, below, strict=True):
            exits.see(number, stack.head(vectors))
        return stack.head(last)

    def vectors(self, stack: Stack, batch: Batch, after: Sequence[int]) -> list[Tensor]:
        """What the head reads after some layers, from the tokens or where cached layers end."""
        inputs, packing, prefix = batch.inputs, batch.packing, self.prefix
        ids, first = inputs["input_ids"], 0
        if prefix is None or "cached" not in inputs:
            x = stack.embed(ids, inputs.get("token_type_ids"), packing)
        else:
            prefix.check()
            cached, first = inputs["cached"], prefix.depth
            x = cached if cached.is_floating_point() else prefix.vectors(cached)
            x = x.to(prefix.dtype)
        return [stack.read(x, ids, packing) for x in stack.states(x, packing, after, first)]


def check_pieces(objective: Objective, prepared: Material, types: bool, packs: bool) -> None:
    """Refuse to train a model in pieces that cannot be, or whose answers would be others."""
    model, kind = objective.model, type(objective.model).__name__
    language = prepared.task == "language"
    if take_apart(model) is None:
        if packs:
            known = "gpt, decoder, and Hugging Face's BERT, GPT-2 and Llama, without hooks"
            raise BadInput(f"train.batching packed does not know {kind}; it knows {known}")
        return
    if not packs and not language:
        return
    text, training = text_of(prepared), objective.training
    tokens = text.splits["train"]
    rows = np.argsort(tokens.lengths, kind="stable")[[0, len(tokens) // 2]]
    apart = collate(tokens, rows, text.pad, types=types)
    form = pack(tokens, rows, text.pad, types=types) if packs else apart
    objective.eval()
    with torch.no_grad():
        wanted = summed_loss(logits_of(model, apart.inputs), apart.targets)
        found = objective(form)
    objective.train(training)
    if not torch.allclose(wanted, found, rtol=1e-4):
        raise BadInput(
            f"{kind} in pieces gives a loss of {float(found):.6g}, not {float(wanted):.6g}"
        )

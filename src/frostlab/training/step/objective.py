"""The objective: a model with the loss of its last layer, or with losses at several layers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.data.prepare import PreparedData, as_token_data
from frostlab.errors import BadInput
from frostlab.models.stack import Stack, take_apart
from frostlab.recipe.settings import Supervise
from frostlab.training.batches.batch import IGNORED, Batch, collate
from frostlab.training.batches.packing import pack
from frostlab.training.batches.prefix import Prefix, prefix_depth
from frostlab.training.step.head_loss import HEAD_COPY, TiedGradient, head_loss

_SUPPORTED = "language models: gpt, decoder, Hugging Face's BERT, GPT-2 and Llama, without hooks"


@dataclass(frozen=True)
class Supervision:
    """The layers of a model that have a loss, counted from 1, and the weight of each loss."""

    layers: tuple[int, ...]  # ascending
    weights: tuple[float, ...]
    left_out: tuple[int, ...] = ()  # requested layers whose loss would only train the head

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def language_stack(model: nn.Module, asked: str) -> Stack:
    """Return a language model's stack of layers, which the setting or feature `asked` needs.

    Refuse classifiers, models whose head is not an `nn.Linear`, and models that frostlab cannot run
    layer by layer.
    """
    stack = take_apart(model)
    if stack is None or stack.classifies or type(stack.head) is not nn.Linear:
        raise BadInput(f"{asked} does not support {type(model).__name__}; it supports {_SUPPORTED}")
    return stack


def resolve_supervision(supervise: Supervise, model: nn.Module) -> Supervision | None:
    """Return the supervised layers; None if `supervise` is the default, the last layer's loss.

    A layer's loss is left out if no weight at or below it is trainable now, unless
    `supervise.frozen` asks for it; the last layer's loss is never left out. By default the
    remaining losses have equal weights that sum to 1; `supervise.weights` are used unchanged.
    """
    if supervise == Supervise():
        return None
    stack = language_stack(model, "supervise.layers")
    count = len(stack.layers)
    weights = _weights(supervise, _named_layers(supervise, count))
    frozen_layers = 0 if supervise.frozen else prefix_depth(model)
    supervised = {
        number: weight
        for number, weight in weights.items()
        if frozen_layers < number or number == count
    }
    if not supervised:
        raise BadInput(
            f"supervise.layers {list(weights)} have no trainable weight at or below them: their "
            f"losses would only train the head; add layer {count}, or set supervise.frozen to true"
        )
    top = max(supervised)
    if any(p.requires_grad for layer in stack.layers[top:] for p in layer.parameters()):
        raise BadInput(
            f"supervise.layers end at {top}, but layers above it learn and would get no gradient; "
            f"add layer {count}, or freeze them"
        )
    layers = sorted(supervised)
    given = [supervised[number] for number in layers]
    resolved = [1 / len(layers) if weight is None else weight for weight in given]
    left_out = sorted(set(weights) - set(supervised))
    return Supervision(tuple(layers), tuple(resolved), tuple(left_out))


def _named_layers(supervise: Supervise, count: int) -> tuple[int, ...]:
    """Return the layers that a recipe names; refuse a layer that the model does not have."""
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
    """Return the weight of each layer's loss in the recipe; None: equal weights."""
    if supervise.weights is None:
        return dict.fromkeys(layers)
    if len(supervise.weights) != len(layers):
        raise BadInput(
            f"supervise.weights has {len(supervise.weights)} values for {len(layers)} layers"
        )
    return dict(zip(layers, supervise.weights, strict=True))


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Call a model and return its logits; Hugging Face models return them in an object."""
    output: Any = model(**inputs)
    return output if isinstance(output, Tensor) else output.logits


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy, in float32 at least, summed over scored targets."""
    flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Exits:
    """Early exits: the layers below the last to whose outputs the head is also applied.

    Layers are numbered from 1. The callback `see` gets each layer's number and logits.
    """

    layers: Sequence[int]
    see: Callable[[int, Tensor], None]


class Objective(nn.Module):
    """A model with its loss; a batch is padded or packed, and may hold cached outputs of layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.prefix: Prefix | None = None
        self.supervision: Supervision | None = None

    @property
    def supervised(self) -> tuple[int, ...]:
        """Return the supervised layers; empty if the recipe keeps the default, the last layer."""
        return () if self.supervision is None else self.supervision.layers

    @property
    def depth(self) -> int:
        """Return the number of layers of a language model."""
        return len(language_stack(self.model, "an early exit").layers)

    def forward(self, batch: Batch, want: Literal["loss", "logits"] | Exits = "loss") -> Tensor:
        """Return the loss, summed over scored targets, or the logits.

        With `Exits`, pass the logits of its layers to its callback, and return the last layer's.
        """
        if isinstance(want, Exits):
            return self._visit_exits(batch, want)
        if want == "loss" and self.supervision is not None:
            return self.supervised_loss(batch, self.supervision)
        stack = take_apart(self.model)
        head = None if stack is None else stack.head
        # a language model: compute the loss without all logits at once
        if want == "loss" and batch.targets.ndim == 2 and stack and type(head) is nn.Linear:
            return self._head_loss(stack, batch, [len(stack.layers)])
        if stack is not None and "attention_mask" not in batch.inputs:  # stacks take no mask
            (vectors,) = self.head_inputs(stack, batch, [len(stack.layers)])
            logits = stack.head(vectors)
        else:
            assert batch.packing is None, "only models with a known stack are packed"
            logits = logits_of(self.model, batch.inputs)
        return logits if want == "logits" else self.loss_of(logits, batch)

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the loss of a model's outputs, summed over scored targets."""
        return summed_loss(logits, batch.targets)

    def supervised_loss(self, batch: Batch, supervision: Supervision) -> Tensor:
        """Return the sum of the supervised layers' losses, each times its weight."""
        stack = language_stack(self.model, "supervise.layers")
        return self._head_loss(stack, batch, supervision.layers, supervision.weights)

    def _head_loss(
        self,
        stack: Stack,
        batch: Batch,
        after: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> Tensor:
        """Return the sum of the losses after some layers, without all logits at once."""
        head, tied = stack.head, TiedGradient()
        with tied.embedding_of(self.model, head.weight):
            vectors = self.head_inputs(stack, batch, after)
        total, _ = head_loss(
            vectors, head.weight, batch.targets, bias=head.bias, weights=weights,
            copy=getattr(head, HEAD_COPY, None), tied=tied,
        )  # fmt: skip
        return total

    def _visit_exits(self, batch: Batch, exits: Exits) -> Tensor:
        """Call `exits.see` with the logits of one layer after another; return the last layer's."""
        stack = language_stack(self.model, "an early exit")
        after = [*exits.layers, len(stack.layers)]
        *below, last = self.head_inputs(stack, batch, after)
        for number, vectors in zip(exits.layers, below, strict=True):
            exits.see(number, stack.head(vectors))
        return stack.head(last)

    def head_inputs(self, stack: Stack, batch: Batch, after: Sequence[int]) -> list[Tensor]:
        """Return the head's input after each layer in `after`, from tokens or cached outputs."""
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


def check_stack(objective: Objective, prepared: PreparedData, types: bool, packs: bool) -> None:
    """Refuse a model whose loss differs when it runs layer by layer.

    `packs` says whether the run packs several examples into one row. If not, classifiers are not
    checked, and a model that cannot run layer by layer uses its own forward pass; with packing,
    such a model is refused.
    """
    model, kind = objective.model, type(objective.model).__name__
    language = prepared.task == "language"
    if take_apart(model) is None:
        if packs:
            supported = "gpt, decoder, and Hugging Face's BERT, GPT-2 and Llama, without hooks"
            raise BadInput(
                f"train.batching packed and train.cache_prefix do not support {kind}; "
                f"they support {supported}"
            )
        return
    if not packs and not language:
        return
    text, training = as_token_data(prepared), objective.training
    tokens = text.splits["train"]
    # compare the losses of two examples: the shortest and one of median length
    rows = np.argsort(tokens.lengths, kind="stable")[[0, len(tokens) // 2]]
    padded = collate(tokens, rows, text.pad, types=types)
    batch = pack(tokens, rows, text.pad, types=types) if packs else padded
    objective.eval()
    with torch.no_grad():
        expected = objective.loss_of(logits_of(model, padded.inputs), padded)
        loss = objective(batch)
    objective.train(training)
    if not torch.allclose(expected, loss, rtol=1e-4):
        raise BadInput(
            f"{kind} run layer by layer gives a loss of {float(loss):.6g}, not "
            f"{float(expected):.6g}: frostlab does not support this variant of the model"
        )

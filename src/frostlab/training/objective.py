"""A model and its loss: what a step differentiates and an evaluation reads."""

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.data import Prepared
from frostlab.errors import BadInput
from frostlab.models.stack import Stack, take_apart
from frostlab.training.batching import IGNORED, Batch, collate
from frostlab.training.losses import head_loss
from frostlab.training.packing import pack
from frostlab.training.prefix import Prefix


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Call a model; Hugging Face ones answer with more than logits."""
    answer: Any = model(**inputs)
    return answer if isinstance(answer, Tensor) else answer.logits


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in float32, summed over what is scored."""
    flat = logits.flatten(0, -2).float()
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Objective(nn.Module):
    """Calls a model in the way a batch asks for: as it is, packed, or without its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.prefix: Prefix | None = None

    def forward(self, batch: Batch, want: Literal["loss", "logits"] = "loss") -> Tensor:
        """The loss, summed over what is scored, or the logits."""
        stack = take_apart(self.model)
        head = None if stack is None else stack.head
        if want == "loss" and batch.targets.ndim == 2 and stack and type(head) is nn.Linear:
            vectors = self._vectors(stack, batch)
            return head_loss(
                vectors, head.weight, batch.targets, bias=head.bias, ignore=IGNORED
            )[0]  # fmt: skip
        if stack is not None and "attention_mask" not in batch.inputs:
            logits = stack.head(self._vectors(stack, batch))
        else:
            assert batch.packing is None, "only models that can be taken apart are packed"
            logits = logits_of(self.model, batch.inputs)
        return logits if want == "logits" else summed_loss(logits, batch.targets)

    def _vectors(self, stack: Stack, batch: Batch) -> Tensor:
        """What the head reads, from the tokens or from where the cached layers end."""
        inputs, prefix = batch.inputs, self.prefix
        if prefix is None or "cached" not in inputs:
            return stack.vectors(inputs["input_ids"], inputs.get("token_type_ids"), batch.packing)
        prefix.check()
        cached = inputs["cached"]
        x = cached if cached.is_floating_point() else prefix.vectors(cached)
        x = stack.run(x.to(prefix.dtype), batch.packing, first=prefix.depth)
        return stack.read(x, inputs["input_ids"], batch.packing)


def check_pieces(objective: Objective, prepared: Prepared, types: bool, packs: bool) -> None:
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
    tokens, training = prepared.splits["train"], objective.training
    rows = np.argsort(tokens.lengths, kind="stable")[[0, len(tokens) // 2]]
    apart = collate(tokens, rows, prepared.pad, types=types)
    form = pack(tokens, rows, prepared.pad, types=types) if packs else apart
    objective.eval()
    with torch.no_grad():
        wanted = summed_loss(logits_of(model, apart.inputs), apart.targets)
        found = objective(form)
    objective.train(training)
    if not torch.allclose(wanted, found, rtol=1e-4):
        raise BadInput(
            f"{kind} in pieces gives a loss of {float(found):.6g}, not {float(wanted):.6g}"
        )

"""A model as a stack: separate steps for its embedding, each layer, and the head's input.

Packed batches, the fused loss of head and cross-entropy, and cached outputs of frozen layers need
these steps, which a model's own forward does not offer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.models.attention import Packing, attend
from frostlab.models.decoder import Decoder
from frostlab.models.fused.embedding import look_up
from frostlab.models.fused.residual_norm import keep_and_norm
from frostlab.models.gpt import GPT

_NAME = "frostlab"  # name of our attention in transformers' registry


class Stack(ABC):
    """The steps of a model's forward pass, in order; the model is neither copied nor changed."""

    model: Any
    layers: Sequence[nn.Module]
    head: Any  # a module with a weight, (outputs, width), and a bias or None
    classifies: bool  # one prediction per sequence; False: a language model, one per token
    parts: Sequence[nn.Module] = ()  # modules before the layers that are compiled on CUDA

    def run(
        self, x: Tensor, packing: Packing | None, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Apply the layers from `first` to `last` (exclusive) to (B, T, width)."""
        end = len(self.layers) if last is None else last
        return self.states(x, packing, [end], first)[0]

    def states(
        self, x: Tensor, packing: Packing | None, after: Sequence[int], first: int = 0
    ) -> list[Tensor]:
        """Return the hidden state after each number of layers in `after`, in one pass.

        `x` is the hidden state after `first` layers.
        """
        states = {first: x}
        with self.attention():
            arguments = self.layer_arguments(x, packing)
            for number in range(first + 1, max(after) + 1):
                x = self.layers[number - 1](x, **arguments)
                if number in after:
                    states[number] = x
        return [states[number] for number in after]

    def places(self, rows: Tensor, packing: Packing | None) -> Tensor:
        """Return (T,): each token's position in its sequence, for rows of shape (B, T, …)."""
        if packing is not None:
            return packing.places
        return torch.arange(rows.shape[1], device=rows.device)

    def bypassed_modules(self) -> list[nn.Module]:
        """Return modules whose forward the stack does not call, so that their hooks do not run."""
        return [self.model, self.head]

    def attention(self) -> AbstractContextManager[None]:
        """Return a context in which the layers use frostlab's attention."""
        return nullcontext()

    @abstractmethod
    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        """Embed (B, T) tokens as (B, T, width); `types` are token types, which only BERT has."""

    @abstractmethod
    def layer_arguments(self, x: Tensor, packing: Packing | None) -> dict[str, Any]:
        """Return the keyword arguments with which each layer is called."""

    @abstractmethod
    def read(self, x: Tensor, ids: Tensor, packing: Packing | None) -> Tensor:
        """Return the head's input: (B, T, width) for a language model, else a vector per sequence.

        `x` is the output of a layer. Without a packing, rows may be padded only at the end and only
        in a causal model, where no token before the padding attends to it. A classifier of
        frostlab's GPT takes no padded rows, because it reads all tokens or the last one of a row.
        """


class GPTStack(Stack):
    """The stack of frostlab's GPT."""

    def __init__(self, model: GPT) -> None:
        self.model, self.layers, self.head = model, list(model.blocks), model.head
        self.classifies = bool(model.config.classes)

    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        return self.model.embed(ids, self.places(ids, packing))

    def layer_arguments(self, x: Tensor, packing: Packing | None) -> dict[str, Any]:
        return {"mask": None, "packing": packing}

    def read(self, x: Tensor, ids: Tensor, packing: Packing | None) -> Tensor:
        if not self.classifies:
            return keep_and_norm(x, self.model.norm)[1]
        x = self.model.norm(x)
        if self.model.config.pooling == "last":
            if packing is None:
                return x[:, -1]
            every = torch.ones_like(packing.owners, dtype=torch.bool)
            return x.squeeze(0)[packing.lasts(every)]
        return x.mean(1) if packing is None else packing.mean(x.squeeze(0))


class DecoderStack(Stack):
    """The stack of frostlab's Decoder."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.layers, self.head = model, list(model.blocks), model.head
        self.classifies = False

    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        return look_up(self.model.tokens, ids)

    def layer_arguments(self, x: Tensor, packing: Packing | None) -> dict[str, Any]:
        return {"angles": self.model.angles(self.places(x, packing)), "packing": packing}

    def read(self, x: Tensor, ids: Tensor, packing: Packing | None) -> Tensor:
        return self.model.norm(x)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention for the layers of a Hugging Face model that runs as a stack."""
    assert attention_mask is None
    mixed = attend(
        query, key, value, packing=packing, causal=bool(module.is_causal), dropout=dropout,
        scale=scaling,
    )  # fmt: skip
    return mixed, None


@cache
def _register_attention() -> None:
    """Add our attention to transformers' registry, once."""
    from transformers import AttentionInterface  # imported here because it takes seconds

    AttentionInterface.register(_NAME, _attention)


class HuggingFaceStack(Stack):
    """The common base of the stacks of Hugging Face models."""

    def __init__(self, model: Any, body: Any, layers: Any, head: Any, classifies: bool) -> None:
        _register_attention()
        self.model, self.body, self.head = model, body, head
        self.layers, self.classifies = list(layers), classifies

    @contextmanager
    def attention(self) -> Iterator[None]:
        config = self.model.config
        implementation = config._attn_implementation
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = implementation

    def bypassed_modules(self) -> list[nn.Module]:
        return [*super().bypassed_modules(), self.body]

    def layer_arguments(self, x: Tensor, packing: Packing | None) -> dict[str, Any]:
        return {"attention_mask": None, "packing": packing}


class BertStack(HuggingFaceStack):
    """BERT: a classifier reads each sequence's first token, a language model reads every token."""

    def __init__(self, model: Any) -> None:
        classifies = hasattr(model, "classifier")
        head = model.classifier if classifies else model.cls.predictions.decoder
        super().__init__(model, model.bert, model.bert.encoder.layer, head, classifies)
        # a language model's tied embedding gets another `forward` in each step (`TiedGradient`)
        self.parts = [model.bert.embeddings] if classifies else []

    def bypassed_modules(self) -> list[nn.Module]:
        between = [] if self.classifies else [self.model.cls, self.model.cls.predictions]
        return [*super().bypassed_modules(), self.body.encoder, *between]

    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        places = self.places(ids, packing)[None]
        return self.body.embeddings(input_ids=ids, token_type_ids=types, position_ids=places)

    def read(self, x: Tensor, ids: Tensor, packing: Packing | None) -> Tensor:
        if not self.classifies:
            return self.model.cls.predictions.transform(x)
        if packing is not None:
            x = x.squeeze(0)[packing.firsts].unsqueeze(1)  # (N, 1, width)
        return self.model.dropout(self.body.pooler(x))


class CausalStack(HuggingFaceStack):
    """GPT-2 and Llama: a classifier reads each sequence's last token before the padding.

    A language model reads every token.
    """

    def __init__(self, model: Any, body: Any, layers: Any, norm: nn.Module) -> None:
        classifies = hasattr(model, "score")
        head = model.score if classifies else model.lm_head
        super().__init__(model, body, layers, head, classifies)
        self.norm = norm

    def read(self, x: Tensor, ids: Tensor, packing: Packing | None) -> Tensor:
        if self.classifies:
            pad = self.model.config.get_text_config().pad_token_id
            real = ids != (-1 if pad is None else pad)
            if packing is not None:
                x = x.squeeze(0)[packing.lasts(real.squeeze(0))]
            else:
                places = torch.arange(ids.shape[1], device=ids.device)
                x = x[torch.arange(len(ids), device=ids.device), (places * real).argmax(1)]
        return self.norm(x)


class GPT2Stack(CausalStack):
    """GPT-2, with learned positions."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.transformer, model.transformer.h, model.transformer.ln_f)

    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        tokens = look_up(self.body.wte, ids)
        return self.body.drop(tokens + self.body.wpe(self.places(ids, packing)))


class LlamaStack(CausalStack):
    """Llama, with rotary positions that are computed once for all layers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.model, model.model.layers, model.model.norm)

    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        return look_up(self.body.embed_tokens, ids)

    def layer_arguments(self, x: Tensor, packing: Packing | None) -> dict[str, Any]:
        places = self.places(x, packing)[None]
        angles = self.body.rotary_emb(x, position_ids=places)
        return super().layer_arguments(x, packing) | {"position_embeddings": angles}


STACKS: dict[str, Any] = {  # class of a model of transformers → its stack
    "BertForSequenceClassification": BertStack,
    "BertLMHeadModel": BertStack,
    "GPT2LMHeadModel": GPT2Stack,
    "GPT2ForSequenceClassification": GPT2Stack,
    "LlamaForCausalLM": LlamaStack,
    "LlamaForSequenceClassification": LlamaStack,
}


def take_apart(model: nn.Module) -> Stack | None:
    """Return a model as a stack, or None if its class is unknown or the stack would skip hooks."""
    kinds: dict[str, Any] = {"GPT": GPTStack, "Decoder": DecoderStack}
    if type(model).__module__.startswith("transformers.models."):
        kinds = STACKS
    elif type(model) not in (GPT, Decoder):
        return None
    kind = kinds.get(type(model).__name__)
    stack = None if kind is None else kind(model)
    return None if stack is None or any(map(_is_hooked, stack.bypassed_modules())) else stack


def is_causal(model: nn.Module) -> bool:
    """Return whether a model is one of frostlab's causal models.

    Without padding, their attention kernel skips later keys, so it computes fewer FLOPs.
    """
    return isinstance(model, Decoder) or (isinstance(model, GPT) and model.config.causal)


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks or pre-hooks of its forward or backward pass."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )

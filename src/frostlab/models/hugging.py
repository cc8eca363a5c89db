"""The pieces of Hugging Face's BERT, GPT-2 and Llama, attending with frostlab's packing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from frostlab.models.attention import Packing, attend
from frostlab.models.stack import Stack

_NAME = "frostlab"


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
    """Called by their attention modules; within a stack there is never a dense mask."""
    assert attention_mask is None
    mixed = attend(
        query, key, value, packing=packing, causal=bool(module.is_causal), dropout=dropout,
        scale=scaling,
    )  # fmt: skip
    return mixed, None


AttentionInterface.register(_NAME, _attention)


class HuggingStack(Stack):
    """What the three have in common."""

    def __init__(self, model: Any, body: Any, layers: Any, head: Any, classifies: bool) -> None:
        self.model, self.body, self.head = model, body, head
        self.layers, self.classifies = list(layers), classifies

    @contextmanager
    def attention(self) -> Iterator[None]:
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    def passed_over(self) -> list[nn.Module]:
        return [*super().passed_over(), self.body]

    def around(self, x: Tensor, packing: Packing | None) -> dict[str, Any]:
        return {"attention_mask": None, "packing": packing}


class BertStack(HuggingStack):
    """BERT reads a sequence's first token, or each token behind a transform."""

    def __init__(self, model: Any) -> None:
        classifies = hasattr(model, "classifier")
        head = model.classifier if classifies else model.cls.predictions.decoder
        super().__init__(model, model.bert, model.bert.encoder.layer, head, classifies)

    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        places = self.places(ids, packing)[None]
        return self.body.embeddings(input_ids=ids, token_type_ids=types, position_ids=places)

    def read(self, x: Tensor, ids: Tensor, packing: Packing | None) -> Tensor:
        if not self.classifies:
            return self.model.cls.predictions.transform(x)
        if packing is not None:
            x = x.squeeze(0)[packing.firsts].unsqueeze(1)  # (N, 1, width)
        return self.model.dropout(self.body.pooler(x))


class CausalStack(HuggingStack):
    """GPT-2 and Llama read each token, or a sequence's last that is no padding, behind a norm."""

    def __init__(self, model: Any, body: Any, layers: Any, norm: nn.Module) -> None:
        classifies = hasattr(model, "score")
        head = model.score if classifies else model.lm_head
        super().__init__(model, body, layers, head, classifies)
        self.norm = norm

    def read(self, x: Tensor, ids: Tensor, packing: Packing | None) -> Tensor:
        if self.classifies:
            pad = self.model.config.get_text_config().pad_token_id
            counts = ids != (-1 if pad is None else pad)
            if packing is not None:
                x = x.squeeze(0)[packing.lasts(counts.squeeze(0))]
            else:
                places = torch.arange(ids.shape[1], device=ids.device)
                x = x[torch.arange(len(ids), device=ids.device), (places * counts).argmax(1)]
        return self.norm(x)


class GPT2Stack(CausalStack):
    """GPT-2: learned positions."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.transformer, model.transformer.h, model.transformer.ln_f)

    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        return self.body.drop(self.body.wte(ids) + self.body.wpe(self.places(ids, packing)))


class LlamaStack(CausalStack):
    """Llama: rotary positions, computed once for all layers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.model, model.model.layers, model.model.norm)

    def embed(self, ids: Tensor, types: Tensor | None, packing: Packing | None) -> Tensor:
        return self.body.embed_tokens(ids)

    def around(self, x: Tensor, packing: Packing | None) -> dict[str, Any]:
        places = self.places(x, packing)[None]
        angles = self.body.rotary_emb(x, position_ids=places)
        return super().around(x, packing) | {"position_embeddings": angles}


STACKS: dict[str, Any] = {
    "BertForSequenceClassification": BertStack,
    "BertLMHeadModel": BertStack,
    "GPT2LMHeadModel": GPT2Stack,
    "GPT2ForSequenceClassification": GPT2Stack,
    "LlamaForCausalLM": LlamaStack,
    "LlamaForSequenceClassification": LlamaStack,
}

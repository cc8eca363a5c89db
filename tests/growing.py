"""Small models that can grow, with gains and biases that make a difference."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from zoo import GPT_SIZES, GROUPED, SIZES, SPECIAL

LAYERS = 3
_OWN: dict[str, Any] = {"vocabulary": 99, "width": 32, "layers": LAYERS, "heads": 4, "hidden": 64}
_BERT = SIZES | SPECIAL | {"num_hidden_layers": LAYERS}
_GPT2 = GPT_SIZES | {"n_layer": LAYERS}
_LLAMA = GROUPED | SPECIAL | {"num_hidden_layers": LAYERS}


def _gpt(**more: Any) -> GPT:
    return GPT(GPTConfig(**_OWN, positions=64, **more))


def _decoder(**more: Any) -> Decoder:
    return Decoder(DecoderConfig(**_OWN, **more))


OWN: dict[str, Callable[[], nn.Module]] = {
    "gpt": _gpt,
    "gpt-classifier": lambda: _gpt(causal=False, classes=3),
    "decoder-before": lambda: _decoder(norm="before", final_norm=True),
    "decoder-after": _decoder,
}
CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "bert-lm": lambda: hf.BertLMHeadModel(hf.BertConfig(**_BERT, is_decoder=True)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_GPT2)),
    "gpt2-scaled": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)),
}
HUGGING: dict[str, Callable[[], nn.Module]] = CAUSAL | {
    "bert": lambda: hf.BertModel(hf.BertConfig(**_BERT)),
    "bert-classifier": lambda: hf.BertForSequenceClassification(hf.BertConfig(**_BERT)),
    "gpt2-classifier": lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**_GPT2)),
    "llama-classifier": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**_LLAMA)),
}
ALL = OWN | HUGGING
ENDS_IN_A_NORM = ("decoder-after", "bert", "bert-lm", "bert-classifier")


def build(name: str, seed: int = 0) -> Any:
    """A model whose norms and biases differ from their initial values."""
    torch.manual_seed(seed)
    model = ALL[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def answers(model: nn.Module) -> Tensor:
    """The logits of a model for a few fixed tokens."""
    ids = torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output: Any = model(ids)
    if isinstance(output, Tensor):
        return output
    logits: Tensor = output["logits"] if "logits" in output else output[0]
    return logits


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((one - other).abs().max() / one.abs().max())

"""The models that peers are tried on, and what their parameters are, found without frostlab."""

from typing import Any

import transformers
from torch import nn

import frostlab as fl
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.load import recipe_from
from frostlab.records.schema import StepEvent
from frostlab.training.treatment import treat
from tiny import tiny
from zoo import GPT_SIZES, GROUPED, SIZES

MODELS = ("gpt", "gpt-language", "gpt-plain", "decoder", "bert", "gpt2", "llama")
TIED = ("gpt-language", "gpt2")
HEADS = ("head", "lm_head", "classifier", "pooler")


def build(name: str) -> nn.Module:
    small: dict[str, Any] = {"vocabulary": 20, "width": 16, "layers": 2, "heads": 2, "hidden": 32}
    if name == "gpt":
        return GPT(GPTConfig(**small, positions=12, classes=4))
    if name == "gpt-language":
        return GPT(GPTConfig(**small, positions=12))
    if name == "gpt-plain":
        return GPT(GPTConfig(**small, positions=12, classes=4, bias=False))
    if name == "decoder":
        return Decoder(DecoderConfig(**small))
    if name == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT_SIZES))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def treated(name: str, treatment: Any, seed: int = 0) -> nn.Module:
    model = build(name)
    treat(model, recipe_from({"treatment": treatment, "seed": seed}))
    return model


def learning(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def named(model: nn.Module, words: tuple[str, ...]) -> set[str]:
    """The parameters with one of these words in their path."""
    return {n for n, _ in model.named_parameters() if any(w in n.split(".") for w in words)}


def longer(treatment: Any, **changes: Any) -> dict[str, Any]:
    """The tiny recipe, long enough for its loss to go down."""
    return tiny(treatment=treatment, train__epochs=6, optim__lr=1e-2, **changes)


def losses(record: fl.RunRecord) -> list[float]:
    return [x for e in record.events(StepEvent) for x in e.loss]


def trained(record: fl.RunRecord) -> bool:
    """Whether the loss went down."""
    found = losses(record)
    return sum(found[-8:]) < 0.98 * sum(found[:8])

"""The model a recipe asks for, its weights drawn from the seed or read from a checkpoint."""

from typing import Any, Literal

import torch
from torch import nn

from frostlab.data import Material, Signals
from frostlab.errors import BadInput, nearest
from frostlab.models.conformer import build_conformer
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.models.pretrained import find_config, first_line, hub_answers
from frostlab.recipe import Recipe
from frostlab.recipe.conformer import ConformerModel
from frostlab.recipe.settings import DecoderModel, GPTModel, PretrainedModel


def build_for(recipe: Recipe, prepared: Material) -> nn.Module:
    """Build a recipe's model for its data, on the CPU; the same seed gives the same weights."""
    if not isinstance(prepared, Signals):
        return build_model(recipe, prepared.vocabulary, prepared.classes, prepared.pad)
    assert isinstance(recipe.model, ConformerModel)
    channels, subjects = len(prepared.channels), len(prepared.subjects)
    return build_conformer(recipe.model, channels, subjects, recipe.seed)


def build_model(recipe: Recipe, vocabulary: int, classes: int, pad: int) -> nn.Module:
    """Build a recipe's model on the CPU; the same seed gives the same weights."""
    torch.manual_seed(recipe.seed)
    wanted = recipe.model
    if isinstance(wanted, GPTModel):
        return GPT(_gpt_config(recipe, wanted, vocabulary, classes))
    if isinstance(wanted, DecoderModel):
        return Decoder(
            DecoderConfig(
                vocabulary=vocabulary,
                width=wanted.width,
                layers=wanted.layers,
                heads=wanted.heads,
                hidden=wanted.hidden or 4 * wanted.width,
                norm=wanted.norm,
                final_norm=wanted.final_norm,
            )
        )
    assert isinstance(wanted, PretrainedModel)
    return _pretrained(wanted, vocabulary, classes, pad, recipe.data.length)


def _gpt_config(recipe: Recipe, wanted: GPTModel, vocabulary: int, classes: int) -> GPTConfig:
    return GPTConfig(
        vocabulary=vocabulary,
        positions=wanted.positions or recipe.data.length,
        width=wanted.width,
        layers=wanted.layers,
        heads=wanted.heads,
        hidden=wanted.hidden or 4 * wanted.width,
        dropout=wanted.dropout,
        bias=wanted.bias,
        causal=not classes if wanted.causal is None else wanted.causal,
        classes=classes,
    )


def _pretrained(
    wanted: PretrainedModel, vocabulary: int, classes: int, pad: int, length: int
) -> nn.Module:
    """A Hugging Face model with the head the task needs; a new head is drawn from the seed."""
    import transformers

    config, _ = find_config(wanted.name)
    _change(config, wanted)
    if classes:
        config.num_labels = classes
    text = config.get_text_config()
    if not wanted.weights or text.pad_token_id is None:  # some look for the last token before it
        text.pad_token_id = pad
    room = getattr(text, "max_position_embeddings", None)
    if isinstance(room, int) and 0 < room < length:
        raise BadInput(f"model.name {wanted.name} has {room} positions; data.length is {length}")
    if not wanted.weights and vocabulary > text.vocab_size:
        text.vocab_size = vocabulary
    elif vocabulary > text.vocab_size:
        raise BadInput(
            f"model.name {wanted.name} knows {text.vocab_size} tokens, the tokenizer makes "
            f"{vocabulary}; use the model's own tokenizer"
        )
    if not classes and not _looks_back_only(text):
        raise BadInput(
            f"model.name {wanted.name} sees the tokens it is to predict; choose a causal model, "
            "or set model.config.is_decoder to true"
        )
    kind: Literal["SequenceClassification", "CausalLM"]
    kind = "SequenceClassification" if classes else "CausalLM"
    auto: Any = getattr(transformers, f"AutoModelFor{kind}")
    try:
        if wanted.weights:
            return auto.from_pretrained(
                wanted.name, config=config, dtype=torch.float32, local_files_only=not hub_answers()
            )
        return auto.from_config(config, dtype=torch.float32)
    except Exception as error:  # a checkpoint can be wrong in any way its class does not expect
        raise BadInput(f"model.name {wanted.name}: {first_line(error)}") from None


def _looks_back_only(config: Any) -> bool:
    """Whether a language model of this config is causal: encoders must be told to be."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    both = getattr(config, "is_encoder_decoder", False)  # its decoder alone is causal
    return bool(not encoder or both or getattr(config, "is_decoder", False))


def _change(config: Any, wanted: PretrainedModel) -> None:
    known = config.to_dict()
    for key, value in wanted.config.items():
        if key not in known:
            raise BadInput(
                f"model.config.{key} is not in the config of {wanted.name}{nearest(key, known)}"
            )
        try:
            setattr(config, key, value)
        except Exception as error:  # configs check what they are given, each in its own way
            raise BadInput(f"model.config.{key} = {value!r}: {first_line(error)}") from None

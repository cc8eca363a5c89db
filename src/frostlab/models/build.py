"""The model a recipe asks for, its weights drawn from the seed or read from a checkpoint."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import nn

from frostlab.data.builtin import PACKAGES, synthetic_vocabulary
from frostlab.data.eeg.recordings import Material, Signals
from frostlab.data.sources import KNOWN
from frostlab.data.tokenizers import definition
from frostlab.errors import BadInput, first_line, nearest
from frostlab.models.conformer import ConformerConfig, build_conformer
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.data import Docstrings, Named, PretrainedTokenizer, SimulatedEEG, Synthetic
from frostlab.recipe.model import ConformerModel, DecoderModel, GPTModel, PretrainedModel
from frostlab.recipe.recipe import Recipe


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


OWN = {"gpt": (GPT, GPTConfig), "decoder": (Decoder, DecoderConfig)}


def blueprint(name: str) -> tuple[nn.Module, str]:
    """Build a model without weights, on the meta device, and say where its shape came from.

    A folder's config comes first, then an architecture's default config (offline), then the
    hub's. No weights are read or downloaded.
    """
    if name in OWN:
        model, config = OWN[name]
        with torch.device("meta"):
            return model(config()), "frostlab's default config"
    config, source = find_config(name)
    try:
        with torch.device("meta"):
            return _model_class(config)(config), source
    except BadInput:
        raise
    except Exception as error:  # a config can be wrong in any way its model does not expect
        raise BadInput(f"{name}: its config builds no model ({first_line(error)})") from None


def recipe_blueprint(recipe: Recipe) -> tuple[nn.Module, str]:
    """Build a recipe's model on the meta device, and describe the sizes that its data decide.

    No data are read. Where the recipe does not fix the vocabulary, the classes, or the channels
    and subjects of an EEG, a common size stands in and the description says "assumed".
    """
    model = recipe.model
    if isinstance(model, ConformerModel):
        default = ConformerConfig()
        subjects, certainty = default.subjects, _ASSUMED
        if isinstance(recipe.data, SimulatedEEG):
            subjects, certainty = recipe.data.subjects, ""
        with torch.device("meta"):
            conformer = build_conformer(model, default.channels, subjects, recipe.seed)
        size = f"{default.channels} channels and {subjects} subjects{certainty}"
        return conformer, f"the recipe's model; {size}"
    sizes, vocabulary = list[str](), 0
    if isinstance(model, PretrainedModel):
        name, certainty = _config_at_hand(model.name)
        sizes.append(f"{model.name}{certainty}")
        model = model.model_copy(update={"weights": False, "name": name})
        recipe = recipe.model_copy(update={"model": model})
    else:
        vocabulary, certainty = _vocabulary(recipe)
        sizes.append(f"vocabulary {vocabulary:,}{certainty}")
    classes, certainty = _classes(recipe)
    if classes:
        sizes.append(f"{classes} classes{certainty}")
    with torch.device("meta"):
        built = build_model(recipe, vocabulary, classes, pad=0)
    return built, f"the recipe's model; {', '.join(sizes)}"


_ASSUMED, _AT_MOST = " (assumed)", " at most"


def _config_at_hand(name: str) -> tuple[str, str]:
    """Return a model whose config can be read: offline, a hub model's architecture stands in."""
    try:
        find_config(name)
    except BadInput:
        architecture = "" if looks_like_path(name) or Path(name).exists() else _beginning(name)
        if not architecture:
            raise
        return architecture, f" (not at hand; {architecture}'s default config is assumed)"
    return name, ""


def _vocabulary(recipe: Recipe) -> tuple[int, str]:
    """Return the size of a recipe's vocabulary, and how certain it is."""
    if isinstance(recipe.data, Synthetic):
        return synthetic_vocabulary(recipe.data), ""
    tokenizer = definition(recipe)
    if isinstance(tokenizer, PretrainedTokenizer):
        try:
            return int(find_config(tokenizer.name)[0].get_text_config().vocab_size), ""
        except BadInput:  # the tokenizer has no config at hand
            return GPTConfig().vocabulary, _ASSUMED
    if tokenizer.size is None:  # as many as the training split has words
        return DecoderConfig().vocabulary, _ASSUMED
    return tokenizer.size, _AT_MOST


def _classes(recipe: Recipe) -> tuple[int, str]:
    """Return how many classes a recipe tells apart, and how certain it is; 0: none."""
    data = recipe.data
    if data.task != "classification":
        return 0, ""
    if isinstance(data, Synthetic):
        return data.symbols, ""
    if isinstance(data, Docstrings):
        return (len(PACKAGES), _AT_MOST) if data.name == "docstrings" else (2, "")
    known = KNOWN[data.name].classes if isinstance(data, Named) else None
    return (2, _ASSUMED) if known is None else (known, "")


def find_config(name: str) -> tuple[Any, str]:
    """A model's config by folder, architecture or hub name, and where it came from."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    path = Path(name)
    if looks_like_path(name) and not os.path.exists(path):
        raise BadInput(f"{name} does not exist{nearest_path(path)}")
    if os.path.exists(path):
        if not (path / "config.json").is_file():
            raise BadInput(f"{name} is not a model folder (no config.json)")
        try:
            return AutoConfig.from_pretrained(path), f"{path / 'config.json'}"
        except Exception as error:  # whatever a damaged config makes transformers raise
            raise BadInput(f"{name}: its config cannot be read ({first_line(error)})") from None
    if name in CONFIG_MAPPING_NAMES:
        try:
            return AutoConfig.for_model(name), "the architecture's default config"
        except Exception as error:  # some architectures have no default
            raise BadInput(f"{name} has no default config ({first_line(error)})") from None
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=not hub_answers())
        return config, "the hub's config"
    except Exception as error:  # the hub's client has errors of many kinds
        raise BadInput(
            f"{name} is no folder, no architecture, and not to be had from the hub "
            f"({first_line(error)}){_nearest_architecture(name, CONFIG_MAPPING_NAMES)}"
        ) from None


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a place on this machine: the hub's have one slash, inside."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/")


def nearest_path(path: Path) -> str:
    """A hint at what there is: a neighbour of a similar name, or the last folder that exists."""
    there = next((folder for folder in path.parents if folder.is_dir()), None)
    if there is None:
        return ""
    if there != path.parent:
        return f"; there is nothing below {there}"
    try:
        names = sorted(each.name for each in there.iterdir())
    except OSError:  # a folder that may not be listed
        return ""
    return nearest(path.name, names, 0.7) or f"; no name like it is in {there}"


def hub_answers() -> bool:
    """Whether the hub's name can be looked up, so that being offline costs no retries."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    try:
        return not constants.HF_HUB_OFFLINE and bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def _nearest_architecture(name: str, known: Iterable[str]) -> str:
    """`bert-base-uncased` is nearest to `bert`, the longest architecture it begins with."""
    choices, last = [*known, *OWN], name.rpartition("/")[2].lower()
    begins = _beginning(name)
    if begins or "/" in name:  # somebody's model is no misspelt architecture
        return f"; did you mean `{begins}`?" if begins else ""
    return nearest(last, choices)


def _beginning(name: str) -> str:
    """Return the longest architecture that a model's name begins with, or ""."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    last = name.rpartition("/")[2].lower()
    begins = (kind for kind in (*CONFIG_MAPPING_NAMES, *OWN) if last.startswith(kind))
    return max(begins, key=len, default="")


def _model_class(config: Any) -> Any:
    """The class a checkpoint was saved from; else the one its kind is pretrained with."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_PRETRAINING_MAPPING_NAMES,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    names = list(getattr(config, "architectures", None) or [])
    for mapping in (
        MODEL_FOR_PRETRAINING_MAPPING_NAMES,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    ):
        found = mapping.get(config.model_type)
        names += [found] if isinstance(found, str) else list(found or [])
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise BadInput(f"no model class is known for `{config.model_type}`")

"""Hugging Face models by folder, architecture or hub name."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from frostlab.errors import BadInput, nearest
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig

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
    begins = max((kind for kind in choices if last.startswith(kind)), key=len, default="")
    if begins or "/" in name:  # somebody's model is no misspelt architecture
        return f"; did you mean `{begins}`?" if begins else ""
    return nearest(last, choices)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


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

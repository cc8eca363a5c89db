"""Models by name: frostlab's own, a folder, an architecture of transformers, or one on the hub."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from frostlab.errors import BadInput, Unavailable, first_line, nearest
from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.models.trust import careful, check_config, code_is_trusted
from frostlab.recipe.model import PretrainedModel

OWN_MODELS: dict[str, tuple[Any, Any]] = {  # name → model class, config class
    "gpt": (GPT, GPTConfig),
    "decoder": (Decoder, DecoderConfig),
    "conformer": (Conformer, ConformerConfig),
}


def find_config(name: str) -> tuple[Any, str]:
    """Return the config of a folder, an architecture or a hub model, and where it comes from."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.utils.hub import cached_file

    path = Path(name)
    exists = os.path.exists(path)
    if looks_like_path(name) and not exists:
        raise BadInput(f"{name} does not exist{nearest_path(path)}")
    if not exists and name in CONFIG_MAPPING_NAMES:
        try:
            return AutoConfig.for_model(name), "the architecture's default config"
        except Exception as error:  # some architectures have no default
            raise BadInput(f"{name} has no default config ({first_line(error)})") from None
    file: Any = path / "config.json"
    offline = exists or not hub_answers()
    if exists and not os.path.lexists(file):
        raise BadInput(f"{name} is not a model folder (no config.json)")
    if not exists:
        try:
            file = cached_file(name, "config.json", local_files_only=offline)
        except Exception as error:  # the hub's client has errors of many kinds
            raise Unavailable(
                f"{name} is not a folder or an architecture, and cannot be read from the hub "
                f"({first_line(error)}){_nearest_architecture(name, CONFIG_MAPPING_NAMES)}"
            ) from None
    check_config(Path(file), name)
    trust = code_is_trusted()
    try:
        with careful(name):
            config = AutoConfig.from_pretrained(
                name, local_files_only=offline, trust_remote_code=trust
            )
    except BadInput:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        raise BadInput(f"{name}: its config cannot be read ({first_line(error):.300})") from None
    return config, f"{file}" if exists else "the hub's config"


def check_available(settings: PretrainedModel) -> None:
    """Raise `Unavailable` if the config or weights of a model on the hub cannot be read."""
    find_config(settings.name)
    if settings.weights:
        check_weights_available(settings.name)


def check_weights_available(name: str) -> None:
    """Raise `Unavailable` if the weights of a model on the hub cannot be read."""
    if os.path.exists(name):
        return
    from transformers.utils.hub import cached_file

    reason = ""
    for file in ("model.safetensors", "model.safetensors.index.json"):
        try:
            cached_file(name, file, local_files_only=not hub_answers())
            return
        except Exception as error:  # the hub's client has errors of many kinds
            reason = reason or first_line(error)
    raise Unavailable(f"model.name {name}: its weights cannot be read from the hub ({reason:.300})")


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be a path: a hub name is `name` or `user/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/")


def nearest_path(path: Path) -> str:
    """Return a hint for a missing path: a similar name, or the last folder that exists."""
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is None:
        return ""
    if folder != path.parent:
        return f"; only {folder} exists"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:  # the folder is not readable
        return ""
    return nearest(path.name, names, 0.7) or f"; {folder} has no similar name"


def hub_answers() -> bool:
    """Return whether HF_HUB_OFFLINE is unset and the hub's host name resolves.

    Without this check, transformers would retry when the machine is offline.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    try:
        return not constants.HF_HUB_OFFLINE and bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def _nearest_architecture(name: str, architectures: Iterable[str]) -> str:
    """Return a hint with the architecture that a name begins with, or the most similar one."""
    choices, last = [*architectures, *OWN_MODELS], name.rpartition("/")[2].lower()
    begins = architecture_of(name)
    if begins or "/" in name:  # a user's model on the hub is not a misspelt architecture
        return f"; did you mean `{begins}`?" if begins else ""
    return nearest(last, choices)


def architecture_of(name: str) -> str:
    """Return the longest architecture that a name begins with (bert-base-uncased → bert), or ""."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    last = name.rpartition("/")[2].lower()
    begins = (kind for kind in (*CONFIG_MAPPING_NAMES, *OWN_MODELS) if last.startswith(kind))
    return max(begins, key=len, default="")

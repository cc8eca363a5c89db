"""Public sets from the hub, through the `datasets` library; offline it fails at once."""

import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from frostlab.data.files import optional
from frostlab.data.rows import Part
from frostlab.errors import BadInput

_ON = ("1", "true", "yes", "on")


def unreachable() -> str | None:
    """Return why the hub cannot be asked, None when it can be or its own cache must answer."""
    offline = any(
        os.environ.get(name, "").lower() in _ON
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    )
    if offline:  # the libraries then answer from their cache, or fail without a try
        return None
    host = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return f"{host} cannot be found; HF_HUB_OFFLINE=1 uses what was downloaded before"
    return None


def hub_parts(name: str, config: str | None, revision: str | None) -> dict[str, Part]:
    """Return the splits of a hub set, or raise BadInput saying why there are none."""
    datasets = optional("datasets", f"the hub's {name}")
    reason = None if Path(name).is_dir() else unreachable()
    if reason is not None:
        raise BadInput(reason)
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(name, config, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(f"the hub's {name}: {reason}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    place = name if config is None else f"{name} ({config})"
    return {
        str(split): Part(
            split=str(split),
            place=f"{place}: {split}",
            files=tuple(Path(file["filename"]) for file in rows.cache_files),
            hub=rows,
        )
        for split, rows in splits.items()
    }

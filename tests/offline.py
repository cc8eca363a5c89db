"""A machine without the hub, its cache and a data folder, whatever this one has."""

import os
from typing import Any

import pytest
import transformers.utils.hub

import frostlab.data.sources
import frostlab.data.tokenizers
import frostlab.models.build
import frostlab.models.named


def cut_off(patch: pytest.MonkeyPatch) -> None:
    """Let nothing be found on the hub or in its cache, and no data in a data folder."""

    original = transformers.utils.hub.cached_file

    def local_file(name: str, *arguments: Any, **options: Any) -> Any:
        if not os.path.isdir(name):
            raise OSError("there is no hub")
        return original(name, *arguments, **options)

    patch.delenv("FROSTLAB_DATA", raising=False)
    for module in (frostlab.data.sources, frostlab.data.tokenizers):
        patch.setattr(module, "unreachable", lambda: "there is no hub")
    for module in (frostlab.models.build, frostlab.models.named):
        patch.setattr(module, "hub_answers", lambda: False)
    patch.setattr(transformers.utils.hub, "cached_file", local_file)

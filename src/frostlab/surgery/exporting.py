"""A plain Hugging Face checkpoint of a model, whatever surgery it went through."""

import os
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import nn

from frostlab.anatomy import survey
from frostlab.data.cache import like_any_file
from frostlab.errors import BadInput
from frostlab.surgery.checks import refuse_untouchable, refuse_wrapped


def export(model: nn.Module, folder: str | Path) -> Path:
    """Write a checkpoint that `from_pretrained` loads without frostlab, with equal logits."""
    refuse_wrapped(model, "export")
    _, slots = survey(model)
    refuse_untouchable(model, slots.values(), "export")
    if any(slot.adapts is not None for slot in slots.values()):
        raise BadInput("export: the model has adapters; put PEFT's adapters into its weights first")
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise BadInput(
            f"export: {type(model).__name__} is not a Hugging Face model; its state_dict() "
            "already has the plain names and shapes"
        )
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise BadInput(f"export: {target} is a file, not a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").exists():
        raise BadInput(f"export: {target} holds something else; choose an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f".{target.name}-{uuid4().hex}")
    made.mkdir()
    try:
        save(made, state_dict=model.state_dict())
        for path in made.glob("*.safetensors"):
            like_any_file(path)
        if not target.exists():
            made.rename(target)
            return target
        written = {path.name for path in made.iterdir()}
        for old in target.glob("model*.safetensors*"):
            if old.name not in written:
                old.unlink()  # a shard of an older checkpoint; other files are the user's
        for path in made.iterdir():
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target

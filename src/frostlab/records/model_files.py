"""The files from which a run's model and tokenizer can be loaded without the run's data.

`model/` holds inputs.json and, for a Hugging Face model, its config.json; `tokenizer/` is a folder
that transformers can load. Both have checksums, so that a changed file is refused. The weights are
in checkpoints.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from frostlab.data.eeg.recordings import Signals
from frostlab.data.prepare import PreparedData
from frostlab.data.tokenizers import (
    Encoder,
    load_pretrained,
    load_trained,
    load_transformers_tokenizer,
    save_trained,
)
from frostlab.errors import BadInput
from frostlab.models.build import build_conformer, build_from_config, build_model
from frostlab.models.trust import code_is_trusted
from frostlab.recipe.model import ConformerModel, PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.records.manifest import MANIFEST, is_as_listed
from frostlab.storage import SEAL, damaged_file, read_json, seal
from frostlab.typed import read

MODEL, TOKENIZER = "model", "tokenizer"  # folders
_INPUTS, _CONFIG = "inputs.json", "config.json"


@dataclass(frozen=True)
class ModelInputs:
    """model/inputs.json: sizes and names of the model's inputs and outputs, given by the data."""

    vocabulary: int | None  # number of token ids; null for EEG
    classes: int  # number of classes; 0 for language and EEG
    pad: int | None  # token id that pads short examples; null for EEG
    tokenizer: Literal["trained", "pretrained"] | None  # null if the data are not text
    channels: list[str] | None  # EEG: names of the channels, in order
    subjects: list[str] | None  # EEG: subjects in the order of the subject embedding's rows


def inputs_of(prepared: PreparedData) -> ModelInputs:
    """Return the inputs and outputs of a model for these data."""
    if isinstance(prepared, Signals):
        return ModelInputs(
            vocabulary=None,
            classes=0,
            pad=None,
            tokenizer=None,
            channels=list(prepared.channels),
            subjects=list(prepared.subjects),
        )
    tokenizer: Literal["trained", "pretrained"] | None = None
    if prepared.tokenizer is not None:
        tokenizer = "pretrained" if prepared.tokenizer.is_dir() else "trained"
    return ModelInputs(
        vocabulary=prepared.vocabulary,
        classes=prepared.classes,
        pad=prepared.pad,
        tokenizer=tokenizer,
        channels=None,
        subjects=None,
    )


def write_model_files(folder: Path, prepared: PreparedData, config: str | None) -> None:
    """Write `model/` and `tokenizer/` into a run's folder.

    `config` is the text of a Hugging Face model's config.json; None for frostlab's own models.
    """
    (folder / MODEL).mkdir()
    text = json.dumps(asdict(inputs_of(prepared)), indent=1)
    (folder / MODEL / _INPUTS).write_text(text, encoding="utf-8")
    if config is not None:
        (folder / MODEL / _CONFIG).write_text(config, encoding="utf-8")
    seal(folder / MODEL)
    source = None if isinstance(prepared, Signals) else prepared.tokenizer
    if source is None:
        return
    if source.is_dir():
        shutil.copytree(source, folder / TOKENIZER, copy_function=shutil.copyfile)
    else:
        (folder / TOKENIZER).mkdir()
        save_trained(source, folder / TOKENIZER)
    seal(folder / TOKENIZER)


def read_inputs(folder: Path) -> ModelInputs:
    """Read model/inputs.json of a run's folder."""
    path = _whole(folder, MODEL, _INPUTS) / _INPUTS
    inputs = read(ModelInputs, read_json(path), path)
    if inputs.classes < 0:
        raise BadInput(f"{path}: classes should not be negative")
    if inputs.channels is None and not 0 <= (inputs.pad or 0) < (inputs.vocabulary or 0):
        raise BadInput(f"{path}: pad should be one of the token ids below vocabulary")
    return inputs


def build_stored(recipe: Recipe, folder: Path) -> nn.Module:
    """Build a run's model on the CPU, without its treatment and its trained weights.

    A model with Python code of its own is built from the folder or hub name in the recipe,
    because the code is not copied.
    """
    inputs, settings = read_inputs(folder), recipe.model
    if isinstance(settings, ConformerModel):
        if inputs.channels is None or inputs.subjects is None:
            raise BadInput(f"{folder / MODEL / _INPUTS} has no channels or no subjects")
        channels, subjects = len(inputs.channels), len(inputs.subjects)
        return build_conformer(settings, channels, subjects, recipe.seed)
    if inputs.vocabulary is None or inputs.pad is None:
        raise BadInput(f"{folder / MODEL / _INPUTS} has no vocabulary or no pad")
    if isinstance(settings, PretrainedModel) and not _runs_code(folder / MODEL / _CONFIG):
        return build_from_config(folder / MODEL, inputs.classes)
    return build_model(recipe, inputs.vocabulary, inputs.classes, inputs.pad)


def _runs_code(config: Path) -> bool:
    """Return whether a config names Python code that the user has allowed to run."""
    if not code_is_trusted() or not config.is_file():
        return False
    values = read_json(config)
    return isinstance(values, dict) and "auto_map" in values


def stored_encoder(folder: Path) -> Encoder:
    """Return the encoder of a run's tokenizer, which encodes texts as it did in training."""
    inputs = read_inputs(folder)
    place = _tokenizer_folder(folder, inputs)
    encoder: Encoder
    if inputs.tokenizer == "trained":
        encoder = load_trained(place / "tokenizer.json")
    else:
        encoder = load_pretrained(str(place.absolute())).encoder
    if encoder.vocabulary != inputs.vocabulary:
        raise BadInput(
            f"{place} has {encoder.vocabulary} tokens, and the model {inputs.vocabulary}; "
            "it is not this run's tokenizer"
        )
    return encoder


def stored_tokenizer(folder: Path) -> Any:
    """Return a run's tokenizer as an object of transformers; it always has a padding token."""
    tokenizer = load_transformers_tokenizer(
        str(_tokenizer_folder(folder, read_inputs(folder)).absolute())
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # as in training
    return tokenizer


def _tokenizer_folder(folder: Path, inputs: ModelInputs) -> Path:
    if inputs.tokenizer is None:
        made_of = "EEG" if inputs.channels is not None else "generated tokens"
        raise BadInput(f"{folder} has no tokenizer: its data are {made_of}, not text")
    needed = ("tokenizer.json",) if inputs.tokenizer == "trained" else ()
    place = _whole(folder, TOKENIZER, *needed)
    if not is_as_listed(folder, f"{TOKENIZER}/{SEAL}"):
        raise BadInput(f"{place} is not this run's tokenizer: {MANIFEST} has other checksums")
    return place


def _whole(folder: Path, name: str, *needed: str) -> Path:
    """Return a folder in a run's folder; verify its checksums, and that it has these files."""
    path = folder / name
    if path.is_symlink() or not path.is_dir():
        raise BadInput(f"{path} is missing, so the run cannot be loaded")
    if (damaged := damaged_file(path)) is not None:
        raise BadInput(f"{damaged} was changed, added or removed, so the run cannot be loaded")
    for file in needed:
        if not (path / file).is_file():
            raise BadInput(f"{path / file} is missing, so the run cannot be loaded")
    return path

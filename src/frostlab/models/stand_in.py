"""Stand-ins: built-in data, learned tokenizers and random weights in place of missing ones.

A stand-in for data has the form of the missing data: as many classes, pairs of texts in place of
pairs, running text in place of running text, EEG in place of EEG. A stand-in for a model has the
same architecture; its layers are narrower if the recipe's scale is tiny or small
(`frostlab.recipe.scale`). A user's own text and everything that is available are never replaced.
The recipe records a stand-in in `stands_for`, and its runs show a warning with their results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frostlab.data.eeg.readers import find_folder
from frostlab.data.sources import PUBLIC_SETS, public_splits
from frostlab.data.tokenizers import load_transformers_tokenizer, tokenizer_settings
from frostlab.errors import BadInput, Unavailable
from frostlab.models.named import architecture_of, check_available, find_config
from frostlab.recipe.data import Named, PretrainedTokenizer, RecordedEEG
from frostlab.recipe.load import recipe_from
from frostlab.recipe.model import PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.scale import narrowed

_SPLITS = ("train", "validation", "test")  # splits of the built-in data `docstrings`
_HEADS = "num_attention_heads"  # key of a Hugging Face config
# settings of text data that a stand-in shares with the missing data
_TEXT = ("task", "length", "stride", "splits", "tune", "report", "limit", "evaluation_limit")
_SIGNALS = ("rate", "length", "hop", "windows")  # the same for EEG


@contextmanager
def suggesting_stand_in() -> Iterator[None]:
    """Add a hint about the option --stand-in to the error about missing data or a missing model."""
    try:
        yield
    except Unavailable as error:
        raise Unavailable(
            f"{error}; or add --stand-in to use built-in data or random weights instead"
        ) from None


def with_stand_ins(recipe: Recipe, data_dir: str | Path | None = None) -> Recipe:
    """Return the recipe with stand-ins for its missing data, tokenizer and pretrained weights.

    Settings that only the stand-in has take their defaults, reduced to the recipe's scale.

    Raises:
        BadInput: nothing stands in for a missing model, because its architecture is not known.
    """
    data, model, tokenizer = recipe.data, recipe.model, recipe.tokenizer
    if data.form == "text" and tokenizer is None:
        tokenizer = tokenizer_settings(recipe)
    changes: dict[str, Any] = {}
    folder = None if data_dir is None else Path(data_dir)
    if isinstance(data, Named) and not _has_text(data, folder):
        changes["data"] = _text_for(data)
    if isinstance(data, RecordedEEG) and _is_missing(find_folder, data.path, folder):
        shared = {key: getattr(data, key) for key in _SIGNALS}
        changes["data"] = {"name": "eeg-simulated", **shared, "stands_for": data.name}
    if isinstance(model, PretrainedModel) and _is_missing(check_available, model):
        changes["model"] = _model_for(model, recipe.scale)
        if isinstance(tokenizer, PretrainedTokenizer):  # the stand-in has no tokenizer of its own
            changes["tokenizer"] = tokenizer.model_dump(mode="json")
    name = tokenizer.name if isinstance(tokenizer, PretrainedTokenizer) else None
    if name is not None and _is_missing(load_transformers_tokenizer, name):
        changes["tokenizer"] = {"kind": "bpe", "stands_for": name}
    return recipe_from(recipe.to_dict() | changes) if changes else recipe


def _is_missing(find: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether `find` raises Unavailable; the run itself will report any other error."""
    try:
        find(*arguments)
    except Unavailable:
        return True
    except BadInput:
        return False
    return False


def _has_text(data: Named, data_dir: Path | None) -> bool:
    needed = {data.name: data.language}
    if data.name == "xnli":  # models for XNLI are trained on MNLI
        needed["mnli"] = "en"
    return not any(_is_missing(public_splits, *item, data_dir) for item in needed.items())


def _text_for(data: Named) -> dict[str, Any]:
    """Return settings of the built-in data `docstrings`, in the form of a public data set."""
    facts = PUBLIC_SETS[data.name]
    values = {key: getattr(data, key) for key in _TEXT}
    for key in ("tune", "report"):
        if isinstance(values[key], str) and values[key] not in _SPLITS:
            values[key] = None
    if data.splits == "honest" and values["report"] == "validation" and values["tune"] is None:
        # docstrings would select checkpoints on this split, so report on the default one
        values["report"] = None
    return {
        "name": "docstrings-pairs" if len(facts.texts) > 1 else "docstrings",
        **values,
        "classes": facts.classes if data.task == "classification" else None,
        "stands_for": data.name,
    }


def _model_for(model: PretrainedModel, scale: str) -> dict[str, Any]:
    """Return settings of the same architecture with random weights.

    The layers are narrower if the scale is not "full".
    """
    name = architecture_of(model.name)
    if not name:
        raise BadInput(
            f"model.name {model.name} is not available, and frostlab has no stand-in for it: the "
            "name does not begin with an architecture, such as bert"
        )
    config = dict(model.config)
    if scale != "full":
        default, _ = find_config(name)
        width, heads = (getattr(default, key, None) for key in ("hidden_size", _HEADS))
        if isinstance(width, int) and isinstance(heads, int):
            narrow = narrowed(scale, width, heads)
            sizes = {"hidden_size": narrow}
            if hasattr(default, "intermediate_size"):
                sizes["intermediate_size"] = default.intermediate_size * narrow // width
            config = sizes | config
    return {
        "kind": "pretrained",
        "name": name,
        "weights": False,
        "config": config,
        "stands_for": model.name,
    }

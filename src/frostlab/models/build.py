"""Construction of models, from a recipe or by name.

The weights of a recipe's model are drawn from the recipe's seed or read from a Hugging Face
checkpoint. A blueprint is a model on the meta device, without values for its weights.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from frostlab.data.builtin import PACKAGES
from frostlab.data.eeg.recordings import Signals
from frostlab.data.prepare import PreparedData
from frostlab.data.sources import PUBLIC_SETS
from frostlab.data.tokenizers import tokenizer_settings
from frostlab.errors import BadInput, first_line, nearest
from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.models.named import (
    OWN_MODELS,
    architecture_of,
    check_weights_available,
    find_config,
    hub_answers,
    looks_like_path,
)
from frostlab.models.trust import (
    Refused,
    careful,
    check_config,
    check_weights,
    code_is_trusted,
    never_ask,
    no_safetensors_on_hub,
)
from frostlab.recipe.data import Docstrings, Generated, Named, PretrainedTokenizer, SimulatedEEG
from frostlab.recipe.model import ConformerModel, DecoderModel, GPTModel, PretrainedModel
from frostlab.recipe.recipe import Recipe
from frostlab.storage import digest_of, file_digest
from frostlab.text import typed

# word in a key of `model.config` → the largest number allowed for this key; 2**24 for other keys
_LARGEST_SETTINGS = {"layer": 300, "position": 2**20}


def build_for(recipe: Recipe, prepared: PreparedData) -> nn.Module:
    """Build a recipe's model for its data, on the CPU; the same seed gives the same weights."""
    if not isinstance(prepared, Signals):
        return build_model(recipe, prepared.vocabulary, prepared.classes, prepared.pad)
    assert isinstance(recipe.model, ConformerModel)
    channels, subjects = len(prepared.channels), len(prepared.subjects)
    return build_conformer(recipe.model, channels, subjects, recipe.seed)


def build_conformer(settings: ConformerModel, channels: int, subjects: int, seed: int) -> Conformer:
    """Build a Conformer on the CPU for the given numbers of EEG channels and subjects."""
    config = ConformerConfig(channels=channels, subjects=subjects, **_config_values(settings))
    return _build_own(Conformer, config, seed)


def build_model(recipe: Recipe, vocabulary: int, classes: int, pad: int) -> nn.Module:
    """Build a recipe's token model on the CPU; the same seed gives the same weights."""
    settings = recipe.model
    if isinstance(settings, GPTModel):
        values = _config_values(settings)
        values["positions"] = settings.positions or recipe.data.length
        values["causal"] = not classes if settings.causal is None else settings.causal
        config = GPTConfig(vocabulary=vocabulary, classes=classes, **values)
        return _build_own(GPT, config, recipe.seed)
    if isinstance(settings, DecoderModel):
        decoder = DecoderConfig(vocabulary=vocabulary, **_config_values(settings))
        return _build_own(Decoder, decoder, recipe.seed)
    assert isinstance(settings, PretrainedModel)
    torch.manual_seed(recipe.seed)
    return _pretrained(settings, vocabulary, classes, pad, recipe.data.length)


def _build_own(kind: Any, config: Any, seed: int) -> Any:
    """Build one of frostlab's own models; refuse one that does not fit into memory."""
    if torch.get_default_device().type != "meta":
        # the size of one layer is the difference between these two sizes
        one_layer, two_layers = (_size(kind, replace(config, layers=count)) for count in (1, 2))
        _check_memory(
            one_layer + (two_layers - one_layer) * (config.layers - 1),
            f"model.width {config.width} and model.layers {config.layers} give",
        )
    torch.manual_seed(seed)
    return kind(config)


@cache
def _size(kind: Any, config: Any) -> int:
    """Return the size in bytes of one of frostlab's own models (cached for further runs)."""
    with _on_meta():
        return _bytes_of(kind(config))


class _WithoutDraws(TorchFunctionMode):
    """Skip `normal_`, which takes milliseconds for each tensor on the meta device.

    The first `normal_` on the meta device also imports torch._dynamo, which takes a second.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.normal_:
            return args[0]
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **kwargs)


@contextmanager
def _on_meta() -> Iterator[None]:
    """Build models on the meta device, where there is nothing to draw."""
    with torch.device("meta"), _WithoutDraws():
        yield


def _bytes_of(model: nn.Module) -> int:
    """Return the size of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _check_memory(size: int, what: str) -> None:
    """Refuse a model whose weights alone are larger than the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise BadInput(
            f"{what} a model of {size / 1e9:,.0f} GB, but this machine has {memory / 1e9:,.0f} GB "
            "of memory"
        )


def _config_values(settings: GPTModel | DecoderModel | ConformerModel) -> dict[str, Any]:
    """Return the values of a recipe's model section, under the names of the model's config."""
    values = settings.model_dump(exclude={"kind"})
    values["hidden"] = settings.hidden or 4 * settings.width
    return values


def _pretrained(
    settings: PretrainedModel, vocabulary: int, classes: int, pad: int, length: int
) -> nn.Module:
    """Build a Hugging Face model with the task's head; a new head is drawn from the seed."""
    config, _ = find_config(settings.name)
    _apply_settings(config, settings)
    if classes:
        config.num_labels = classes
    text = config.get_text_config()
    if not settings.weights or text.pad_token_id is None:
        # some classifiers find the last token of a text by the padding token after it
        text.pad_token_id = pad
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < length:
        raise BadInput(
            f"model.name {settings.name} has {positions} positions; data.length is {length}"
        )
    if not settings.weights and vocabulary > text.vocab_size:
        text.vocab_size = vocabulary
    elif vocabulary > text.vocab_size:
        raise BadInput(
            f"model.name {settings.name} has a vocabulary of {text.vocab_size} tokens, and the "
            f"tokenizer one of {vocabulary}; use the model's own tokenizer"
        )
    if not classes and not _is_causal(text):
        raise BadInput(
            f"model.name {settings.name} sees the tokens that it predicts; choose a causal model, "
            "or set model.config.is_decoder to true"
        )
    auto, trust = _auto_class(classes), code_is_trusted()
    if settings.weights:
        check_weights_available(settings.name)
    if settings.weights and os.path.exists(settings.name):
        folder = Path(settings.name)
        check_weights(folder, check_config(folder / "config.json", settings.name))
    try:
        with never_ask():
            _check_config_memory(auto, config, f"model.name {settings.name} and model.config give")
            if not settings.weights:
                return auto.from_config(config, dtype=torch.float32, trust_remote_code=trust)
            return auto.from_pretrained(
                settings.name,
                config=config,
                dtype=torch.float32,
                local_files_only=not hub_answers(),
                trust_remote_code=trust,
                use_safetensors=True,
            )
    except BadInput:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        problem = first_line(error)
        if "use_safetensors" in problem:  # transformers then advises unpickling the weights
            problem = no_safetensors_on_hub(settings.name)
        raise BadInput(f"model.name {settings.name}: {problem:.300}") from None


def _auto_class(classes: int) -> Any:
    """Return transformers' auto class for a classifier or, without classes, a language model."""
    import transformers

    kind = "SequenceClassification" if classes else "CausalLM"
    return getattr(transformers, f"AutoModelFor{kind}")


def _check_config_memory(auto: Any, config: Any, what: str) -> None:
    """Refuse a Hugging Face config whose model does not fit into memory."""
    if torch.get_default_device().type != "meta":
        with _on_meta(), torch.random.fork_rng(devices=[]):
            model = auto.from_config(
                config, dtype=torch.float32, trust_remote_code=code_is_trusted()
            )
        _check_memory(_bytes_of(model), what)


def config_json(model: Any) -> str:
    """Return the config.json of a Hugging Face model, with every default spelled out."""
    return str(model.config.to_json_string(use_diff=False))


def build_from_config(folder: Path, classes: int) -> nn.Module:
    """Build the Hugging Face model of a folder's config.json; its weights are drawn, not read."""
    config, _ = find_config(str(folder))
    auto = _auto_class(classes)
    try:
        with never_ask():
            with careful(str(folder)):
                _check_config_memory(auto, config, f"{folder / 'config.json'} gives")
            return auto.from_config(
                config, dtype=torch.float32, trust_remote_code=code_is_trusted()
            )
    except BadInput:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        raise BadInput(f"{folder / 'config.json'}: {first_line(error):.300}") from None


def weight_source(settings: object) -> dict[str, str | None]:
    """Return a digest of the files of a recipe's pretrained model, and the hub's commit.

    Both are None if the weights are drawn from the seed; the commit is also None for a folder. The
    model must have been loaded before, so that a hub model's files are in the local cache.
    """
    if not isinstance(settings, PretrainedModel) or not settings.weights:
        return {"source": None, "revision": None}
    folder, revision = Path(settings.name), None
    if not os.path.exists(folder):
        from transformers.utils.hub import cached_file

        folder = Path(str(cached_file(settings.name, "config.json", local_files_only=True))).parent
        revision = folder.name  # a snapshot in the hub's cache is named after its commit
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("*.json")))
    states = tuple((str(path), (state := path.stat()).st_size, state.st_mtime_ns) for path in files)
    return {"source": _files_digest(states), "revision": revision}


@cache
def _files_digest(states: tuple[tuple[str, int, int], ...]) -> str:
    """Return a digest of files; their sizes and modification times only serve as cache keys."""
    return digest_of([(Path(path).name, file_digest(Path(path))) for path, _, _ in states])[:16]


def _is_causal(config: Any) -> bool:
    """Return whether a language model is causal; an encoder is causal only if `is_decoder`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encoder_decoder = getattr(config, "is_encoder_decoder", False)  # its decoder is causal
    return bool(not encoder or encoder_decoder or getattr(config, "is_decoder", False))


def _apply_settings(config: Any, settings: PretrainedModel) -> None:
    """Set the values of the recipe's `model.config` in a Hugging Face config."""
    defaults = config.to_dict()
    for key, value in settings.config.items():
        if key not in defaults:
            raise BadInput(
                f"model.config.{key} is not in the config of {settings.name}"
                f"{nearest(key, defaults)}"
            )
        most = next((most for word, most in _LARGEST_SETTINGS.items() if word in key), 2**24)
        if isinstance(value, int | float) and typed(defaults[key], int) and value < 0:
            raise BadInput(f"model.config.{key} = {value} should not be negative")
        if isinstance(value, int | float) and abs(value) > most:
            limit = f"at most {most}" if value > 0 else f"at least {-most}"
            raise BadInput(f"model.config.{key} = {value} should be {limit}")
        try:
            setattr(config, key, value)
        except Exception as error:  # configs validate values in different ways
            raise BadInput(f"model.config.{key} = {value!r:.80}: {first_line(error)}") from None


def blueprint(name: str) -> tuple[nn.Module, str]:
    """Build a model on the meta device; return it and the source of its config.

    The name is one of frostlab's own models (gpt, decoder, conformer), a folder with a config,
    an architecture of transformers, which has a default config, or a model on the hub. No
    weights are read or downloaded.
    """
    if name in OWN_MODELS:
        model, config = OWN_MODELS[name]
        with _on_meta():
            return model(config()), "frostlab's default config"
    config, source = find_config(name)
    try:
        with careful(name), _on_meta():
            return _without_weights(config), source
    except BadInput:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        raise BadInput(
            f"{name}: no model can be built from its config ({first_line(error):.300})"
        ) from None


def recipe_blueprint(recipe: Recipe) -> tuple[nn.Module, str]:
    """Build a recipe's model on the meta device; return it and a description of its sizes.

    No data are read. If the recipe does not fix the vocabulary, the classes, or the EEG channels
    and subjects, a typical or the largest size is used, and the description says "assumed" or
    "at most".
    """
    model = recipe.model
    if isinstance(model, ConformerModel):
        default = ConformerConfig()
        subjects, certainty = default.subjects, _ASSUMED
        if isinstance(recipe.data, SimulatedEEG):
            subjects, certainty = recipe.data.subjects, ""
        with _on_meta():
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
    with careful("the recipe's model"), _on_meta():
        built = build_model(recipe, vocabulary, classes, pad=0)
    return built, f"the recipe's model; {', '.join(sizes)}"


_ASSUMED, _AT_MOST = " (assumed)", " at most"


def _config_at_hand(name: str) -> tuple[str, str]:
    """Return a model's name and ""; if its config is missing, its architecture and a note."""
    try:
        find_config(name)
    except Refused:
        raise
    except BadInput:
        architecture = "" if looks_like_path(name) or Path(name).exists() else architecture_of(name)
        if not architecture:
            raise
        return architecture, f" (not available; {architecture}'s default config is assumed)"
    return name, ""


def _vocabulary(recipe: Recipe) -> tuple[int, str]:
    """Return the size of a recipe's vocabulary, and a note if the size is not certain."""
    if isinstance(recipe.data, Generated):
        return recipe.data.vocabulary, ""
    tokenizer = tokenizer_settings(recipe)
    if isinstance(tokenizer, PretrainedTokenizer):
        try:
            return int(find_config(tokenizer.name)[0].get_text_config().vocab_size), ""
        except BadInput:  # the tokenizer's config is not available
            return GPTConfig().vocabulary, _ASSUMED
    if tokenizer.size is None:  # every word of the training split, which is not read here
        return DecoderConfig().vocabulary, _ASSUMED
    return tokenizer.size, _AT_MOST


def _classes(recipe: Recipe) -> tuple[int, str]:
    """Return the number of classes (0 without classification), and a note if it is not certain."""
    data = recipe.data
    if isinstance(data, Generated):
        return data.classes, ""
    if data.task != "classification":
        return 0, ""
    if isinstance(data, Docstrings):
        if data.classes is not None:
            return data.classes, ""
        return (len(PACKAGES), _AT_MOST) if data.name == "docstrings" else (2, "")
    classes = PUBLIC_SETS[data.name].classes if isinstance(data, Named) else None
    return (2, _ASSUMED) if classes is None else (classes, "")


def _without_weights(config: Any) -> nn.Module:
    """Build a model from its config alone, with the model's own code if the user trusts it."""
    import transformers

    own = getattr(config, "auto_map", None) or {}
    autos = [key for key in own if key.startswith("AutoModel")]
    if not autos or not code_is_trusted():
        return _model_class(config)(config)
    auto = next((key for key in autos if key == "AutoModelForCausalLM"), autos[0])
    return getattr(transformers, auto).from_config(config, trust_remote_code=True)


def _model_class(config: Any) -> Any:
    """Return the class named in the config, or else the first class for the config's model type."""
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
        classes = mapping.get(config.model_type)
        names += [classes] if isinstance(classes, str) else list(classes or [])
    for name in names:
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class
    raise BadInput(f"transformers has no model class for `{config.model_type}`")

"""Export of a run as a Hugging Face folder, with its tokenizer and a model card."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from frostlab import __version__
from frostlab.data.encode import columns_of
from frostlab.errors import BadInput
from frostlab.models.huggingface import is_own
from frostlab.models.sampling import position_limit
from frostlab.recipe.recipe import shorten_paths
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import read_inputs, stored_tokenizer
from frostlab.storage import whole_folder, write_whole
from frostlab.surgery.adapters import merge_adapters
from frostlab.surgery.save import HEAD, check_exportable, write_checkpoint
from frostlab.text import Markdown, escaped, markdown, number, plain
from frostlab.training.restore import best_model
from frostlab.training.treatment import wants_types
from frostlab.use.predict import text_data

CARD = "README.md"
_GENERATED = 50  # the most tokens that the card's code generates


def export_run(record: RunRecord, folder: str | Path) -> Path:
    """Write a run's best weights, tokenizer, labels and a model card as a Hugging Face folder.

    If the run was trained on a synthetic task (random symbols as token ids, no text), there is no
    tokenizer to write. Adapters are merged into the weights they adapt. If no class of transformers
    can express the model, the run is refused, and nothing is written. This is so for the Conformer
    and, with some settings, for frostlab's other models.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise BadInput(f"export: {target} is a file; choose another folder")
    if target.is_dir() and any(target.iterdir()):
        raise BadInput(f"export: {target} is not empty; choose another folder")
    if record.data.task == "envelope":
        raise BadInput(
            f"export: {record.folder} decodes EEG with frostlab's Conformer, which no class "
            f"of transformers can hold; `frostlab predict {record.folder.name} FOLDER` decodes "
            "EEG with it"
        )
    model, labels = best_model(record), record.data.labels
    merge_adapters(model)
    check_exportable(model)
    tokenizer = _tokenizer(record, model)
    with whole_folder(target) as temporary:
        write_checkpoint(
            model,
            temporary,
            tokenizer,
            None if labels is None else [str(label) for label in labels],
            record.recipe.data.length,
        )
        card = model_card(record, model, target.absolute().name, tokenizer is not None)
        write_whole(temporary / CARD, card)
    return target


def _tokenizer(record: RunRecord, model: nn.Module) -> Any:
    """Return the run's tokenizer, set to make inputs as in training; None if it has none."""
    if read_inputs(record.folder).tokenizer is None:
        return None
    tokenizer = stored_tokenizer(record.folder)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    if is_own(model) or not wants_types(model):
        names.remove("token_type_ids")
    tokenizer.model_input_names = names
    tokenizer.init_kwargs["model_input_names"] = names  # else it is not saved
    if record.data.task == "classification":
        tokenizer.model_max_length = record.recipe.data.length
    elif (limit := position_limit(model)) is not None:
        tokenizer.model_max_length = limit
    return tokenizer


# The model card


def model_card(record: RunRecord, model: nn.Module, folder: str, tokenizer: bool) -> str:
    """Return the model card of a run in Markdown: how to use the model, and how it was trained.

    Args:
        folder: the name of the folder that the card's code loads.
        tokenizer: whether the folder has a tokenizer.
    """
    language = record.data.task == "language"
    task = "text-generation" if language else "text-classification"
    kind = "language model" if language else "classifier"
    code = _snippet(record, model, folder, tokenizer)
    sections = [
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- frostlab\n---",
        f"# {escaped(record.start.name)}",
        f"A {kind}, trained with frostlab and exported by its version {__version__}. "
        f"{_made_of(record, model)}",
        f"## Use\n\n```python\n{code}```",
        f"## Results\n\n{_results(record)}",
        f"## Data\n\n{_data(record)}",
        f"## Training\n\n{_training(record)}",
        f"## Recipe\n\n```yaml\n{_recipe(record)}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def plain_block(text: str) -> str:
    """Return a text that cannot end the Markdown code block that holds it."""
    return "\n".join(plain(line) for line in text.rstrip().split("\n")).replace("```", "` ` `")


def _made_of(record: RunRecord, model: nn.Module) -> str:
    """Name the class of transformers that holds the model, and the differences from that class."""
    if not is_own(model):
        return f"Its class is `{type(model).__name__}` of transformers."
    if record.data.task == "classification":
        reads = (
            "the mean of the last hidden states over the tokens"
            if getattr(record.recipe.model, "pooling", "mean") == "mean"
            else "the last hidden state of the last token"
        )
        causal = getattr(record.recipe.model, "causal", False)
        unlike = " Versions 5.9 to 5.17 of transformers ignore that it is causal." if causal else ""
        return (
            f"The linear head of frostlab's `gpt` reads {reads}. The folder has the model without "
            "its head as a MegatronBERT, which gives the same hidden states, and the head in "
            f"`{HEAD}`; the code below joins them.{unlike}"
        )
    own = "Qwen3" if getattr(record.recipe.model, "qk_norm", False) else "Llama"
    name = "GPT-2" if record.recipe.model.kind == "gpt" else own
    bias = getattr(record.recipe.model, "bias", True)
    where = "" if bias is False else " in attention"
    zero = "" if bias is True else f" It was trained without biases{where}, which are zero here."
    return (
        f"The folder has the weights of frostlab's `{record.recipe.model.kind}` as a {name} of "
        f"transformers, which gives the same logits.{zero}"
    )


def _snippet(record: RunRecord, model: nn.Module, folder: str, tokenizer: bool) -> str:
    """Return code that loads the folder and uses the model."""
    language = record.data.task == "language"
    only_body = is_own(model) and not language
    auto = "AutoModelForCausalLM" if language else "AutoModelForSequenceClassification"
    if only_body:
        auto = "AutoModel"
    names = f"{auto}, AutoTokenizer" if tokenizer else auto
    needs_torch = not (language and tokenizer)
    load = "folder, add_pooling_layer=False" if only_body else "folder"
    lines = ["import torch"] if needs_torch else []
    lines += ["from safetensors.torch import load_file"] if only_body else []
    lines += [
        f"from transformers import {names}",
        "",
        f"folder = {json.dumps(folder)}",
        f"model = {auto}.from_pretrained({load}).eval()",
    ]
    if tokenizer:
        lines.append("tokenizer = AutoTokenizer.from_pretrained(folder)")
        lines += _encoding(record, only_body)
    else:
        lines.append("ids = torch.tensor([[1, 2, 1]])")
        lines.append("batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids))")
    lines += _generating(model, tokenizer) if language else _classifying(record, only_body)
    return "\n".join(lines) + "\n"


def _generating(model: nn.Module, tokenizer: bool) -> list[str]:
    limit = position_limit(model)
    most = _GENERATED if limit is None else max(1, min(_GENERATED, limit // 2))
    return [
        f"tokens = model.generate(**batch, max_new_tokens={most})[0]",
        "print(tokenizer.decode(tokens))" if tokenizer else "print(tokens)",
    ]


def _classifying(record: RunRecord, only_body: bool) -> list[str]:
    logits = ["    logits = model(**batch).logits"]
    if only_body:
        logits = [
            "    states = model(**batch).last_hidden_state",
            *_pooling(record),
            f'    logits = pooled @ load_file(f"{{folder}}/{HEAD}")["weight"].T',
        ]
    shown = "model.config.id2label[number] for number in logits.argmax(-1).tolist()"
    return ["with torch.no_grad():", *logits, f"print([{shown}])"]


def _pooling(record: RunRecord) -> list[str]:
    """Return the lines of the card's code that turn hidden states into the head's input."""
    if getattr(record.recipe.model, "pooling", "mean") == "mean":
        return [
            '    mask = batch["attention_mask"].unsqueeze(-1)',
            "    pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)",
        ]
    return [
        '    last = batch["attention_mask"].sum(1) - 1',
        "    pooled = states[torch.arange(len(states)), last]",
    ]


def _encoding(record: RunRecord, only_body: bool) -> list[str]:
    """Return the lines of the card's code that make a batch."""
    if record.data.task == "language":
        return ['batch = tokenizer("The", add_special_tokens=False, return_tensors="pt")']
    pairs = len(columns_of(text_data(record)).texts) == 2
    if only_body and not pairs:  # an empty text has no tokens with frostlab's own tokenizers
        return [
            'rows = tokenizer(["a text"], truncation=True)["input_ids"]',
            "rows = [row or [tokenizer.eos_token_id] for row in rows]  # an empty text",
            'batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")',
        ]
    texts = '["a first text"], ["a second text"]' if pairs else '["a text"]'
    return [f'batch = tokenizer({texts}, padding=True, truncation=True, return_tensors="pt")']


def _results(record: RunRecord) -> str:
    """Return a table of the reported metrics, or a sentence that says that there is no result."""
    if record.ending != "finished":
        text = (
            "The run has not finished: these weights are preliminary, and there is no result yet."
        )
        caution = record.recipe.caution
        return text if caution is None else f"{text} Caution: {escaped(caution)}."
    split = record.data.splits["report"]
    rows = [
        (name, number(value), "report", f"{split.examples:,}")
        for name, value in record.metrics.items()
    ]
    best = record.result.best
    tune = record.data.splits.get("tune")
    if tune is not None and best.value is not None:
        rows.append((best.metric, number(best.value), "tune", f"{tune.examples:,}"))
    table = markdown(("metric", "value", "split", "examples"), rows)
    chosen = "report" if tune is None else "tune"
    text = f"{table}\n\nThe weights were chosen on the {chosen} split, by {escaped(best.metric)}."
    caution = record.result.caution
    return text if caution is None else f"{text} Caution: {escaped(caution)}."


def _data(record: RunRecord) -> str:
    """Return a table of the splits, and the digest of all data."""
    return f"{record.data.markdown()}\n\nDigest of all data: `{plain(record.data.digest)}`."


def _recipe(record: RunRecord) -> str:
    """Return the recipe as YAML; its paths have only their last part, because a card is shared."""
    values = record.recipe.to_dict()
    shorten_paths(values)
    return plain_block(yaml.safe_dump(values, sort_keys=False))


def _command(record: RunRecord) -> str:
    """Return the command that trained the run, without the path of the interpreter."""
    text = plain(record.environment.get("command"))
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    names = [os.path.basename(word) for word in words]
    if "frostlab" in names:  # `.venv/bin/frostlab run …` or `python -m frostlab run …`
        return shlex.join(["frostlab", *words[names.index("frostlab") + 1 :]])
    return shlex.join(names[:1] + words[1:])


def _training(record: RunRecord) -> str:
    """Return a table of how the run was trained, from the treatment to the command."""
    recipe, environment = record.recipe, record.environment
    rows: list[tuple[str, str]] = [
        ("treatment", f"{recipe.treatment_name}: {recipe.surgery.description}"),
        ("seed", str(recipe.seed)),
        ("run", record.folder.absolute().name),
    ]
    if record.ending == "finished":
        result = record.result
        counts = result.parameters
        share = f"{counts.trainable:,} of {counts.total:,} ({counts.trainable / counts.total:.1%})"
        rows.insert(1, ("trainable parameters", share))
        rows.append(("steps", f"{result.steps:,}"))
        rows.append(("weights digest", str(result.weights_digest)))
    if record.digests.source is not None:
        revision = record.digests.revision or record.digests.source
        rows.append(("pretrained weights", f"{getattr(recipe.model, 'name', '')} ({revision})"))
    versions = environment.get("versions")
    version = versions.get("frostlab") if isinstance(versions, dict) else None
    rows += [
        ("recipe digest", record.start.recipe_digest),
        ("frostlab", plain(version)),
        ("command", Markdown(f"`{_command(record).replace('`', '')}`")),
    ]
    return markdown(("", ""), rows)

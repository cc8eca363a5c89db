"""Texts that a language model generates at the end of its run, written to samples.json.

With its best weights, the model begins a new text and continues the first texts of the `report`
(test) split. The seed is fixed, so `frostlab generate` with the same prompts and settings gives the
same texts. The random numbers come from a generator of their own, so torch's random state is
unchanged.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch import nn

from frostlab.data.prepare import as_token_data
from frostlab.data.tokens import Tokens
from frostlab.errors import first_line
from frostlab.models.sampling import Sampling, continue_texts, position_limit
from frostlab.records.model_files import stored_encoder, stored_tokenizer
from frostlab.records.schema import GeneratedText, Samples
from frostlab.storage import write_whole
from frostlab.training.restore import best_checkpoint, load_weights
from frostlab.training.setup import build_model
from frostlab.training.state import Progress, RunContext
from frostlab.training.step.compiled import uncompiled

SAMPLES = "samples.json"
_SAMPLING = Sampling(max_tokens=48)
_PROMPTS = 2  # texts that are continued
_PROMPT = 8  # most tokens of a prompt
_SEARCHED = 20_000  # tokens of the report split in which the beginnings of texts are searched
# If there are too few texts, the beginnings of examples, which may lie inside a text, are used as
# prompts; only this many examples are tried.
_EXAMPLES = 100


def write_samples(context: RunContext, progress: Progress) -> None:
    """Write samples.json in rank 0, if the data are texts for a language model.

    A model that cannot generate, such as one without a causal mask, leaves a note in the record.
    """
    prepared = context.prepared
    if context.folder is None or prepared.task != "language":
        return
    if as_token_data(prepared).tokenizer is None:  # without one, generated tokens have no text
        return
    if _is_sharded(context.model):  # `_generate` reads a checkpoint, which must be written first
        context.writer.wait()
    try:
        samples = _generate(context, progress)
    except Exception as error:  # models raise errors of many types; the run itself has succeeded
        note = f"no text was generated: {first_line(error)}"
        context.folder.event("note", progress.step, text=note)
        return
    record = Samples(
        samples=samples,
        max_tokens=_SAMPLING.max_tokens,
        temperature=_SAMPLING.temperature,
        top_p=_SAMPLING.top_p,
        seed=_SAMPLING.seed,
        caution=prepared.caution,
    )
    write_whole(context.path / SAMPLES, json.dumps(asdict(record), indent=1))


def _generate(context: RunContext, progress: Progress) -> list[GeneratedText]:
    encoder, tokenizer = stored_encoder(context.path), stored_tokenizer(context.path)
    model = _whole_model(context, progress)
    split = as_token_data(context.prepared).splits["report"]
    most = min(_PROMPT, (position_limit(model) or _PROMPT + 1) - 1)
    prompts = ["", *islice(_beginnings(split, encoder.end, tokenizer, most), _PROMPTS)]
    training = model.training
    model.eval()
    try:
        with uncompiled():
            generated = continue_texts(model, encoder, tokenizer, prompts, _SAMPLING)
    finally:
        model.train(training)
    return [GeneratedText(sample.prompt, sample.text, sample.ended) for sample in generated]


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def _whole_model(context: RunContext, progress: Progress) -> nn.Module:
    """Return the model with the best weights; if it is sharded, a copy on the CPU.

    Only one process generates, and it cannot gather the shards without the other processes.
    """
    if not _is_sharded(context.model):
        return context.model
    with torch.random.fork_rng(devices=[]):
        stages = context.stages[: context.current.index + 1]
        model = build_model(context.recipe, context.prepared, stages).model
    load_weights(model, best_checkpoint(context.path, progress))
    return model


def _beginnings(split: Tokens, end: int, tokenizer: Any, most: int) -> Iterator[str]:
    """Yield the beginnings of texts, then of examples.

    A beginning has at most `most` tokens, and at most half of what is left of its text.
    """
    ids = split.ids[:_SEARCHED].tolist()
    ends = [place for place, token in enumerate(ids) if token == end] + [len(ids)]
    seen = {""}
    for start in (0, *(place + 1 for place in ends[:-1]), *split.starts[:_EXAMPLES].tolist()):
        stop = next((place for place in ends if place >= start), start)
        length = min(most, (stop - start + 1) // 2)
        # a character of several tokens may be cut at either end
        prompt = tokenizer.decode(ids[start : start + length]).strip("\ufffd").strip()
        if prompt not in seen:
            seen.add(prompt)
            yield prompt

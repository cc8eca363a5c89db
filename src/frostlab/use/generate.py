"""`Run.generate` and `frostlab generate`: texts that a run's language model generates."""

import textwrap
from collections.abc import Sequence

from frostlab.errors import BadInput
from frostlab.models.sampling import Sample, Sampling, continue_texts
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import stored_tokenizer
from frostlab.text import plain
from frostlab.training.setup import modes_of
from frostlab.use.scoring import Evaluator

_WIDTH = 80  # characters of a line


def check_generates(record: RunRecord) -> None:
    """Refuse a run that is not a language model."""
    task = record.data.task
    if task != "language":
        does = "decodes EEG" if task == "envelope" else "classifies texts"
        raise BadInput(
            f"generate: {record.folder} {does}, and only language models generate; "
            f"try `frostlab predict {record.folder.name} FILE`"
        )


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuse prompts that are not texts."""
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise BadInput(f"generate: prompt {prompt!r:.40} is not a text")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise BadInput(f"generate: prompt {prompt!a:.40} is not valid UTF-8") from None


def generate(loaded: Evaluator, prompts: Sequence[str], sampling: Sampling) -> list[Sample]:
    """Continue prompts with a run's language model; return all samples, prompt by prompt.

    An empty prompt begins a new text.
    """
    check_prompts(prompts)
    tokenizer = stored_tokenizer(loaded.record.folder)
    model = loaded.objective.model.eval()
    with modes_of(loaded.recipe, loaded.compute.device):
        return continue_texts(model, loaded.encoder, tokenizer, prompts, sampling)


def samples_text(samples: Sequence[tuple[str, Sample]]) -> str:
    """Format samples with the names of their runs: a block per prompt, and in it a list per run."""
    blocks: dict[str, dict[str, list[Sample]]] = {}
    for name, sample in samples:
        blocks.setdefault(sample.prompt, {}).setdefault(name, []).append(sample)
    lines: list[str] = []
    for prompt, runs in blocks.items():
        title = f"prompt: {plain(prompt)}" if prompt else "without a prompt"
        lines += _wrapped(title, "")
        for name, continuations in runs.items():
            lines += ["", *_wrapped(plain(name), "  ")]
            for number, sample in enumerate(continuations, 1):
                text = f"{number}: {plain(sample.text)} [{sample.ended}]"
                lines += _wrapped(text, "    ")
        lines.append("")
    return "\n".join(lines[:-1])


def _wrapped(text: str, indent: str) -> list[str]:
    """Wrap a text; if it is indented, lines after the first are indented further."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}   " if indent else ""
    )

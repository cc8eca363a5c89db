"""Texts that language models generated at the end of their runs, as a table of a report."""

from collections.abc import Iterable, Sequence

from frostlab.errors import BadInput
from frostlab.pages.content import Block, Cell, Records, Table, words
from frostlab.records.schema import Samples
from frostlab.storage import path_inside, read_bytes
from frostlab.text import plain
from frostlab.typed import read_object

SAMPLES = "samples.json"


def generated_texts(
    records: Records, runs: Iterable[tuple[str, str]], problems: list[str] | None = None
) -> list[Block]:
    """Return the texts of runs in a table, prompt by prompt, below a paragraph about the settings.

    `runs` has for each run the name to show, such as its arm's, and its folder, relative to the
    reported folder. If all names are empty, the table has no column for them. A run without texts
    is left out, and so is a file that cannot be read, whose error is added to `problems`, if given.
    If no text is left, the result is an empty list.
    """
    by_prompt: dict[str, list[tuple[str | Cell, ...]]] = {}
    first, named = "", False
    for name, folder in runs:
        file = f"{folder}/{SAMPLES}".lstrip("/")
        try:
            path = path_inside(records.folder, file)
            read = read_object(Samples, read_bytes(path), file)
        except FileNotFoundError:
            continue
        except BadInput as error:
            if problems is not None:
                problems.append(plain(str(error)))
            continue
        first, named = first or file, named or bool(name)
        for number, sample in enumerate(read.samples):
            prompt, text, ended = (records.cell(file, "samples", number, key, format="lines")
                                   for key in ("prompt", "text", "ended"))  # fmt: skip
            begun = prompt if sample.prompt else "(a new text)"
            row = (begun, plain(name), text, ended) if name else (begun, text, ended)
            by_prompt.setdefault(sample.prompt, []).append(row)
    if not by_prompt:
        return []
    rows = [row for of_prompt in by_prompt.values() for row in of_prompt]
    head = ("prompt", *(["arm"] if named else []), "generated text", "ended")
    settings: Sequence[str | Cell] = (
        "The best checkpoint of a run generates a new text, and continues prompts, which are the "
        "beginnings of texts from the report split, by at most ",
        records.cell(first, "max_tokens", format="count"),
        " tokens. Each token is drawn at temperature ",
        records.cell(first, "temperature"),
        " from the most probable tokens, which together have ",
        records.cell(first, "top_p", format="percent of a ratio"),
        " of the probability. All texts use the same random numbers.",
    )
    note = (
        "Ended: with the token that ends a text (end), after the allowed number of tokens "
        "(length), or at the model's last position (positions). A few texts show a model's style, "
        "not its quality."
    )
    return [words(*settings), Table("samples", "Texts by prompt", head, tuple(rows), note)]

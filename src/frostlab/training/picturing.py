"""What a finished decoder of envelopes does, as a page: scores, excerpts, kernels, electrodes."""

import json
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from frostlab.data import Signals, prepare
from frostlab.errors import BadInput
from frostlab.models.conformer import Conformer, electrode_importance
from frostlab.models.pretrained import first_line
from frostlab.records.record import RunRecord
from frostlab.records.scores import SCORES, SPLITS, read_scores
from frostlab.scoring.drawing import Rows, excerpt_rows, kernel_rows
from frostlab.scoring.page import eeg_page
from frostlab.training.best import best_model, recipe_of
from frostlab.training.examples import WindowExamples

_WINDOWS = 32  # that electrodes are judged by


def draw_run(folder: Path, data_dir: Path | None = None) -> Path:
    """Write a page with figures of a finished run into its folder, and return the page."""
    record = RunRecord(folder)
    if record.status != "finished":
        raise BadInput(f"{folder} is {record.status}; a page needs a finished run")
    recipe = recipe_of(record)
    if recipe.data.task != "envelope":
        raise BadInput(f"{folder} is a run for {recipe.data.task}; this page is for envelopes")
    scores = read_scores(folder)
    signals = prepare(recipe, data_dir)
    assert isinstance(signals, Signals)
    model = best_model(record, recipe, signals)
    assert isinstance(model, Conformer)
    kernels = model.get_parameter("cnn.0.conv.weight").detach()  # (filters, channels, taps)
    return eeg_page(
        folder / "envelopes",
        scores,
        best=json.loads((folder / SCORES).read_text("utf-8"))["best"],
        excerpts=_excerpts(folder, signals),
        kernels=kernel_rows(kernels.numpy(), signals.rate, first=-(kernels.shape[-1] // 2)),
        importance=(signals.channels, _importance(model, signals)),
        caution=record.result["caution"],
        titles=SPLITS,
    )


def _excerpts(folder: Path, signals: Signals) -> dict[str, Rows]:
    """The middle of each split's first recording: what was heard, and what was decoded."""
    found, decoded = {}, _decoded(folder / "decoded.npz")
    for split, meaning in SPLITS.items():
        if split in signals.splits:
            first = signals.splits[split].recordings[0]
            shown = {"heard": first.envelope, "decoded": decoded[first.name]}
            seconds = min(10.0, len(first) / signals.rate)
            start = (len(first) / signals.rate - seconds) / 2
            found[f"{first.name} ({meaning})"] = excerpt_rows(
                shown, signals.rate, start=start, seconds=seconds
            )
    return found


def _decoded(path: Path) -> dict[str, NDArray[np.float32]]:
    try:
        with path.open("rb") as file, np.load(file) as held:
            return dict(held)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise BadInput(f"{path} cannot be read ({first_line(error)})") from None


def _importance(model: Conformer, signals: Signals) -> NDArray[np.float32]:
    """How much every electrode moves what is decoded, over windows of the reporting split."""
    examples = WindowExamples(signals.splits["report"])
    rows = signals.splits["report"].grid
    some = rows[np.linspace(0, len(rows) - 1, min(_WINDOWS, len(rows))).round().astype(int)]
    inputs = examples.collate(some).inputs
    return electrode_importance(model, inputs["eeg"], inputs["subject"]).numpy()

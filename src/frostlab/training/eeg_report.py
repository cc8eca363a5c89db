"""The report of an EEG run, whose model decodes speech envelopes (loudness over time) from EEG.

The model reads windows, which are pieces of a recording. The report scores whole decoded recordings
against a linear baseline.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frostlab.data.arrays import read_npz
from frostlab.data.eeg.recordings import Signals, Windows
from frostlab.data.prepare import prepare
from frostlab.envelopes.challenge import challenge_scores
from frostlab.envelopes.correlation import stitch, window_starts
from frostlab.envelopes.figures import Rows, eeg_page, excerpt_rows, kernel_rows
from frostlab.envelopes.ridge import fit_ridge
from frostlab.envelopes.scores import EnvelopeScores, score_recordings
from frostlab.envelopes.scores_json import REPORTED, SCORES, SPLITS, scores_file
from frostlab.errors import BadInput
from frostlab.models.conformer import Conformer, electrode_importance
from frostlab.records.folder import RunRecord
from frostlab.storage import build_once, cache_folder, path_inside, read_json, write_whole
from frostlab.training.batches.batch import WindowExamples, in_batches, micro_batches
from frostlab.training.distributed import Compute
from frostlab.training.restore import best_model, check_same_data
from frostlab.training.state import RunContext
from frostlab.training.step.compiled import uncompiled
from frostlab.training.step.objective import Objective

_FORMAT = 2  # version of cached baseline scores; raise it when the baseline or scoring changes
_WINDOWS = 32  # the most windows over which electrode importance is averaged

Scores = dict[str, EnvelopeScores]  # scores by split


def baseline_scores(signals: Signals) -> Scores:
    """Return the scores of the linear baseline, a ridge decoder, for each reported split.

    The scores are cached.
    """

    def build(folder: Path) -> None:
        ridge = fit_ridge(signals.splits["train"].recordings, signals.rate)
        scores = {}
        for split in reported(signals):
            recordings = signals.splits[split].recordings
            decoded = {recording.name: ridge.predict(recording) for recording in recordings}
            scores[split] = score_recordings(decoded, recordings, signals.rate).to_dict()
        (folder / SCORES).write_text(json.dumps(scores))

    folder = cache_folder(None) / "ridge" / f"{signals.digest[:32]}-{_FORMAT}"
    path = build_once(folder, build) / SCORES
    scores = read_json(path)
    if not isinstance(scores, dict):
        raise BadInput(f"{path} is not a table of scores")
    return {split: EnvelopeScores.from_dict(values) for split, values in scores.items()}


def reported(signals: Signals) -> tuple[str, ...]:
    """Return the splits to report: `report` and, if there is one, `unseen`.

    Neither was used to train or select weights; `unseen` has subjects that were not trained on.
    """
    return tuple(split for split in REPORTED if split in signals.splits)


def measure_recordings(
    context: RunContext, signals: Signals, window_metrics: dict[str, float]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Score whole recordings of every reported split; return metrics and result.json's `scores`.

    The decoded envelopes, the heard envelopes and the scores are written to decoded.npz,
    heard.npz and scores.json. `window_metrics` holds the loss and the mean Pearson's r of single
    windows; the metrics include both.
    """
    ridge, decoded, model = baseline_scores(signals), {}, {}
    for split in reported(signals):
        windows = signals.splits[split]
        decoded[split] = decode(
            context.objective, windows, context.evaluation_batch, context.compute
        )
        model[split] = score_recordings(decoded[split], windows.recordings, signals.rate)
    scores = {split: {"model": model[split], "ridge": ridge[split]} for split in model}
    if context.folder:
        arrays = {
            name: envelope.astype(np.float32)
            for by_name in decoded.values()
            for name, envelope in by_name.items()
        }
        heard = {
            recording.name: recording.envelope.astype(np.float32)
            for split in decoded
            for recording in signals.splits[split].recordings
        }
        np.savez(context.folder.path / "decoded.npz", **arrays)  # type: ignore[arg-type]
        np.savez(context.folder.path / "heard.npz", **heard)  # type: ignore[arg-type]
        text = json.dumps(scores_file(scores, signals.known, signals.caution))
        write_whole(context.folder.path / SCORES, text)
    return recording_metrics(model, ridge, window_metrics), {
        split: {
            decoder: result.to_dict()["summary"] | {"digest": result.digest}
            for decoder, result in by_decoder.items()
        }
        for split, by_decoder in scores.items()
    }


def recording_metrics(
    model: Scores, ridge: Scores, window_metrics: dict[str, float]
) -> dict[str, float]:
    """Return the metrics of decoded recordings; names of metrics on `unseen` end in `_unseen`.

    `challenge`, the score of the Auditory EEG Challenge, needs both `report` and `unseen`. `ridge`
    holds the scores of the linear baseline; it may be empty.
    """
    metrics: dict[str, float] = {}
    by_window = {name: value for name, value in window_metrics.items() if name != "pearson"}
    for split, split_scores in model.items():
        summary, suffix = split_scores.summary, "_unseen" if split == "unseen" else ""
        metrics[f"pearson{suffix}"] = summary.mean
        metrics |= by_window
        if split in ridge:
            metrics[f"ridge{suffix}"] = ridge[split].summary.mean
        metrics[f"chance{suffix}"] = summary.null.high
        if (matched := summary.match.accuracy) is not None:
            metrics[f"match{suffix}"] = matched
        segments = split_scores.segments
        metrics[f"segment_pearson{suffix}"] = segments.mean
        if segments.std is not None:
            metrics[f"segment_std{suffix}"] = segments.std
    challenge = challenge_scores({split: {"model": scores} for split, scores in model.items()})
    if (score := challenge["model"].score) is not None:
        metrics["challenge"] = score
    metrics["window_pearson"] = window_metrics["pearson"]
    return metrics


@torch.no_grad()
def decode(
    objective: Objective, windows: Windows, batch: int, compute: Compute
) -> dict[str, NDArray[np.float64]]:
    """Decode windows that overlap by half; return the envelope of each recording, by name.

    Afterwards, the objective is still in evaluation mode.
    """
    device, world = compute.device, compute.world
    examples, half = WindowExamples(windows), max(1, windows.length // 2)
    starts = [
        window_starts(len(recording), windows.length, half) for recording in windows.recordings
    ]
    # the first sample of each window, counted over all recordings
    rows = np.concatenate(
        [first + within for first, within in zip(windows.bounds[:-1], starts, strict=True)]
    )
    decoded = torch.zeros(len(rows), windows.length, device=device)
    objective.eval()
    with uncompiled():
        for indices in in_batches(np.arange(len(rows)), batch):
            (own,) = micro_batches(indices, world.rank, world.size, count=1)
            with compute.autocast():
                prediction = objective(examples.collate(rows[own]).to(device), want="logits")
            # a process without windows in this batch has decoded a placeholder
            decoded[torch.from_numpy(own).to(device)] = prediction[: len(own)].float()
    ends = np.cumsum([len(recording_starts) for recording_starts in starts])[:-1]
    predictions = np.split(world.total(decoded).cpu().numpy(), ends)
    return {
        recording.name: stitch(prediction, at, len(recording))
        for recording, prediction, at in zip(windows.recordings, predictions, starts, strict=True)
    }


def draw_run(folder: Path, data_dir: Path | None = None) -> Path:
    """Write a page with figures of a finished run into its folder; return the page's path."""
    record = RunRecord(folder)
    if record.status != "finished":
        raise BadInput(f"{folder} is {record.status}; a page with figures needs a finished run")
    recipe = record.recipe
    if recipe.data.task != "envelope":
        raise BadInput(
            f"{folder} is a run for {recipe.data.task}; a page with figures needs a run that "
            "decodes EEG"
        )
    scores, best = record.envelope_scores
    signals = prepare(recipe, data_dir)
    assert isinstance(signals, Signals)
    check_same_data(record, signals)
    model = best_model(record)
    assert isinstance(model, Conformer)
    kernels = model.get_parameter("cnn.0.conv.weight").detach()  # (filters, channels, taps)
    return eeg_page(
        path_inside(folder, "envelopes"),
        scores,
        best=best,
        excerpts=_excerpts(folder, signals),
        kernels=kernel_rows(kernels.numpy(), signals.rate, first=-(kernels.shape[-1] // 2)),
        importance=(signals.channels, _importance(model, signals)),
        caution=record.result.caution,
        titles=SPLITS,
    )


def _excerpts(folder: Path, signals: Signals) -> dict[str, Rows]:
    """Return the heard and the decoded envelope of each reported split's first recording.

    Only the middle ten seconds of a longer recording are returned.
    """
    excerpts, decoded = {}, read_npz(folder / "decoded.npz")
    for split, meaning in SPLITS.items():
        if split in signals.splits:
            first = signals.splits[split].recordings[0]
            if first.name not in decoded or decoded[first.name].shape != first.envelope.shape:
                raise BadInput(f"{folder / 'decoded.npz'} has no envelope that fits {first.name}")
            shown = {"heard": first.envelope, "decoded": decoded[first.name]}
            seconds = min(10.0, len(first) / signals.rate)
            start = (len(first) / signals.rate - seconds) / 2
            excerpts[f"{first.name} ({meaning})"] = excerpt_rows(
                shown, signals.rate, start=start, seconds=seconds
            )
    return excerpts


def _importance(model: Conformer, signals: Signals) -> NDArray[np.float32]:
    """Return each electrode's importance, averaged over windows of the `report` split."""
    examples = WindowExamples(signals.splits["report"])
    rows = signals.splits["report"].grid
    sampled = rows[np.linspace(0, len(rows) - 1, min(_WINDOWS, len(rows))).round().astype(int)]
    inputs = examples.collate(sampled).inputs
    return electrode_importance(model, inputs["eeg"], inputs["subject"]).numpy()

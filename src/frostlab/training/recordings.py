"""Whole recordings decoded and scored, with the linear baseline beside: what a run reports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frostlab.data import Signals, Windows
from frostlab.data.cache import build_once, cache_folder
from frostlab.records.folder import write_whole
from frostlab.records.scores import REPORTED, SCORES, scores_file
from frostlab.scoring.measuring import score_recordings
from frostlab.scoring.ridge import fit_ridge
from frostlab.scoring.scores import EnvelopeScores
from frostlab.scoring.stitching import stitch, window_starts
from frostlab.training.batching import shared
from frostlab.training.compiled import uncompiled
from frostlab.training.examples import WindowExamples, cut
from frostlab.training.setting import Setting

_FORMAT = 1  # raise it when the baseline, or how it is scored, changes

Scores = dict[str, EnvelopeScores]  # by split


def baseline_scores(signals: Signals) -> Scores:
    """The ridge decoder's scores, fitted once for the same data, whoever asks.

    Before a run begins this also finds out whether its recordings can be scored at all.
    """

    def build(folder: Path) -> None:
        ridge = fit_ridge(signals.splits["train"].recordings, signals.rate)
        found = {}
        for split in reported(signals):
            recordings = signals.splits[split].recordings
            decoded = {each.name: ridge.predict(each) for each in recordings}
            found[split] = score_recordings(decoded, recordings, signals.rate).to_dict()
        (folder / SCORES).write_text(json.dumps(found))

    place = cache_folder(None) / "ridge" / f"{signals.digest[:32]}-{_FORMAT}"
    kept = json.loads((build_once(place, build) / SCORES).read_text())
    return {split: EnvelopeScores.from_dict(said) for split, said in kept.items()}


def reported(signals: Signals) -> tuple[str, ...]:
    """The splits that nothing was chosen by."""
    return tuple(split for split in REPORTED if split in signals.splits)


def measure_recordings(
    setting: Setting, signals: Signals, quick: dict[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Score whole recordings of every reported split; return metrics, and a summary for the record.

    Beside them in the metrics is what single windows gave: the loss, and their mean r.
    """
    ridge, decoded, model = baseline_scores(signals), {}, {}
    for split in reported(signals):
        windows = signals.splits[split]
        decoded[split] = decode(setting, windows)
        model[split] = score_recordings(decoded[split], windows.recordings, signals.rate)
    scores = {split: {"model": model[split], "ridge": ridge[split]} for split in model}
    if setting.folder:
        arrays = {
            name: each.astype(np.float32) for d in decoded.values() for name, each in d.items()
        }
        np.savez(setting.folder.path / "decoded.npz", **arrays)  # type: ignore[arg-type]
        text = json.dumps(scores_file(scores, signals.known))
        write_whole(setting.folder.path / SCORES, text)
    metrics = {"pearson": model["report"].summary.mean, "loss": quick["loss"]}
    for split, found in model.items():
        ending = "" if split == "report" else f"_{split}"
        metrics[f"pearson{ending}"] = found.summary.mean
        metrics[f"ridge{ending}"] = ridge[split].summary.mean
        metrics[f"chance{ending}"] = found.summary.null.high
        if (matched := found.summary.match.accuracy) is not None:
            metrics[f"match{ending}"] = matched
    metrics["window_pearson"] = quick["pearson"]
    return metrics, {
        split: {
            name: each.to_dict()["summary"] | {"digest": each.digest} for name, each in d.items()
        }
        for split, d in scores.items()
    }


@torch.no_grad()
def decode(setting: Setting, windows: Windows) -> dict[str, NDArray[np.float64]]:
    """Each recording's envelope, by name, from windows of which half overlaps."""
    recipe, device, world = setting.recipe, setting.device, setting.world
    batch = recipe.evaluate.batch or recipe.train.batch // recipe.train.accumulate
    examples, half = WindowExamples(windows), max(1, windows.length // 2)
    starts = [window_starts(len(each), windows.length, half) for each in windows.recordings]
    rows = np.concatenate([b + s for b, s in zip(windows.bounds[:-1], starts, strict=True)])
    decoded = torch.zeros(len(rows), windows.length, device=device)
    setting.objective.eval()
    with uncompiled():
        for places in cut(np.arange(len(rows)), batch):
            (mine,) = shared(places, world.rank, world.size, parts=1)
            bf16 = setting.precision == torch.bfloat16
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                found = setting.objective(examples.collate(rows[mine]).to(device), want="logits")
            decoded[torch.from_numpy(mine).to(device)] = found[: len(mine)].float()
    ends = np.cumsum([len(each) for each in starts])[:-1]
    parts = np.split(world.total(decoded).cpu().numpy(), ends)
    return {
        each.name: stitch(part, at, len(each))
        for each, part, at in zip(windows.recordings, parts, starts, strict=True)
    }

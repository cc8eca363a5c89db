"""Hold out every recording once, and score a recipe's decoder and the ridge decoder on it.

There is one run per held-out trial and seed, under --runs (finished ones are not repeated). A
trial's r is the mean over seeds by Fisher's z, and `chance` is the 95 % quantile for shifted
envelopes. A run holds out one more trial to choose its weights by, and its ridge decoder is fitted
without that trial, too; `ridge, all others` includes it, as a study without a model to tune would.

    python benchmarks/leave_one_out.py --data-dir D [--recipe eeg-cocktail] [--trials 5] [--seeds 3]
        [--set key=value] [--runs folder] [--out record.json]
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import frostlab as fl
from common import device_name
from frostlab.data.eeg.recordings import Signals
from frostlab.data.prepare import prepare
from frostlab.devices import choose_device
from frostlab.envelopes.correlation import fisher_mean
from frostlab.envelopes.ridge import fit_ridge
from frostlab.envelopes.scores import EnvelopeScores, score_recordings
from frostlab.recipe.load import parse_settings
from frostlab.records.folder import RunRecord

DECODERS = ("model", "ridge", "ridge, all others")


def score(options: argparse.Namespace, trial: int, seed: int) -> dict[str, Any]:
    """Train with one trial held out and return both decoders' scores on it."""
    settings = parse_settings(options.settings) | {"data.held_out": trial}
    folder = options.runs / f"trial-{trial}-seed-{seed}"
    recipe = fl.load_recipe(options.recipe, settings, seed=seed)
    if not (folder / "result.json").exists():
        fl.run(recipe, out=folder, data_dir=options.data_dir, resume=folder.exists())
    row = {"trial": trial, "seed": seed}
    scores = dict(RunRecord(folder).envelope_scores[0]["report"])
    scores["ridge, all others"] = ridge_of_all_others(recipe, options.data_dir)
    for name, decoder_scores in scores.items():
        summary = decoder_scores.summary
        row[name] = {
            "attended": summary.mean, "other": summary.mean_other, "chance": summary.null.high,
            "p": summary.null.p, "told": [summary.attended.right, summary.attended.decisions],
        }  # fmt: skip
    return row


@cache
def ridge_of_all_others(recipe: fl.Recipe, data_dir: Path | None) -> EnvelopeScores:
    """Score a ridge decoder that is also fitted on the trial that chooses a model's weights."""
    signals = prepare(recipe, data_dir)
    assert isinstance(signals, Signals)
    splits = signals.splits
    ridge = fit_ridge([*splits["train"].recordings, *splits["tune"].recordings], signals.rate)
    held_out = splits["report"].recordings
    decoded = {recording.name: ridge.predict(recording) for recording in held_out}
    return score_recordings(decoded, held_out, signals.rate)


def trial_means(runs: list[dict[str, Any]], decoder: str, which: str) -> list[float]:
    """Return one number per trial, the mean over seeds by Fisher's z, and their mean last."""
    trials = sorted({run["trial"] for run in runs})
    r = [float(fisher_mean([run[decoder][which] for run in runs if run["trial"] == trial]))
         for trial in trials]  # fmt: skip
    return [*r, float(fisher_mean(np.array(r)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="eeg-cocktail")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/leave-one-out"))
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    options = parser.parse_args()
    trials = range(1, options.trials + 1)
    runs = [score(options, trial, seed) for trial in trials for seed in range(options.seeds)]
    print(f"| r | {' | '.join(f'trial {t}' for t in trials)} | mean |")
    print("|---" * (len(trials) + 2) + "|")
    for decoder in DECODERS:
        for which in ("attended", "other", "chance"):
            cells = " | ".join(f"{r:.3f}" for r in trial_means(runs, decoder, which))
            print(f"| {decoder}, {which} | {cells} |")
    if options.out:
        where = device_name(choose_device("auto"))
        settings = {"recipe": options.recipe, "settings": options.settings, "device": where}
        record = {"benchmark": "leave_one_out", **settings, "runs": runs}
        options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

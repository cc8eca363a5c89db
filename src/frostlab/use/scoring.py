"""A trained run's model, ready to be evaluated, and its metrics on some examples.

Metrics are computed by the code that evaluates during training. For a run of one process,
evaluating the report split again with the same hardware, libraries and number of threads gives
exactly the metrics of the record.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from frostlab.data.eeg.recordings import Signals, Windows
from frostlab.data.prepare import PreparedData
from frostlab.data.tokenizers import Encoder
from frostlab.data.tokens import Prepared, Tokens
from frostlab.devices import choose_device
from frostlab.envelopes.scores import score_recordings
from frostlab.errors import BadInput
from frostlab.recipe.data import EEGData
from frostlab.recipe.recipe import Recipe
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import (
    ModelInputs,
    read_inputs,
    stored_encoder,
)
from frostlab.text import NONE, columns, counted, joined, number, plain, short
from frostlab.training.batches.batch import scored_counts
from frostlab.training.distributed import Compute
from frostlab.training.eeg_report import (
    Scores,
    decode,
    recording_metrics,
)
from frostlab.training.evaluate import evaluate
from frostlab.training.restore import best_model
from frostlab.training.setup import add_loss, choose_precision, modes_of
from frostlab.training.state import evaluation_batch
from frostlab.training.step.objective import Objective
from frostlab.training.tasks import TASKS


@dataclass(frozen=True)
class ClassScore:
    """The examples of one class, and how many of them were predicted correctly."""

    label: str | int
    n: int  # examples of this class
    correct: int  # of these, predicted as this class
    predicted: int  # examples of any class that were predicted as this class
    recall: float | None  # correct / n; None if n is 0


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The metrics of a run's best weights on some examples."""

    run: str  # the run's folder
    split: str  # report, tune, train, unseen (EEG), or `data` for files that the user named
    source: str  # where the examples come from
    metrics: dict[str, float]
    n: dict[str, int]  # metric → the number of `unit`s that it is computed from
    unit: dict[str, str]  # metric → what `n` counts: examples, tokens, windows, …
    classes: list[ClassScore] = field(default_factory=list)  # empty without classes
    # deep supervision: number of each layer with a loss of its own → metrics
    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    # EEG: group of recordings → decoder → summary of its scores, as in result.json
    scores: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    caution: str | None = None  # a warning to show with the metrics

    def __str__(self) -> str:
        return "\n".join(evaluation_lines(self))

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {number(value)}" for name, value in self.metrics.items())
        first = next(iter(self.metrics))
        count = f"{self.n[first]:,} {self.unit[first]}"
        caution = f"; {self.caution}" if self.caution else ""
        return f"Evaluation({self.split}: {metrics}; {count} of {self.source}{caution})"


class Evaluator:
    """A run's model on a device, ready to be evaluated on any number of splits."""

    def __init__(self, record: RunRecord, device: str | None = None) -> None:
        self.record, self.recipe = record, record.recipe
        chosen = choose_device(device or self.recipe.train.device)
        self.compute = Compute(chosen, choose_precision(self.recipe.train, chosen))
        self.task = TASKS[self.recipe.data.task]
        self.objective = _objective(record, self.recipe, chosen)

    @property
    def batch(self) -> int:
        """The number of examples in an evaluation batch, if all have the greatest length."""
        return evaluation_batch(self.recipe, self.objective.model)

    @cached_property
    def inputs(self) -> ModelInputs:
        """The contents of model/inputs.json."""
        return read_inputs(self.record.folder)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of the run's tokenizer."""
        return stored_encoder(self.record.folder)

    @cached_property
    def labels(self) -> list[str | int]:
        """The labels of the classes, in the order of the model's outputs."""
        labels = self.record.data.labels or []
        if len(labels) != self.inputs.classes:
            raise BadInput(
                f"{self.record.folder / 'data.json'} has {len(labels)} labels, and the model "
                f"{self.inputs.classes} classes"
            )
        return labels

    def metrics(self, prepared: PreparedData, split: Tokens | Windows, **more: Any) -> Any:
        """Return the metrics of a split, as during training."""
        with modes_of(self.recipe, self.compute.device):
            return evaluate(
                self.task,
                self.objective,
                prepared,
                split,
                self.batch,
                self.compute,
                layers=self.objective.supervised,
                **more,
            )

    def score_tokens(
        self, prepared: Prepared, tokens: Tokens, split: str, source: str, caution: str | None
    ) -> Evaluation:
        """Evaluate examples of token ids."""
        labels = tokens.labels
        predicted = None
        if self.task.predicts_classes:
            predicted = torch.zeros(len(tokens), dtype=torch.long, device=self.compute.device)
        metrics = self.metrics(prepared, tokens, classes=predicted)
        layers = metrics.pop("layers", {})
        metrics = {self.recipe.metric: metrics[self.recipe.metric], **metrics}
        count, unit = int(scored_counts(tokens).sum()), "tokens" if labels is None else "examples"
        scores: list[ClassScore] = []
        if labels is not None and predicted is not None:
            truth = torch.from_numpy(labels.copy())
            # `evaluate` stores 1 + the predicted class.
            scores = _class_scores(truth, predicted.cpu() - 1, self.labels)
        return Evaluation(
            run=str(self.record.folder),
            split=split,
            source=source,
            metrics=metrics,
            n=dict.fromkeys(metrics, count),
            unit=dict.fromkeys(metrics, unit),
            classes=scores,
            layers=layers,
            caution=self._marked(caution),
        )

    def score_windows(
        self,
        groups: Mapping[str, Windows],
        ridge: Scores,
        split: str,
        source: str,
        caution: str | None,
    ) -> Evaluation:
        """Decode and score recordings by group, such as `report` and `unseen`.

        `ridge` has the scores of the ridge decoder, the baseline, if they are known.
        """
        first = next(iter(groups.values()))
        signals = Signals(
            dict(groups), self._rate, tuple(self.inputs.channels or ()),
            tuple(self.inputs.subjects or ()), {}, None, {}, "",
        )  # fmt: skip
        window_metrics = self.metrics(signals, first)
        scores: Scores = {}
        for name, windows in groups.items():
            with modes_of(self.recipe, self.compute.device):
                decoded = decode(self.objective, windows, self.batch, self.compute)
            scores[name] = score_recordings(decoded, windows.recordings, self._rate)
        metrics = recording_metrics(scores, ridge, window_metrics)
        n, unit = {}, {}
        for metric in metrics:
            name = "unseen" if metric.endswith("_unseen") else next(iter(groups))
            summary = scores[name].summary
            n[metric], unit[metric] = summary.subjects, "subjects"
            if metric.startswith("match"):
                n[metric], unit[metric] = summary.match.decisions, "decisions"
            elif metric == "challenge":
                n[metric] = sum(len(by_group.subjects) for by_group in scores.values())
            elif metric == "window_pearson" or (metric != "pearson" and metric in window_metrics):
                n[metric], unit[metric] = len(first), "windows"
        return Evaluation(
            run=str(self.record.folder),
            split=split,
            source=source,
            metrics=metrics,
            n=n,
            unit=unit,
            scores={
                name: {
                    decoder: by_group[name].to_dict()["summary"]
                    for decoder, by_group in (("model", scores), ("ridge", ridge))
                    if name in by_group
                }
                for name in scores
            },
            caution=self._marked(caution),
        )

    def _marked(self, caution: str | None) -> str | None:
        """Add the recipe's caution (a reduced scale, stand-ins for data or weights) if missing."""
        own = self.recipe.caution
        if own is None or (caution or "").startswith(own):
            return caution
        return joined([own, caution])

    @property
    def _rate(self) -> float:
        data = self.recipe.data
        assert isinstance(data, EEGData)
        return data.rate


def _objective(record: RunRecord, recipe: Recipe, device: torch.device) -> Objective:
    """Return a run's best model with its loss, on a device."""
    supervise = None
    if record.ending == "finished":  # else the model may lack layers that a later stage adds
        supervise = (recipe.stages[-1].supervise if recipe.stages else None) or recipe.supervise
    return add_loss(best_model(record), recipe, supervise, TASKS[recipe.data.task]).to(device)


def _class_scores(
    labels: torch.Tensor, predicted: torch.Tensor, names: Iterable[str | int]
) -> list[ClassScore]:
    scores = []
    for index, name in enumerate(names):
        own = labels == index
        count, correct = int(own.sum()), int((own & (predicted == index)).sum())
        recall = correct / count if count else None
        scores.append(ClassScore(name, count, correct, int((predicted == index).sum()), recall))
    return scores


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Return an evaluation as lines of text."""
    lines = [plain(f"{evaluation.split}: {evaluation.source}")]
    rows = [
        [name, number(value), counted(evaluation.n[name], evaluation.unit[name])]
        for name, value in evaluation.metrics.items()
    ]
    lines += columns([["metric", "value", "n"], *rows], right=[1])
    if evaluation.layers:
        names = list(next(iter(evaluation.layers.values())))
        rows = [[layer, *map(number, m.values())] for layer, m in evaluation.layers.items()]
        lines += ["", *columns([["layer", *names], *rows], right=range(1, len(names) + 1))]
    if evaluation.classes:
        rows = [
            [short(str(score.label), 40), f"{score.n:,}", f"{score.predicted:,}",
             NONE if score.recall is None else f"{score.recall:.2%}"]
            for score in evaluation.classes
        ]  # fmt: skip
        head = ["class", "n", "predicted", "recall"]
        lines += ["", *columns([head, *rows], right=[1, 2, 3])]
    if evaluation.scores:
        lines += ["", *_scores_lines(evaluation.scores)]
    if evaluation.caution:
        lines += ["", evaluation.caution]
    return lines


def _scores_lines(scores: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return a row for each group of recordings and decoder.

    `95 %` is the interval of the mean r, `chance ≤` the 95 % quantile of r with mismatched
    envelopes, and `n` the number of recordings.
    """
    rows = []
    for group, decoders in scores.items():
        for decoder, summary in decoders.items():
            low, high = summary["low"], summary["high"]
            between = NONE if low is None else f"{low:.3f} to {high:.3f}"
            null = summary["null"]
            rows.append(
                [group, decoder, f"{summary['mean']:.3f}", between, f"{null['high']:.3f}",
                 number(null["p"]), str(summary["subjects"]), str(summary["recordings"])]
            )  # fmt: skip
    head = ["split", "decoder", "r", "95 %", "chance ≤", "p", "subjects", "n"]
    return columns([head, *rows], right=[2, 4, 5, 6, 7])


def languages_lines(evaluations: Mapping[str, Evaluation]) -> list[str]:
    """Return the evaluations of several languages as a table, a row each."""
    names = list(next(iter(evaluations.values())).metrics)
    rows = [
        [language, *(number(evaluation.metrics[name]) for name in names),
         counted(evaluation.n[names[0]], evaluation.unit[names[0]])]
        for language, evaluation in evaluations.items()
    ]  # fmt: skip
    lines = columns([["language", *names, "n"], *rows], right=range(1, len(names) + 1))
    cautions = dict.fromkeys(e.caution for e in evaluations.values() if e.caution)
    return [*lines, *([""] if cautions else []), *cautions]

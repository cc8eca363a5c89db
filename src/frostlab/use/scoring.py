"""Evaluation of a trained run: on a split of its data, another language, or other files.

Metrics are computed by the code that evaluates during training. For a run of one process,
evaluating the report split again with the same hardware, libraries and number of threads gives
exactly the metrics of the record.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from frostlab.data.eeg.load import load_undivided, recorded_like
from frostlab.data.eeg.recordings import PreparedData, Signals, Windows
from frostlab.data.encode import columns_of, encode_split, given_split, recipe_split
from frostlab.data.prepare import prepare
from frostlab.data.sources import LANGUAGES, Columns, TextData
from frostlab.data.splits import survey
from frostlab.data.tokenizers import Encoder
from frostlab.data.tokens import Prepared, Tokens
from frostlab.devices import choose_device
from frostlab.envelopes.scores import score_recordings
from frostlab.errors import BadInput, nearest
from frostlab.recipe.data import EEGData, Named, PretrainedTokenizer, Synthetic
from frostlab.recipe.recipe import Recipe
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import (
    TOKENIZER,
    ModelInputs,
    read_inputs,
    stored_encoder,
)
from frostlab.storage import cache_folder
from frostlab.text import NONE, columns, counted, joined, number, plain, short
from frostlab.training.batches.batch import scored_counts
from frostlab.training.distributed import Compute
from frostlab.training.eeg_report import (
    Scores,
    baseline_scores,
    decode,
    recording_metrics,
    reported,
)
from frostlab.training.evaluate import evaluate
from frostlab.training.restore import best_model, check_same_data
from frostlab.training.setup import add_loss, choose_precision, modes_of
from frostlab.training.state import evaluation_batch
from frostlab.training.step.objective import Objective
from frostlab.training.tasks import TASKS

SPLITS = ("report", "tune", "train")
_CAUTIONS = {
    "train": "the model was trained on these examples",
    "tune": "the weights were selected on this split",
}


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
    layers: dict[str, dict[str, float]] = field(default_factory=dict)  # supervised layer → metrics
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
        if labels is not None:
            predicted = torch.zeros(len(tokens), dtype=torch.long, device=self.compute.device)
        metrics = self.metrics(prepared, tokens, classes=predicted)
        layers = metrics.pop("layers", {})
        metrics = {self.recipe.metric: metrics[self.recipe.metric], **metrics}
        count, unit = int(scored_counts(tokens).sum()), "tokens" if labels is None else "examples"
        scores: list[ClassScore] = []
        if labels is not None and predicted is not None:
            truth = torch.from_numpy(labels.copy())
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
            elif metric in ("loss", "window_pearson"):
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
        """Add the recipe's caution, about its scale and stand-ins, unless it is there already."""
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


def evaluate_run(
    run: RunRecord | Evaluator,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    settings: Mapping[str, Any] | None = None,
    data_dir: str | Path | None = None,
    device: str | None = None,
) -> Evaluation:
    """Evaluate a run's best weights.

    Args:
        run: a run's record, or an evaluator that has loaded its model.
        data: a file or folder to evaluate instead of the run's own data: text with the columns of
            the recipe, or for EEG a folder of recordings.
        split: report (the default), tune or train; for EEG also unseen, the subjects that the model
            was not trained on. For EEG, report also scores unseen subjects, apart from the others.
        settings: changes of the evaluated data: `data.path`, `data.language`, `data.text`,
            `data.label`, `data.report` (another split of the same data set) and
            `data.evaluation_limit`; for EEG, only `data.path`.
        data_dir: the folder with the data sets.
        device: the device; None: the recipe's. An evaluator keeps its own device.
    """
    evaluator = run if isinstance(run, Evaluator) else Evaluator(run, device)
    choice = _Choice.of(settings or {}, data, split)
    folder = None if data_dir is None else Path(data_dir)
    if isinstance(evaluator.recipe.data, EEGData):
        return _evaluate_recordings(evaluator, choice, folder)
    if choice.is_default:
        return _evaluate_own(evaluator, choice.role, folder)
    return _evaluate_text(evaluator, choice, folder)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that cannot be set for an evaluation."""
    _Choice.of(settings, None, None)


def evaluate_languages(
    run: RunRecord,
    languages: str,
    *,
    split: str | None = None,
    data_dir: str | Path | None = None,
    device: str | None = None,
) -> dict[str, Evaluation]:
    """Evaluate a run on languages of XNLI: `all`, or several with commas, such as `en,zh`."""
    data = run.recipe.data
    if not isinstance(data, Named) or data.name != "xnli":
        raise BadInput(f"--languages is for runs on xnli; {run.folder} was trained on {data.name}")
    wanted = list(LANGUAGES) if languages == "all" else languages.split(",")
    for name in wanted:
        if name not in LANGUAGES:
            hint = nearest(name, LANGUAGES) or f"; choose all, or some of {', '.join(LANGUAGES)}"
            raise BadInput(f"--languages: {name!r:.40} is not a language of xnli{hint}")
    evaluator = Evaluator(run, device)
    return {
        name: evaluate_run(
            evaluator, split=split, settings={"data.language": name}, data_dir=data_dir
        )
        for name in wanted
    }


_SETTABLE = ("path", "report", "language", "text", "label", "evaluation_limit")  # keys of `data`


@dataclass(frozen=True)
class _Choice:
    """The split to evaluate, and everything that differs from the run's own data."""

    split: str | None
    path: str | None = None
    report: str | None = None  # name of the split to evaluate as `report`
    language: str | None = None
    text: tuple[str, ...] | None = None
    label: str | None = None
    evaluation_limit: int | None = None

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], data: str | Path | None, split: str | None
    ) -> "_Choice":
        """Check the arguments of an evaluation, and return them as a choice."""
        values = {key.removeprefix("data."): value for key, value in settings.items()}
        for key, name in zip(settings, values, strict=True):
            if name not in _SETTABLE or not key.startswith("data."):
                listed = ", ".join(f"data.{name}" for name in _SETTABLE)
                raise BadInput(f"{key} cannot be set for an evaluation; only {listed} can")
        if data is not None and "path" in values:
            raise BadInput("--data and data.path both name the data; give one of them")
        if data is not None:
            values["path"] = str(data)
        if isinstance(values.get("text"), str):
            values["text"] = [values["text"]]
        if "text" in values:
            values["text"] = tuple(values["text"] if isinstance(values["text"], list) else ())
        for name, value in values.items():
            texts = value if name == "text" else [value]
            kind = int if name == "evaluation_limit" else str
            if not texts or not all(isinstance(v, kind) and v and v is not True for v in texts):
                wanted = "a whole number above 0" if kind is int else "a name"
                given = data if name == "path" and data is not None else settings[f"data.{name}"]
                raise BadInput(f"data.{name} {given!r:.40} is not {wanted}")
        if values.get("evaluation_limit", 1) < 1:
            raise BadInput("data.evaluation_limit should be at least 1")
        choice = cls(split, **values)
        if split is not None and split not in (*SPLITS, "unseen"):
            known = (*SPLITS, "unseen")
            hint = nearest(split, known) or f"; there are {', '.join(known)} (EEG)"
            raise BadInput(f"--split {split!r:.40} is not a split{hint}")
        if split is not None and choice.path is not None and Path(choice.path).is_file():
            raise BadInput(f"--split is for the run's data or a folder; {choice.path} is one file")
        if choice.report is not None and choice.role != "report":
            raise BadInput(f"data.report names the split to evaluate; leave out --split {split}")
        return choice

    @property
    def is_default(self) -> bool:
        """Whether the run's own data are evaluated, with the recipe's settings."""
        return self == _Choice(self.split)

    @property
    def role(self) -> str:
        return self.split or "report"


def _evaluate_own(evaluator: Evaluator, role: str, data_dir: Path | None) -> Evaluation:
    """Evaluate a split of the run's own data, which must be unchanged."""
    prepared = _own_data(evaluator, _with_own_tokenizer(evaluator), data_dir)
    assert isinstance(prepared, Prepared)
    tokens = prepared.splits.get(role)
    if tokens is None:
        listed = ", ".join(prepared.splits)
        raise BadInput(f"--split {role}: the run's data have no such split; there are {listed}")
    caution = _CAUTIONS.get(role, prepared.caution)
    return evaluator.score_tokens(prepared, tokens, role, prepared.origin[role], caution)


def _own_data(evaluator: Evaluator, recipe: Recipe, data_dir: Path | None) -> PreparedData:
    """Prepare the run's own data; an error about missing or changed files suggests --data."""
    try:
        prepared = prepare(recipe, data_dir)
        check_same_data(evaluator.record, prepared)
    except BadInput as error:
        if isinstance(recipe.data, Synthetic):
            raise
        raise BadInput(f"{error}; to evaluate other data, use --data") from None
    return prepared


def _with_own_tokenizer(evaluator: Evaluator) -> Recipe:
    """Return the recipe with the run folder's copy of a pretrained tokenizer.

    The original may have been moved or deleted.
    """
    recipe = evaluator.recipe
    if evaluator.inputs.tokenizer != "pretrained":
        return recipe
    name = str((evaluator.record.folder / TOKENIZER).absolute())
    tokenizer = PretrainedTokenizer(kind="pretrained", name=name)
    return recipe.model_copy(update={"tokenizer": tokenizer})


def _evaluate_text(evaluator: Evaluator, choice: _Choice, data_dir: Path | None) -> Evaluation:
    """Evaluate other text, or a split with other settings, encoded by the run's tokenizer."""
    if choice.role == "unseen":
        raise BadInput(f"--split unseen is for EEG; there are {', '.join(SPLITS)}")
    record, data = evaluator.record, evaluator.recipe.data
    if isinstance(data, Synthetic):
        raise BadInput(
            f"{record.folder} was trained on generated tokens ({data.name}), so it cannot be "
            "evaluated on other data; leave --data and --set out"
        )
    assert not isinstance(data, EEGData)
    cache = cache_folder(None)
    if choice.language is not None and not (isinstance(data, Named) and data.name == "xnli"):
        raise BadInput(f"data.language: {data.name} has no languages; only xnli has")
    if choice.path is not None:
        if choice.language is not None:
            raise BadInput("data.language chooses a language of xnli; leave out the path")
        if choice.report is not None:
            raise BadInput("data.report chooses a split of the run's data; leave out the path")
        split = given_split(choice.path, choice.role, "--data", getattr(data, choice.role))
        limit = choice.evaluation_limit
    else:
        if choice.report is not None:
            data = data.model_copy(update={"report": choice.report})
        split = recipe_split(data, choice.role, choice.language, data_dir, cache)
        own_limit = data.limit if choice.role == "train" else data.evaluation_limit
        limit = choice.evaluation_limit or own_limit
    read = _columns(data, choice)
    labels = evaluator.labels if data.task == "classification" else None
    tokens = encode_split(split, read, evaluator.encoder, data, labels, limit, cache)
    inputs = evaluator.inputs
    assert inputs.vocabulary is not None
    assert inputs.pad is not None
    prepared = Prepared(
        task=data.task,
        classes=inputs.classes,
        vocabulary=inputs.vocabulary,
        pad=inputs.pad,
        splits={choice.role: tokens},
        origin={},
        caution=None,
        known={},
        digest=tokens.digest,
        tokenizer=None,
    )
    role = "data" if choice.path is not None else choice.role
    caution = _CAUTIONS.get(role) or _known_rows(record, survey(split, read, cache).digest)
    return evaluator.score_tokens(prepared, tokens, role, split.place, caution)


def _columns(data: TextData, choice: _Choice) -> Columns:
    """Return the columns to read: the recipe's, unless the settings name others."""
    own = columns_of(data)
    if choice.text is not None and len(choice.text) != len(own.texts):
        raise BadInput(
            f"data.text names {len(choice.text)} columns; the run reads {len(own.texts)}, "
            f"{' and '.join(own.texts)}"
        )
    if choice.label is not None and own.label is None:
        raise BadInput("data.label: a language model has no labels")
    return replace(
        own, texts=choice.text or own.texts, label=own.label and (choice.label or own.label)
    )


def _known_rows(record: RunRecord, digest: str) -> str | None:
    """Return a warning if rows with this digest were used to train the run or to select weights."""
    splits = record.data.splits
    known = [role for role in splits if splits[role].rows_digest == digest]
    return next((_CAUTIONS[role] for role in known if role in _CAUTIONS), None)


def _evaluate_recordings(
    evaluator: Evaluator, choice: _Choice, data_dir: Path | None
) -> Evaluation:
    """Evaluate EEG: the run's own data, or all recordings of a folder."""
    data = evaluator.recipe.data
    assert isinstance(data, EEGData)
    if choice != _Choice(choice.split, choice.path):
        raise BadInput("only data.path can be set for an evaluation of EEG")
    if choice.path is not None:
        if choice.split is not None:
            raise BadInput("--split is for the run's own data; all recordings of --data are used")
        inputs = evaluator.inputs
        wanted = recorded_like(data, choice.path)
        groups = load_undivided(
            wanted, inputs.channels or [], inputs.subjects or [], data_dir, cache_folder(None)
        )
        return evaluator.score_windows(groups, {}, "data", choice.path, None)
    signals = _own_data(evaluator, evaluator.recipe, data_dir)
    assert isinstance(signals, Signals)
    role = choice.role
    if role == "report":
        groups = {name: signals.splits[name] for name in reported(signals)}
        ridge, caution = baseline_scores(signals), signals.caution
    elif role in signals.splits:
        windows = signals.splits[role]
        groups = {role: replace(windows, hop=windows.hop or windows.length)}
        ridge, caution = {}, _CAUTIONS.get(role, signals.caution)
    else:
        listed = ", ".join(signals.splits)
        raise BadInput(f"--split {role}: the run's data have no such split; there are {listed}")
    return evaluator.score_windows(groups, ridge, role, signals.origin[role], caution)


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

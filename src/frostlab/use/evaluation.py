"""Evaluation of a trained run: on a split of its data, another language, or other files."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frostlab.data.eeg.load import load_undivided, recorded_like
from frostlab.data.eeg.recordings import Signals
from frostlab.data.encode import columns_of, encode_split, given_split, recipe_split
from frostlab.data.prepare import PreparedData, prepare
from frostlab.data.sources import LANGUAGES, Columns, TextData
from frostlab.data.splits import survey
from frostlab.data.tokens import Prepared
from frostlab.errors import BadInput, nearest
from frostlab.recipe.data import EEGData, Generated, Named, PretrainedTokenizer
from frostlab.recipe.recipe import Recipe
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import TOKENIZER
from frostlab.storage import cache_folder
from frostlab.training.eeg_report import baseline_scores, reported
from frostlab.training.restore import check_same_data
from frostlab.use.scoring import Evaluation, Evaluator

SPLITS = ("report", "tune", "train")
_CAUTIONS = {  # split → warning to show with its metrics
    "train": "the model was trained on these examples",
    "tune": "the weights were selected on this split",
}


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
            was not trained on. An evaluation of report also scores these subjects, separately.
        settings: settings that replace the recipe's in this evaluation: `data.path`,
            `data.language`, `data.text`, `data.label`, `data.report` (another split of the same
            data set) and `data.evaluation_limit`; for EEG, only `data.path`.
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
    """Evaluate a run on languages of XNLI: `all`, or some, such as `en,zh`."""
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
    report: str | None = None  # the data set's own name for the split to evaluate as `report`
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
        """The split to evaluate; `report` by default."""
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
        if isinstance(recipe.data, Generated):
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
    if isinstance(data, Generated):
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
            raise BadInput(
                f"data.language chooses a language of xnli; leave out the path {choice.path}"
            )
        if choice.report is not None:
            raise BadInput(
                f"data.report chooses a split of the run's data; leave out the path {choice.path}"
            )
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
        # Evaluate adjacent windows if training redraws their starts in every epoch.
        groups = {role: replace(windows, hop=windows.hop or windows.length)}
        ridge, caution = {}, _CAUTIONS.get(role, signals.caution)
    else:
        listed = ", ".join(signals.splits)
        raise BadInput(f"--split {role}: the run's data have no such split; there are {listed}")
    return evaluator.score_windows(groups, ridge, role, signals.origin[role], caution)

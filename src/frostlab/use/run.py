"""`fl.Run`: a run's record, with its trained model ready to use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, cast, get_args

from torch import nn

from frostlab.devices import choose_device
from frostlab.errors import BadInput, nearest, require
from frostlab.flow.measurements import load_flow
from frostlab.models.sampling import Sample, Sampling
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import stored_tokenizer
from frostlab.records.schema import EvaluationEvent, StepEvent
from frostlab.training.restore import best_model
from frostlab.training.run import run as train_recipe
from frostlab.use.evaluation import evaluate_run
from frostlab.use.export import export_run
from frostlab.use.generate import check_generates, generate
from frostlab.use.predict import Envelopes, Predictions, Predictor, predict
from frostlab.use.scoring import Evaluation

Frame = Literal["steps", "evaluations", "flow"]
_P = ParamSpec("_P")


@dataclass(frozen=True, repr=False)
class Run(RunRecord):
    """A run: its record and its trained model, both loaded from the run's folder."""

    def model(self, device: str = "cpu") -> nn.Module:
        """Return the model with the run's best weights, in evaluation mode."""
        chosen = choose_device(device)
        return best_model(self).to(chosen)

    def tokenizer(self) -> Any:
        """Return the run's tokenizer as a tokenizer of transformers, with a padding token.

        frostlab's own tokenizers (BPE and words) also have an end token and a separator.
        """
        return stored_tokenizer(self.folder)

    @cached_property
    def labels(self) -> tuple[str | int, ...] | None:
        """The labels of the classes, in the order of the model's outputs; None without classes."""
        labels = self.data.labels
        return None if labels is None else tuple(labels)

    def evaluate(
        self,
        data: str | Path | None = None,
        *,
        split: str | None = None,
        settings: Mapping[str, Any] | None = None,
        data_dir: str | Path | None = None,
        device: str | None = None,
    ) -> Evaluation:
        """Evaluate the best weights on the run's data, or on a file or folder of other data.

        Args:
            data: a file or folder to evaluate instead of the run's own data: text with the columns
                of the recipe, or for EEG a folder of recordings.
            split: report (the default), tune or train; for EEG also unseen, the subjects that the
                model was not trained on. An evaluation of report also scores these subjects,
                separately.
            settings: settings that replace the recipe's in this evaluation: `data.path`,
                `data.language`, `data.text`, `data.label`, `data.report` (another split of the same
                data set) and `data.evaluation_limit`; for EEG, only `data.path`.
            data_dir: the folder with the data sets.
            device: the device; None: the recipe's.
        """
        evaluator = self._loaded(device)
        return evaluate_run(evaluator, data, split=split, settings=settings, data_dir=data_dir)

    def predict(
        self,
        inputs: Sequence[str] | Sequence[tuple[str, str]] | str | Path,
        *,
        device: str | None = None,
    ) -> Predictions[Any] | Envelopes:
        """Predict texts, or decode EEG, with the best weights.

        A classifier returns a `Prediction` for each text (or pair of texts), and a language model
        a `TextLoss`. For EEG, `inputs` is a file or folder of recordings, and the result has the
        decoded envelope of each recording.
        """
        return predict(self._loaded(device), inputs)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        samples: int = 1,
        max_tokens: int = 100,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
        device: str | None = None,
    ) -> list[Sample]:
        """Continue one or several prompts with the run's language model.

        Args:
            prompts: a text, or several; an empty one begins a new text.
            samples: the number of continuations of each prompt.
            max_tokens: the most tokens of a continuation.
            temperature: below 1 favours probable tokens; 0 always takes the most probable one.
            top_p: draw from the smallest set of most probable tokens whose probabilities sum to
                this or more.
            seed: the same seed gives the same samples up to rounding, whichever other prompts and
                samples are generated.
            device: the device; None: the recipe's.
        """
        sampling = Sampling(max_tokens, temperature, top_p, seed, samples)
        check_generates(self)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return generate(self._loaded(device), texts, sampling)

    def export(self, folder: str | Path) -> Path:
        """Write the run as a Hugging Face folder: weights, tokenizer, labels and a model card.

        The folder must be new or empty. transformers loads it without frostlab; the head of
        frostlab's own classifiers is in a separate file, and the card has the code that adds it.
        """
        return export_run(self, folder)

    def _loaded(self, device: str | None) -> Predictor:
        """Return a predictor on a device; for a finished run, load it only once."""
        if self.ending != "finished":
            return Predictor(self, device)
        if device not in self._predictors:
            self._predictors[device] = Predictor(self, device)
        return self._predictors[device]

    @cached_property
    def _predictors(self) -> dict[str | None, Predictor]:
        return {}

    def frame(self, kind: Frame = "steps") -> Any:
        """Return a pandas DataFrame of the run's steps, evaluations or gradient flow.

        Steps have the columns step, loss, norm (of the gradient, before clipping), ms (duration)
        and rate (learning rate); several steps are recorded together, and only the last of them
        has a rate. Evaluations have step, split, best and a column for each metric. Gradient flow
        has norms of gradients and updates in each part of the model, if the run measured them.
        """
        kinds = get_args(Frame)
        if kind not in kinds:
            hint = nearest(str(kind), kinds) or f"; choose from {', '.join(kinds)}"
            raise BadInput(f"Run.frame: {kind!r:.40} is not a kind of record{hint}")
        pandas = require("pandas", "data", "Run.frame")
        if kind == "flow":
            return load_flow(self.folder).to_frame()
        rows = _step_rows(self) if kind == "steps" else _evaluation_rows(self)
        return pandas.DataFrame(rows)


def _step_rows(record: RunRecord) -> list[dict[str, Any]]:
    rows = []
    for event in record.events(StepEvent):
        values = zip(event.loss, event.norm, event.ms, strict=True)
        for step, (loss, norm, ms) in enumerate(values, event.first):
            rate = event.rate if step == event.step else None
            rows.append({"step": step, "loss": loss, "norm": norm, "ms": ms, "rate": rate})
    return rows


def _evaluation_rows(record: RunRecord) -> list[dict[str, Any]]:
    rows = []
    for event in record.events(EvaluationEvent):
        metrics = {name: v for name, v in event.metrics.items() if not isinstance(v, dict)}
        rows.append({"step": event.step, "split": event.split, "best": event.best, **metrics})
    return rows


def load_run(folder: str | Path) -> Run:
    """Load the run in a folder, finished or not."""
    path = Path(folder)
    if not (path / "events.jsonl").is_file():
        problem = "it has no events.jsonl" if path.is_dir() else "it is not a folder"
        raise BadInput(f"{path} does not hold a run: {problem}")
    return Run(path)


def _returning_run(train: Callable[_P, RunRecord]) -> Callable[_P, Run]:
    """Wrap the function that trains a recipe so that it returns a `Run`; keep its parameters."""

    @wraps(train)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> Run:
        return Run(train(*args, **kwargs).folder)

    return cast(Callable[_P, Run], run)


run = _returning_run(train_recipe)

"""Predictions of a trained run: classes of texts, losses of texts, or envelopes from EEG."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from frostlab.data.eeg.load import load_eeg, recorded_like
from frostlab.data.encode import (
    STDIN,
    columns_of,
    encode_documents,
    encode_examples,
    read_texts_to_predict,
)
from frostlab.data.sources import TextData
from frostlab.data.tokenizers import Texts
from frostlab.data.tokens import Tokens
from frostlab.errors import BadInput, require
from frostlab.recipe.data import EEGData, Generated
from frostlab.records.folder import RunRecord
from frostlab.storage import finite, whole_file
from frostlab.training.batches.batch import IGNORED, TokenExamples, padding_limit
from frostlab.training.eeg_report import decode
from frostlab.training.setup import modes_of
from frostlab.training.step.compiled import uncompiled
from frostlab.training.treatment import wants_types
from frostlab.use.scoring import Evaluator

AT_ONCE = 4096  # texts that are encoded together and batched by length
Envelopes = dict[str, NDArray[np.float32]]  # recording → decoded envelope
T = TypeVar("T")


@dataclass(frozen=True)
class Prediction:
    """The predicted class of a text."""

    label: str | int
    probability: float
    probabilities: dict[str | int, float]  # of every class, in the order of the model's outputs

    def row(self) -> dict[str, Any]:
        """Return flat values: label, probability, and `p_LABEL` for every class."""
        every = {f"p_{label}": value for label, value in self.probabilities.items()}
        return {"label": self.label, "probability": self.probability, **every}


@dataclass(frozen=True)
class TextLoss:
    """The loss of a language model on a text."""

    tokens: int  # number of predicted tokens
    loss: float | None  # mean over the tokens; None for a text without tokens
    perplexity: float | None

    def row(self) -> dict[str, Any]:
        """Return the values by column."""
        return {"tokens": self.tokens, "loss": self.loss, "perplexity": self.perplexity}


class Predictions(list[T]):
    """A list of predictions, in the order of the texts."""

    def rows(self) -> list[dict[str, Any]]:
        """Return each prediction as a flat dict: column → value."""
        return [item.row() for item in self]  # type: ignore[attr-defined]

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each text."""
        return require("pandas", "data", "Predictions.to_frame").DataFrame(self.rows())


class Predictor(Evaluator):
    """A run's model on a device, ready to predict."""

    def texts(self, texts: Sequence[Texts]) -> Predictions[Any]:
        """Predict texts, or pairs of texts: a `Prediction` or a `TextLoss` for each."""
        if not texts:
            return Predictions()
        data = self.recipe.data
        if data.task == "language":
            return self._losses([text for (text,) in texts])
        tokens = encode_examples(list(texts), self.encoder, data.length)
        probabilities = np.zeros((len(tokens), self.inputs.classes))
        for rows, logits, _ in self._logits(tokens):
            probabilities[rows] = logits.double().softmax(-1).cpu().numpy()
        labels = self.labels
        return Predictions(
            Prediction(labels[best], float(row[best]), dict(zip(labels, row.tolist(), strict=True)))
            for row, best in zip(probabilities, probabilities.argmax(-1), strict=True)
        )

    def _losses(self, texts: list[str]) -> Predictions[TextLoss]:
        # a long text becomes several examples; `owners` has the index of each example's text
        tokens, owners = encode_documents(texts, self.encoder, self.recipe.data.length)
        losses, counts = np.zeros(len(texts)), np.zeros(len(texts), dtype=np.int64)
        for rows, logits, targets in self._logits(tokens):
            token_losses = functional.cross_entropy(
                logits.flatten(0, 1).float(),
                targets.flatten(),
                ignore_index=IGNORED,
                reduction="none",
            )
            sums = token_losses.view(targets.shape).double().sum(-1).cpu().numpy()
            np.add.at(losses, owners[rows], sums)
            np.add.at(counts, owners[rows], (targets != IGNORED).sum(-1).cpu().numpy())
        return Predictions(
            _text_loss(int(count), float(loss)) for count, loss in zip(counts, losses, strict=True)
        )

    def _logits(
        self, tokens: Tokens
    ) -> Iterator[tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]]:
        """Yield batches of examples of similar length: their indices, logits and targets."""
        if not len(tokens):
            return
        device, pad = self.compute.device, self.inputs.pad
        assert pad is not None
        types = wants_types(self.objective.model)
        examples = TokenExamples(tokens, pad, types, padding_limit(tokens, device))
        self.objective.eval()
        with uncompiled(), modes_of(self.recipe, device), torch.no_grad():
            for rows in examples.evaluation_order(self.batch):
                batch = examples.collate(rows).to(device)
                with self.compute.autocast():
                    logits = self.objective(batch, want="logits")
                yield rows, logits, batch.targets

    def envelopes(self, path: Path) -> Envelopes:
        """Decode the EEG of a file, or of every file in a folder."""
        data, inputs = self.recipe.data, self.inputs
        assert isinstance(data, EEGData)
        decoded: Envelopes = {}
        like = recorded_like(data, str(path))
        for windows in load_eeg(like, path, inputs.channels or [], inputs.subjects or []):
            with modes_of(self.recipe, self.compute.device):
                envelopes = decode(self.objective, windows, self.batch, self.compute)
            decoded |= {name: values.astype(np.float32) for name, values in envelopes.items()}
        return decoded


def _text_loss(count: int, loss: float) -> TextLoss:
    if not count:
        return TextLoss(0, None, None)
    mean = loss / count
    return TextLoss(count, mean, math.exp(mean) if mean < 700 else math.inf)


def predict(
    predictor: Predictor, inputs: Sequence[str] | Sequence[tuple[str, str]] | str | Path
) -> Predictions[Any] | Envelopes:
    """Predict texts, or decode a file or folder of EEG; see `Run.predict`."""
    record = predictor.record
    if isinstance(record.recipe.data, EEGData):
        if not isinstance(inputs, str | Path):
            raise BadInput("predict: a run on EEG takes the path of a file or folder of recordings")
        return predictor.envelopes(Path(inputs))
    wanted = columns_of(text_data(record)).texts
    if isinstance(inputs, str | Path):
        raise BadInput('predict takes a list of texts, such as ["a fine film"]')
    texts = [tuple(item) if isinstance(item, tuple | list) else (item,) for item in inputs]
    for number, item in enumerate(texts, 1):
        if len(item) != len(wanted) or not all(isinstance(text, str) for text in item):
            form = "a text" if len(wanted) == 1 else f"a pair: {', '.join(wanted)}"
            raise BadInput(f"predict: item {number} is {inputs[number - 1]!r:.60}, not {form}")
    predicted: Predictions[Any] = Predictions()
    for group in _groups(texts):
        predicted += predictor.texts(group)
    return predicted


def text_data(record: RunRecord) -> TextData:
    """Return the data settings of a run that reads text; refuse another run."""
    data = record.recipe.data
    if isinstance(data, Generated | EEGData):
        made_of = "EEG" if isinstance(data, EEGData) else f"generated tokens ({data.name})"
        raise BadInput(f"{record.folder} was trained on {made_of}, so it cannot read texts")
    return data


def _groups(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while group := list(islice(iterator, AT_ONCE)):
        yield group


def predict_file(
    record: RunRecord, path: str, device: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the number and prediction of each text of a file, or of the standard input ("-")."""
    texts = read_texts_to_predict(path, columns_of(text_data(record)))
    predictor: Predictor | None = None
    number = 0
    for group in _groups(texts):
        predictor = predictor or Predictor(record, device)
        for prediction in predictor.texts(group):
            number += 1
            yield {"row": number, **prediction.row()}
    if not number:
        raise BadInput(f"{'the standard input' if path == STDIN else path} holds no text")


@contextmanager
def new_file(path: Path, endings: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary path that becomes a new file; refuse an existing file."""
    check_new(path, endings)
    try:
        with whole_file(path) as temporary:
            yield temporary
    except OSError as error:
        raise BadInput(f"--out {path} cannot be written ({error.strerror})") from None


def check_new(path: Path, endings: Sequence[str]) -> None:
    """Refuse an output that exists, has another ending than these, or whose folder is missing."""
    if path.suffix not in endings:
        raise BadInput(f"--out {path}: the name should end in {' or '.join(endings)}")
    if path.exists():
        raise BadInput(f"--out {path} exists already; choose another file")
    if not path.parent.is_dir():
        raise BadInput(f"--out {path}: there is no folder {path.parent}")


def write_rows(rows: Iterable[Mapping[str, Any]], file: io.TextIOBase, kind: str) -> int:
    """Write rows as .csv, .tsv or .jsonl; return their number."""
    writer: Any = None
    count = 0
    for row in rows:
        count += 1
        if kind == ".jsonl":
            file.write(json.dumps(finite(dict(row)), ensure_ascii=False) + "\n")
            continue
        if writer is None:
            writer = csv.writer(
                file, delimiter="\t" if kind == ".tsv" else ",", lineterminator="\n"
            )
            writer.writerow(row)
        writer.writerow(row.values())
    return count


def envelope_rows(envelopes: Envelopes, rate: float) -> Iterator[dict[str, Any]]:
    """Yield the samples of decoded envelopes as rows: seconds, and a column for each recording."""
    longest = max(map(len, envelopes.values()))
    for sample in range(longest):
        values = {
            name: float(envelope[sample]) if sample < len(envelope) else None
            for name, envelope in envelopes.items()
        }
        yield {"seconds": sample / rate, **values}

"""Predictions: classes with probabilities, losses of texts, and decoded envelopes."""

from pathlib import Path

import numpy as np
import pytest
import torch

import frostlab as fl
from eeg_made import made
from frostlab.data.arrays import read_npz
from frostlab.data.prepare import prepare
from frostlab.use import predict as predict_module
from frostlab.use.predict import Prediction, TextLoss, predict_file
from tiny import tiny
from weather import rows


def test_the_classes_of_the_report_split_are_those_of_the_record(classifier: fl.Run) -> None:
    predicted = classifier.predict([text for text, _ in rows(40, 12)])
    assert classifier.predictions is not None
    assert classifier.labels is not None
    recorded = [classifier.labels[index] for index in classifier.predictions.classes]
    assert [prediction.label for prediction in predicted] == recorded
    for prediction in predicted:
        assert isinstance(prediction, Prediction)
        assert list(prediction.probabilities) == ["dry", "wet"]
        assert sum(prediction.probabilities.values()) == pytest.approx(1)
        assert prediction.probability == max(prediction.probabilities.values())
        assert prediction.probabilities[prediction.label] == prediction.probability


def test_probabilities_are_those_of_the_model_itself(pairs: fl.Run) -> None:
    """With the model and the tokenizer as a user of transformers calls them."""
    texts = [("sun on day 3", "day 1"), ("rain", "a much longer second text"), ("", "day")]
    tokenizer, model = pairs.tokenizer(), pairs.model()
    predicted = pairs.predict(texts)
    for (first, second), prediction in zip(texts, predicted, strict=True):
        inputs = tokenizer(first, second, return_tensors="pt", truncation=True, max_length=24)
        with torch.no_grad():
            expected = model(**inputs).logits.softmax(-1)[0]
        assert list(prediction.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_prediction_does_not_depend_on_its_neighbours(
    classifier: fl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text for text, _ in rows(0, 12)]
    monkeypatch.setattr(predict_module, "AT_ONCE", 5)
    together = classifier.predict(texts)
    for text, prediction in zip(texts, together, strict=True):
        (alone,) = classifier.predict([text])
        assert alone.label == prediction.label
        assert alone.probability == pytest.approx(prediction.probability, abs=1e-6)


def test_the_callers_modes_change_nothing(classifier: fl.Run) -> None:
    texts = [text for text, _ in rows(0, 6)]
    expected, scores = classifier.predict(texts), classifier.evaluate().metrics
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert classifier.predict(texts) == expected
            assert classifier.evaluate().metrics == scores
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.is_grad_enabled()


def test_rows_and_frame(classifier: fl.Run) -> None:
    predicted = classifier.predict(["sun", "rain"])
    frame = predicted.to_frame()  # type: ignore[union-attr]
    assert list(frame.columns) == ["label", "probability", "p_dry", "p_wet"]
    assert len(frame) == 2
    assert classifier.predict([]) == []


def test_the_loss_of_a_text(language: fl.Run) -> None:
    """Against the model called once a text, with the end token in front."""
    short, long = "rain on day 3", "sun and hail on day 7 and after " * 3
    losses = language.predict([short, long, ""])
    tokenizer, model = language.tokenizer(), language.model()
    length = language.recipe.data.length
    for text, loss in zip((short, long), losses, strict=False):
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
        total = 0.0
        for start in range(0, len(ids) - 1, length):
            part = torch.tensor(ids[start : start + length + 1])
            with torch.no_grad():
                logits = model(part[None, :-1])
            logits = logits if isinstance(logits, torch.Tensor) else logits.logits
            total += float(torch.nn.functional.cross_entropy(logits[0], part[1:], reduction="sum"))
        assert isinstance(loss, TextLoss)
        assert loss.tokens == len(ids) - 1
        assert loss.loss == pytest.approx(total / loss.tokens, rel=1e-5)
        assert loss.perplexity == pytest.approx(np.exp(total / loss.tokens), rel=1e-5)
    assert len(tokenizer(long)["input_ids"]) > 2 * length
    assert losses[2] == TextLoss(0, None, None)


def test_the_files_that_hold_the_texts(classifier: fl.Run, tmp_path: Path) -> None:
    texts = ["sun on day 3", "", "rain, and\tmore"]
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "b.txt").write_bytes("\r\n".join(texts).encode())
    lines = ["id,text", "7,sun on day 3", '8,""', '9,"rain, and\tmore"']
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    expected = [{"row": number, **p.row()} for number, p in enumerate(classifier.predict(texts), 1)]
    for name in ("a.txt", "b.txt", "a.csv"):
        assert list(predict_file(classifier, str(tmp_path / name))) == expected


def test_own_envelopes_are_decoded_again(listener: fl.Run, tmp_path: Path) -> None:
    """The report recordings of the run, written as files of EEG alone, give its decoded.npz."""
    signals = prepare(listener.recipe)
    for split in ("report", "unseen"):
        for recording in signals.splits[split].recordings:  # type: ignore[union-attr]
            np.save(tmp_path / f"{recording.name}.npy", recording.eeg)
    decoded = listener.predict(tmp_path)
    assert isinstance(decoded, dict)
    recorded = read_npz(listener.folder / "decoded.npz")
    assert decoded.keys() == recorded.keys()
    for name, values in recorded.items():
        np.testing.assert_allclose(decoded[name], values, atol=1e-4)


def test_a_single_recording_without_speech_is_decoded(listener: fl.Run, tmp_path: Path) -> None:
    eeg = made("x", "s", seed=1, samples=200, channels=64).eeg
    np.save(tmp_path / "mine.npy", eeg)
    (decoded,) = listener.predict(tmp_path / "mine.npy").values()  # type: ignore[union-attr]
    assert decoded.shape == (200,)
    assert np.isfinite(decoded).all()
    with pytest.raises(fl.BadInput, match="takes the path of a file or folder"):
        listener.predict(["a"])
    with pytest.raises(fl.BadInput, match="did you mean `mine.npy`"):
        listener.predict(tmp_path / "mime.npy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(fl.BadInput, match="has no EEG file"):
        listener.predict(tmp_path / "empty")
    np.save(tmp_path / "short.npy", eeg[:30])
    with pytest.raises(fl.BadInput, match="short has 30 samples, but a window has 64"):
        listener.predict(tmp_path / "short.npy")


def test_bad_inputs_are_one_line(classifier: fl.Run, pairs: fl.Run, tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match="takes a list of texts"):
        classifier.predict("a fine film")
    with pytest.raises(fl.BadInput, match=r"item 2 is \('a', 'b'\), not a text"):
        classifier.predict(["a", ("a", "b")])  # type: ignore[list-item]
    with pytest.raises(fl.BadInput, match="item 1 is 'a', not a pair: first, second"):
        pairs.predict(["a"])
    with pytest.raises(fl.BadInput, match="item 1 is 3, not a text"):
        classifier.predict([3])  # type: ignore[list-item]
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(fl.BadInput, match="a.txt holds no text"):
        list(predict_file(classifier, str(tmp_path / "a.txt")))
    (tmp_path / "b.txt").write_text("one\n")
    with pytest.raises(fl.BadInput, match="reads pairs of texts, .* columns first and second"):
        list(predict_file(pairs, str(tmp_path / "b.txt")))
    generated = fl.run(tiny(), runs=tmp_path)
    with pytest.raises(fl.BadInput, match="was trained on generated tokens"):
        generated.predict(["a"])

"""A run's folder is enough to load its model, its tokenizer and its labels."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import frostlab as fl
from frostlab.data.prepare import prepare
from frostlab.data.tokenizers import load_trained
from frostlab.records import SCHEMA
from frostlab.records.checkpoint import checkpoints_in
from frostlab.records.model_files import (
    ModelInputs,
    read_inputs,
    stored_encoder,
    stored_tokenizer,
)
from frostlab.records.schema import EvaluationEvent, StepEvent
from frostlab.storage import load_tensors, save_tensors, seal
from frostlab.training.treatment import state_digest
from stages import progressive
from tiny import tiny
from weather import recipe


def copy_of(run: fl.Run, folder: Path) -> fl.Run:
    return fl.load_run(shutil.copytree(run.folder, folder / "copy"))


@pytest.mark.parametrize("name", ["classifier", "language", "pairs", "listener"])
def test_the_model_has_the_reported_weights(name: str, request: pytest.FixtureRequest) -> None:
    run: fl.Run = request.getfixturevalue(name)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    model = run.model()
    assert torch.equal(torch.rand(1), expected), "the caller's generator is left alone"
    assert not any(module.training for module in model.modules())
    assert state_digest(model) == run.result.weights_digest
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("file", ["result.json", "events.jsonl"])
def test_a_run_of_another_schema_is_refused(language: fl.Run, tmp_path: Path, file: str) -> None:
    """Its weights are not used either, and its result does not count as missing."""
    run = copy_of(language, tmp_path)
    path = run.folder / file
    first, rest, end = path.read_text().partition('"schema": ')
    path.write_text(f"{first}{rest}1{end.removeprefix(str(SCHEMA))}")
    said = f"{file}.* has schema 1, and this frostlab reads {SCHEMA}"
    with pytest.raises(fl.BadInput, match=said):
        run.model()
    with pytest.raises(fl.BadInput, match=said):
        run.evaluate()


def test_a_model_is_loaded_with_another_default_dtype(language: fl.Run) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = language.model()
    finally:
        torch.set_default_dtype(torch.float32)
    assert state_digest(model) == language.result.weights_digest


def test_a_loaded_model_has_its_treatment(classifier: fl.Run) -> None:
    counts = classifier.result.parameters
    frozen = sum(p.numel() for p in classifier.model().parameters() if not p.requires_grad)
    assert frozen == counts.frozen > 0


def test_layers_that_a_stage_added_are_loaded(tmp_path: Path) -> None:
    run = fl.run(progressive(), runs=tmp_path)
    assert state_digest(run.model()) == run.result.weights_digest


def test_adapters_are_loaded(weather: Path, tmp_path: Path) -> None:
    treatment = {"peft": {"method": "lora", "r": 2, "select": ["output"]}}
    run = fl.run(recipe(weather, treatment=treatment), runs=tmp_path)
    assert state_digest(run.model()) == run.result.weights_digest


def test_a_trained_tokenizer_encodes_as_in_training(classifier: fl.Run, language: fl.Run) -> None:
    texts = ["sun on day 3", "Rain  on<|end|>day <|sep|> x", "", "день 5 🌧"]
    for run in (classifier, language):
        prepared = prepare(run.recipe)
        assert prepared.tokenizer is not None  # type: ignore[union-attr]
        expected = load_trained(prepared.tokenizer).running(texts)  # type: ignore[union-attr]
        tokenizer = run.tokenizer()
        assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
        assert [tokenizer(text)["input_ids"] for text in texts] == expected
        assert stored_encoder(run.folder).running(texts) == expected
        special = (tokenizer.pad_token, tokenizer.eos_token, tokenizer.sep_token)
        assert special == ("<|pad|>", "<|end|>", "<|sep|>")
        assert tokenizer.pad_token_id == prepared.pad  # type: ignore[union-attr]
    assert language.tokenizer().decode(language.tokenizer()("a fine day")["input_ids"]) == (
        "a fine day"
    )


def test_a_pretrained_tokenizer_travels(pairs: fl.Run) -> None:
    tokens = pairs.tokenizer()("on day", "a 1").tokens()
    assert tokens == ["[CLS]", "on", "day", "[SEP]", "a", "1", "[SEP]"]


def test_a_tokenizer_without_padding_pads_with_the_end_token(tmp_path: Path) -> None:
    """As GPT-2's, and as in training."""
    vocabulary = {"<end>": 0, "sun": 1, "rain": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "model").mkdir()
    inputs = ModelInputs(3, 2, 0, "pretrained", None, None)
    (tmp_path / "model" / "inputs.json").write_text(json.dumps(asdict(inputs)))
    for name in ("tokenizer", "model"):
        seal(tmp_path / name)
    loaded = stored_tokenizer(tmp_path)
    assert loaded.pad_token == "<end>"
    assert loaded(["sun", "rain sun"], padding=True)["input_ids"] == [[1, 0], [2, 1]]
    assert stored_encoder(tmp_path).pad == 0


def test_labels(classifier: fl.Run, language: fl.Run, listener: fl.Run) -> None:
    assert classifier.labels == ("dry", "wet")
    assert language.labels is listener.labels is None


def test_frames(classifier: fl.Run) -> None:
    steps = classifier.frame("steps")
    assert list(steps["step"]) == list(range(1, classifier.result.steps + 1))
    losses = [loss for event in classifier.events(StepEvent) for loss in event.loss]
    assert list(steps["loss"]) == losses
    evaluations = classifier.frame("evaluations")
    assert len(evaluations) == len(classifier.events(EvaluationEvent))
    assert evaluations["accuracy"].iloc[-1] == classifier.metrics["accuracy"]
    with pytest.raises(fl.BadInput, match="did you mean `steps`"):
        classifier.frame("step")  # type: ignore[arg-type]
    with pytest.raises(fl.BadInput, match="flow"):
        classifier.frame("flow")


def test_a_watched_run_has_a_frame_of_its_flow(tmp_path: Path) -> None:
    run = fl.run(tiny(watch={"every_n_steps": 4}), runs=tmp_path)
    frame = run.frame("flow")
    assert {"step", "part", "ratio"} <= set(frame.columns)


def test_the_repr_is_short(classifier: fl.Run) -> None:
    text = repr(classifier)
    assert text.startswith(f"Run({classifier.folder}: finished, accuracy ")
    assert len(text) < len(str(classifier.folder)) + 80


def test_the_repr_of_an_evaluation_is_short(classifier: fl.Run) -> None:
    evaluation = classifier.evaluate()
    accuracy = f"{evaluation.metrics['accuracy']:.4g}"
    assert repr(evaluation).startswith(f"Evaluation(report: accuracy {accuracy}, loss ")
    n = evaluation.n["accuracy"]
    assert repr(evaluation).endswith(f"; {n} examples of {evaluation.source})")


def test_generated_tokens_and_eeg_have_no_tokenizer(tmp_path: Path, listener: fl.Run) -> None:
    run = fl.run(tiny(), runs=tmp_path)
    assert run.labels == (0, 1, 2, 3)
    with pytest.raises(fl.BadInput, match="has no tokenizer: its data are generated tokens"):
        run.tokenizer()
    with pytest.raises(fl.BadInput, match="has no tokenizer: its data are EEG"):
        listener.tokenizer()
    assert read_inputs(listener.folder).subjects == list(prepare(listener.recipe).subjects)  # type: ignore[union-attr]


def test_changed_files_are_refused(classifier: fl.Run, tmp_path: Path) -> None:
    run = copy_of(classifier, tmp_path)
    for name in ("tokenizer/tokenizer.json", "model/inputs.json"):
        text = (run.folder / name).read_text()
        (run.folder / name).write_text(f"{text} ")
        with pytest.raises(fl.BadInput, match=f"{name} was changed"):
            run.tokenizer()
        (run.folder / name).write_text(text)
    run.tokenizer()
    shutil.rmtree(run.folder / "tokenizer")
    with pytest.raises(fl.BadInput, match="tokenizer is missing, so the run cannot be loaded"):
        run.tokenizer()
    run.model()
    shutil.rmtree(run.folder / "model")
    with pytest.raises(fl.BadInput, match="model is missing, so the run cannot be loaded"):
        run.model()


def test_another_runs_tokenizer_is_refused(
    classifier: fl.Run, language: fl.Run, tmp_path: Path
) -> None:
    run = copy_of(classifier, tmp_path)
    shutil.rmtree(run.folder / "tokenizer")
    shutil.copytree(language.folder / "tokenizer", run.folder / "tokenizer")
    with pytest.raises(fl.BadInput, match="is not this run's tokenizer: manifest.json has other"):
        run.predict(["sun"])
    (run.folder / "manifest.json").unlink()
    with pytest.raises(fl.BadInput, match="tokens, and the model .* not this run's tokenizer"):
        run.predict(["sun"])


def test_another_tokenizer_of_the_same_size_is_refused(classifier: fl.Run, tmp_path: Path) -> None:
    run = copy_of(classifier, tmp_path)
    path = run.folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"sun"', '"fog"'))
    seal(path.parent)
    with pytest.raises(fl.BadInput, match="is not this run's tokenizer"):
        run.predict(["sun"])
    with pytest.raises(fl.BadInput, match="is not this run's tokenizer"):
        run.tokenizer()


def test_changed_weights_are_refused(classifier: fl.Run, tmp_path: Path) -> None:
    run = copy_of(classifier, tmp_path)
    best = run.folder / str(run.result.checkpoint)
    tensors = load_tensors(best / "model.safetensors")
    name = next(iter(tensors))
    save_tensors(best / "model.safetensors", tensors | {name: tensors[name] + 1})
    with pytest.raises(fl.FrostlabError, match="model.safetensors is damaged"):
        run.model()
    seal(best)
    with pytest.raises(fl.BadInput, match="does not hold the reported weights"):
        run.model()
    shutil.rmtree(best)
    with pytest.raises(fl.BadInput, match=r"has no weights: checkpoints/step-\d+ is missing"):
        run.model()


@pytest.mark.parametrize("result", ["absent", "stopped"])
def test_an_unfinished_run_has_its_best_weights_so_far(
    classifier: fl.Run, tmp_path: Path, result: str
) -> None:
    run = copy_of(classifier, tmp_path)
    best = run.result.best.step
    text = (run.folder / "result.json").read_text()
    (run.folder / "result.json").unlink()
    if result == "stopped":
        stopped = text.replace('"finished"', '"stopped"')
        (run.folder / "result.json").write_text(stopped)
    unfinished = fl.load_run(run.folder)
    with pytest.warns(fl.UnfinishedRun, match=f"has not finished; .* those of step {best}"):
        model = unfinished.model()
    assert state_digest(model) == classifier.result.weights_digest
    assert "not finished" in repr(unfinished) or "stopped" in repr(unfinished)


def test_a_run_without_a_checkpoint_has_no_weights(classifier: fl.Run, tmp_path: Path) -> None:
    run = copy_of(classifier, tmp_path)
    (run.folder / "result.json").unlink()
    for checkpoint in checkpoints_in(run.folder):
        shutil.rmtree(checkpoint.folder)
    with pytest.raises(fl.BadInput, match="has no weights: the run has no undamaged checkpoint"):
        fl.load_run(run.folder).model()


def test_the_public_run_takes_what_the_inner_one_takes() -> None:
    import inspect

    from frostlab.training.run import run as inner

    assert inspect.signature(fl.run).parameters == inspect.signature(inner).parameters


def test_a_stage_that_has_just_begun_has_weights(tmp_path: Path) -> None:
    """Of a run that stopped right after a boundary: the checkpoint of the boundary."""
    run = fl.run(progressive(), runs=tmp_path)
    (run.folder / "result.json").unlink()
    grown = [c for c in checkpoints_in(run.folder) if c.stage == 2]
    assert grown
    with pytest.warns(fl.UnfinishedRun):
        model: Any = fl.load_run(run.folder).model()
    assert len(list(model.parameters())) > 0


def test_the_document_runs(
    classifier: fl.Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "use.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shutil.copytree(classifier.folder, tmp_path / "runs" / "weather")
    (tmp_path / "my-test.csv").write_text("text,label\nsun on day 51,dry\nflood,wet\n")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.startswith("('dry', 'wet') torch.Size([1, 2])\n")

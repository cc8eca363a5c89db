"""`Run.export`: a folder that transformers loads alone, with the run's logits and its card."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import frostlab as fl
from frostlab.training.step.objective import logits_of
from tiny import tiny
from trained import needs_causal_megatron, trained

CLASS = {
    "gpt": "GPT2LMHeadModel",
    "lora": "GPT2LMHeadModel",
    "decoder": "LlamaForCausalLM",
    "bert decoder": "BertLMHeadModel",
}
CAUSAL_PAIRS = pytest.param("causal pairs", marks=needs_causal_megatron)
TEXTS = ["the cat sat on the mat", "a bird"]
OTHERS = ["then the dog slept", "a tree and a house"]


@torch.no_grad()
@pytest.mark.parametrize("name", CLASS)
def test_a_language_model_loads_with_equal_logits_and_texts(name: str, tmp_path: Path) -> None:
    run = trained(name)
    folder = run.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == CLASS[name]
    batch = tokenizer(TEXTS[0], add_special_tokens=False, return_tensors="pt")
    logits = logits_of(run.model(), {"input_ids": batch["input_ids"]})
    theirs = model(**batch).logits
    torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-5)
    assert model.generation_config.eos_token_id is not None or name == "bert decoder"
    for text in TEXTS:
        (sample,) = run.generate(text, temperature=0, max_tokens=10)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        end = tokenizer.eos_token_id
        tokens = model.generate(
            **ids, do_sample=False, max_new_tokens=10, eos_token_id=end, pad_token_id=end
        )
        assert tokens[0, ids["input_ids"].shape[1] :].tolist() == list(sample.tokens)


def run_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Execute the code of a model card next to its folder; return its names."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.parametrize(
    "name", [*CLASS, "classifier", CAUSAL_PAIRS, "bert", "generated", "majority"]
)
def test_the_code_of_the_card_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = trained(name).export(tmp_path / "my model")
    run_card(folder, monkeypatch)
    out = capsys.readouterr().out
    assert out
    if name in ("classifier", "causal pairs", "bert"):
        assert out in ("['animal']\n", "['other']\n")


@torch.no_grad()
@pytest.mark.parametrize("name", ["classifier", CAUSAL_PAIRS, "bert"])
def test_a_classifier_gives_the_logits_of_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(name)
    folder = run.export(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 24
    texts = (TEXTS,) if name == "classifier" else (TEXTS, OTHERS)
    batch = tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")
    assert ("token_type_ids" in batch) == (name == "bert")
    if name == "bert":
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        logits = model(**batch).logits
        assert bool((batch["token_type_ids"] == 1).any())
        config = model.config
    else:
        (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
        code = re.sub(r"^batch = .*$", "", code, flags=re.MULTILINE)
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {"batch": batch}
        exec(code, names)
        logits, config = names["logits"], names["model"].config
    torch.testing.assert_close(logits, logits_of(run.model(), dict(batch)), rtol=1e-4, atol=1e-5)
    assert config.id2label == {0: "animal", 1: "other"} == dict(enumerate(run.labels or ()))
    assert config.label2id == {"animal": 0, "other": 1}


def test_the_card_reads_an_empty_text_as_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained("classifier")
    texts = ["", "the cat sat " * 20, "a bird"]
    path = run.export(tmp_path / "out") / "README.md"
    path.write_text(path.read_text().replace('["a text"]', json.dumps(texts)))
    shares = run_card(path.parent, monkeypatch)["logits"].softmax(-1)
    expected = [list(prediction.probabilities.values()) for prediction in run.predict(texts)]
    torch.testing.assert_close(shares, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_the_tokenizer_encodes_as_in_training(tmp_path: Path) -> None:
    from frostlab.records.model_files import stored_encoder

    for name in ("gpt", "decoder", "classifier"):
        run = trained(name)
        tokenizer = AutoTokenizer.from_pretrained(run.export(tmp_path / name))
        (ids,) = stored_encoder(run.folder).running(["the cat <|end|> sat"])
        assert tokenizer("the cat <|end|> sat", add_special_tokens=False)["input_ids"] == ids
        assert tokenizer.pad_token_id is not None


def test_the_card_has_the_numbers_of_the_record(tmp_path: Path) -> None:
    run = trained("classifier")
    card = (run.export(tmp_path / "out") / "README.md").read_text()
    result, data = run.result, run.data
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    report, train = data.splits["report"], data.splits["train"]
    for name, value in run.metrics.items():
        assert f"| {name} | {value:.4g} | report | {report.examples:,} |" in card
    (row,) = re.findall(r"\| train \|.*", card)
    assert f"| {train.examples:,} |" in row
    assert f"| rows.jsonl (sha256 {train.files[0].sha256[:16]}) |" in row
    assert train.classes is not None
    assert f"animal: {train.classes[0]:,}" in row
    assert str(Path(train.files[0].path).parent) not in card
    counts = result.parameters
    assert f"| trainable parameters | {counts.trainable:,} of {counts.total:,} (" in card
    assert "| treatment | oelm: query and key of every head: orthogonal, frozen; the rest" in card
    for text in (data.digest, str(result.weights_digest), result.recipe_digest, fl.__version__):
        assert text in card
    assert "| seed | 0 |" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    stored = yaml.safe_load((run.folder / "recipe.yaml").read_text())
    assert recipe == stored | {"data": stored["data"] | {"path": "rows.jsonl"}}


def test_an_unfinished_run_is_exported_without_a_result(tmp_path: Path) -> None:
    shutil.copytree(trained("gpt").folder, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.warns(UserWarning, match="has not finished"):
        fl.load_run(tmp_path / "run").export(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The run has not finished: these weights are preliminary" in card


def test_what_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    for run, folder, message in (
        (trained("gpt"), tmp_path, "is not empty; choose another folder"),
        (trained("gpt"), tmp_path / "notes.txt", "is a file; choose another folder"),
        (trained("decoder, norm after"), tmp_path / "x", "Llama cannot express model.norm after"),
    ):
        with pytest.raises(fl.BadInput, match=message) as error:
            run.export(folder)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()
    assert trained("gpt").export(str(tmp_path / "empty")) == tmp_path / "empty"


def test_adapters_are_merged_by_a_run_and_refused_by_export(tmp_path: Path) -> None:
    run = trained("lora")
    with pytest.raises(fl.BadInput, match=r"call fl.merge_adapters\(model\) first"):
        fl.export(run.model(), tmp_path / "x")
    state = AutoModelForCausalLM.from_pretrained(run.export(tmp_path / "out")).state_dict()
    assert not [name for name in state if "lora" in name]


def test_export_writes_a_tokenizer_when_given_one(tmp_path: Path) -> None:
    run = trained("gpt")
    fl.export(run.model(), tmp_path / "out", run.tokenizer())
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.get_vocab() == run.tokenizer().get_vocab()
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert config.eos_token_id == loaded.eos_token_id
    fl.export(run.model(), tmp_path / "alone")
    assert not list((tmp_path / "alone").glob("token*"))


def test_a_card_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    """A card is shared: paths have only their last part, and the command has no interpreter."""
    rows = [f"text {number},{'ab'[number % 2]}" for number in range(60)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label", *rows]))
    recipe = tiny(data={"name": "own", "path": str(tmp_path / "mine.csv"), "length": 8,
                        "tune": 0.2, "report": 0.2}, tokenizer={"kind": "words"})  # fmt: skip
    run = fl.run(recipe, runs=tmp_path)
    card = (run.export(tmp_path / "model") / "README.md").read_text()
    assert "path: mine.csv" in card
    assert "| train | 36 | a: 18, b: 18 | mine.csv (sha256 " in card
    assert str(tmp_path) not in card
    assert sys.executable not in card

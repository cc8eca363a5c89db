"""`Run.generate`: texts in and out, and one clear line for runs that cannot generate."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import frostlab as fl
from frostlab.errors import UnfinishedRun
from frostlab.models.sampling import Sample
from frostlab.records.checkpoint import PROGRESS, checkpoints_in
from frostlab.storage import seal
from frostlab.use.generate import samples_text
from trained import trained


def test_samples_are_texts_with_their_tokens_and_their_end() -> None:
    run = trained("gpt")
    samples = run.generate("the cat", samples=3, max_tokens=8)
    assert len(samples) == 3
    tokenizer = run.tokenizer()
    for sample in samples:
        assert sample.prompt == "the cat"
        assert 1 <= len(sample.tokens) <= 8
        ended = sample.tokens[-1] == tokenizer.eos_token_id
        assert sample.ended == ("end" if ended else "length")
        tokens = sample.tokens[:-1] if ended else sample.tokens
        ids = tokenizer("the cat", add_special_tokens=False)["input_ids"]
        assert tokenizer.decode([*ids, *tokens]) == "the cat" + sample.text
    assert run.generate("the cat", samples=3, max_tokens=8) == samples
    assert run.generate("the cat", samples=3, max_tokens=8, seed=1) != samples
    several = run.generate(["a dog", "the cat"], samples=3, max_tokens=8)
    assert several[3:] == samples


def test_autocast_of_the_caller_does_not_change_samples() -> None:
    samples = trained("gpt").generate("the cat", samples=8, temperature=2.0, top_p=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = trained("gpt").generate("the cat", samples=8, temperature=2.0, top_p=1.0)
    assert again == samples


def test_a_tokenizer_of_words_keeps_the_space() -> None:
    (sample,) = trained("decoder").generate("the cat", max_tokens=4, temperature=0)
    assert sample.text.startswith(" ")
    (begun,) = trained("decoder").generate("", max_tokens=4, temperature=0)
    assert not begun.text.startswith(" ")
    assert begun.text


@torch.no_grad()
def test_an_empty_prompt_begins_after_the_end_token() -> None:
    run = trained("gpt")
    (sample,) = run.generate("", temperature=0, max_tokens=1)
    logits = run.model()(torch.tensor([[run.tokenizer().eos_token_id]]))
    assert sample.tokens == (int(logits[0, -1].argmax()),)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "generate: prompt 3 is not a text"),
        ("caf\udce9", "generate: prompt 'caf\\udce9' is not valid UTF-8"),
    ],
)
def test_a_prompt_that_is_not_a_text_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(fl.BadInput) as caught:
        trained("gpt").generate(["the cat", prompt])
    assert str(caught.value) == message


def test_a_sample_ends_at_the_last_position() -> None:
    run = trained("gpt")
    samples = run.generate("the cat sat", samples=20, max_tokens=100, temperature=1.5)
    ids = run.tokenizer()("the cat sat", add_special_tokens=False)["input_ids"]
    longest = [sample for sample in samples if sample.ended == "positions"]
    assert longest
    assert {len(sample.tokens) for sample in longest} == {40 - len(ids)}
    with pytest.raises(fl.BadInput, match="the model has 40 positions, so a prompt can have"):
        run.generate("the cat " * 40)


@pytest.mark.parametrize("name", ["lora", "bert decoder"])
def test_other_kinds_of_models_generate(name: str) -> None:
    samples = trained(name).generate(["the", "a bird ran"], samples=2, max_tokens=5)
    assert [sample.prompt for sample in samples] == ["the", "the", "a bird ran", "a bird ran"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("classifier", {}, "classifies texts, and only language models .* `frostlab predict run-"),
        ("generated", {}, "has no tokenizer: its data are generated tokens, not text"),
        ("gpt", {"samples": 0}, "samples 0 should be 1 or more"),
        ("gpt", {"samples": 3, "temperature": 0}, "temperature 0 all 3 samples are equal"),
        ("gpt", {"top_p": 2.0}, "top-p 2.0 should be above 0 and at most 1"),
    ],
)
def test_what_cannot_be_generated_is_one_line(name: str, settings: Any, message: str) -> None:
    with pytest.raises(fl.BadInput, match=message) as error:
        trained(name).generate("the", **settings)
    assert "\n" not in str(error.value)


def test_an_unfinished_run_uses_its_best_weights_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "unfinished"
    shutil.copytree(trained("gpt").folder, folder)
    (folder / "result.json").unlink()
    with pytest.warns(UnfinishedRun, match="its best weights so far are used"):
        samples = fl.load_run(folder).generate("the cat", max_tokens=5)
    assert samples == trained("gpt").generate("the cat", max_tokens=5)
    newest = checkpoints_in(folder)[-1].folder
    progress = json.loads((newest / PROGRESS).read_text())
    progress["best"] |= {"value": None, "step": None}  # as before the first evaluation
    (newest / PROGRESS).write_text(json.dumps(progress))
    seal(newest)
    with pytest.warns(UnfinishedRun, match="its newest weights are used"):
        fl.load_run(folder).generate("the cat", max_tokens=5)


def test_the_table_fits_80_columns_and_shows_control_characters() -> None:
    samples = [
        ("first", Sample("Once", " upon\n" + "word " * 40, (1, 2), "length")),
        ("second", Sample("Once", " \x1b[31mred", (1,), "end")),
        ("first", Sample("", "x" * 200, (1,), "positions")),
    ]
    text = samples_text(samples)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("prompt: Once") == 1
    assert r"1:  \x1b[31mred [end]" in text
    assert r"upon\n" in text
    assert "without a prompt" in text

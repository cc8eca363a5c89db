"""Samples of language models: what `Run.generate` gives, written once at the end of a run."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import frostlab as fl
from forked import run_command
from frostlab.records.schema import NoteEvent, Samples
from frostlab.training import loop, samples
from frostlab.training import run as running
from frostlab.typed import read_object
from trained import recipe_of, trained


def samples_of(run: fl.RunRecord) -> Samples:
    path = run.folder / "samples.json"
    return read_object(Samples, path.read_bytes(), path)


def check_regenerated(run: fl.Run) -> None:
    """The samples are those of `Run.generate` with the recorded prompts and settings."""
    record = samples_of(run)
    prompts = [sample.prompt for sample in record.samples]
    assert len(set(prompts)) == 3
    assert prompts[0] == ""
    again = run.generate(
        prompts, max_tokens=record.max_tokens, temperature=record.temperature, top_p=record.top_p,
        seed=record.seed,
    )  # fmt: skip
    assert [(s.text, s.ended) for s in again] == [(s.text, s.ended) for s in record.samples]
    assert "samples.json" in json.loads((run.folder / "manifest.json").read_text())


@pytest.mark.parametrize("name", ["gpt", "decoder", "lora", "bert decoder"])
def test_a_language_model_leaves_samples(name: str) -> None:
    run = trained(name)
    check_regenerated(run)
    text = (Path(run.recipe.data.path)).read_text()  # type: ignore[union-attr]
    for sample in samples_of(run).samples:
        words = sample.prompt.split()
        assert " ".join(words[:-1]) in " ".join(text.split()), "the beginning of a held-out text"


@pytest.mark.parametrize("name", ["classifier", "generated"])
def test_other_runs_leave_none(name: str) -> None:
    assert not (trained(name).folder / "samples.json").exists()


def test_samples_leave_the_random_state_and_the_mode_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(context: Any, *arguments: Any) -> None:
        state, training = torch.get_rng_state(), context.model.training
        samples.write_samples(context, *arguments)
        assert torch.equal(torch.get_rng_state(), state)
        assert context.model.training == training

    monkeypatch.setattr(running, "write_samples", watched)
    record = fl.run(recipe_of("gpt"), runs=tmp_path)
    assert samples_of(record) == samples_of(trained("gpt"))


def test_a_model_that_cannot_generate_still_has_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("no cache\nand a trace")

    monkeypatch.setattr(samples, "continue_texts", refuse)
    record = fl.run(recipe_of("gpt"), runs=tmp_path)
    assert record.result.status == "finished"
    assert [note.text for note in record.events(NoteEvent)] == ["no text was generated: no cache"]
    assert not (record.folder / "samples.json").exists()


@pytest.mark.slow
def test_samples_of_a_sharded_model_do_not_hide_a_failed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are read from the last checkpoint, whose error is the run's."""
    last, save = trained("gpt").result.steps, loop.save_checkpoint
    assert trained("gpt").result.best.step == last

    def full(path: Path, step: int, *given: Any) -> Any:
        if step == last:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(path, step, *given)

    monkeypatch.setattr(loop, "save_checkpoint", full)
    monkeypatch.setattr(samples, "_is_sharded", lambda model: True)
    with pytest.raises(running.RunFailed, match="the disk is full"):
        fl.run(recipe_of("gpt"), runs=tmp_path)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_one_of_two_processes_writes_the_samples(way: str, tmp_path: Path, free_port: int) -> None:
    recipe = recipe_of("decoder")
    recipe["train"] = recipe["train"] | {"parallel": way, "processes": 2}
    given = ("--out", str(tmp_path / "run"))
    done = run_command(tmp_path, recipe, *given, processes=2, port=free_port).wait()
    assert done.returncode == 0, done.stderr[-3000:]
    check_regenerated(fl.load_run(tmp_path / "run"))

"""The catalogue: its page is current, its records exist, and its estimates hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frostlab.data.sources import PUBLIC_SETS
from frostlab.experiments import costs as module
from frostlab.experiments.costs import (
    MACHINE,
    STEP_RECORDS,
    Entry,
    Step,
    StepRecord,
    catalogue,
    catalogue_page,
)
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.groups import Group, group_names, load_group
from frostlab.recipe.load import load_recipe
from frostlab.roles.read import anatomy

ROOT = Path(__file__).parents[2]
GROUPS = [load_group(name) for name in group_names()]
SMALLEST_GPU = 16e9  # bytes in which every experiment must fit


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    return {entry.id: entry for listed in catalogue(GROUPS).values() for entry in listed}


@pytest.fixture
def page(entries: dict[str, Entry], monkeypatch: pytest.MonkeyPatch) -> str:
    made = {group.name: [entries[name] for name in group.experiments] for group in GROUPS}
    monkeypatch.setattr(module, "catalogue", lambda groups: made)
    return catalogue_page(GROUPS)


def test_the_page_is_current(page: str) -> None:
    stored = (ROOT / "docs/catalogue.md").read_text()
    assert page == stored, "run `frostlab recipes --details > docs/catalogue.md`"


def test_every_experiment_fits(entries: dict[str, Entry]) -> None:
    for entry in entries.values():
        known = entry.memory_bytes is not None
        assert known == (not entry.id.startswith("eeg-"))
        assert (entry.memory_bytes or 0) < SMALLEST_GPU


def test_the_counts(entries: dict[str, Entry]) -> None:
    """Further counts are in docs/from-the-sources.md, which has its own test."""
    grown = entries["progressive-standard-published"]
    assert (grown.parameters, grown.trainable) == (9_200_896, 4_534_784)
    assert (grown.steps, grown.stops_early) == (15_700, True)  # 2 stages of 50 × 157
    bert = entries["mnli-oelm"]
    assert (bert.steps, bert.tokens) == (36_816, 36_816 * 32 * 128)
    assert bert.parameters - bert.trainable == 12 * 2 * (768 * 768 + 768)
    assert entries["gpt-02"].extends == "tinystories-gpt-published"
    assert entries["gpt-01"].digest == entries["tinystories-baseline"].digest


def test_words_are_those_of_the_recorded_runs(entries: dict[str, Entry]) -> None:
    lines = (ROOT / "docs/records/progressive-runs.jsonl").read_text().splitlines()
    runs = {run["run"]: run for run in map(json.loads, lines)}
    counts = runs["progressive-standard"]["parameters"]
    patient = entries["progressive-patient"]  # the same model, with other patience
    assert (patient.parameters, patient.trainable) == (counts["total"], counts["trainable"])


def test_freezing_and_supervision_change_the_work(entries: dict[str, Entry]) -> None:
    def flops(name: str) -> float:
        count = entries[name].flops
        assert count is not None
        return count

    assert flops("sst2-oelm") < flops("sst2-baseline")
    assert flops("sst2-oelm") == flops("sst2-random")
    # Two stages of the published decoder, per token: layers, and the head of 69,830 × 64.
    layer, attention, head = 16 * 64 * 64, 2 * 2 * 16 * 64, 69_830 * 64
    first = 3 * (6 * layer + 3 * attention) + 6 * head
    # Below the fourth layer everything is frozen, so its inputs need no gradient.
    qkv, rest = 3 * 64 * 64, layer - 3 * 64 * 64
    second = 3 * (2 * layer + attention) + 4 * qkv + 6 * rest + 3 * attention + 6 * head
    tokens = 50 * 157 * 64 * 32
    assert flops("progressive-standard-published") == pytest.approx(tokens * (first + second))
    # Deep supervision: two more heads that learn with what is below, then three with no learning
    # below, which need no gradient of their input.
    more = 2 * 6 * head + 3 * 4 * head
    deep = flops("progressive-deep-published") - flops("progressive-standard-published")
    assert deep == pytest.approx(tokens * more)


# Records


def stored_record(step: Step, record: StepRecord) -> dict[str, Any]:
    lines = (ROOT / "docs/records" / record.file).read_text().splitlines()
    found = [
        line
        for line in map(json.loads, lines)
        if line["benchmark"] == record.benchmark
        and line["precision"] == step.precision
        and line.get("model", "bert") == "bert"
    ]
    (only,) = found
    return only


@pytest.mark.parametrize(("step", "record"), STEP_RECORDS.items(), ids=str)
def test_times_are_those_of_records(step: Step, record: StepRecord) -> None:
    stored = stored_record(step, record)
    assert MACHINE in (stored.get("device") or json.dumps(stored))
    assert stored[f"{record.side}_ms"] == record.ms
    assert stored.get(f"{record.side}_peak_bytes") == record.peak_bytes
    if "case" in stored:
        assert stored["case"] == f"{step.batch} × {step.length}"


def test_every_record_serves_an_experiment(entries: dict[str, Entry]) -> None:
    named = {entry.record for entry in entries.values()} - {None}
    assert named == {f"{record.file}: {record.benchmark}" for record in STEP_RECORDS.values()}
    gpt = entries["gpt-06"]
    assert gpt.seconds == pytest.approx(200_000 * 4.23728e-3)
    assert (gpt.memory_bytes, gpt.memory_measured) == (1_650_419_712, True)
    assert entries["gpt-07"].seconds is None  # no record has frozen queries and keys


@pytest.mark.parametrize(
    ("recipe", "benchmark", "case"),
    [
        ("gpt-01", "gpt-language-8", "8 × 512"),
        ("sst2-baseline", "bert-finetune", "32 × 128"),
        ("sst2-oelm", "frozen-qk", "32 × 128"),
    ],
)
def test_estimates_of_memory_agree_with_records(recipe: str, benchmark: str, case: str) -> None:
    """Within 10 % of what was measured, in bf16."""
    loaded = load_recipe(recipe, {"train.precision": "bf16"})
    built, _ = module.recipe_blueprint(loaded)
    parts = anatomy(built)
    if loaded.surgery.frozen:
        parts = parts.with_frozen(*loaded.surgery.frozen)
    estimate = module._memory(loaded, parts, loaded.train.batch * loaded.data.length)
    lines = (ROOT / "docs/records/h200-bench.jsonl").read_text().splitlines()
    (stored,) = [
        line
        for line in map(json.loads, lines)
        if (line["benchmark"], line["case"]) == (benchmark, case)
    ]
    assert estimate == pytest.approx(stored["ours_peak_bytes"], rel=0.1)


# Other groups


def test_a_group_of_ones_own(tmp_path: Path) -> None:
    """Steps of an unknown data set are known only if the recipe sets them."""
    recipe = (
        "data: {name: docstrings, length: 24}\nmodel: {kind: gpt, width: 16, layers: 1, heads: 2}\n"
    )
    (tmp_path / "epochs.yaml").write_text(recipe)
    (tmp_path / "steps.yaml").write_text("extends: epochs.yaml\ntrain: {steps: 7, batch: 2}\n")
    values = {"about": "", "experiments": {"epochs.yaml": {}, "steps.yaml": {}}}
    group = Group.model_validate(values)
    group._folder = tmp_path
    epochs, steps = catalogue([group])["group"]
    assert (epochs.steps, epochs.tokens, epochs.flops) == (None, None, None)
    assert (steps.steps, steps.extends) == (7, "epochs.yaml")
    assert steps.tokens == 7 * 2 * 24


def test_allocating_a_model_keeps_tied_weights_tied() -> None:
    with torch.device("meta"):
        model: nn.Module = GPT(GPTConfig(vocabulary=50, width=8, layers=1, heads=2))
    count = anatomy(model).count()
    module._allocate(model)
    assert anatomy(model).count() == count
    assert not any(weight.is_meta for weight in [*model.parameters(), *model.buffers()])


def test_sizes_of_training_sets_are_those_of_the_published_steps() -> None:
    assert -(-PUBLIC_SETS["sst2"].rows["train"] // 32) * 3 == 6_315
    assert -(-PUBLIC_SETS["mnli"].rows["train"] // 32) * 3 == 36_816

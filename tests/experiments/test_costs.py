"""The catalogue: its page is current, its steps are the measured ones, and its estimates hold."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from frostlab.data.sources import PUBLIC_SETS
from frostlab.experiments import costs as module
from frostlab.experiments import steps as steps_module
from frostlab.experiments.costs import Entry, catalogue, catalogue_page
from frostlab.experiments.steps import (
    MACHINE,
    Measured,
    Step,
    allocate,
    measured_steps,
    planned_stages,
    read_measured,
)
from frostlab.models.build import recipe_blueprint
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.groups import Group, group_names, load_group
from frostlab.recipe.load import load_recipe
from frostlab.roles.read import anatomy

ROOT = Path(__file__).parents[2]
GROUPS = [load_group(name) for name in group_names()]
SMALLEST_GPU = 16e9  # bytes in which an experiment must fit


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


def test_what_fits(entries: dict[str, Entry]) -> None:
    for entry in entries.values():
        conformer = entry.id.startswith("eeg-")
        known = entry.memory_bytes is not None
        assert known == (entry.memory_measured or not conformer)
        assert conformer or (entry.memory_bytes or 0) < SMALLEST_GPU
    lines = (ROOT / "docs/records/eeg-runs.jsonl").read_text().splitlines()
    runs = {run["run"]: run for run in map(json.loads, lines)}
    for version in ("v1", "v2"):  # in bf16
        run = runs[f"trial-{version}"]
        published = entries[f"eeg-conformer-{version}-published"]
        assert run["parameters"]["total"] == published.parameters
        assert run["device_memory_peak"] < SMALLEST_GPU


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


# Measured steps

GROWN = "progressive-standard-published"
FIRST = Step("Decoder", 9_135_232, 9_135_232, 64, 32, "bfloat16", 1)
SECOND = Step("Decoder", 9_200_896, 4_534_784, 64, 32, "bfloat16", 1)


def line(step: Step, ms: float, peak: int) -> str:
    """A line as benchmarks/catalogue.py prints it."""
    facts = {"how": "compiled and captured", "ms": ms, "low": ms - 0.1, "high": ms + 0.1}
    others = {"benchmark": "catalogue", "peak_bytes": peak, "device": MACHINE, "ids": ["any"]}
    return json.dumps(step._asdict() | facts | others)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the measured steps, which the test fills."""
    lines: list[str] = []
    monkeypatch.setattr(module, "measured_steps", lambda: read_measured(lines))
    return lines


def entry_of(experiment: str) -> Entry:
    (group,) = [group for group in GROUPS if experiment in group.experiments]
    return module._entry(group, experiment, group.experiments[experiment], {})


def test_stages_have_the_time_and_memory_of_their_steps(recorded: list[str]) -> None:
    recorded += [line(FIRST, 2.0, 3_000_000_000), line(SECOND, 1.5, 2_000_000_000)]
    entry = entry_of(GROWN)
    assert entry.seconds == pytest.approx(7_850 * (2.0 + 1.5) / 1000)  # 27.5 s
    assert (entry.memory_bytes, entry.memory_measured) == (3_000_000_000, True)
    assert module._row(entry)[8:10] == ("≈ 27 s", "3 GB")


def test_a_stage_that_was_not_measured_leaves_the_time_open(recorded: list[str]) -> None:
    recorded += [
        line(FIRST, 2.0, 3_000_000_000),
        line(SECOND._replace(losses=4), 1.5, 2_000_000_000),
    ]
    entry = entry_of(GROWN)
    assert (entry.seconds, entry.memory_measured) == (None, False)
    assert module._row(entry)[8] == "not measured"
    assert module._row(entry)[9].startswith("≈ ")


def test_the_last_line_of_a_step_counts_and_is_shown() -> None:
    measured = read_measured([line(FIRST, 9.0, 1), line(FIRST, 2.0, 3_000_000_000)])
    assert measured == {FIRST: Measured("compiled and captured", 2.0, 1.9, 2.1, 3_000_000_000)}
    assert module._steps_section(measured).splitlines()[-1] == (
        "| Decoder | 9,135,232 | 9,135,232 | 64 × 32 | bfloat16 | 1 | compiled and captured "
        "| 2 [1.9, 2.1] | 3 GB |"
    )


def test_deep_supervision_counts_its_losses() -> None:
    (group,) = [group for group in GROUPS if "progressive-deep-published" in group.experiments]
    stages = planned_stages(group.recipe("progressive-deep-published"), {})
    steps = [planned.step for planned in stages]
    assert steps == [FIRST._replace(losses=3), SECOND._replace(losses=4)]


def test_steps_of_a_recipe_with_adapters_are_planned() -> None:
    models: dict[str, nn.Module] = {}
    plain, lora, again = (
        next(planned_stages(load_recipe("gpt-02", {"treatment": treatment}), models)).step
        for treatment in ("baseline", {"peft": {"method": "lora", "select": ["query"]}}, "baseline")
    )
    assert plain.trainable == plain.parameters == again.trainable
    assert lora.trainable == lora.parameters - plain.parameters > 0


def test_every_measured_step_serves_an_experiment() -> None:
    models: dict[str, nn.Module] = {}
    planned = {
        stage.step
        for group in GROUPS
        for experiment in group.experiments
        for stage in planned_stages(group.recipe(experiment), models)
    }
    assert measured_steps().keys() <= planned
    stored = (Path(steps_module.__file__).parent / "steps.jsonl").read_text().splitlines()
    assert all(MACHINE in json.loads(text)["device"] for text in stored)


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
    built, _ = recipe_blueprint(loaded)
    parts = anatomy(built)
    if loaded.surgery.frozen:
        parts = parts.with_frozen(*loaded.surgery.frozen)
    estimate = module._memory(loaded, parts, loaded.train.batch * loaded.data.length)
    lines = (ROOT / "docs/records/h200-bench.jsonl").read_text().splitlines()
    *_, stored = (
        record
        for record in map(json.loads, lines)
        if (record["benchmark"], record["case"]) == (benchmark, case)
    )
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
    allocate(model)
    assert anatomy(model).count() == count
    assert not any(weight.is_meta for weight in [*model.parameters(), *model.buffers()])


def test_sizes_of_training_sets_are_those_of_the_published_steps() -> None:
    assert -(-PUBLIC_SETS["sst2"].rows["train"] // 32) * 3 == 6_315
    assert -(-PUBLIC_SETS["mnli"].rows["train"] // 32) * 3 == 36_816

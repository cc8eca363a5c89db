"""The catalogue: the steps, FLOPs, time and memory of every experiment of a group.

Everything is computed from the recipe, without the data. The time is the number of steps times the
time of one step, which was measured in advance (`frostlab.experiments.steps`). If a kind of step
that an experiment takes was not measured, the experiment's time is not known, and its peak memory
is an estimate or, for a Conformer, not known.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from frostlab.experiments.steps import (
    MACHINE,
    Measured,
    Models,
    PlannedStage,
    Step,
    measured_steps,
    planned_stages,
    precision_of,
    training_examples,
)
from frostlab.models.stack import is_causal
from frostlab.recipe.groups import Experiment, Group
from frostlab.recipe.load import read_values
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.settings import metric_facts
from frostlab.roles.snapshot import Anatomy
from frostlab.text import NONE, escaped, markdown
from frostlab.timing.flops import savings
from frostlab.timing.memory import estimated_memory

_GIGABYTE = 1e9


@dataclass(frozen=True)
class Entry:
    """An experiment and its cost; a number that is None is not known."""

    id: str
    extends: str | None  # the recipe that its recipe extends, if any
    digest: str  # of the recipe
    parameters: int  # in the last stage, if there are several
    trainable: int  # in the last stage, if there are several
    steps: int | None
    stops_early: bool  # whether patience can end it before `steps`
    tokens: int | None  # steps × batch × length, padding included; samples if the data are EEG
    flops: float | None  # of all steps, matmuls only
    seconds: float | None  # of all steps on MACHINE, without evaluations
    memory_bytes: int | None  # at the peak of a step
    memory_measured: bool  # else `memory_bytes` is an estimate
    reported: dict[str, float]  # metric → value that the sources (published studies) reported
    optional: bool  # whether the sources only suggest this experiment


def catalogue(groups: Iterable[Group]) -> dict[str, list[Entry]]:
    """Return the experiments of each group with their costs, by the group's name."""
    models: Models = {}
    return {
        group.name: [
            _entry(group, name, facts, models) for name, facts in group.experiments.items()
        ]
        for group in groups
    }


def _entry(group: Group, name: str, facts: Experiment, models: Models) -> Entry:
    recipe = group.recipe(name)
    tokens = recipe.train.batch * recipe.data.length  # per step
    steps, flops, estimate, stops_early = 0, 0.0, 0, False
    steps_by_kind: dict[Step, int] = {}
    for planned in planned_stages(recipe, models):
        stage, parts = planned.stage, planned.parts
        steps += stage.steps
        steps_by_kind[planned.step] = steps_by_kind.get(planned.step, 0) + stage.steps
        flops += stage.steps * tokens * _flops_per_token(recipe, planned)
        estimate = max(estimate, _memory(recipe, parts, tokens))
        stops_early = stops_early or stage.patience is not None
    steps_known = recipe.train.steps is not None or training_examples(recipe) is not None
    seconds, peak = _measured(steps_by_kind, measured_steps())
    estimated = None if recipe.model.kind == "conformer" else estimate
    return Entry(
        name,
        read_values(group.source_of(name)).get("extends"),
        recipe.digest,
        parts.count(),
        parts.count("trainable"),
        steps if steps_known else None,
        stops_early,
        steps * tokens if steps_known else None,
        flops if steps_known else None,
        seconds if steps_known else None,
        estimated if peak is None else peak,
        peak is not None,
        facts.reported,
        facts.optional,
    )


def _measured(
    counts: Mapping[Step, int], measured: Mapping[Step, Measured]
) -> tuple[float | None, int | None]:
    """Return the seconds of all steps and their peak memory; None if a step was not measured."""
    if not counts.keys() <= measured.keys():
        return None, None
    milliseconds = sum(count * measured[step].ms for step, count in counts.items())
    return milliseconds / 1000, max(measured[step].peak_bytes for step in counts)


# FLOPs and memory of a step


def _flops_per_token(recipe: Recipe, planned: PlannedStage) -> float:
    """Return the matmul FLOPs of a step per token.

    With deep supervision, the head runs after every supervised layer, not only after the last one.
    """
    parts, supervision = planned.parts, planned.supervision
    flops = savings(parts, recipe.data.length, causal=is_causal(planned.model)).flops
    if supervision is None:
        return flops
    head = next(part for part in parts.parts if part.role == "head" and part.matmul)
    head_learns = head.state == "trainable"
    outside = (part for part in parts.parts if not part.layers and part.role != "head")
    # whether something before the head learns, which needs the gradient of the head's input
    learns_below = any(part.state == "trainable" for part in outside)
    for layer_number, layer in enumerate(parts.layers, 1):
        learns_below = learns_below or any(part.state == "trainable" for part in layer.parts)
        if layer_number in supervision.layers[:-1]:  # the last one is in `flops`
            # the head's output, the gradient of its input, and the gradient of its weights
            flops += 2 * head.parameters * (1 + learns_below + head_learns)
    return flops


def _memory(recipe: Recipe, parts: Anatomy, tokens: int) -> int:
    """Estimate the peak memory of a step: weights, gradients, moments, activations and logits."""
    value_bytes = 2 if precision_of(recipe) == "bfloat16" else 4
    language = recipe.data.task == "language"
    return round(estimated_memory(parts, value_bytes, language, recipe.optim.facts).of(tokens))


# The page

_ABOUT = f"""\
Every experiment of these groups with its cost. `frostlab recipes --details` prints this page; with
`--group NAME`, it prints only one group, and with `--json`, only the values.
[From the sources](from-the-sources.md) explains the ids, and what differs from the sources (the
published studies).

- *digest*: of the recipe. Experiments with equal digests have the same recipe.
- *parameters*, *trainable*: in the last stage, if there are several.
- *steps*: "≤" if patience can end a stage earlier.
- *tokens*: steps × batch × length, so padding counts, and an incomplete last batch counts as a full
  one. For EEG, samples.
- *FLOPs*: matmuls of all steps, forward and backward, without those that freezing saves.
- *time*: of the steps alone on one {MACHINE}, without evaluations and set-up: the number of steps
  of each stage times the time of one step in the table at the end of this page. The steps in the
  table have full batches without padding, so the time of a padding mask is not included.
- *memory*: at the peak of a step, from the same table; the largest of all stages. A value with "≈"
  is an estimate where a step was not measured: 4 bytes per parameter and 12 per trainable parameter
  (gradient and Adam's moments), the values that a layer keeps for its backward pass (16 per token
  and unit of the width, and 2 bytes of dropout masks), and a language model's logits. For BERT-base
  (32 × 128) and GPT Medium-512 (8 × 512) in bf16, it is within 10 % of the measured peak. The
  Conformer's layers keep other values, so their memory is not estimated. All experiments fit in
  16 GB, except the Conformers, which run in float32 as published; in bf16, a run of
  `eeg-conformer-v1-published` took 11.4 GB and one of `eeg-conformer-v2-published` 11.5 GB
  ([runs](records/eeg-runs.jsonl)).
- *reported*: the results that the sources reported.
"""

_STEPS = f"""\
`python benchmarks/catalogue.py` on one {MACHINE}: the steps that runs take there, but with random
weights and full batches of random inputs, without padding. A step's time is the median of ten
rounds, [smallest, largest]. *losses* is the number of layers after which a loss is computed: 1
without deep supervision.
"""


def catalogue_page(groups: Sequence[Group]) -> str:
    """Return the catalogue of groups in Markdown; groups without experiments are left out."""
    entries = catalogue(groups)
    sections = [
        f"## {escaped(group.name)}\n\n{escaped(group.about)}\n\n{_table(entries[group.name])}"
        for group in groups
        if group.experiments
    ]
    return "\n".join(["# Catalogue", "", _ABOUT, *sections, _steps_section(measured_steps())])


def catalogue_values(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Return plain values for JSON: every experiment with its group."""
    return [
        {"group": name, **asdict(entry)}
        for name, entries in catalogue(groups).items()
        for entry in entries
    ]


def _table(entries: Sequence[Entry]) -> str:
    head = (
        "id", "extends", "digest", "parameters", "trainable", "steps", "tokens", "FLOPs", "time",
        "memory", "reported",
    )  # fmt: skip
    return markdown(head, map(_row, entries)) + "\n"


def _row(entry: Entry) -> tuple[str, ...]:
    most = "≤ " if entry.stops_early else ""
    memory = "not measured"
    if entry.memory_bytes is not None:
        memory = f"{entry.memory_bytes / _GIGABYTE:.2g} GB"
        memory = memory if entry.memory_measured else f"≈ {memory}"
    return (
        f"{entry.id} (optional)" if entry.optional else entry.id,
        entry.extends or NONE,
        entry.digest,
        f"{entry.parameters:,}",
        f"{entry.trainable:,}",
        NONE if entry.steps is None else f"{most}{entry.steps:,}",
        NONE if entry.tokens is None else f"{most}{_scaled(entry.tokens)}",
        NONE if entry.flops is None else f"{most}{entry.flops:.2e}".replace("e+", "e"),
        "not measured" if entry.seconds is None else f"≈ {_time(entry.seconds)}",
        memory,
        "; ".join(_reported(name, value) for name, value in entry.reported.items()) or NONE,
    )


def _scaled(count: int) -> str:
    unit, name = (1e9, "G") if count >= 1e9 else (1e6, "M")
    return f"{count / unit:.3g} {name}"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _reported(name: str, value: float) -> str:
    if metric_facts(name).form == "percent":
        return f"{name.replace('_', ' ')} {100 * value:.2f} %"
    if name.endswith("_seconds"):
        return f"{value:g} s {'a step' if name == 'step_seconds' else 'in all'}"
    return f"{name} {value:g}"


def _steps_section(measured: Mapping[Step, Measured]) -> str:
    """Return the section about the measured steps."""
    rows = [
        (
            step.model,
            f"{step.parameters:,}",
            f"{step.trainable:,}",
            f"{step.batch} × {step.length}",
            step.precision,
            str(step.losses),
            facts.how,
            f"{facts.ms:.4g} [{facts.low:.4g}, {facts.high:.4g}]",
            f"{facts.peak_bytes / _GIGABYTE:.2g} GB",
        )
        for step, facts in measured.items()
    ]
    head = (
        "model", "parameters", "trainable", "batch × length", "precision", "losses", "kind of step",
        "ms", "memory",
    )  # fmt: skip
    return f"## The steps that were measured\n\n{_STEPS}\n{markdown(head, rows)}\n"

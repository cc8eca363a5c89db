"""The catalogue: what every experiment of a group takes, from its recipe and without its data.

Models are built without values, on the meta device if the recipe has no stages. Times are those of
the benchmarks in docs/records: a step that no record measures has no time. Peak memory is
measured where a record has it, and otherwise estimated, except for the Conformer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from frostlab.data.sources import PUBLIC_SETS
from frostlab.models.build import recipe_blueprint
from frostlab.models.stack import is_causal
from frostlab.recipe.data import SimulatedEEG
from frostlab.recipe.groups import Experiment, Group
from frostlab.recipe.load import read_values
from frostlab.recipe.recipe import Recipe
from frostlab.roles.read import anatomy
from frostlab.roles.snapshot import Anatomy
from frostlab.storage import digest_of
from frostlab.text import NONE, escaped, markdown
from frostlab.timing.flops import savings
from frostlab.training.stages import Entered, Stage, enter_stage, stages_of
from frostlab.training.step.objective import resolve_supervision

MACHINE = "NVIDIA H200"  # of STEP_RECORDS
WORDS = {"wikitext2": 28_914, "wikitext2-raw": 69_830}  # sizes of vocabularies of whole words
_WEIGHT_BYTES = 4  # per parameter
_STATE_BYTES = 12  # per trainable parameter: its gradient and Adam's two moments
# Values that a transformer layer keeps for its backward pass, per token and unit of the width, and
# bytes of dropout masks; attention kernels keep no scores (Korthikanti et al. 2022).
_KEPT_VALUES, _MASK_BYTES = 16, 2
_GIGABYTE = 1e9


class Step(NamedTuple):
    """The properties of a training step on which its time depends."""

    model: str  # class of the model
    millions: int  # of parameters, rounded
    batch: int
    length: int
    precision: str
    frozen: tuple[str, ...]  # roles of the frozen parts, such as query


@dataclass(frozen=True)
class StepRecord:
    """A step that was measured on MACHINE."""

    file: str  # in docs/records
    benchmark: str  # the record's name
    side: str  # of the record: `ours` or `theirs`
    differs: str  # how it differs from the recipes' step
    ms: float
    peak_bytes: int | None = None  # None: not measured


_QK = ("query", "key")
_BERT = ("BertForSequenceClassification", 109, 32, 128, "float32")
_EAGER = "eager; runs capture their steps"
_OTHER_GPT = "vocabulary of 50,304, biases in attention, no dropout"
STEP_RECORDS = {
    Step(*_BERT, ()): StepRecord("h200.jsonl", "step", "theirs", _EAGER, 57.021),
    Step(*_BERT, _QK): StepRecord("h200.jsonl", "step", "ours", _EAGER, 53.946),
    Step("GPT", 45, 8, 512, "bfloat16", ()): StepRecord(
        "h200-bench.jsonl", "gpt-language-8", "ours", _OTHER_GPT, 4.23728, 1_650_419_712
    ),
}


@dataclass(frozen=True)
class Entry:
    """An experiment and what it takes; None: not known."""

    id: str
    extends: str | None
    digest: str
    parameters: int  # in the last stage, if there are several
    trainable: int  # in the last stage, if there are several
    steps: int | None
    stops_early: bool  # whether patience can end it before `steps`
    tokens: int | None  # steps × batch × length, padding included; samples if the data are EEG
    flops: float | None  # of all steps, matmuls only
    seconds: float | None  # of all steps on MACHINE, without evaluations
    record: str | None  # of the step's time
    memory_bytes: int | None  # at the peak of a step
    memory_measured: bool
    reported: dict[str, float]  # by the sources
    optional: bool


Models = dict[str, tuple[nn.Module, Anatomy]]  # models on the meta device by their settings


def catalogue(groups: Iterable[Group]) -> dict[str, list[Entry]]:
    """Return the experiments of each group, by its name, with what they take."""
    models: Models = {}
    return {
        group.name: [
            _entry(group, name, facts, models) for name, facts in group.experiments.items()
        ]
        for group in groups
    }


def _entry(group: Group, name: str, facts: Experiment, models: Models) -> Entry:
    recipe = group.recipe(name)
    work = _work(_with_vocabulary(recipe), models)
    record = STEP_RECORDS.get(work.step) if not recipe.stages else None
    seconds = record.ms / 1000 * work.steps if record and work.steps else None
    measured = record.peak_bytes if record else None
    return Entry(
        name,
        read_values(group.source_of(name)).get("extends"),
        recipe.digest,
        work.parameters,
        work.trainable,
        work.steps,
        work.stops_early,
        work.tokens,
        work.flops,
        seconds,
        f"{record.file}: {record.benchmark}" if record and seconds else None,
        measured or work.memory,
        measured is not None,
        facts.reported,
        facts.optional,
    )


# The work of a recipe


@dataclass(frozen=True)
class _Work:
    step: Step  # of the first stage
    parameters: int
    trainable: int
    steps: int | None
    stops_early: bool
    tokens: int | None
    flops: float | None
    memory: int | None


def _with_vocabulary(recipe: Recipe) -> Recipe:
    """Return the recipe with the size of its vocabulary, if that is known without the data."""
    tokenizer = recipe.tokenizer
    size = WORDS.get(recipe.data.name)
    if size is None or tokenizer is None or tokenizer.kind != "words":
        return recipe
    return recipe.model_copy(update={"tokenizer": tokenizer.model_copy(update={"size": size})})


def _model_of(recipe: Recipe, models: Models) -> tuple[nn.Module, Anatomy]:
    """Build a recipe's model; recipes without stages share those that are equal."""
    settings = (recipe.model, recipe.tokenizer, recipe.data)
    key = digest_of([part and part.model_dump(mode="json") for part in settings])
    if key not in models or recipe.stages:
        model, _ = recipe_blueprint(recipe)
        if recipe.stages:
            _allocate(model)
            return model, anatomy(model)
        models[key] = model, anatomy(model)
    return models[key]


def _work(recipe: Recipe, models: Models) -> _Work:
    model, parts = _model_of(recipe, models)
    if recipe.surgery.frozen:
        parts = parts.with_frozen(*recipe.surgery.frozen)
    examples = _examples(recipe)
    per_step = recipe.train.batch * recipe.data.length
    steps, flops, memory, entered = 0, 0.0, 0, Entered()
    # with one example, a number of steps that the recipe sets is right, and epochs are not used
    stages = stages_of(recipe, examples or 1)
    step: Step | None = None
    for index, stage in enumerate(stages):
        if recipe.stages:
            entered = enter_stage(model, recipe, stage, index, entered)
            parts = anatomy(model)
        step = step or _step(recipe, model, parts)
        steps += stage.steps
        flops += stage.steps * per_step * _flops_per_token(recipe, stage, model, parts)
        memory = max(memory, _memory(recipe, parts, per_step))
    assert step is not None
    known = examples is not None or recipe.train.steps is not None
    return _Work(
        step,
        parts.count(),
        parts.count("trainable"),
        steps if known else None,
        any(stage.patience is not None for stage in stages),
        steps * per_step if known else None,
        flops if known else None,
        None if recipe.model.kind == "conformer" else memory,
    )


def _allocate(model: nn.Module) -> None:
    """Move a model from the meta device to memory, without values, because stages change weights.

    Unlike `Module.to_empty`, this keeps tied weights tied.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in allocated:
                empty = torch.empty_like(weight, device="cpu")
                allocated[weight] = nn.Parameter(empty, weight.requires_grad)
            setattr(module, name, allocated[weight])
        for name, values in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(values, device="cpu"))


def _examples(recipe: Recipe) -> int | None:
    """Return the number of training examples; None if only the data can tell."""
    data = recipe.data
    if isinstance(data, SimulatedEEG):
        fitting = round(data.seconds * data.rate) // data.length
        trained = data.subjects * (data.recordings - data.tune - data.report)
        return trained * (data.windows or fitting)
    limit = getattr(data, "limit", None)
    facts = PUBLIC_SETS.get("mnli" if data.name == "xnli" else data.name)  # XNLI trains on MNLI
    everything = None if facts is None else facts.rows.get("train")
    return limit if everything is None else min(limit or everything, everything)


def _step(recipe: Recipe, model: nn.Module, parts: Anatomy) -> Step:
    frozen = {part.role for part in parts.parts if part.state == "frozen"}
    return Step(
        type(model).__name__,
        round(parts.count() / 1e6),
        recipe.train.batch,
        recipe.data.length,
        _precision(recipe),
        _QK if frozen == set(_QK) else tuple(sorted(frozen)),
    )


def _precision(recipe: Recipe) -> str:
    """Return the precision of a run on a GPU."""
    return "bfloat16" if recipe.train.precision in ("auto", "bf16") else recipe.train.precision


def _flops_per_token(recipe: Recipe, stage: Stage, model: nn.Module, parts: Anatomy) -> float:
    """Return the matmul FLOPs of a step per token, with the head at every supervised layer."""
    flops = savings(parts, recipe.data.length, causal=is_causal(model)).flops
    supervision = resolve_supervision(stage.supervise, model)
    if supervision is None:
        return flops
    head = next(part for part in parts.parts if part.role == "head" and part.matmul)
    learns = head.state == "trainable"
    outside = (part for part in parts.parts if not part.layers and part.role != "head")
    below = any(part.state == "trainable" for part in outside)
    for layer_number, layer in enumerate(parts.layers, 1):
        below = below or any(part.state == "trainable" for part in layer.parts)
        if layer_number in supervision.layers[:-1]:  # the last one is in `flops`
            flops += 2 * head.parameters * (1 + below + learns)
    return flops


def _memory(recipe: Recipe, parts: Anatomy, tokens: int) -> int:
    """Estimate the peak memory of a step: weights, gradients, moments, activations and logits."""
    value = 2 if _precision(recipe) == "bfloat16" else 4
    widths = [
        next((part.shape[1 - part.axis] for part in layer.parts if part.role == "query"), 0)
        for layer in parts.layers
    ]
    kept = sum(widths) * (_KEPT_VALUES * value + _MASK_BYTES)
    vocabulary = max(
        (part.shape[0] for part in parts.parts if part.role == "embedding" and part.shape),
        default=0,
    )
    logits = vocabulary * value if recipe.data.task == "language" else 0
    state = _WEIGHT_BYTES * parts.count() + _STATE_BYTES * parts.count("trainable")
    return state + tokens * (kept + logits)


# The page

_ABOUT = f"""\
Every experiment of these groups with what it takes. `frostlab recipes --details` prints this page,
`--group NAME` one group of it, and `--json` its values. What the ids mean, and what differs from
the sources, is in [From the sources](from-the-sources.md).

- *digest*: of the recipe. Two experiments with one digest have the same recipe.
- *parameters*, *trainable*: in the last stage, if there are several.
- *steps*: "≤" if patience can end a stage earlier.
- *tokens*: steps × batch × length, so padding and an incomplete last batch count. For EEG, samples.
- *FLOPs*: matmuls of all steps, forward and backward, with what freezing saves.
- *time*: of the steps alone on one {MACHINE}, without evaluations and set-up: the time of
  such a step in a record (below) times the number of steps. Other steps are not measured.
- *memory*: at the peak of a step, from the record of its time. A value with "≈" is an estimate:
  4 bytes per parameter and 12 per trainable parameter (gradient and Adam's moments), the values
  that a layer keeps for its backward pass (16 per token and unit of the width, and 2 bytes of
  dropout masks), and a language model's logits. For the recorded steps of BERT-base (32 × 128) and
  GPT Medium-512 (8 × 512) in bf16, it is within 10 % of the measured peak. The Conformer's layers
  keep other values, so their memory is not estimated.
- *reported*: by the sources.
"""


def catalogue_page(groups: Sequence[Group]) -> str:
    """Return the catalogue of groups in Markdown; groups without experiments are left out."""
    entries = catalogue(groups)
    sections = [
        f"## {escaped(group.name)}\n\n{escaped(group.about)}\n\n{_table(entries[group.name])}"
        for group in groups
        if group.experiments
    ]
    return "\n".join(["# Catalogue", "", _ABOUT, *sections, _records()])


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
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _reported(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{name.replace('_', ' ')} {100 * value:.2f} %"
    if name.endswith("_seconds"):
        return f"{value:g} s {'a step' if name == 'step_seconds' else 'in all'}"
    return f"{name} {value:g}"


def _records() -> str:
    """Return the section that names the records of the times."""
    rows = [
        (
            f"{step.model}, {step.millions} M parameters, {step.batch} × {step.length}, "
            f"{step.precision}, {' and '.join(step.frozen) or 'nothing'} frozen",
            f"{record.ms:.4g} ms",
            record.differs,
            f"{record.file}: {record.benchmark}, {record.side}",
        )
        for step, record in STEP_RECORDS.items()
    ]
    table = markdown(
        ("step", "time", "differs from the recipes' step", "record in docs/records"), rows
    )
    return f"## The steps that were measured\n\nOn one {MACHINE}:\n\n{table}\n"

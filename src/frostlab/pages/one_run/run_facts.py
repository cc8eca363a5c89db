"""The records of one run, and the sections of its report that list facts about it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.flow.measurements import Flow, flows_of
from frostlab.pages.content import Block, Cell, Figure, Records, Table, item, words
from frostlab.pages.one_run import run_figures
from frostlab.records.events import effective, read_events
from frostlab.records.finding.index import EVENTS, RESULT, dotted
from frostlab.records.schema import (
    EndEvent,
    EvaluationEvent,
    Event,
    NoteEvent,
    ResumeEvent,
    StageEvent,
    StartEvent,
    StepEvent,
)
from frostlab.text import plain, short

RECIPE, DATA, ENVIRONMENT = "recipe.yaml", "data.json", "environment.json"
CLASSES = 30  # with more classes, no chart of them is drawn
_SHOWN = (StartEvent, ResumeEvent, StageEvent, StepEvent, EvaluationEvent, NoteEvent, EndEvent)


@dataclass(frozen=True)
class OneRun:
    """A run's folder with its records, from which every section is made."""

    folder: Path
    records: Records
    problems: list[str] = field(default_factory=list)  # errors of reading, which the report shows

    def cell(
        self, *keys: str | int, format: str = "number", file: str = RESULT, alarm: bool = False
    ) -> Cell:
        """Return the cell of a value, by default of result.json."""
        return self.records.cell(file, *keys, format=format, alarm=alarm)

    def value(self, *keys: str | int, file: str = RESULT) -> Any:
        """Return a value, by default of result.json; None if it is missing."""
        return self.records.value(file, *keys)

    @cached_property
    def events(self) -> list[Event]:
        """The events that the report shows; those of gradient flow are not read here."""
        damaged: list[str] = []
        events = effective(read_events(self.folder / EVENTS, *_SHOWN, damaged=damaged))
        self.problems.extend(map(plain, damaged))
        return events

    @cached_property
    def metric(self) -> str:
        """Name of the metric that selects the checkpoint; without a result, the first evaluated."""
        chosen = self.value("best", "metric")
        first = (name for event in self.evaluations for name in event.metrics)
        return str(chosen or next(first, "metric"))

    @cached_property
    def evaluations(self) -> list[EvaluationEvent]:
        """The evaluations on the split that selects the checkpoint, in order."""
        return [
            event for event in self.events
            if isinstance(event, EvaluationEvent) and event.checkpoint is None
        ]  # fmt: skip

    @cached_property
    def later_stages(self) -> list[dict[str, Any]]:
        """The step at which each stage but the first begins, and its name."""
        begins = [event for event in self.events if isinstance(event, StageEvent)][1:]
        return [{"step": event.step, "stage": short(plain(event.name), 30)} for event in begins]

    def per_step(self, quantity: str) -> list[tuple[int, float | None]]:
        """Return the loss, the gradient's norm or the duration of every step.

        Args:
            quantity: `loss`, `norm` or `ms`, as in `StepEvent`.
        """
        return [
            (event.first + place, value)
            for event in self.events
            if isinstance(event, StepEvent)
            for place, value in enumerate(getattr(event, quantity))
        ]

    @cached_property
    def flows(self) -> dict[str, Flow]:
        """The gradient flow by stage; empty if the run was not watched."""
        if self.value("watch", file=RECIPE) is None:
            return {}
        try:
            return {name: flow for name, flow in flows_of(self.folder).items() if flow.reports}
        except BadInput as error:
            self.problems.append(plain(str(error)))
            return {}


def parameters(run: OneRun) -> list[Block]:
    """Return the parameters, the memory and the load of the machine."""
    if run.value("parameters") is None:
        return []
    telemetry = [
        ("GPU memory, peak of this run", ("device_memory_peak",), "GiB"),
        ("host memory, peak of the process", ("telemetry", "host_peak_bytes"), "GiB"),
        ("GPU utilisation, mean", ("telemetry", "gpu_utilisation_percent", "mean"),
         "whole percent"),
        ("GPU power, mean", ("telemetry", "gpu_power_watts", "mean"), "watts"),
        ("GPU energy", ("telemetry", "gpu_energy_joules"), "kJ"),
        ("GPU temperature, highest", ("telemetry", "gpu_temperature_c", "max"), "celsius"),
        ("GPU clock, mean", ("telemetry", "gpu_sm_clock_mhz", "mean"), "MHz"),
        ("CPU use of the process, mean", ("telemetry", "process_cpu_percent", "mean"),
         "whole percent"),
        ("load of the host, mean", ("telemetry", "load_1min", "mean"), "number"),
    ]  # fmt: skip
    rows: list[tuple[str | Cell, ...]] = [
        (name, run.cell("parameters", key, format="count"))
        for name, key in (("parameters", "total"), ("trainable", "trainable"),
                          ("frozen", "frozen"))
    ]  # fmt: skip
    rows.append(("trainable share", run.cell("parameters", format="trainable share")))
    rows += [(name, run.cell(*keys, format=shown)) for name, keys, shown in telemetry]
    known = tuple(row for row in rows if isinstance(row[1], Cell) and row[1].file)
    return [Table("parameters", "Parameters, memory and load", ("", "value"), known)]


_SPLIT_ROWS = (
    ("examples", ("examples",), "count"), ("rows read", ("rows",), "count"),
    ("tokens", ("tokens",), "count"), ("characters", ("characters",), "count"),
    ("shortest, in tokens", ("lengths", "least"), "count"),
    ("median length", ("lengths", "median"), "number"), ("longest", ("lengths", "most"), "count"),
    ("examples cut at the maximum length", ("lengths", "cut"), "count"),
    ("empty texts", ("empty",), "count"), ("repeated texts", ("duplicates",), "count"),
    ("contradicting labels", ("contradictions",), "count"),
    ("recordings", ("recordings",), "count"), ("subjects", ("subjects",), "count"),
    ("seconds", ("seconds",), "number"), ("source", ("source",), "text"),
    ("how it was made", ("note",), "text"),
)  # fmt: skip


def data(run: OneRun) -> list[Block]:
    """Return the splits of the data, remarks about them, and how many examples each class has."""
    splits = run.value("splits", file=DATA)
    if not splits:
        return []
    rows: list[tuple[str | Cell, ...]] = []
    for name, keys, shown in _SPLIT_ROWS:
        cells = [run.cell("splits", split, *keys, file=DATA, format=shown) for split in splits]
        if any(cell.file and cell.text for cell in cells):
            rows.append((name, *cells))
    blocks: list[Block] = [Table("data", "Splits of the data", ("", *map(plain, splits)),
                                 tuple(rows))]  # fmt: skip
    notes = run.value("notes", file=DATA) or []
    blocks += [item(run.cell("notes", number, file=DATA, format="text"), alarm=True)
               for number, _ in enumerate(notes)]  # fmt: skip
    labels = run.value("labels", file=DATA) or []
    counts = [
        {"class": short(plain(str(label)), 40), "split": plain(split), "count": count}
        for place, label in enumerate(labels)
        for split, values in splits.items()
        for count in (values.get("classes") or [])[place : place + 1]
    ]
    if counts and len(labels) <= CLASSES:
        blocks.append(Figure("classes", "Examples of each class", run_figures.class_counts(counts),
                             "How many examples of each class the splits have.", counts,
                             (DATA,)))  # fmt: skip
    return blocks


def configuration(run: OneRun) -> list[Block]:
    """Return the settings of the recipe."""
    recipe = run.value(file=RECIPE)
    if not recipe:
        return []
    rows = tuple(
        (plain(key), run.cell(*_keys(recipe, key), file=RECIPE, format="setting"))
        for key, value in dotted(recipe)
        if value not in (None, [], {}) and key != "about"
    )
    digest = run.cell("recipe_digest", format="text")
    return [
        words("Every setting of the recipe that has a value; its digest is ", digest, "."),
        Table("settings", "Settings", ("setting", "value"), rows),
    ]


def _keys(recipe: dict[str, Any], key: str) -> tuple[str, ...]:
    """Split a dotted key such as `data.length` into its keys, which can have dots of their own."""
    parts, keys, value = key.split("."), [], recipe
    while parts:
        size = next(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in value)
        keys.append(".".join(parts[:size]))
        value, parts = value[keys[-1]], parts[size:]
    return tuple(keys)


def environment(run: OneRun) -> list[Block]:
    """Return the machine and the libraries."""
    shown: list[tuple[str, tuple[str, ...], str]] = [
        ("time", ("time",), "text"), ("device", ("device_name",), "text"),
        ("GPU driver", ("gpu", "driver"), "text"), ("CPU", ("host", "cpu"), "text"),
        ("usable cores", ("host", "usable_cores"), "count"),
        ("memory", ("host", "memory_bytes"), "GiB"), ("system", ("host", "os"), "text"),
        ("host", ("host", "name"), "text"), ("command", ("command",), "text"),
        ("commit", ("code", "commit"), "text"), ("digest of the code", ("code", "digest"), "text"),
    ]  # fmt: skip
    versions = run.value("versions", file=ENVIRONMENT) or {}
    shown += [(plain(name), ("versions", name), "text") for name in versions]
    rows = [(name, run.cell(*keys, file=ENVIRONMENT, format=how)) for name, keys, how in shown]
    known = tuple(row for row in rows if row[1].file)
    if not known:
        return []
    return [Table("environment", "Machine and libraries", ("", "value"), known)]


def notes(run: OneRun) -> list[Block]:
    """Return the notes of users and of the training, and how steps were run (e.g. compiled)."""
    notes = run.value("notes", file="annotations.json") or []
    blocks: list[Block] = [
        item(run.cell("notes", number, "at", file="annotations.json", format="day"), ": ",
             run.cell("notes", number, "text", file="annotations.json", format="text"))
        for number, _ in enumerate(notes)
    ]  # fmt: skip
    blocks += [item(f"During training: {plain(event.text)}")
               for event in run.events if isinstance(event, NoteEvent)]  # fmt: skip
    blocks += [
        item("Steps are ", run.cell("stepping", number, "how", format="text"), ": ",
             run.cell("stepping", number, "reason", format="text"), ".")
        for number, stepping in enumerate(run.value("stepping") or [])
        if number == 0 or stepping["how"] != run.value("stepping", number - 1, "how")
    ]  # fmt: skip
    if run.value("tags", file="annotations.json"):
        blocks.append(item("Tags: ", run.cell("tags", file="annotations.json", format="list")))
    return blocks

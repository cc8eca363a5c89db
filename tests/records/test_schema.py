"""The schema of records: each key is explained, in code and in docs/runs.md, and nothing else."""

import ast
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

import frostlab as fl
from frostlab.comparison.evidence import Effect, Evidence, MachineLoad
from frostlab.comparison.plan import Plan, Rules
from frostlab.comparison.run import _Steps
from frostlab.comparison.runner import StoredPlan
from frostlab.data.split_record import SplitRecord
from frostlab.envelopes.challenge import ChallengeScore
from frostlab.envelopes.scores import StoredScores
from frostlab.envelopes.scores_json import ScoresFile
from frostlab.experiments.further import _Scores
from frostlab.experiments.means import Means
from frostlab.experiments.run import _Stored
from frostlab.experiments.summary import GroupSummary
from frostlab.flow.measurements import _StoredFlow
from frostlab.matrix.store import DriverState, Holder, MatrixPlan, PlannedRun
from frostlab.records import schema
from frostlab.records.finding.annotations import Annotations
from frostlab.records.model_files import ModelInputs
from frostlab.records.schema import (
    EVENTS,
    Clocks,
    DataRecord,
    Digests,
    Event,
    GpuState,
    Predictions,
    Result,
    Samples,
    Scores,
    Stage,
    TelemetrySummary,
    WallClock,
)
from frostlab.surgery.save import Manifest
from tiny import tiny

DOCUMENT = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
TABLES: dict[str, type] = {  # heading in the document: the dataclass
    "result.json": Result,
    "Stages of a result": Stage,
    "Clocks": Clocks,
    "Wall clock": WallClock,
    "Telemetry": TelemetrySummary,
    "Scores": Scores,
    "digests.json": Digests,
    "samples.json": Samples,
    "inputs.json": ModelInputs,
    "data.json": DataRecord,
    "Splits of the data": SplitRecord,
}


def classes_in(hint: Any) -> list[type]:
    """The dataclasses and models that an annotation names."""
    if dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return [hint]  # type: ignore[list-item]
    return [found for inner in get_args(hint) for found in classes_in(inner)]


def keys_of(kind: type) -> set[str]:
    """The keys of a dataclass, and of those within that have no table of their own."""
    keys = {field.name for field in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    within = [inner for key in keys for inner in classes_in(hints[key])]
    return keys.union(*(keys_of(inner) for inner in within if inner not in TABLES.values()))


def rows_under(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    (text,) = re.findall(rf"^###+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", DOCUMENT, re.M | re.S)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[2:]]


def names_in(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


@pytest.mark.parametrize("heading", TABLES)
def test_the_document_names_the_keys_of_every_record(heading: str) -> None:
    named = [name for row in rows_under(heading) for name in names_in(row[0])]
    assert set(named) == keys_of(TABLES[heading])


def test_the_document_names_the_keys_of_every_event() -> None:
    rows = {names_in(kind)[0]: names_in(keys) for kind, keys in rows_under("events.jsonl")}
    assert list(rows) == list(EVENTS)
    common = {field.name for field in dataclasses.fields(Event)}
    for kind, named in rows.items():
        own = {field.name for field in dataclasses.fields(EVENTS[kind])} - common
        assert set(named) | common == keys_of(EVENTS[kind]) | common, kind
        assert own <= set(named), kind


# The classes of JSON files; those of their values are found by their annotations.
FILES: tuple[type, ...] = (
    *TABLES.values(), Predictions, *EVENTS.values(), Annotations, Evidence, StoredPlan, Plan,
    _Stored, GroupSummary, Means, _Scores, MatrixPlan, DriverState, Holder, ScoresFile,
    StoredScores, ChallengeScore, Manifest, _StoredFlow, _Steps,
)  # fmt: skip


def with_inner(kind: type, known: set[type]) -> set[type]:
    """A class, its bases and the classes of its values."""
    own = {base for base in kind.__mro__ if base.__module__.startswith("frostlab.")}
    for name in own - known:
        known.add(name)
        for hint in get_type_hints(name).values():
            for inner in classes_in(hint):
                with_inner(inner, known)
    return known


def unexplained(kind: type) -> list[str]:
    """The keys of a class that have a comment neither in their line nor above it."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    keys = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    return [
        f"{kind.__name__}.{ast.unparse(node.target)}"
        for node in keys
        if "ClassVar" not in ast.unparse(node.annotation)
        and not any("  # " in line for line in lines[node.lineno - 1 : node.end_lineno])
        and not lines[node.lineno - 2].strip().startswith("#")
    ]


def test_every_key_is_explained_in_code() -> None:
    known: set[type] = set()
    for kind in FILES:
        with_inner(kind, known)
    assert {SplitRecord, Stage, Event, Effect, MachineLoad, Rules, PlannedRun, GpuState} <= known
    assert not [key for kind in sorted(known, key=str) for key in unexplained(kind)]
    assert {cls.kind: cls for cls in EVENTS.values()} == EVENTS


def test_the_document_says_the_schema() -> None:
    assert f"Schema {schema.SCHEMA}:" in DOCUMENT


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Every file of a run fits; asdict gives back what the file says."""
    import json

    recipe = tiny(
        watch={"every_n_steps": 3, "distance": True}, evaluate={"target": 0.0, "batch": 256}
    )
    record = fl.run(recipe, runs=tmp_path)
    written = json.loads((record.folder / "result.json").read_text())
    assert dataclasses.asdict(record.result) == written
    lines = (record.folder / "events.jsonl").read_text().splitlines()
    assert len(record.events()) == len(lines) > 10
    for event, line in zip(record.events(), lines, strict=True):
        values = json.loads(line)
        assert values.pop("kind") == event.kind
        assert values.items() <= dataclasses.asdict(event).items()
    assert dataclasses.asdict(record.digests) == json.loads(
        (record.folder / "digests.json").read_text()
    )
    assert dataclasses.asdict(record.data) == json.loads((record.folder / "data.json").read_text())
    assert record.data.digest == record.digests.data
    assert record.data.labels == [0, 1, 2, 3]
    assert record.recipe.digest == record.result.recipe_digest == record.start.recipe_digest


def test_events_are_parsed_in_one_place() -> None:
    """Other modules get events, or their values, from the readers of records/events.py."""
    source = Path(str(fl.__file__)).parent
    parsed = re.compile(r"""['"]\\?\{+"kind"|\bread_objects\(|\bevent_of\(""")
    readers = {path for path in source.rglob("*.py") if parsed.search(path.read_text())}
    homes = ("typed.py", "records/schema.py", "records/events.py")
    assert readers == {source / home for home in homes}

"""Properties: what is written is read back equal; one flipped bit is noticed or changes nothing."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frostlab.errors import DamagedCache, FrostlabError
from frostlab.flow.measurements import QUANTITIES, Flow, GroupFacts, PartFacts, Report, load_flow
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.records.checkpoint import checkpoints_in, save_checkpoint
from frostlab.records.finding.index import Summary, _load, _save, _stored_summary
from frostlab.records.folder import RunFolder, RunRecord
from frostlab.records.schema import EVENTS, Digests, Event, Result
from frostlab.storage import build_once, damaged_file, file_digest, finite, save_tensors, seal
from frostlab.surgery.freeze import freeze
from frostlab.surgery.save import load_trainable, save_trainable
from frostlab.training.state import Best, Progress
from frostlab.typed import read
from run_made import RESULT, START

QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
STARTED = {key: value for key, value in START.items() if key not in ("kind", "at", "step")}
number = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(-(2**63), 2**63 - 1)
text = st.text(max_size=12)
metrics = st.dictionaries(text.filter(lambda key: key != "layers"), number | st.none(), max_size=4)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    place %= 8 * len(content)
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


@QUICK
@given(name=text, seed=whole, seconds=number, report=metrics, error=text | st.none())
def test_a_result(name: str, seed: int, seconds: float, report: Any, error: str | None) -> None:
    clocks = RESULT["clocks"] | {"total_seconds": seconds}
    values = {"name": name, "seed": seed, "clocks": clocks, "report": report, "error": error}
    result = read(Result, RESULT | values, "result.json")
    with folder() as run:
        RunFolder(run).write("result.json", result)
        assert RunRecord(run).result == result


notes = st.tuples(st.just("note"), st.fixed_dictionaries({"text": text}))
evaluations = st.tuples(
    st.just("evaluation"),
    st.fixed_dictionaries({
        "split": text, "metrics": metrics, "frozen_verified": whole, "best": st.booleans(),
        "epoch": number, "seconds": number, "total_seconds": number,
    }),
)  # fmt: skip
blocks = st.tuples(
    st.just("step"),
    st.fixed_dictionaries({
        "first": whole, "loss": st.lists(number | st.none()), "norm": st.lists(number | st.none()),
        "ms": st.lists(number), "rate": number, "tokens": whole, "padded": whole,
        "examples": whole, "warmup": whole, "clipped": whole, "order": text,
    }),
)  # fmt: skip


@QUICK
@given(st.lists(notes | evaluations | blocks, max_size=5))
def test_events(events: list[tuple[str, dict[str, Any]]]) -> None:
    with folder() as root:
        with RunFolder.create(root / "run", {}, **STARTED) as run:
            for kind, values in events:
                run.event(kind, 1, **values)
        start, *found = RunRecord(root / "run").events()
        assert start.kind == "start"
        expected: list[Event] = [EVENTS[kind](at=0.0, step=1, **values) for kind, values in events]
        assert [asdict(e) | {"at": 0.0} for e in found] == [asdict(e) for e in expected]


@QUICK
@given(
    st.builds(
        Digests,
        text,
        st.none() | text,
        st.none() | text,
        st.dictionaries(text, text),
        st.lists(text),
        st.just({}),
    )
)
def test_digests(digests: Digests) -> None:
    with folder() as run:
        RunFolder(run).write("digests.json", digests)
        assert RunRecord(run).digests == digests


progresses = st.builds(
    Progress,
    best=st.builds(Best, st.just("accuracy"), number, whole, whole),
    step=whole,
    seconds=st.dictionaries(text, number),
    order=text,
    last=metrics,
    metrics=metrics,
    ended=st.just(list(read(Result, RESULT, "").stages)),
    flow_start=text | st.none(),
)


@QUICK
@given(progresses)
def test_progress(progress: Progress) -> None:
    with folder() as run:
        checkpoint = save_checkpoint(run, 1, {}, {}, progress.to_dict())
        assert Progress.from_dict(checkpoint.progress(), "progress.json") == progress


@QUICK
@given(name=text, status=text, steps=whole | st.none(), report=st.none() | st.just({"a": 1.5}))
def test_the_index(name: str, status: str, steps: int | None, report: Any) -> None:
    with folder() as root:
        summary = Summary("run", root / "run", status, treatment=name, steps=steps, report=report)
        stored = [getattr(summary, field.name) for field in fields(Summary)[2:]]
        _save(root, {"run": [[1, 2, 3, 4], stored]})
        assert _stored_summary(root / "run", [1, 2, 3, 4], _load(root)["run"]) == summary


@QUICK
@given(st.lists(st.lists(number, min_size=2, max_size=2), max_size=3), text, whole)
def test_a_flow(values: list[list[float]], name: str, elements: int) -> None:
    flow = Flow(name, "AdamW")
    flow.groups = (GroupFacts(0.1, 0.9, 1e-8),)
    part = PartFacts(name, "query", "", 0, "trainable", ("a",), ("a",), (), (0,), "x", elements)
    flow.parts = (part, part)
    for step, pair in enumerate(values):
        measured = {quantity: tuple(map(abs, pair)) for quantity in QUANTITIES}  # norms
        ends = {"front": 1.0, "back": float("nan"), "output": 0.5}
        flow.reports.append(Report(step, measured, (1e-3,), (), ends))
    with folder() as root:
        assert load_flow(flow.save(root / "flow.json")).to_dict() == flow.to_dict()


def tiny_gpt(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocabulary=5, width=4, layers=1, heads=2, positions=4))


def saved_delta(root: Path) -> Path:
    model = tiny_gpt(0)
    freeze(model, "query")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    return save_trainable(model, root / "delta")


@QUICK
@given(st.integers(0, 2**20), st.booleans())
def test_a_flipped_bit_in_a_delta(place: int, manifest: bool) -> None:
    with folder() as root:
        delta = saved_delta(root)
        expected, found = tiny_gpt(0), tiny_gpt(0)
        load_trainable(expected, delta)
        flipped(next(delta.glob("*.json" if manifest else "*.safetensors")), place)
        before = {name: value.clone() for name, value in found.state_dict().items()}
        try:
            load_trainable(found, delta)
            before = expected.state_dict()
        except FrostlabError:
            pass
        assert all(torch.equal(before[n], v) for n, v in found.state_dict().items())


@QUICK
@given(st.integers(0, 2**20), st.integers(0, 3))
def test_a_flipped_bit_in_a_checkpoint(place: int, file: int) -> None:
    weights, state = {"a": torch.arange(8.0)}, {"a//step": torch.tensor(2.0)}
    with folder() as run:
        checkpoint = save_checkpoint(run, 1, weights, state, {"step": 1})
        flipped(sorted(checkpoint.folder.iterdir())[file], place)
        (again,) = checkpoints_in(run)
        with contextlib.suppress(FrostlabError):
            assert torch.equal(again.model()["a"], weights["a"])
        with contextlib.suppress(FrostlabError):
            assert torch.equal(again.optimizer()["a//step"], state["a//step"])
        with contextlib.suppress(FrostlabError):
            assert again.progress() == {"step": 1}


@QUICK
@given(st.integers(0, 2**20))
def test_a_flipped_bit_in_a_sealed_folder(place: int) -> None:
    import warnings

    with folder() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedCache)

        def build(target: Path) -> None:
            (target / "labels.bin").write_bytes(bytes(range(64)))

        cache = build_once(root / "cache", build)
        for path in list(cache.iterdir()):
            flipped(path, place)
            again = build_once(root / "cache", build)
            assert (again / "labels.bin").read_bytes() == bytes(range(64))


@QUICK
@given(st.integers(0, 2**20))
def test_a_flipped_bit_changes_the_digest_of_the_flow_start(place: int) -> None:
    with folder() as root:
        path = root / "flow-start.safetensors"
        save_tensors(path, {"a": torch.arange(8.0)})
        before = file_digest(path)
        flipped(path, place)
        assert file_digest(path) != before


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    progress = Progress(Best("accuracy"), last={"accuracy": float("nan"), "loss": float("inf")})
    checkpoint = save_checkpoint(tmp_path, 1, {}, {}, progress.to_dict())
    read_back = Progress.from_dict(checkpoint.progress(), "progress.json")
    assert read_back.last == finite(progress.last) == {"accuracy": None, "loss": None}
    seal(checkpoint.folder)
    assert damaged_file(checkpoint.folder) is None
    json.loads((checkpoint.folder / "progress.json").read_text(), parse_constant=str)

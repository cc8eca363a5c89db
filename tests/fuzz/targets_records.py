"""Fuzz targets: the readers of runs, checkpoints, deltas and flows."""

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostlab.data.split_record import FileRecord, LengthRecord, SplitRecord
from frostlab.envelopes.correlation import Null, Tally
from frostlab.envelopes.scores import (
    EnvelopeScores,
    RecordingScore,
    Settings,
    Spread,
    SubjectScore,
)
from frostlab.envelopes.scores_json import scores_file, scores_lines
from frostlab.errors import BadInput, FrostlabError
from frostlab.flow.measurements import (
    QUANTITIES,
    Flow,
    GroupFacts,
    PartFacts,
    Report,
    load_flow,
    parts_event,
    report_event,
)
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.pages.content import Records, Table
from frostlab.pages.curves import read_curve
from frostlab.pages.generated import generated_texts
from frostlab.pages.tables import latex
from frostlab.records.checkpoint import (
    Checkpoint,
    checkpoints_in,
    keep_only,
    save_checkpoint,
    save_frozen,
)
from frostlab.records.finding.index import INDEX, list_runs
from frostlab.records.finding.listing import runs_table
from frostlab.records.finding.show import show, show_json
from frostlab.records.folder import RunRecord
from frostlab.records.model_files import ModelInputs, read_inputs
from frostlab.records.schema import DataRecord
from frostlab.roles.parts import Rows
from frostlab.storage import file_digest, seal, write_whole
from frostlab.surgery.freeze import PartlyFrozen, freeze
from frostlab.surgery.orthogonal import orthogonalize
from frostlab.surgery.save import load_trainable, save_trainable
from frostlab.training.state import Best, Progress
from fuzz.mutate import Target
from run_made import RESULT, START, evaluation_event, step_event


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def _lines(*events: dict[str, Any]) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


def _run(folder: Path, **files: bytes) -> Path:
    """Make a run's folder with these files, and plain ones for the others."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    events = _lines(START, step_event(1), evaluation_event(1, {"accuracy": 0.5}))
    for name, content in {"events.jsonl": events, "result.json": _json(RESULT), **files}.items():
        (run / name).write_bytes(content)
    return run


def _everything(run: Path) -> None:
    """Read a run in every way that the commands do; each error is a line of its own."""
    runs_table(list_runs(run.parent))
    show(run)
    json.dumps(show_json(run))


# Runs


def _check_result(content: bytes, folder: Path) -> None:
    run = _run(folder, **{"result.json": content})
    _everything(run)
    record = RunRecord(run)
    with contextlib.suppress(FrostlabError):
        json.dumps([record.metrics, record.layers, record.status])


def _flow_events() -> bytes:
    flow = _flow()
    facts = parts_event(flow, 10, ["a.weight"])
    start = {"kind": "flow_parts", "at": 1.0, "step": 0, "stage": "1", **facts}
    reports = [
        {"kind": "flow", "at": 1.0, "step": r.step, **report_event(r, flow.parts)}
        for r in flow.reports
    ]
    return _lines(START, start, *reports)


def _check_events(content: bytes, folder: Path) -> None:
    run = _run(folder, **{"events.jsonl": content})
    (run / "result.json").unlink()
    _everything(run)
    with contextlib.suppress(FrostlabError):
        _use(load_flow(run))
    with contextlib.suppress(FrostlabError):
        read_curve(run)
    RunRecord(run).events()


def _digests() -> list[bytes]:
    values = {
        "data": "d",
        "source": None,
        "revision": None,
        "weights": {"a": "x"},
        "touched": ["a"],
        "frozen": {"a": "x"},
    }
    return [_json(values)]


def _check_digests(content: bytes, folder: Path) -> None:
    assert RunRecord(_run(folder, **{"digests.json": content})).digests


def _model_inputs() -> list[bytes]:
    text = ModelInputs(99, 2, 0, "trained", None, None)
    eeg = ModelInputs(None, 0, None, None, ["Fz", "Cz"], ["sub-001"])
    return [_json(asdict(text)), _json(asdict(eeg))]


def _check_model_inputs(content: bytes, folder: Path) -> None:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "inputs.json").write_bytes(content)
    seal(folder / "model")
    inputs = read_inputs(folder)
    assert inputs.channels is not None or inputs.pad in range(inputs.vocabulary or 0)


def _environment() -> list[bytes]:
    from frostlab.records.environment import environment

    return [_json(environment("cpu"))]


def _check_environment(content: bytes, folder: Path) -> None:
    run = _run(folder, **{"environment.json": content})
    show(run)
    assert RunRecord(run).environment is not None


def _predictions() -> list[bytes]:
    return [_json({"split": "report", "labels": [0, 1, 1], "classes": [1, 1, 0]})]


def _check_predictions(content: bytes, folder: Path) -> None:
    assert RunRecord(_run(folder, **{"predictions.json": content})).predictions


def _samples() -> list[bytes]:
    sample = {"prompt": "A", "text": " cat\nsat", "ended": "length"}
    return [_json({"samples": [sample], "max_tokens": 8, "temperature": 0.8, "top_p": 0.95,
                   "seed": 0, "caution": None})]  # fmt: skip


def _check_samples(content: bytes, folder: Path) -> None:
    problems: list[str] = []
    run = _run(folder, **{"samples.json": content})
    blocks = generated_texts(Records(run), [("", "")], problems)
    if problems:
        raise BadInput(problems[0])
    for block in blocks[1:]:
        assert isinstance(block, Table)
        latex(block)


def _data() -> list[bytes]:
    train = SplitRecord(
        "/a/train.csv", 6, "d", rows=9, carved={"tune": 1}, dropped={"beyond data.limit 6": 2},
        classes=[3, 3], lengths=LengthRecord(1, 2.5, 2.5, 4, 1), tokens=15, empty=1,
        files=[FileRecord("/a/train.csv", 99, "s")], seed=1,
    )  # fmt: skip
    tune = SplitRecord("/a/train.csv", 1, "e", carved_from="train", note="5%", seconds=1.5)
    splits = {"train": train, "tune": tune}
    labelled = DataRecord("classification", "d", ["a", 1], splits, ["a note"])
    running = DataRecord("language", "d", None, {"train": tune}, [])
    return [_json(asdict(record)) for record in (labelled, running)]


def _check_data(content: bytes, folder: Path) -> None:
    run = _run(folder, **{"data.json": content})
    _everything(run)
    assert RunRecord(run).data


def _index() -> list[bytes]:
    with tempfile.TemporaryDirectory() as root:
        run = _run(Path(root))
        for path in run.iterdir():
            os.utime(path, (1, 1))
        list_runs(Path(root))
        return [(Path(root) / INDEX).read_bytes()]


def _check_index(content: bytes, folder: Path) -> None:
    """Give the index a fresh checksum and signatures, so that more of it is believed."""
    run = _run(folder)
    for path in run.iterdir():
        os.utime(path, (1, 1))
    head, _, body = content.partition(b"\n")
    for text in (content, b""):
        (folder / INDEX).write_bytes(text)
        runs_table(list_runs(folder))
    with contextlib.suppress(ValueError, RecursionError):
        header = json.loads(head)
        if isinstance(header, list) and header:
            header[-1] = zlib.crc32(body)
            (folder / INDEX).write_bytes(json.dumps(header).encode() + b"\n" + body)
            runs_table(list_runs(folder))


def envelope_scores() -> EnvelopeScores:
    null, match = Null(-0.1, 0.0, 0.1, 0.05), Tally(3.0, 4, 2)
    recordings = tuple(
        RecordingScore(f"r{i}", f"s{i}", 640, 0.1 * i + 0.05, None, (0.1, 0.3), null, match, None)
        for i in range(2)
    )
    subjects = tuple(
        SubjectScore(r.subject, 1, r.r, None, Spread.of(r.segments), null) for r in recordings
    )
    return EnvelopeScores(Settings(64.0, 100, 2.0, 5.0, 1.0, 5.0, 0), recordings, subjects, null)


def scores_result(scores: EnvelopeScores) -> dict[str, Any]:
    """A result that goes with these scores."""
    values = scores.to_dict()
    return RESULT | {
        "scores": {"report": {"ridge": {**values["summary"], "digest": values["digest"]}}}
    }


def _scores() -> list[bytes]:
    return [_json(scores_file({"report": {"ridge": envelope_scores()}}, {"best_r": 0.5}))]


def _check_scores(content: bytes, folder: Path) -> None:
    result = _json(scores_result(envelope_scores()))
    run = _run(folder, **{"scores.json": content, "result.json": result})
    record = RunRecord(run)
    scores_lines(run, record.result.scores)
    _ = record.envelope_scores


# Checkpoints


@cache
def _files() -> dict[str, bytes]:
    """The files of a checkpoint, which are then written without waiting for the disk."""
    with tempfile.TemporaryDirectory() as root:
        checkpoint = save_checkpoint(Path(root), 1, {}, {}, {})
        return {path.name: path.read_bytes() for path in checkpoint.folder.iterdir()}


def _checkpoint(folder: Path, **files: bytes) -> Checkpoint:
    """Make a checkpoint with these files; its checksums are those of the original files."""
    target = folder / "checkpoints" / "step-000000001"
    target.mkdir(parents=True, exist_ok=True)
    for name, content in {**_files(), **files}.items():
        (target / name).write_bytes(content)
    (checkpoint,) = checkpoints_in(folder)
    return checkpoint


def _progress() -> list[bytes]:
    stage = RESULT["stages"][0]
    first = Progress(Best("accuracy", 0.5, 1), 1, seconds={"total": 1.0}, target={"step": 1.0})
    values = first.to_dict() | {"ended": [stage], "last": {"accuracy": 0.5, "layers": {}}}
    return [_json(first.to_dict()), _json(values)]


def _check_progress(content: bytes, folder: Path) -> None:
    checkpoint = _checkpoint(folder, **{"progress.json": content})
    with contextlib.suppress(FrostlabError):
        checkpoint.progress()
    seal(checkpoint.folder)
    (again,) = checkpoints_in(folder)
    progress = Progress.from_dict(again.progress(), "progress.json")
    json.dumps([progress.stage, progress.lengths, progress.stage_step])


def _tensors() -> list[bytes]:
    from safetensors.torch import save

    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1)}
    moments = {f"a//{key}": weights["a"].clone() for key in ("exp_avg", "exp_avg_sq")}
    return [save(weights), save(moments | {"a//step": torch.tensor(1.0)})]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3))
        self.register_buffer("b", torch.tensor(0))


def _check_tensors(content: bytes, folder: Path) -> None:
    from frostlab.training.restore import load_weights
    from frostlab.training.step.optimizer import restore_optimizer

    names = ("model.safetensors", "optimizer.safetensors")
    checkpoint = _checkpoint(folder, **dict.fromkeys(names, content))
    seal(checkpoint.folder)
    (again,) = checkpoints_in(folder)
    model = _Model()
    try:
        load_weights(model, again)
    except FrostlabError:  # it may be the state of an optimizer
        optimizer = torch.optim.AdamW(model.parameters())
        restore_optimizer(model, optimizer, again.optimizer(), partly=True)


@cache
def _frozen_files() -> dict[str, bytes]:
    """The files of a checkpoint with a partly frozen tensor, by their paths in the run."""
    rows = PartlyFrozen(0, Rows(3, 1, ((1, 3),)))
    with tempfile.TemporaryDirectory() as root:
        frozen = save_frozen(Path(root), {"a": torch.ones(2, 3), "c": torch.ones(1)}, {"a": rows})
        learning = {"a": torch.zeros(1, 3), "b": torch.tensor(1)}
        save_checkpoint(Path(root), 1, learning, {}, {}, frozen=frozen)
        files = [path for path in Path(root).rglob("*") if path.is_file()]
        return {str(path.relative_to(root)): path.read_bytes() for path in files}


_FROZEN = "checkpoints/step-000000001/frozen.json"


def _check_frozen(content: bytes, folder: Path) -> None:
    for name, original in {**_frozen_files(), _FROZEN: content}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(original)
    seal((folder / _FROZEN).parent)
    (checkpoint,) = checkpoints_in(folder)
    assert checkpoint.model().keys() == {"a", "b", "c"}
    keep_only(folder, 1, 1)


# Deltas


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=5, width=4, layers=1, heads=2, positions=4))


@cache
def _delta() -> tuple[bytes, str, bytes]:
    """The manifest of a delta, the name of its tensor file, and its content."""
    with tempfile.TemporaryDirectory() as root:
        model = _gpt()
        orthogonalize(model, "query", "key", source="gaussian", seed=1)
        freeze(model, "query", "key")
        folder = save_trainable(model, Path(root) / "delta")
        (tensors,) = folder.glob("*.safetensors")
        return (folder / "delta.json").read_bytes(), tensors.name, tensors.read_bytes()


def _load(folder: Path) -> None:
    """Load a delta; if it is refused, no weight of the model may have changed."""
    model = _gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        load_trainable(model, folder)
    except FrostlabError:
        assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
        raise


def _check_manifest(content: bytes, folder: Path) -> None:
    _, name, tensors = _delta()
    (folder / "delta.json").write_bytes(content)
    (folder / name).write_bytes(tensors)
    _load(folder)


def _check_delta_tensors(content: bytes, folder: Path) -> None:
    manifest, name, _ = _delta()
    (folder / name).write_bytes(content)
    values = json.loads(manifest)
    values["tensors"]["sha256"] = file_digest(folder / name)
    write_whole(folder / "delta.json", json.dumps(values))
    _load(folder)


# Flows


def _flow() -> Flow:
    flow = Flow("GPT", "AdamW")
    flow.groups = (GroupFacts(0.1, 0.9, 1e-8),)
    flow.parts = (
        PartFacts("layers[0].query", "query", "", 0, "trainable", ("a.weight",), ("a.weight",),
                  (), (0,), "float32", 6),
        PartFacts("head", "head", "", None, "frozen", ("b",), (), (), (), "float32", 0),
    )  # fmt: skip
    for step in (1, 11, 21):
        report = Report(
            step=step,
            values={name: (0.5 + step, float("nan")) for name in QUANTITIES},
            rates=(1e-3,),
            unreached=("a.weight",),
            largest={"front": 0.1, "back": 0.2, "output": 0.3},
            ranges={"a.weight": 1.5},
            dead={"relu": 0.5},
            saturated={"relu": 0.1},
            entropy={"attention": (0.5, 0.25)},
        )
        flow.reports.append(report)
    return flow


def _use(flow: Flow) -> None:
    flow.verdicts()
    flow.depth_ratios()
    flow.norms()
    flow.ratios()
    flow.first_broken()
    json.dumps(flow.to_dict())


def _check_flow(content: bytes, folder: Path) -> None:
    (folder / "flow.json").write_bytes(content)
    _use(load_flow(folder / "flow.json"))


def _seeds(*makers: Callable[[], bytes]) -> Callable[[], list[bytes]]:
    return lambda: [make() for make in makers]


TARGETS: dict[str, Target] = {
    "result": Target(_seeds(lambda: _json(RESULT)), _check_result, "json"),
    "events": Target(
        _seeds(
            lambda: _lines(START, step_event(1), evaluation_event(1, {"accuracy": 0.5})),
            _flow_events,
        ),
        _check_events,
        "jsonl",
    ),
    "digests": Target(_digests, _check_digests, "json"),
    "model-inputs": Target(_model_inputs, _check_model_inputs, "json"),
    "environment": Target(_environment, _check_environment, "json"),
    "data": Target(_data, _check_data, "json"),
    "predictions": Target(_predictions, _check_predictions, "json"),
    "samples": Target(_samples, _check_samples, "json"),
    "index": Target(_index, _check_index, "jsonl"),
    "scores": Target(_scores, _check_scores, "json"),
    "progress": Target(_progress, _check_progress, "json"),
    "checkpoint": Target(_tensors, _check_tensors, "bytes"),
    "frozen": Target(_seeds(lambda: _frozen_files()[_FROZEN]), _check_frozen, "json"),
    "delta": Target(_seeds(lambda: _delta()[0]), _check_manifest, "json"),
    "delta-tensors": Target(_seeds(lambda: _delta()[2]), _check_delta_tensors, "bytes"),
    "flow": Target(_seeds(lambda: _json(_flow().to_dict())), _check_flow, "json"),
}

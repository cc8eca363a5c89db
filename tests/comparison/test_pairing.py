"""Two runs are a pair only if their digests agree."""

import json
import shutil
from pathlib import Path

import pytest

import frostlab as fl
from comparing import LAYERS, compare
from frostlab.comparison.pairing import PairingFacts, why_unpaired
from frostlab.records.folder import RunRecord


def why_unpaired_at(one: Path, other: Path) -> str | None:
    return why_unpaired(*(PairingFacts.of(RunRecord(folder)) for folder in (one, other)))


@pytest.mark.parametrize("planted", ["data", "order", "weights", "precision"])
def test_a_planted_difference_keeps_runs_apart(
    planted: str, made: fl.Comparison, tmp_path: Path
) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for path, arm in ((one, "baseline"), (other, "oelm")):
        shutil.copytree(made.folder / "runs" / f"{arm}-s0", path)
    assert why_unpaired_at(one, other) is None
    digests = json.loads((other / "digests.json").read_text())
    events = (other / "events.jsonl").read_text()
    if planted == "data":
        digests["data"] = "another"
    elif planted == "weights":
        key = next(key for key in digests["weights"] if key not in digests["touched"])
        digests["weights"][key] = "another"
    elif planted == "order":
        parsed = map(json.loads, events.splitlines())
        order = next(e["order"] for e in parsed if e["kind"] == "epoch")
        events = events.replace(order, "another")
    else:
        events = events.replace('"precision": "float32"', '"precision": "bfloat16"')
    (other / "digests.json").write_text(json.dumps(digests))
    (other / "events.jsonl").write_text(events)
    reason = why_unpaired_at(one, other)
    assert reason is not None
    assert {"order": "order of examples", "weights": "initial weights"}.get(
        planted, planted
    ) in reason


def test_a_run_resumed_elsewhere_is_no_pair(tmp_path: Path) -> None:
    found = compare(tmp_path / "c", seeds=1)
    folders = [found.folder / "runs" / f"{name}-s0" for name in ("baseline", "oelm")]
    assert why_unpaired_at(*folders) is None
    events = (folders[1] / "events.jsonl").read_text().splitlines()
    began = next(e for e in map(json.loads, events) if e["kind"] == "start")
    machine = {key: began[key] for key in ("at", "device", "processes", "threads")}
    resumed = {"kind": "resume", "step": 99, "precision": "bfloat16", **machine}
    with (folders[1] / "events.jsonl").open("a") as file:
        file.write(json.dumps(resumed) + "\n")
    assert "precision differs" in (why_unpaired_at(*folders) or "")


def test_other_weights_of_one_size_are_still_no_pair(tmp_path: Path) -> None:
    """What varies says nothing of them."""
    arms = [{"name": "one", "set": {}}, {"name": "long", "set": {"train.epochs": 2}}]
    values = LAYERS | {"arms": arms, "vary": ["train.epochs"], "contrasts": [], "seeds": 1}
    found = fl.compare(values, out=tmp_path / "c")
    assert not found.evidence.refused_pairs
    digests = tmp_path / "c" / "runs" / "long-s0" / "digests.json"
    digests.write_text(digests.read_text().replace('"weights": {', '"weights": {"more": "0",'))
    (tmp_path / "c" / "evidence.json").unlink()
    (refused,) = fl.compare(values, out=tmp_path / "c").evidence.refused_pairs
    assert refused.reason == "only one of the two runs has the weights more"


def test_the_facts_of_a_run_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    real = PairingFacts.of

    def counted(record: RunRecord) -> PairingFacts:
        folders.append(record.folder.name)
        return real(record)

    monkeypatch.setattr(PairingFacts, "of", counted)
    fl.compare(LAYERS | {"seeds": 2}, out=tmp_path / "c")
    names = ("one", "two", "two-frozen")
    assert sorted(folders) == sorted(f"{name}-s{seed}" for name in names for seed in (0, 1))

"""Two runs are a pair only if their digests agree."""

import json
import shutil
from pathlib import Path

import pytest

import frostlab as fl
from comparing import LAYERS, SMALL, compare
from frostlab.comparison.evidence import ComparedOrder
from frostlab.comparison.pairing import PairingFacts, steps_compared, why_unpaired
from frostlab.records.folder import RunRecord
from frostlab.training.batches.batch import Order
from frostlab.training.batches.feed import Feed


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
        events = events.replace(RunRecord(other).result.order_digest, "another")
    else:
        events = events.replace('"precision": "float32"', '"precision": "bfloat16"')
    (other / "digests.json").write_text(json.dumps(digests))
    (other / "events.jsonl").write_text(events)
    reason = why_unpaired_at(one, other)
    assert reason is not None
    assert {"order": "order of examples", "weights": "initial weights"}.get(
        planted, planted
    ) in reason


SHORT = {**SMALL, "train": {**SMALL["train"], "epochs": None, "steps": 3}}


def test_another_order_within_the_first_epoch_is_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six steps; only the last batch of one run has another order."""
    real = Feed.order

    def swapped(self: Feed, epoch: int) -> Order:
        order = [rows.copy() for rows in real(self, epoch)]
        order[2][[0, 1]] = order[2][[1, 0]]
        return order

    fl.run({**SHORT, "treatment": "none"}, out=tmp_path / "one")
    fl.run({**SHORT, "treatment": "oelm"}, out=tmp_path / "two")
    assert why_unpaired_at(tmp_path / "one", tmp_path / "two") is None
    monkeypatch.setattr(Feed, "order", swapped)
    fl.run({**SHORT, "treatment": "oelm"}, out=tmp_path / "other")
    reason = why_unpaired_at(tmp_path / "one", tmp_path / "other")
    assert "the order of examples differs by step 3 (" in (reason or "")


def test_runs_of_other_lengths_are_compared_over_the_steps_of_both(tmp_path: Path) -> None:
    """The page says which of these steps could not be compared."""
    arms = [{"name": name, "set": {"train.steps": steps}}
            for name, steps in (("four", 4), ("long", 13), ("epoch", 6))]  # fmt: skip
    values = LAYERS | {"recipe": SHORT, "arms": arms, "vary": ["train.steps"], "contrasts": [],
                       "seeds": 1}  # fmt: skip
    found = fl.compare(values, out=tmp_path / "c")
    facts = {name: PairingFacts.of(RunRecord(found.folder / "runs" / f"{name}-s0"))
             for name in ("four", "long", "epoch")}  # fmt: skip
    assert steps_compared(facts["four"], facts["four"]) == (4, 4)
    assert steps_compared(facts["long"], facts["epoch"]) == (6, 6), "an epoch has six steps"
    assert steps_compared(facts["long"], facts["four"]) == (4, 0)
    assert found.evidence.partly_compared == (
        ComparedOrder("long", "four", 0, 4, 0), ComparedOrder("epoch", "four", 0, 4, 0),
    )  # fmt: skip
    text = found.page.read_text()
    assert (
        "long and four seed 0: the order of examples was compared for the first 0 of the 4" in text
    )
    assert "by digest" not in text


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

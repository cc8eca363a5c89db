"""Old runs are removed, but never one that is tagged, running, unknown or part of a comparison."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from frostlab.errors import BadInput
from frostlab.records.finding.annotations import add_tag
from frostlab.records.finding.clean import duration, old_runs, remove_run
from frostlab.storage import Lock
from run_made import RESULT, START, evaluation_event, write_events

DAY = 86_400.0


def write_run(folder: Path, days: float, **changes: Any) -> Path:
    """A run that ended some days ago; status None: it was interrupted then."""
    folder.mkdir(parents=True)
    ended = time.time() - days * DAY
    write_events(folder, START, evaluation_event(3, {"accuracy": 0.5}) | {"at": ended})
    (folder / "run.lock").touch()
    if changes.get("status", "") is not None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(ended))
        (folder / "result.json").write_text(json.dumps(RESULT | {"ended": moment} | changes))
    return folder


def old(root: Path, keep: str = "tagged", *comparisons: Path) -> tuple[list[str], dict[str, str]]:
    removed, kept = old_runs(root, 30 * DAY, keep, comparisons)
    return [entry.folder.name for entry in removed], {k.folder.name: k.reason for k in kept}


def test_what_is_removed(tmp_path: Path) -> None:
    write_run(tmp_path / "old", 31)
    write_run(tmp_path / "failed", 40, status="failed")
    write_run(tmp_path / "interrupted", 50, status=None)
    write_run(tmp_path / "new", 29)
    add_tag(write_run(tmp_path / "tagged", 90), "paper")
    running = write_run(tmp_path / "running", 90, status=None)
    (write_run(tmp_path / "damaged", 90) / "result.json").write_text("{")
    (write_run(tmp_path / "spoilt", 90) / "annotations.json").write_text("{")
    elsewhere = write_run(tmp_path.parent / f"{tmp_path.name}-other" / "linked", 90)
    (tmp_path / "linked").symlink_to(elsewhere)
    (tmp_path / "pictures").mkdir()
    lock = Lock(running / "run.lock")
    assert lock.acquire(0)
    removed, kept = old(tmp_path)
    assert sorted(removed) == ["failed", "interrupted", "old"]
    assert kept.pop("spoilt").startswith("its tags cannot be read: ")
    assert kept == {
        "tagged": "it is tagged paper",
        "running": "it is running",
        "damaged": "its age is unknown, because no readable record says when it ended",
        "linked": "it is a link",
    }
    with pytest.raises(BadInput, match="running is kept: it is running"):
        remove_run(running)
    lock.release()
    entry = old_runs(tmp_path, 30 * DAY, "tagged", [])[0][0]
    assert entry.size == sum(p.stat().st_size for p in entry.folder.iterdir())
    for name in removed:
        remove_run(tmp_path / name)
    left = {"new", "tagged", "running", "damaged", "spoilt", "linked", "pictures"}
    assert set(os.listdir(tmp_path)) - {".index.json"} == left


def test_only_the_named_tags_keep_a_run(tmp_path: Path) -> None:
    add_tag(write_run(tmp_path / "a", 90), "paper")
    add_tag(write_run(tmp_path / "b", 90), "trial")
    assert old(tmp_path, "paper") == (["b"], {"a": "it is tagged paper"})
    assert old(tmp_path, "paper,trial")[0] == []
    with pytest.raises(BadInput, match="--keep 'papr': no run has this tag; did you mean `paper`"):
        old(tmp_path, "papr")
    with pytest.raises(BadInput, match="--keep is empty"):
        old(tmp_path, "")


def test_runs_of_comparisons_are_kept(tmp_path: Path) -> None:
    runs, comparison = tmp_path / "runs", tmp_path / "comparisons" / "c"
    for name in ("a-s0", "b-s0", "c-s0"):
        write_run(runs / name, 90)
    comparison.mkdir(parents=True)
    (comparison / "plan.json").write_text(
        json.dumps({"plan": {"runs": {"a": ["../../runs/a-s0"]}}})
    )
    evidence = {"arms": {"b": {"runs": [{"folder": str(runs / "b-s0")}]}}}
    (comparison / "evidence.json").write_text(json.dumps(evidence))
    removed, kept = old(runs, "tagged", tmp_path / "comparisons")
    assert removed == ["c-s0"]
    assert kept == dict.fromkeys(("a-s0", "b-s0"), f"the comparison {comparison} refers to it")
    assert old(runs, "tagged", comparison)[0] == ["c-s0"], "its own folder may be named too"
    own = write_run(comparison / "runs" / "baseline-s0", 90)
    assert old(own.parent) == ([], {own.name: f"it is part of the comparison {comparison}"})
    (comparison / "plan.json").write_text("{")
    with pytest.raises(BadInput, match=r"plan\.json .* so nothing is removed"):
        old(runs, "tagged", tmp_path / "comparisons")


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 30 * DAY), ("12h", DAY / 2), ("2w", 14 * DAY)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-3d", "1.5d", "3 days", "3m", "٣d", "9" * 9 + "d"]
)
def test_bad_durations(text: str) -> None:
    with pytest.raises(BadInput, match="is not a duration; e.g. 12h, 30d or 2w"):
        duration(text)

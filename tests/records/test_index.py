"""Runs are found and summarised the same with the index, without it, and whatever happened."""

import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import slow_unless
from frostlab.errors import BadInput
from frostlab.records import events as events_file
from frostlab.records.finding import index
from frostlab.records.finding.annotations import add_note, add_tag
from frostlab.records.finding.index import INDEX, Summary, find_run, list_runs, read_run
from frostlab.records.finding.listing import runs_table
from frostlab.records.schema import ENDINGS
from run_made import (
    RESULT,
    SHAPE,
    START,
    evaluation_event,
    stage_event,
    step_event,
    write_events,
)


def write_run(
    folder: Path, result: dict[str, Any] | None = None, steps: int = 3, at: float = 100.0
) -> Path:
    folder.mkdir(parents=True)
    events: list[dict[str, Any]] = [START | {"at": at}]
    events += [step_event(step) for step in range(1, steps + 1)]
    events.append(evaluation_event(steps, {"accuracy": 0.25, "loss": 0.5}))
    write_events(folder, *events)
    (folder / "run.lock").touch()
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def age(root: Path, seconds: float = 60) -> None:
    """Make every file old enough for the index to trust it."""
    for path in root.rglob("*"):
        moment = path.stat().st_mtime - seconds
        os.utime(path, (moment, moment))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs whose files were read."""
    names: list[str] = []
    real = index._read

    def counted(folder: Path) -> tuple[Summary, bool]:
        names.append(folder.name)
        return real(folder)

    monkeypatch.setattr(index, "_read", counted)
    return names


def test_a_finished_run_is_summarised(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", RESULT)
    expected = Summary(
        name="a",
        folder=folder,
        status="finished",
        recipe_digest="d1",
        seed=3,
        treatment="oelm",
        data="sst2",
        model="gpt",
        started=100.0,
        ended=1000000010.0,
        steps=30,
        metric="accuracy",
        value=0.8,
        report={"accuracy": 0.0, "loss": 0.5},
        caution="checkpoint selected on the reporting split",
        total_seconds=9.5,
        step_ms=4.5,
        runs_at_once=1,
    )
    assert list_runs(tmp_path) == [expected]
    assert read_run(folder) == expected


@pytest.mark.parametrize("steps", [3, 30000])  # more than head and tail hold
def test_an_unfinished_run_says_how_far_it_came(tmp_path: Path, steps: int) -> None:
    folder = write_run(tmp_path / "a", steps=steps)
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 99')  # torn by the crash
    (run,) = list_runs(tmp_path)
    assert (run.status, run.error, run.steps) == ("interrupted", None, steps)
    assert (run.metric, run.value, run.data, run.seed) == ("accuracy", 0.25, "sst2", 3)


def test_a_watched_run_still_shows_its_last_evaluation(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    flow = json.dumps({"kind": "flow", "step": 4, "gradient": [0.1] * 1000}) + "\n"
    with open(folder / "events.jsonl", "a") as file:
        file.write(flow * 100)
        file.write(json.dumps(step_event(9)) + "\n")
    assert (folder / "events.jsonl").stat().st_size > 4 * 65536
    (run,) = list_runs(tmp_path)
    assert (run.steps, run.metric, run.value) == (9, "accuracy", 0.25)


def evaluated(folder: Path, *evaluations: tuple[int, float, bool], **more: Any) -> None:
    with open(folder / "events.jsonl", "a") as file:
        for step, value, best in evaluations:
            event = evaluation_event(step, {"accuracy": value, "loss": 0.1}, best=best)
            file.write(json.dumps(event) + "\n")


def test_the_best_value_of_an_interrupted_run_is_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "a")
    evaluated(folder, (4, 0.75, True), (5, 0.5, False), (6, 0.625, False))
    for block in (7, 100, events_file._BLOCK):  # lines that lie in several blocks
        monkeypatch.setattr(events_file, "_BLOCK", block)
        assert (read_run(folder).value, read_run(folder).steps) == (0.75, 6)
    shape = SHAPE
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"kind": "resume", "at": 1.0, "step": 3, **shape}) + "\n")
    assert read_run(folder).value == 0.25, "later steps no longer count"
    evaluated(folder, (4, 0.5, True), (5, 0.375, False))
    assert read_run(folder).value == 0.5
    best = {"metric": "accuracy", "value": 0.5, "step": 4, "epoch": 1.0}
    stage = stage_event(5, best_before=best)
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps(stage) + "\n")
    assert read_run(folder).value == 0.5
    evaluated(folder, (6, 0.375, True))
    assert read_run(folder).value == 0.375, "the best of the last stage, as in a result"


def test_settings_notes_and_tags_are_listed(tmp_path: Path, reads: list[str]) -> None:
    for name, lr in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        folder = write_run(tmp_path / name, RESULT)
        (folder / "recipe.yaml").write_text(f"about: x\noptim:\n  lr: {lr}\nloss: null\nseed: 3\n")
    age(tmp_path)
    for _ in range(2):
        runs = list_runs(tmp_path)
        assert [run.settings for run in runs] == [
            {"optim.lr": lr, "loss": None} for lr in (0.1, 0.1, 0.2)
        ]
        assert runs[0].settings is runs[1].settings
    assert len(reads) == 3
    add_tag(tmp_path / "b", "keep")
    add_note(tmp_path / "b", "slow")
    assert [(run.tags, run.notes) for run in list_runs(tmp_path)][1] == (("keep",), ("slow",))
    assert reads[3:] == ["b"]
    (tmp_path / "c" / "recipe.yaml").write_text("optim: {lr: 0.3}")
    assert list_runs(tmp_path)[2].settings == {"optim.lr": 0.3}
    (tmp_path / "c" / "recipe.yaml").write_text("[")
    (tmp_path / "b" / "annotations.json").write_text("[")
    runs = list_runs(tmp_path)
    assert [run.status for run in runs] == ["finished"] * 3
    assert runs[2].settings == {}
    assert "annotations.json is not a JSON object" in runs[1].notes[0]


def test_a_cached_listing_imports_nothing_heavy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", RESULT)
    (folder / "recipe.yaml").write_text("optim: {lr: 0.1}")
    age(tmp_path)
    list_runs(tmp_path)
    code = "import sys\nfrom pathlib import Path\n"
    code += "from frostlab.records.finding.index import list_runs\n"
    code += "(run,) = list_runs(Path(sys.argv[1]))\nassert run.settings == {'optim.lr': 0.1}\n"
    code += "print(*{'torch', 'pydantic', 'yaml', 'frostlab.records.schema'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("\n", "")


def test_runs_stand_by_age_and_other_folders_are_ignored(tmp_path: Path) -> None:
    write_run(tmp_path / "later", RESULT, at=200)
    write_run(tmp_path / "sooner", RESULT, at=100)
    (tmp_path / "unstarted").mkdir()
    (tmp_path / "unstarted" / "run.lock").touch()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "recipe.yaml").touch()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    write_run(tmp_path / ".hidden", RESULT)
    assert [run.name for run in list_runs(tmp_path)] == ["sooner", "later", "unstarted"]


OTHER_SCHEMA = "{} has schema 1, and this frostlab reads 7"
STEP = json.dumps(step_event(1)) + "\n"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("result.json", "", "result.json is not a JSON object"),
        ("result.json", "[1]", "result.json is not a JSON object"),
        ("result.json", "{}", "result.json has no schema, and this frostlab reads 7"),
        ("result.json", '{"schema": 1}', OTHER_SCHEMA.format("result.json")),
        ("result.json", json.dumps(RESULT | {"zz": 3}), "result.json: zz is not a key"),
        (
            "result.json",
            json.dumps(RESULT | {"status": "fine"}),
            "result.json: status should be 'finished' or 'stopped' or 'failed' or 'diverged', "
            "but is 'fine'",
        ),
        ("result.json", '{"a":' * 100_000, "result.json is not a JSON object"),
        ("events.jsonl", "\x00\x00\n", "events.jsonl does not begin with a start event"),
        ("events.jsonl", STEP, "events.jsonl does not begin with a start event"),
        ("events.jsonl", '{"kind": "step"}\n', "events.jsonl: at is missing"),
        ("events.jsonl", '{"kind": "start", "schema": 1}\n', OTHER_SCHEMA.format("events.jsonl")),
    ],
)
def test_a_damaged_run_says_why(tmp_path: Path, file: str, text: str, reason: str) -> None:
    (write_run(tmp_path / "a") / file).write_text(text)
    age(tmp_path)
    for _ in range(2):
        assert [(run.status, run.error) for run in list_runs(tmp_path)] == [("damaged", reason)]


def test_a_file_that_cannot_be_read_is_not_remembered_as_such(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "result.json").mkdir()
    age(tmp_path)
    (run,) = list_runs(tmp_path)
    reason = f"{folder}/result.json is not a regular file"
    assert (run.status, run.error) == ("damaged", reason)
    assert "a" not in index._load(tmp_path)


def test_unchanged_runs_are_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    for name in "abc":
        write_run(tmp_path / name, RESULT)
    age(tmp_path)
    first = list_runs(tmp_path)
    assert sorted(reads) == ["a", "b", "c"]
    assert list_runs(tmp_path) == first
    assert len(reads) == 3
    (tmp_path / "b" / "result.json").write_text(json.dumps(RESULT | {"steps": 31}))
    assert [run.steps for run in list_runs(tmp_path)] == [30, 31, 30]
    assert reads[3:] == ["b"]
    age(tmp_path / "b")
    for _ in range(2):
        assert [run.steps for run in list_runs(tmp_path)] == [30, 31, 30]
    assert reads[4:] == ["b"]
    (tmp_path / INDEX).unlink()
    assert [run.steps for run in list_runs(tmp_path)] == [30, 31, 30]
    assert len(reads) == 8


def test_a_change_within_one_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    result = write_run(tmp_path / "a", RESULT) / "result.json"
    tick = time.time_ns()
    for steps in range(10, 20):  # the same size each time
        result.write_text(json.dumps(RESULT | {"steps": steps}))
        os.utime(result, ns=(tick, tick))
        assert [run.steps for run in list_runs(tmp_path)] == [steps]


def test_an_index_of_another_version_or_damaged_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    write_run(tmp_path / "a", RESULT)
    age(tmp_path)
    first = list_runs(tmp_path)
    good = (tmp_path / INDEX).read_bytes()
    for bad in (b"", b"{}", good[:-9], good.replace(b"0.8", b"0.9"), b"[" * 10**5, b"\xff\n{}"):
        (tmp_path / INDEX).write_bytes(bad)
        del reads[:]
        assert list_runs(tmp_path) == first
        assert reads == ["a"]
        assert (tmp_path / INDEX).read_bytes() == good
    monkeypatch.setattr(index, "_VERSION", 99)
    assert list_runs(tmp_path) == first
    assert reads == ["a", "a"]


def test_where_nothing_can_be_written_runs_are_still_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", RESULT)
    age(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert [run.name for run in list_runs(tmp_path)] == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def naive(root: Path) -> dict[str, tuple[Any, ...]]:
    """What the runs are, read whole and without an index, by other code."""
    found = {}
    for folder in root.iterdir():
        result, events = folder / "result.json", folder / "events.jsonl"
        if folder.is_file() or not any(map(Path.exists, (result, events, folder / "run.lock"))):
            continue
        said: Any = None
        if result.exists():
            with contextlib.suppress(ValueError):
                said = json.loads(result.read_bytes())
            if not isinstance(said, dict) or said.get("status") not in ENDINGS:
                found[folder.name] = ("damaged", None, None)
                continue
            found[folder.name] = (said["status"], said["steps"], said["best"]["value"])
            continue
        lines = events.read_bytes().split(b"\n") if events.exists() else []
        good: list[Any] = []
        for line in lines[:-1]:
            try:
                good.append(json.loads(line))
            except ValueError:
                good.append(None)
        if good and (not isinstance(good[0], dict) or good[0].get("kind") != "start"):
            found[folder.name] = ("damaged", None, None)
            continue
        whole = [event for event in good if isinstance(event, dict)]
        values = [event["metrics"]["accuracy"] for event in whole if event["kind"] == "evaluation"]
        steps = [event["step"] for event in whole]
        found[folder.name] = (
            "interrupted",
            steps[-1] if steps else None,
            values[-1] if values else None,
        )
    return found


def harm(path: Path, chance: random.Random) -> None:
    """Truncate a file, delete it, overwrite some of it, or add to it."""
    data = path.read_bytes()
    place = chance.randrange(len(data) + 1)
    match chance.randrange(4):
        case 0:
            path.write_bytes(data[:place])
        case 1:
            path.unlink()
        case 2:
            path.write_bytes(data[:place] + b"\x00\xff{\n" + data[place + 4 :])
        case 3:
            path.write_bytes(data + json.dumps(step_event(4)).encode() + b'\nnull\n{"k')


@pytest.mark.parametrize("seed", slow_unless(range(5), range(25)))
def test_damage_gives_the_answer_of_a_naive_reader(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for i in range(12):
        ending = RESULT | {"status": chance.choice(ENDINGS), "steps": i}
        write_run(tmp_path / f"r{i}", ending if chance.random() < 0.5 else None, steps=i)
    for _ in range(6):
        if chance.random() < 0.5:
            age(tmp_path)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        for path in chance.sample(files, 3):
            harm(path, chance)
        runs = list_runs(tmp_path)
        assert {run.name: (run.status, run.steps, run.value) for run in runs} == naive(tmp_path)
        assert all(run.error for run in runs if run.status == "damaged")
        again = list_runs(tmp_path)
        (tmp_path / INDEX).unlink(missing_ok=True)
        assert runs == again == list_runs(tmp_path)


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs this run."""
    command = [sys.executable, "-c", HOLD, str(folder / "run.lock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_run_is_running_while_a_process_holds_it(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", RESULT | {"status": "failed", "error": "out of memory"})
    write_run(tmp_path / "c", RESULT)
    age(tmp_path)
    free = [("interrupted", None), ("failed", "out of memory"), ("finished", None)]
    assert [(run.status, run.error) for run in list_runs(tmp_path)] == free
    with held(tmp_path / "a"), held(tmp_path / "b") as resumed, held(tmp_path / "c"):
        busy = [run.status for run in list_runs(tmp_path)]
        assert busy == ["running", "running", "finished"]
        resumed.kill()  # as kill -9: nothing is cleaned up
        resumed.wait()
        assert [run.status for run in list_runs(tmp_path)] == ["running", "failed", "finished"]
    assert [(run.status, run.error) for run in list_runs(tmp_path)] == free


def test_who_only_looks_is_not_running_a_run(tmp_path: Path) -> None:
    with open(write_run(tmp_path / "a") / "run.lock", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as another listing, at the same moment
        assert [run.status for run in list_runs(tmp_path)] == ["interrupted"]


def test_a_damaged_run_stays_so_while_it_is_held(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", RESULT)
    (folder / "result.json").write_text("{")
    with held(folder):
        (run,) = list_runs(tmp_path)
    assert (run.status, run.error) == ("damaged", "result.json is not a JSON object")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"seed": True}, "seed should be a whole number, but is True"),
        ({"steps": "9"}, "steps should be a whole number, but is '9'"),
        ({"best": [1]}, "best should be an object, but is [1]"),
        (
            {"report": {"accuracy": "x"}},
            "report.accuracy should be a number or an object, but is 'x'",
        ),
        (
            {"clocks": RESULT["clocks"] | {"total_seconds": "1:00"}},
            "clocks.total_seconds should be a number, but is '1:00'",
        ),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(
    tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    write_run(tmp_path / "a", RESULT | wrong)
    (run,) = list_runs(tmp_path)
    assert (run.status, run.error) == ("damaged", f"result.json: {reason}")


def test_a_run_is_found_by_path_name_or_prefix(tmp_path: Path) -> None:
    for name in ("imdb", "imdb-2", "sst2-bert"):
        write_run(tmp_path / name)
    assert find_run(tmp_path, str(tmp_path / "imdb")) == tmp_path / "imdb"
    assert find_run(tmp_path, "imdb") == tmp_path / "imdb"
    assert find_run(tmp_path, "ss") == tmp_path / "sst2-bert"


SOME = "imdb-0, imdb-1, imdb-2, imdb-3, imdb-4 and 1 more"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imd", "run 'imd' could be {some} in {root}"),
        ("idmb-3", "no run 'idmb-3' in {root}; did you mean `imdb-3`?"),
        ("zzz", "no run 'zzz' in {root}; it has {some}"),
        ("", "no run '' in {root}; it has {some}"),
        ("..", "'..' is not the folder of a run; name a run in {root}; it has {some}"),
    ],
)
def test_a_run_that_is_not_one_is_refused(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # whose parent, `..`, holds no run
    for i in range(6):
        write_run(tmp_path / f"imdb-{i}")
    with pytest.raises(BadInput) as caught:
        find_run(tmp_path, text)
    assert str(caught.value) == message.format(root=tmp_path, some=SOME)


def test_a_comparison_is_not_taken_for_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "imdb")
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms" / "plan.json").touch()
    with pytest.raises(BadInput, match="folder of a comparison, not of a run; name a run in"):
        find_run(tmp_path / "runs", str(tmp_path / "arms"))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="rusn is not a folder of runs: No such file or directory"):
        list_runs(tmp_path / "rusn")
    with pytest.raises(BadInput, match="no run 'x' in .*; it has no runs"):
        find_run(tmp_path, "x")


def test_listing_needs_no_heavy_library() -> None:
    code = "import sys, frostlab.records.finding.show\n"
    code += "print(*{'torch', 'pydantic', 'yaml'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_one_bad_run_does_not_hide_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "good", RESULT)
    for name, file in (("pipe", "result.json"), ("zeros", "events.jsonl"), ("lock", "run.lock")):
        path = write_run(tmp_path / name) / file
        path.unlink(missing_ok=True)
        if name == "zeros":
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(path)
    (write_run(tmp_path / "huge") / "result.json").write_text(
        json.dumps(RESULT).replace('"steps": 30', f'"steps": {"9" * 400}')
    )
    runs = {run.name: run for run in list_runs(tmp_path)}
    assert runs["good"].status == "finished"
    assert {name for name, run in runs.items() if run.status == "damaged"} == {
        "pipe", "zeros", "huge",
    }  # fmt: skip
    assert "result.json: steps should be a number of at most 64 bits" in str(runs["huge"].error)
    assert runs_table(runs.values())


def test_a_crafted_index_is_not_believed(tmp_path: Path, reads: list[str]) -> None:
    """Types are checked even if the checksum and the signatures fit."""
    write_run(tmp_path / "a", RESULT)
    age(tmp_path)
    first = list_runs(tmp_path)
    entries = index._load(tmp_path)
    for change in (["x"], "x", {"a": 1}, float("nan")):
        stored = json.loads(json.dumps(entries))
        stored["a"][1][8] = change  # steps
        del reads[:]
        index._save(tmp_path, stored)
        assert list_runs(tmp_path) == first
        assert reads == ["a"]

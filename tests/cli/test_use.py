"""`frostlab evaluate` and `predict`, from the folder of a run to a table or a file."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import frostlab as fl
from eeg_made import made
from forked import Command
from hearing import hearing
from weather import recipe, rows, write_weather


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: a classifier `weather` and an EEG model `hearing`."""
    folder = tmp_path_factory.mktemp("use")
    made_of = recipe(write_weather(folder / "data"))
    fl.run(made_of, out=folder / "runs" / "weather")
    fl.run(hearing(train__epochs=1), out=folder / "runs" / "hearing")
    return folder


def test_evaluate(place: Path, in_this_process: Command, tmp_path: Path) -> None:
    runs = ["--runs", str(place / "runs")]
    done = in_this_process("evaluate", "weather", *runs)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["metric", "value", "n"]
    assert lines[2].split()[0] == "accuracy"
    assert lines[2].endswith("examples")
    out = tmp_path / "evaluation.json"
    test = str(place / "data" / "test.csv")
    done = in_this_process(
        "evaluate", "weather", "--data", test, "--json", "--out", str(out), *runs
    )
    shown = json.loads(done.stdout)
    assert shown == json.loads(out.read_text())
    assert shown["metrics"] == fl.load_run(place / "runs" / "weather").metrics
    assert [score["label"] for score in shown["classes"]] == ["dry", "wet"]
    again = in_this_process("evaluate", "weather", "--out", str(out), *runs)
    assert again.returncode == 2
    assert "exists already; choose another file" in again.stderr


def test_predict_prints_or_writes(
    place: Path, in_this_process: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, texts = ["--runs", str(place / "runs")], tmp_path / "texts.txt"
    texts.write_text("".join(f"{text}\n" for text, _ in rows(50, 4)))
    done = in_this_process("predict", "weather", str(texts), *runs)
    assert done.returncode == 0, done.stderr
    printed = list(csv.DictReader(io.StringIO(done.stdout)))
    assert list(printed[0]) == ["row", "label", "probability", "p_dry", "p_wet"]
    assert [int(row["row"]) for row in printed] == list(range(1, len(rows(50, 4)) + 1))
    as_json = json.loads(in_this_process("predict", "weather", str(texts), "--json", *runs).stdout)
    assert [row["label"] for row in as_json] == [row["label"] for row in printed]
    out = tmp_path / "predictions.csv"
    done = in_this_process("predict", "weather", str(texts), "--out", str(out), *runs)
    assert done.stdout.startswith(f"{out}: {len(printed)} texts; predicted classes: ")
    assert list(csv.DictReader(io.StringIO(out.read_text()))) == printed
    again = in_this_process("predict", "weather", str(texts), "--out", str(out), *runs)
    assert again.returncode == 2
    assert "exists already; choose another file" in again.stderr
    other = in_this_process("predict", "weather", str(texts), "--out", "a.xlsx", *runs)
    assert "should end in .csv or .tsv or .jsonl" in other.stderr
    stream = io.TextIOWrapper(io.BytesIO(texts.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stream)
    done = in_this_process("predict", "weather", "-", *runs)
    assert list(csv.DictReader(io.StringIO(done.stdout))) == printed


def test_predict_leaves_no_half_file(place: Path, in_this_process: Command, tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("text\nsun\nrain,too,many\n")
    out = tmp_path / "out.csv"
    done = in_this_process(
        "predict", "weather", str(table), "--out", str(out), "--runs", str(place / "runs")
    )
    assert done.returncode == 2
    assert "a.csv:3: the row has 3 columns" in done.stderr
    assert list(tmp_path.iterdir()) == [table]


def test_predict_envelopes(place: Path, in_this_process: Command, tmp_path: Path) -> None:
    runs = ["--runs", str(place / "runs")]
    (tmp_path / "eeg").mkdir()
    for number, samples in enumerate((100, 130)):
        eeg = made("x", "s", seed=number, samples=samples, channels=64).eeg
        np.save(tmp_path / "eeg" / f"r{number}.npy", eeg)
    out = tmp_path / "out.npz"
    done = in_this_process("predict", "hearing", str(tmp_path / "eeg"), "--out", str(out), *runs)
    assert done.stdout == f"{out}: 2 recordings at 64 Hz\n"
    arrays = np.load(out)
    assert {name: len(arrays[name]) for name in arrays} == {"r0": 100, "r1": 130}
    done = in_this_process("predict", "hearing", str(tmp_path / "eeg"), *runs)
    table = list(csv.DictReader(io.StringIO(done.stdout)))
    assert list(table[0]) == ["seconds", "r0", "r1"]
    assert len(table) == 130
    assert float(table[64]["seconds"]) == 1
    assert float(table[3]["r1"]) == pytest.approx(arrays["r1"][3])
    assert table[120]["r0"] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "weathr"], "no run 'weathr'"),
        (["evaluate", "weather", "--set", "optim.lr=1"], "optim.lr cannot be set"),
        (["evaluate", "weather", "--languages", "all"], "--languages is for runs on xnli"),
        (["evaluate", "weather", "--languages", "all", "--data", "x"], "leave out --data and"),
        (["evaluate", "weather", "--data", "nowhere.csv"], "nowhere.csv does not exist"),
        (["evaluate", "weather", "--out", "nowhere/a.json"], "there is no folder nowhere"),
        (["predict", "weather", "nowhere.csv"], "nowhere.csv does not exist"),
        (["predict", "hearing", "nowhere"], "nowhere does not exist"),
        (["evaluate", "weather", "--device", "cuda:77"], "cuda"),
    ],
)
def test_bad_input_is_one_line(
    place: Path, in_this_process: Command, arguments: list[str], message: str
) -> None:
    done = in_this_process(*arguments, "--runs", str(place / "runs"))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unfinished_run_says_so(place: Path, in_this_process: Command, tmp_path: Path) -> None:
    folder = shutil.copytree(place / "runs" / "weather", tmp_path / "half")
    (folder / "result.json").unlink()
    (tmp_path / "a.txt").write_text("sun\n")
    with pytest.warns(fl.UnfinishedRun, match="half has not finished; its best weights so far"):
        done = in_this_process("predict", str(folder), str(tmp_path / "a.txt"))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2

"""A run says what it was trained on: in data.json, in notes, on the terminal and in `show`."""

import shutil
from pathlib import Path

import pytest
import yaml

import frostlab as fl
from frostlab import BadInput
from frostlab.data.prepare import prepare
from frostlab.recipe.load import load_recipe
from frostlab.records.finding.show import show, show_json
from frostlab.records.schema import NoteEvent
from frostlab.training.progress import Display, Nowhere
from tiny import tiny

ROWS = [*((f"text {number}", "ab"[number % 2]) for number in range(120)),
        ("torn", "a"), ("torn", "b"), (" ", "a"), ("alone", "rare")]  # fmt: skip


class Heard(Nowhere):
    """A screen that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "texts").mkdir()
    lines = [f"{text},{label}" for text, label in ROWS]
    (folder / "texts" / "a.csv").write_text("\n".join(["text,label", *lines]))
    recipe = tiny(
        data={"name": "own", "path": "texts/a.csv", "length": 8, "report": 0.2, "tune": 0.1},
        tokenizer={"kind": "words"}, train__epochs=1,
    )  # fmt: skip
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="module")
def record(project: Path, heard: Heard) -> fl.RunRecord:
    return fl.run(str(project / "mine.yaml"), runs=project / "runs", progress=Display(heard))


def test_the_record_describes_the_data(record: fl.RunRecord, project: Path) -> None:
    data = record.data
    assert data.labels == ["a", "b", "rare"]
    assert data.digest == record.digests.data
    train = data.splits["train"]
    assert train.source == str(project / "texts" / "a.csv")
    assert train.rows == len(ROWS)
    assert sum(split.examples for split in data.splits.values()) == len(ROWS)
    assert record.recipe.data.path == train.source, "the run records the absolute path"


def test_notes_are_in_the_run_and_on_the_terminal(record: fl.RunRecord, heard: Heard) -> None:
    notes = [event.text for event in record.events(NoteEvent)]
    assert notes == record.data.notes
    assert any(note.endswith("rare (line 125)") for note in notes)
    assert any("have an empty or blank text" in note for note in notes)
    assert [f"note: {note}" for note in notes] == [x for x in heard.lines if x.startswith("note: ")]


def test_show_has_a_section_of_the_data(record: fl.RunRecord) -> None:
    text = show(record.folder, 80)
    section = text.split("\n\ndata\n")[1].split("\n\n")[0].splitlines()
    assert section[0].split() == ["train", "tune", "report"]
    cells = {line[2:].rsplit(None, 3)[0]: line.rsplit(None, 3)[1:] for line in section[1:]}
    splits = record.data.splits.values()
    assert cells["examples"] == [str(split.examples) for split in splits]
    assert cells["class rare"] == ["1", "0", "0"]
    carved = sum(record.data.splits["train"].carved.values())
    assert cells["moved to other splits"] == [str(carved), "0", "0"]
    assert all(len(line) <= 80 for line in section), section
    assert show_json(record.folder)["data"]["labels"] == ["a", "b", "rare"]


def test_a_missing_path_is_named(record: fl.RunRecord, project: Path, tmp_path: Path) -> None:
    shutil.copytree(record.folder, tmp_path / "run")
    moved = tmp_path / "moved.csv"
    shutil.move(project / "texts" / "a.csv", moved)
    try:
        with pytest.raises(BadInput, match=f"data.path {project}/texts/a.csv does not exist"):
            prepare(fl.RunRecord(tmp_path / "run").recipe)
    finally:
        shutil.move(moved, project / "texts" / "a.csv")
    assert load_recipe(str(project / "mine.yaml")).digest == record.result.recipe_digest


def test_a_damaged_description_is_said(record: fl.RunRecord, tmp_path: Path) -> None:
    run = shutil.copytree(record.folder, tmp_path / "run")
    (run / "data.json").write_text('{"task": 3}')
    assert f"data\n  {run / 'data.json'}: task should be a text, but is 3" in show(run)
    (run / "data.json").unlink()
    assert "\ndata\n" not in show(run)

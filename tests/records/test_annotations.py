"""Notes and tags of a run, in a file that its manifest does not list."""

import json
import threading
from pathlib import Path

import pytest

from frostlab.errors import BadInput
from frostlab.records.finding.annotations import add_note, add_tag, read_annotations, remove_tag
from frostlab.records.manifest import problems_in, write_manifest


def test_notes_and_tags_are_kept_and_change_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "failed").mkdir()  # a run without a manifest, inside a comparison
    write_manifest(tmp_path)
    add_note(tmp_path, "first\nnote ")
    add_note(tmp_path, "second")
    add_tag(tmp_path, "paper")
    add_tag(tmp_path, "keep")
    add_tag(tmp_path, "keep")
    add_note(tmp_path / "failed", "why?")
    annotations = read_annotations(tmp_path)
    assert [note.text for note in annotations.notes] == ["first note", "second"]
    assert annotations.notes[0].at <= annotations.notes[1].at
    assert annotations.tags == ("keep", "paper")
    assert remove_tag(tmp_path, "keep").tags == ("paper",)
    assert list(problems_in(tmp_path)) == []
    write_manifest(tmp_path)
    assert "annotations.json" not in json.loads((tmp_path / "manifest.json").read_text())


def test_notes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    threads = [threading.Thread(target=add_note, args=(tmp_path, f"{i}")) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {note.text for note in read_annotations(tmp_path).notes} == set(map(str, range(12)))


@pytest.mark.parametrize("tag", ["", "two words", "a,b", "x" * 41, "a/b", "\x1b[2J"])
def test_a_bad_tag_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(BadInput, match=r"should be one word .* e\.g\. keep"):
        add_tag(tmp_path, tag)
    assert not list(tmp_path.iterdir())


def test_other_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a note should have 1 to 2000 characters, but has 0"):
        add_note(tmp_path, " \n")
    with pytest.raises(BadInput, match="has no tag 'keep'; it has no tags"):
        remove_tag(tmp_path, "keep")
    add_tag(tmp_path, "keep")
    with pytest.raises(BadInput, match="has no tag 'kep'; did you mean `keep`"):
        remove_tag(tmp_path, "kep")
    for text in ("[", '{"tags": 3}', '{"colour": "red"}'):
        (tmp_path / "annotations.json").write_text(text)
        with pytest.raises(BadInput, match=r"annotations\.json"):
            add_tag(tmp_path, "keep")
        assert (tmp_path / "annotations.json").read_text() == text

"""Verdicts in Chinese and Japanese: every word has its sentence, and every number its record."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from cases import slow_unless
from frostlab.comparison.evidence import Evidence, Limit, read_evidence
from frostlab.comparison.verdict import Word
from frostlab.errors import BadInput
from frostlab.pages import compared as compared_page
from frostlab.pages import languages
from frostlab.pages.content import Cell, Records
from frostlab.pages.languages import LANGUAGES, PHRASES, WORDS, time_pieces, verdict_pieces
from frostlab.pages.write import PAGE, report
from walking import complaints

FOREIGN = [language for language in LANGUAGES if language != "en"]


def evidence_of(folder: Path) -> Evidence:
    evidence = read_evidence(folder / "evidence.json")
    assert evidence is not None
    return evidence


def shown(pieces: list[str | Cell]) -> str:
    return "".join(piece.text if isinstance(piece, Cell) else piece for piece in pieces)


@pytest.mark.parametrize("language", FOREIGN)
@pytest.mark.parametrize("word", get_args(Word))
def test_every_word_has_a_sentence_whose_numbers_are_cells(
    language: str, word: Word, compared: Path
) -> None:
    evidence, records = evidence_of(compared), Records(compared)
    verdict = replace(evidence.verdicts["oelm"], word=word)

    def cell(*keys: str | int, format: str = "number") -> Cell:
        return records.cell("evidence.json", *keys, format=format)

    pieces = verdict_pieces(verdict, evidence.rules, language, cell, "verdicts", "oelm")
    for piece in pieces:
        if isinstance(piece, str):
            assert not re.search(r"\d", piece.replace("80 %", ""))
            assert "{" not in piece
        else:
            assert piece.file == "evidence.json"
    text = shown(pieces)
    assert "oelm" in text
    assert "baseline" in text
    assert re.search(r"[\u3040-\u30ff\u4e00-\u9fff]", text)
    assert not re.search(r"[。；，、]{2}|。；|，。", text), text
    assert len({languages._SENTENCES[language][other] for other in get_args(Word)}) == 9
    assert set(WORDS[language]) == set(get_args(Word))
    if word not in ("did not finish",):
        assert cell("verdicts", "oelm", "paired", format="effect").text in text


@pytest.mark.parametrize("language", FOREIGN)
def test_parts_follow_the_numbers(language: str, compared: Path, spoken: Path) -> None:
    evidence = evidence_of(compared)
    verdict = replace(
        evidence.verdicts["oelm"], word="no difference found", missing={"baseline": 1},
        together=("model.layers", "optim.lr"),
    )  # fmt: skip

    def cell(*keys: str | int, format: str = "number") -> Cell:
        return Cell(f"<{'/'.join(map(str, keys))}>")

    for answer, largest, keys in (
        ("yes", 0.1, {"limit"}), ("not shown", 0.1, {"limit", "largest"}),
        ("not shown", None, set()),
    ):  # fmt: skip
        margin = Limit(answer, 1.1, 0.1, largest, None)  # type: ignore[arg-type]
        text = shown(verdict_pieces(replace(verdict, margin=margin), evidence.rules, language,
                                    cell, "verdicts", "oelm"))  # fmt: skip
        assert set(re.findall(r"<verdicts/oelm/margin/(\w+)>", text)) == keys
        assert "<verdicts/oelm/missing/baseline>" in text
        assert "<verdicts/oelm/together>" in text
    confounded = replace(verdict, word="confounded")
    rules = evidence.rules
    own = shown(verdict_pieces(confounded, rules, language, cell, "verdicts", "oelm"))
    other = shown(verdict_pieces(confounded, rules, language, cell, "orthogonality"))
    assert "<confounds/oelm>" in own
    assert "confounds" not in other
    ratio = evidence_of(spoken)
    language_model = replace(
        ratio.verdicts["oelm"], word="no difference found", could_have_seen=0.2
    )
    text = shown(verdict_pieces(language_model, ratio.rules, language, cell, "verdicts", "oelm"))
    assert ratio.rules.log
    assert "<verdicts/oelm/could_have_seen>" in text


@pytest.mark.parametrize("language", FOREIGN)
def test_times_have_a_sentence(language: str, tuned: Path) -> None:
    evidence, records = evidence_of(tuned), Records(tuned)
    assert evidence.timing is not None
    arm = evidence.timing.arms["oelm"]
    texts = {
        word: shown(time_pieces("oelm", replace(arm, word=word), "baseline", language,
                                lambda *keys, format: records.cell("evidence.json", *keys,
                                                                   format=format)))
        for word in ("better", "worse", "no difference found", "unproven")
    }  # fmt: skip
    assert len(set(texts.values())) == 4
    ratio = records.cell("evidence.json", "timing", "arms", "oelm", format="step ratio")
    assert all(ratio.text in text for text in texts.values())


@pytest.mark.parametrize(
    ("which", "language"),
    slow_unless(
        [("compared", "zh"), ("tuned", "ja")],
        [(which, language) for which in ("compared", "tuned") for language in FOREIGN],
    ),
)
def test_the_first_screen_is_in_the_language(
    language: str, which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(request.getfixturevalue(which), tmp_path, dirs_exist_ok=True)
    text = report(tmp_path, language).read_text(encoding="utf-8")
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    assert f'<html lang="{language}">' in text
    for verdict in evidence["verdicts"].values():
        assert WORDS[language][verdict["word"]] in text
    assert PHRASES["Verdicts"][language] in text
    timed = (evidence["timing"] or {"arms": {}})["arms"]
    assert complaints(tmp_path / PAGE, timed) == []


def test_every_heading_of_a_comparison_is_translated() -> None:
    headings = {title for _, title, _ in compared_page.SECTIONS}
    assert headings <= set(PHRASES)
    assert all(set(phrase) == set(FOREIGN) for phrase in PHRASES.values())


def test_no_translation_is_left_without_its_text() -> None:
    """Each translated text is still written somewhere in the pages' code."""
    folder = Path(languages.__file__).parent
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py")
                   if path.name != "languages.py")  # fmt: skip
    joined = re.sub(r'"\s*\n\s*f?"', "", code)
    assert [text for text in PHRASES if f'"{text}"' not in joined] == []


def test_another_language_is_refused(compared: Path) -> None:
    with pytest.raises(BadInput, match="'fr' is not one of en, zh, ja"):
        report(compared, "fr")
    assert not (compared / PAGE).exists()

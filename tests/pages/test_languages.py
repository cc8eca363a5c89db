"""Verdicts in Chinese and Japanese: every word has its sentence, and every number its record."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import frostlab as fl
from cases import slow_unless
from frostlab.comparison.evidence import Evidence, Limit, read_evidence
from frostlab.comparison.judging.verdict import MEANINGS, Word
from frostlab.errors import BadInput
from frostlab.pages.content import Block, Cell, Paragraph, Records
from frostlab.pages.languages import phrases, sentences
from frostlab.pages.languages.phrases import LANGUAGES, PHRASES, translated
from frostlab.pages.languages.sentences import time_pieces, verdict_pieces
from frostlab.pages.languages.words import TRANSLATIONS, translated_word
from frostlab.pages.one_comparison import compared as compared_page
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
    if word not in ("did not finish",):
        assert cell("verdicts", "oelm", "paired", format="effect").text in text


@pytest.mark.parametrize("language", FOREIGN)
def test_every_word_has_its_translations(language: str) -> None:
    assert set(TRANSLATIONS[language]) == set(get_args(Word))
    names = ("word", "meaning", "sentence")
    for name in names:
        texts = {getattr(words, name) for words in TRANSLATIONS[language].values()}
        assert len(texts) == len(get_args(Word)), "each has its own"
    for word, meaning in MEANINGS.items():
        assert translated(meaning, language) == TRANSLATIONS[language][word].meaning
        assert translated_word(word, language) == TRANSLATIONS[language][word].word
        assert translated_word(word, "en") == word


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
        assert TRANSLATIONS[language][verdict["word"]].word in text
    assert PHRASES["Verdicts"][language] in text
    timed = (evidence["timing"] or {"arms": {}})["arms"]
    assert complaints(tmp_path / PAGE, timed) == []


def test_every_heading_of_a_comparison_is_translated() -> None:
    headings = {title for _, title, _ in compared_page.SECTIONS}
    assert headings <= set(PHRASES)
    assert all(set(phrase) == set(FOREIGN) for phrase in PHRASES.values())


def test_no_translation_is_left_without_its_text() -> None:
    """The longest clause of each translated text is still written somewhere in the code."""
    folder = Path(fl.__file__).parent
    rooms = [folder / room for room in ("pages", "comparison", "flow")]
    paths = [
        path for room in rooms for path in room.rglob("*.py") if path.parent.name != "languages"
    ]
    code = "".join(path.read_text(encoding="utf-8") for path in paths)
    joined = re.sub(r'"\s*\n\s*f?"', "", code)
    clauses = (max(re.split(r"\{\w+\}|[.;:,()] ?| and |\b5\b", text), key=len) for text in PHRASES)
    assert [clause for clause in clauses if clause and clause not in joined] == []


WRITTEN = (  # words that are not translated: names of arms, metrics, settings and commands
    "baseline", "oelm-random", "oelm", "accuracy", "perplexity", "optim.lr", "clock.seconds",
    "model.layers", "A/A", "alpha", "tune", "report", "learning rate",
)  # fmt: skip


def english_in(text: str) -> list[str]:
    text = re.sub(r"/\S+", "", text)  # a folder
    for name in WRITTEN:
        text = text.replace(name, "")
    return re.findall(r"[A-Za-z]{3,}[^\u3000-\u9fff]*", text)


def texts_of(blocks: tuple[Block, ...]) -> list[str]:
    paragraphs = [block for block in blocks if isinstance(block, Paragraph)]
    return [shown([block.lead, *block.pieces]) for block in paragraphs]


@pytest.mark.parametrize("language", FOREIGN)
@pytest.mark.parametrize("which", ["compared", "tuned", "spoken"])
def test_no_english_is_left_in_verdicts_and_captions(
    language: str, which: str, request: pytest.FixtureRequest
) -> None:
    made = compared_page.document(request.getfixturevalue(which), language)
    document = sentences.in_its_language(made)
    (verdicts,) = [section for section in document.sections if section.name == "verdicts"]
    found = [*texts_of(document.first), *texts_of(verdicts.blocks)]
    assert len(found) > 3
    found += [text for figure in document.figures for text in (figure.title, figure.caption)]
    found += [text for section in document.record if section.name == "findings"
              for text in texts_of(section.blocks)]  # fmt: skip
    assert {text: english for text in found if (english := english_in(text))} == {}


SENTENCE = (
    "oelm against baseline on accuracy (these test examples) is unproven ({}): +0.1, 5 paired."
)


@pytest.mark.parametrize(
    ("reason", "chinese"),
    [
        ("2 of 5 runs of oelm failed, so the values are not known; the same command tries them "
         "again", "oelm 的 5 次运行中有 2 次失败，数值未知；用同一命令可重试"),
        ("all 5 differences are equal (+0.1); noise is not like that",
         "全部 5 个差值都相等（+0.1）；噪声不会如此"),
        ("seed 3: the data differ (a and b)", "种子 3：数据不同（a 和 b）"),
        ("seed 3: device differs (a and b)", "原因见记录"),
        ("of another program", "原因见记录"),
    ],
)  # fmt: skip
def test_a_reason_is_translated_or_left_to_the_record(reason: str, chinese: str) -> None:
    assert phrases.reason_in(SENTENCE.format(reason), "zh") == chinese
    assert english_in(phrases.reason_in(SENTENCE.format(reason), "ja")) == []


def test_notes_are_translated_clause_by_clause() -> None:
    note = ("for other test examples of the same kind: +0.01 (95 %: -0.01 to +0.03); a difference "
            "is not shown for them")  # fmt: skip
    assert translated(note, "zh") == (
        "对同类的其他测试样本：+0.01（95 %：-0.01 至 +0.03）；对它们没有证实差异"
    )
    assert translated("oelm, seed 3: diverged", "ja") == "oelm、シード 3：発散"
    assert (
        translated("oelm, seed 3: an error of its own", "ja") == "oelm, seed 3: an error of its own"
    )
    assert translated("Verdicts", "en") == "Verdicts"


def test_another_language_is_refused(compared: Path) -> None:
    with pytest.raises(BadInput, match="'fr' is not one of en, zh, ja"):
        report(compared, "fr")
    assert not (compared / PAGE).exists()

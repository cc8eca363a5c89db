"""The page and the terminal show what was found."""

from pathlib import Path

import pytest

import frostlab as fl
from comparing import LANGUAGE, LAYERS, compare
from frostlab.comparison.page import show


def test_the_page_says_what_was_found(made: fl.Comparison) -> None:
    text = made.page.read_text()
    for verdict in made.verdicts.values():
        assert verdict.sentence in text
    assert "by digest" in text
    assert text.count("| finished |") == 18
    for question in ("How large is the gap?", "Is it faster?", "Is orthogonality needed?"):
        assert question in text


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_language_model(seeds: int, tmp_path: Path) -> None:
    found = compare(tmp_path / "c", recipe=LANGUAGE, seeds=seeds)
    assert "perplexity within 1.05 × the baseline's?" in found.page.read_text()


def test_the_page_answers_the_questions(tmp_path: Path) -> None:
    found = fl.compare(LAYERS | {"seeds": 2}, out=tmp_path / "c")
    text = found.page.read_text()
    assert "1. **Do two layers help?** too few seeds to judge two against one" in text
    assert (
        "2. **Does freezing hurt with two?** too few seeds to judge two-frozen against two" in text
    )
    assert "The five questions" not in text
    assert "- Compared settings: model.layers." in text
    assert "- two: model.layers 2" in text
    assert not found.evidence.refused_pairs  # other weights, as models of other sizes have
    for verdict in (answer.verdict for answer in found.evidence.contrasts):
        ours, theirs = (
            [run.metrics["accuracy"] for run in found.evidence.arms[name].runs]
            for name in (verdict.arm, verdict.baseline)
        )
        gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
        assert verdict.paired.effect == pytest.approx(sum(gaps) / 2)


def test_the_terminal_shows_its_own_questions(heard: fl.Comparison) -> None:
    said = show(heard.evidence, heard.page)
    assert "Better? too few seeds" in said
    assert "Is orthogonality needed?" not in said

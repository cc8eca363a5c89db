"""Foreign text is shown on one line, and obeyed neither by a terminal nor by Markdown."""

import time

import pytest

from frostlab.text import columns, counted, escaped, markdown, plain, printable
from fuzz.targets_pages import check_markdown, tokens


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\r\tc\x00", r"a\nb\r\tc\x00"),
        ("\u202eabc\u200b", r"\u202eabc\u200b"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("layers[0].größe – 層", "layers[0].größe – 層"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert plain(text) == plain(plain(text)) == shown
    assert columns([[text, "x"]]) == [f"{shown}  x"]
    assert printable(f"a\n{text}").startswith("a\n")


@pytest.mark.parametrize(
    "text",
    [
        "a|b", "`a`", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "# a", "a\n# b",
        "12. a", "- a", "> a", "*a* _b_ __c__ ~~d~~", "&lt;b&gt;", "![x](y)", "[a]: http://b.c",
        "```", "a\\", "---", "a #", "<!-- ", "<http://a.b>",
    ],
)  # fmt: skip
def test_markdown_is_not_obeyed(text: str) -> None:
    check_markdown(text)


def test_a_long_text_takes_no_time() -> None:
    for run in "#_[]*-=1":
        began = time.monotonic()
        escaped(run * 200_000 + "x")
        assert time.monotonic() - began < 3


def test_good_text_stays_as_it_is() -> None:
    for text in ("oelm is better: +0.01 [0.005, 0.02]", "front_ratio", "-0.5", "p < 0.05 (n=3)"):
        assert escaped(text) == text
    table = markdown(["a|b"], [["c\nd"]])
    assert table.count("\n") == 2
    assert [token.content for token in tokens(table) if token.type == "inline"] == ["a|b", r"c\\nd"]


def test_one_thing_has_no_plural() -> None:
    assert counted(1, "subjects") == "1 subject"
    assert counted(0, "subjects") == "0 subjects"
    assert counted(1200, "texts") == "1,200 texts"

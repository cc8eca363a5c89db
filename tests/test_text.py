"""Foreign text is shown on one line, and obeyed neither by a terminal nor by Markdown."""

import time

import pytest

from frostlab.text import (
    columns,
    counted,
    escaped,
    fitted,
    markdown,
    plain,
    printable,
    shared_start,
    short_names,
    size_text,
)
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


def test_names_are_cut_in_the_middle_and_stay_different() -> None:
    seeds = [f"openwebtext-random-tiny-oelm-s{seed}" for seed in range(3)]
    assert short_names(seeds, 14) == ["openwe…oelm-s0", "openwe…oelm-s1", "openwe…oelm-s2"]
    begin = [f"gpt-{number}-with-a-long-name-s0" for number in range(100, 103)]
    assert len(set(short_names(begin, 10))) == 3
    assert all(len(name) == 10 for name in short_names(begin, 10))
    assert short_names(["a-short-name", "b"], 12) == ["a-short-name", "b"]


@pytest.mark.parametrize(
    ("names", "start"),
    [
        (["gpt@lr=0.001-s0", "gpt@lr=0.003-s0"], "gpt@"),  # not half of a number
        (["gpt-01-s0", "gpt-01-s1"], "gpt-01-"),
        (["gpt-01-s0", "wiki-s0"], ""),
        (["a-s0", "a-s1"], ""),  # too short
        (["gpt-01-s0"], ""),
        (["gpt-01-", "gpt-01-s0"], "gpt-"),  # something is left of each
    ],
)
def test_what_names_share_ends_at_a_mark(names: list[str], start: str) -> None:
    assert shared_start(names) == start


def test_a_table_loses_columns_before_its_names_are_cut() -> None:
    names = [f"a-recipe@lr={rate}-s0" for rate in ("0.0001", "0.0003")]
    whole = [["id", "steps", "time"], *([name, "1,000", "0:01:00"] for name in names)]
    tables = [[row[:count] for row in whole] for count in (3, 2, 1)]
    assert fitted(tables, None, keep=2) == fitted(tables, 37, keep=2) == (whole, [])
    shorter, notes = fitted(tables, 36, keep=2)
    assert [row[0] for row in shorter] == ["id", "…lr=0.0001-s0", "…lr=0.0003-s0"]
    assert (len(shorter[0]), notes) == (3, ["all names begin with a-recipe@"])
    assert [len(fitted(tables, width, keep=2)[0][0]) for width in (29, 28, 20, 19)] == [3, 2, 2, 2]
    cut, _ = fitted(tables, 19, keep=2)
    assert [row[0] for row in cut[1:]] == ["…lr=0…001-s0", "…lr=0…003-s0"]
    assert len(fitted(tables, 18, keep=2)[0][0]) == 1, "names that cannot be told apart are worse"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600_000, "1 GB"),
        (83_000_000, "83 MB"), (1_500_000_000_000, "1.5 TB"), (2 * 10**15, "2,000 TB"),
    ],
)  # fmt: skip
def test_a_number_of_bytes(size: int | None, text: str) -> None:
    assert size_text(size) == text

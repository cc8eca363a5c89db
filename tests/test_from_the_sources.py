"""docs/from-the-sources in three languages: the same commands, ids and numbers, which work."""

import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from typer.main import get_command

from frostlab.cli.main import app
from frostlab.cli.options import settings_from
from frostlab.recipe.groups import load_group
from frostlab.recipe.load import load_recipe

DOCS = Path(__file__).parents[1] / "docs"
LANGUAGES = {"en": ".md", "zh": ".zh.md", "ja": ".ja.md"}
PAGES = {name: (DOCS / f"from-the-sources{end}").read_text() for name, end in LANGUAGES.items()}
OTHERS = [name for name in PAGES if name != "en"]
PLACEHOLDERS = {"RUN"}


def blocks(text: str) -> list[str]:
    return re.findall(r"```\n(.*?)```", text, re.DOTALL)


def tables(text: str) -> list[list[str]]:
    """The lines of each table, without its two first."""
    text = re.sub(r"```\n.*?```", "", text, flags=re.DOTALL)
    found = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    return [table.splitlines()[2:] for table in found]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("language", OTHERS)
def test_a_translation_has_the_same_code(language: str) -> None:
    assert blocks(PAGES[language]) == blocks(PAGES["en"])
    prose = [re.sub(r"```\n.*?```", "", PAGES[name], flags=re.DOTALL) for name in ("en", language)]
    sections = [text.split("\n## ") for text in prose]
    assert len(sections[0]) == len(sections[1])
    for own, english in zip(*reversed(sections), strict=True):
        assert set(code(own)) == set(code(english)), english.splitlines()[0]


@pytest.mark.parametrize("language", OTHERS)
def test_a_translation_has_the_same_tables(language: str) -> None:
    own, english = tables(PAGES[language]), tables(PAGES["en"])
    assert [len(table) for table in own] == [len(table) for table in english]
    assert len(english) == 5
    for rows in zip(chain(*own), chain(*english), strict=True):
        first, second = (sorted(code(row)) for row in rows)
        assert first == second, rows[1]
    experiments = 3  # the table whose cells are numbers
    for rows in zip(own[experiments], english[experiments], strict=True):
        cells = [[re.findall(r"[\d.,e-]*\d", cell) for cell in row.split("|")] for row in rows]
        assert len(cells[0]) == 11
        assert cells[0][:-2] == cells[1][:-2], rows[1]
        assert sorted(cells[0][-2]) == sorted(cells[1][-2])
        assert "PPL" not in rows[1] or "PPL" in rows[0]


@pytest.mark.parametrize("language", OTHERS)
def test_a_translation_has_the_same_links_and_bullets(language: str) -> None:
    def links(name: str) -> set[str]:
        found = set(re.findall(r"\]\(([^)]+)\)", PAGES[name]))
        return {link for link in found if not link.startswith("from-the-sources")}

    assert links(language) == links("en")
    assert PAGES[language].count("\n- ") == PAGES["en"].count("\n- ")
    for other in set(LANGUAGES) - {language}:
        assert f"(from-the-sources{LANGUAGES[other]})" in PAGES[language]


# Commands


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every frostlab command in blocks and tables, but not its bare name."""
    lines = [line for block in blocks(text) for line in block.splitlines()]
    lines += code(re.sub(r"```\n.*?```", "", text, flags=re.DOTALL))
    for line in lines:
        words = shlex.split(line, comments=True) if "frostlab " in line else []
        if "frostlab" in words and "…" not in words:
            arguments = words[words.index("frostlab") + 1 :]
            if len(arguments) > 1 or arguments == ["runs"]:
                yield arguments


ALL = sorted({tuple(arguments) for text in PAGES.values() for arguments in commands(text)})


def test_the_pages_have_commands() -> None:
    assert {arguments[0] for arguments in ALL} == {
        "recipes", "run", "runs", "show", "compare", "diagnose",
    }  # fmt: skip


@pytest.mark.parametrize("arguments", ALL, ids=" ".join)
def test_a_command_is_one_that_frostlab_takes(arguments: tuple[str, ...]) -> None:
    command = get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    options = command.make_context(arguments[0], list(arguments[1:])).params
    settings = settings_from(options.get("settings"), options.get("device"))
    if arguments[0] in ("run", "diagnose") and arguments[1] not in PLACEHOLDERS:
        load_recipe(arguments[1], settings)
    if arguments[0] == "compare":
        (name,) = options["sources"]
        group = load_group(name)
        comparisons = group.published if options["as_published"] else group.fair
        assert comparisons
        assert options["only"] is None or options["only"] in comparisons
    if arguments[0] == "recipes":
        load_group(options["group"])

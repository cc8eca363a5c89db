"""A walk over a report's page that checks every number against the record that it links to."""

import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from frostlab.comparison.judging.verdict import MEANINGS
from frostlab.errors import BadInput
from frostlab.pages.content import FORMATS, read_record, resolve
from frostlab.pages.languages.phrases import PHRASES

_HIDDEN = {"svg", "script", "style", "code", "pre", "title"}  # not read as prose
_VOID = {"br", "col", "hr", "img", "input", "link", "meta", "wbr"}
# Numbers of the method, not of the records.
METHOD = re.compile(
    r"\b(95 %|80 %|100 %|[12] in 10|[28] of 10|the ratio 1|fewer than 5 pairs)(?!\w)"
)
# Texts of pages in other languages, which name the same numbers.
_FIXED = [text for texts in PHRASES.values() for text in texts.values() if "{" not in text]
_NAME = re.compile(
    r"[^\W\d_][\w.@=-]*"
)  # a name such as macro_f1 or GPT-2, which begins in letters


class Walk(HTMLParser):
    """The cells and the other texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.cells: list[tuple[dict[str, str | None], str]] = []  # attributes and text
        self.words: list[str] = []  # visible text outside the cells, element by element
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._cell: dict[str, str | None] | None = None
        self._text = ""
        self.feed(text)
        self.close()
        assert not self._open, f"the page does not close {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in _VOID:
            self._open.append((tag, values))
        if tag == "a" and "n" in (values.get("class") or "").split():
            assert self._cell is None, f"a cell inside a cell: {values}"
            self._cell, self._text = values, ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Skip an element that is closed at once."""

    def handle_endtag(self, tag: str) -> None:
        name, _ = self._open.pop()
        assert name == tag, f"</{tag}> closes <{name}>"
        if tag == "a" and self._cell is not None:
            self.cells.append((self._cell, self._text))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._text += data
        elif data.strip() and not any(tag in _HIDDEN for tag, _ in self._open):
            self.words.append(data.strip())


def complaints(page: Path, names: Iterable[str] = ()) -> list[str]:
    """Return what is wrong with the numbers of a page, whose records lie in its folder.

    `names` are names on the page, such as those of arms, that may hold numbers.
    """
    walk = Walk(page.read_text(encoding="utf-8"))
    files: dict[str, Any] = {}
    wrong = [
        complaint for cell, text in walk.cells if (complaint := _wrong(page, cell, text, files))
    ]
    for text in walk.words:
        rest = text
        for name in sorted((*names, *MEANINGS.values(), *_FIXED), key=len, reverse=True):
            rest = rest.replace(name, "")
        rest = _NAME.sub("", METHOD.sub("", rest))
        if any(character.isdigit() for character in rest):
            wrong.append(f"a number without a record: {text!r}")
    if not walk.cells:
        wrong.append("the page has no number")
    return wrong


def _wrong(page: Path, cell: dict[str, str | None], text: str, files: dict[str, Any]) -> str | None:
    """Return what is wrong with a cell, or None."""
    file, pointer, form = (cell.get(f"data-{key}") for key in ("file", "pointer", "format"))
    if not file or pointer is None or form not in FORMATS:
        return f"{text!r} does not say its file, pointer and format: {cell}"
    where = f"{file}{pointer}"
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts:
        return f"{where} is outside the folder"
    if unquote((cell.get("href") or "").partition("#")[0]) != file:
        return f"{where} links to {cell.get('href')}"
    if file not in files:
        try:
            files[file] = read_record(page.parent / file)
        except (OSError, BadInput) as error:
            return f"{where} cannot be read: {error}"
    try:
        expected = FORMATS[form](resolve(files[file], pointer))
    except (BadInput, KeyError, TypeError, ValueError) as error:
        return f"{where} as {form}: {error!r}"
    return None if text == expected else f"{where} as {form} is {expected!r}, not {text!r}"

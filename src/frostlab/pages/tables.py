"""The tables of a report, and the data of its figures, as CSV and LaTeX files.

A LaTeX file holds one `tabular` with the rules of booktabs. It compiles in any document that loads
booktabs: `\\input{tables/performance}`. Texts come from users, so every character with a meaning in
LaTeX is escaped, and a character that LaTeX cannot print becomes its code point, as in (U+4F60).
"""

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Sequence

from frostlab.pages.content import Cell, Document, Figure, Table
from frostlab.text import NONE

_LONG = 45  # columns with more characters are broken into lines
_WIDTH = 0.3  # width of such a column, as a share of the line
_SPECIAL = {  # character → command that needs only the usual fonts; `\$` would need others
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"$\mathdollar$", "&": r"\&",
    "#": r"\#", "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"{\char34}",
    "`": r"\`{}",
}  # fmt: skip
_SYMBOLS = {
    "–": r"\textendash{}", "—": r"\textemdash{}", "−": "$-$", "±": r"$\pm$", "×": r"$\times$",
    "÷": r"$\div$", "∞": r"$\infty$", "≤": r"$\leq$", "≥": r"$\geq$", "≠": r"$\neq$",
    "≈": r"$\approx$", "→": r"$\rightarrow$", "←": r"$\leftarrow$", "·": r"$\cdot$",
    "°": r"$^\circ$", "…": r"\textellipsis{}", "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}", "‘": r"\textquoteleft{}", "’": r"\textquoteright{}",
    "\u00a0": "~", "√": r"$\surd$", "²": "$^2$", "³": "$^3$", "ß": r"\ss{}",
    "æ": r"\ae{}", "Æ": r"\AE{}", "ø": r"\o{}", "Ø": r"\O{}", "œ": r"\oe{}", "Œ": r"\OE{}",
    "ł": r"\l{}", "Ł": r"\L{}",
    "ı": r"\i{}", "§": r"$\mathsection$", "©": "(c)", "µ": r"$\mu$",
} | {
    unicodedata.lookup(f"GREEK SMALL LETTER {name.replace('lambda', 'lamda')}"): rf"$\{name}$"
    for name in (
        "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa",
        "lambda", "mu", "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi",
        "omega",
    )
}  # fmt: skip
_ACCENTS = {
    "\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u ",
    "\u0307": ".", "\u0308": '"', "\u030a": "r ", "\u030b": "H ", "\u030c": "v ", "\u0327": "c ",
}  # fmt: skip
_LIGATURE = re.compile(r"([-',])(?=\1)")  # such as --, which would become a dash
_SIGN = re.compile(r"(?<![\w.)\]])[-−](?=[\d.∞])")  # minus sign of a number, not a hyphen
_POWER = re.compile(r"(?<=\d)e([+-]?)0*(\d+)\b")  # the exponent in 5.2e-06


def table_files(document: Document) -> dict[str, bytes]:
    """Return the CSV files of all figures and tables, and the LaTeX files of the tables.

    The document's caution becomes a column of every CSV file and a comment in every LaTeX file.
    """
    caution = document.caution
    files = {f"{figure.name}.csv": figure_csv(figure, caution) for figure in document.figures}
    for table in document.tables:
        files[f"{table.name}.csv"] = table_csv(table, caution)
        comment = "" if caution is None else _comment(f"% Caution: {caution}") + "\n"
        files[f"{table.name}.tex"] = f"{comment}{latex(table)}".encode()
    return files


def figure_csv(figure: Figure, caution: str | None) -> bytes:
    """Return the data that a figure draws, as CSV."""
    head = list(dict.fromkeys(key for row in figure.rows for key in row))
    rows = [[row.get(key, "") for key in head] for row in figure.rows]
    return _csv(_with_caution([head, *rows], caution))


def table_csv(table: Table, caution: str | None = None) -> bytes:
    """Return a table as CSV, with the texts that the page shows."""
    rows = [[text_of(cell) for cell in row] for row in table.rows]
    return _csv(_with_caution([list(table.head), *rows], caution))


def _with_caution(rows: Sequence[Sequence[object]], caution: str | None) -> list[Sequence[object]]:
    if caution is None:
        return list(rows)
    head, *others = rows
    return [[*head, "caution"], *([*row, caution] for row in others)]


def _csv(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def text_of(piece: str | Cell) -> str:
    """Return the text of a cell; a string is its own text."""
    return piece.text if isinstance(piece, Cell) else piece


def latex(table: Table) -> str:
    """Return a table as a LaTeX `tabular`; cells in red on the page are emphasized."""
    columns = [_column(*column) for column in zip(table.numeric, zip(*table.rows, strict=True),
                                                  strict=True)]  # fmt: skip
    comments = [f"% {line}" for line in (table.title, table.note) if line]
    lines = [
        *(_comment(line) for line in comments),
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{''.join(columns) or 'l' * len(table.head)}}}",
        r"\toprule",
        _line(escaped(title) for title in table.head),
        r"\midrule",
        *(_line(map(_cell, row)) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _comment(line: str) -> str:
    return " ".join(line.encode("ascii", "backslashreplace").decode().split())


def _column(numeric: bool, cells: Sequence[str | Cell]) -> str:
    if numeric:
        return "r"
    longest = max(len(text_of(cell)) for cell in cells)
    return f"p{{{_WIDTH}\\linewidth}}" if longest > _LONG else "l"


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return escaped(cell)
    shown = number(cell.text) if cell.is_number else escaped(cell.text)
    return rf"\emph{{{shown}}}" if cell.alarm and cell.text != NONE else shown


def number(text: str) -> str:
    """Escape the text of a number, with a true minus sign and powers of ten."""
    pieces, end = [], 0
    marked = _SIGN.sub("−", text)
    for power in _POWER.finditer(marked):
        sign = "-" if power[1] == "-" else ""
        pieces += [escaped(marked[end : power.start()]), rf"$\times10^{{{sign}{power[2]}}}$"]
        end = power.end()
    return "".join([*pieces, escaped(marked[end:])])


def escaped(text: str) -> str:
    """Escape a text for LaTeX, so that LaTeX prints it and never runs it as a command."""
    shown = "".join(map(_character, unicodedata.normalize("NFC", text)))
    shown = _LIGATURE.sub(r"\1{}", shown)
    return f"{{{shown[0]}}}{shown[1:]}" if shown[:1] in ("[", "*") else shown


def _character(letter: str) -> str:
    if letter in _SPECIAL:
        return _SPECIAL[letter]
    if letter in _SYMBOLS:
        return _SYMBOLS[letter]
    if letter.isascii():
        return letter if letter.isprintable() else " "
    decomposed = unicodedata.normalize("NFD", letter)
    base, accent = decomposed[:1], decomposed[1:]
    if base.isascii() and base.isalpha() and accent in _ACCENTS:
        return rf"\{_ACCENTS[accent]}{{{base}}}"
    return f"(U+{ord(letter):04X})"

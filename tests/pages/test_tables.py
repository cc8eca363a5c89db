"""Tables as CSV and LaTeX: numbers as on the page, nothing that LaTeX would obey."""

import csv
import io
import shutil
import subprocess
from pathlib import Path

import pytest

from frostlab.pages.content import Cell, Document, Figure, Section, Table
from frostlab.pages.one_comparison.compared import document
from frostlab.pages.tables import escaped, latex, number, table_csv, table_files

SPECIAL = "\\ { } $ & # % _ ^ ~ < > | \" ` ' -- ,, ?` !` [x] *"
ODD = "é ü ç Å ő ß µ ∞ ≤ → α Ω 你 \x00 \u202e 🙂 “x” – — § © …"


def cell(text: str, form: str = "number", alarm: bool = False) -> Cell:
    return Cell(text, "evidence.json", "/x", form, alarm)


TABLE = Table(
    "t", "Title % \\input{x}", ("arm_1", "50 %", "note"),
    (
        ("a&b", cell("-0.12 [-0.2, +5.2e-06] ×", "effect"), SPECIAL),
        ("[c]", cell("3 ± 0.5", "summary", alarm=True), ODD),
        (Cell("d (confounded)", alarm=True), "–", "w" * 60),
    ),
    "A note with % and\nlines.",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-0.12", "$-$0.12"),
        ("+0.02 [-0.1, +0.1]", "+0.02 [$-$0.1, +0.1]"),
        ("1.5 ± 0.1", r"1.5 $\pm$ 0.1"),
        ("0.93 [5.29e-06, ∞] ×", r"0.93 [5.29$\times10^{-6}$, $\infty$] $\times$"),
        ("2e+12", r"2$\times10^{12}$"),
        ("[−∞, 3]", r"{[}$-$$\infty$, 3]"),
        ("12.5 %", r"12.5 \%"),
        ("-20.18% [-44.96%, +0.37%]", r"$-$20.18\% [$-$44.96\%, +0.37\%]"),
        ("1,234", "1,234"),
        ("2026-11-17", "2026-11-17"),
        ("< 0.0001", r"\textless{} 0.0001"),
    ],
)
def test_numbers_have_a_true_minus_and_powers(text: str, shown: str) -> None:
    assert number(text) == shown


def test_every_special_character_is_escaped() -> None:
    shown = escaped(SPECIAL)
    for letter in "&#%_":
        assert shown.count(letter) == shown.count(f"\\{letter}") == 1
    assert escaped("a_b & 50 % of #1 {x}") == r"a\_b \& 50 \% of \#1 \{x\}"
    assert (
        escaped("\\input{x}^~") == r"\textbackslash{}input\{x\}\textasciicircum{}\textasciitilde{}"
    )
    assert escaped("a--b,,c''d") == "a-{}-b,{},c'{}'d"
    assert escaped("[x]") == "{[}x]"  # after \\, a bracket would be an option
    assert escaped("gpt-2") == "gpt-2"
    assert escaped("é ő 你") == r"\'{e} \H {o} (U+4F60)"
    assert escaped(ODD).isascii()
    assert escaped(ODD).isprintable()


def test_a_table_of_latex() -> None:
    assert latex(TABLE).splitlines() == [
        r"% Title % \input{x}",
        "% A note with % and lines.",
        r"% \usepackage{booktabs}",
        r"\begin{tabular}{lrp{0.3\linewidth}}",
        r"\toprule",
        r"arm\_1 & 50 \% & note \\",
        r"\midrule",
        rf"a\&b & $-$0.12 [$-$0.2, +5.2$\times10^{{-6}}$] $\times$ & {escaped(SPECIAL)} \\",
        rf"{{[}}c] & \emph{{3 $\pm$ 0.5}} & {escaped(ODD)} \\",
        rf"\emph{{d (confounded)}} & \textendash{{}} & {'w' * 60} \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_a_table_as_csv_is_what_the_page_shows() -> None:
    lines = list(csv.reader(io.StringIO(table_csv(TABLE).decode(), newline="")))
    assert lines[0] == list(TABLE.head)
    assert lines[1] == ["a&b", "-0.12 [-0.2, +5.2e-06] ×", SPECIAL]
    assert [len(line) for line in lines] == [3] * 4


def test_a_lone_surrogate_is_written_escaped() -> None:
    table = Table("t", "T", ("a",), (("\ud800",),))
    assert table_csv(table) == b"a\n\\ud800\n"
    assert r"\ud800" not in latex(table)


def test_every_table_has_two_files_and_every_figure_one() -> None:
    figure = Figure("f", "F", None, "", [{"x": 1}, {"x": 2, "y": "z"}])
    report = Document("T", "", (figure,), (Section("s", "S", (TABLE,)),))
    files = table_files(report)
    assert sorted(files) == ["f.csv", "t.csv", "t.tex"]
    assert files["f.csv"] == b"x,y\n1,\n2,z\n"


def test_columns_of_nothing_but_numbers_are_aligned_right() -> None:
    rows = (("a", cell("1"), cell("x", "text"), cell("2"), Cell("–")), ("b", "", "", "no", ""))
    assert Table("t", "T", tuple("abcde"), rows).numeric == [False, True, False, False, False]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(tuned: Path, tmp_path: Path) -> None:
    tables = [TABLE, *document(tuned, "en").tables]
    for table in tables:
        (tmp_path / f"{table.name}.tex").write_text(latex(table), encoding="utf-8")
    inputs = "\n\n".join(rf"\input{{{table.name}}}" for table in tables)
    (tmp_path / "all.tex").write_text(
        "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
        f"{inputs}\n\\end{{document}}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "all"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert (tmp_path / "all.pdf").stat().st_size > 1000

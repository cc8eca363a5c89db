"""The program itself: help, version, exit codes."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import typer
from packaging.version import Version

import frostlab
from cases import slow_unless
from forked import Command
from frostlab.cli import main
from frostlab.cli.main import app


def test_help_and_version_without_torch() -> None:
    program = (
        "import sys; sys.argv = ['frostlab', {!r}]\n"
        "from frostlab.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    for argument in ("--help", "--version"):
        result = subprocess.run(
            [sys.executable, "-c", program.format(argument)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        if argument == "--version":
            assert result.stdout.strip() == f"frostlab {frostlab.__version__}"


def test_bad_input_ends_the_program_so() -> None:
    """The program itself, as a shell starts it."""
    command = [sys.executable, "-m", "frostlab", "run", "docstring-gpt"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "frostlab: no recipe is called 'docstring-gpt'; did you mean `docstrings-gpt`?"
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["", *sorted(c.name or "" for c in app.registered_commands)])
def test_flags_are_shown_without_a_value(command: str, in_this_process: Command) -> None:
    result = in_this_process(*filter(None, [command]), "--help")
    assert result.returncode == 0, result.stderr
    assert "--help" in result.stdout
    assert "bool" not in result.stdout.lower()


@pytest.mark.skipif(
    Version(typer.__version__) < Version("0.24"), reason="no empty line between paragraphs"
)
@pytest.mark.parametrize("width", [60, 80, 100])
def test_help_fills_the_lines_of_a_terminal(
    width: int, in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of a paragraph ends only where the next word would not fit."""
    monkeypatch.setenv("COLUMNS", str(width))
    text = in_this_process("diagnose", "--help").stdout
    lines = [line.strip() for line in text[: text.index("╭")].split("\n")]
    pairs = [(line, after) for line, after in pairwise(lines) if line and after]
    assert len(pairs) > 5
    for line, after in pairs:
        assert len(line) + 1 + len(after.split()[0]) > width - 4, line


@pytest.mark.parametrize("encoding", slow_unless(["ascii"], ["ascii", "utf-8"]))
def test_hostile_names_reach_no_terminal(tmp_path: Path, encoding: str) -> None:
    name = b"r\x1b[31m\xff\n[red]"
    folder = os.fsencode(tmp_path) + b"/" + name
    os.mkdir(folder)
    with open(folder + b"/events.jsonl", "wb") as file:
        file.write(b"{}\n")
    environment = os.environ | {"PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    for arguments in (["runs", "--runs", tmp_path], ["show", folder], ["diagnose", folder],
                      ["show", "--runs", tmp_path, name + b"x"]):  # fmt: skip
        command = [sys.executable, "-m", "frostlab", *arguments]
        made = subprocess.run(command, capture_output=True, env=environment, timeout=60)
        output = made.stdout + made.stderr
        assert b"Traceback" not in output
        assert b"\x1b" not in output
        assert rb"\x1b[31m\udcff\n[red]" in output


def test_a_warning_of_frostlab_is_one_line() -> None:
    from frostlab.cli.main import _format_warning
    from frostlab.errors import DamagedCache

    line = _format_warning("x\x1b was damaged", DamagedCache, "main.py", 3)
    assert line == "frostlab: warning: x\\x1b was damaged\n"
    assert "main.py:3: UserWarning: y" in _format_warning("y", UserWarning, "main.py", 3)


@pytest.mark.parametrize("used", [True, False])
def test_a_program_that_used_a_gpu_skips_the_shutdown(
    used: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it printed is flushed first, also if one of its streams is closed."""
    left: list[int] = []
    flushed: list[bool] = []

    def leave(code: int) -> NoReturn:
        left.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys.stdout, "flush", lambda: flushed.append(True))
    with pytest.raises(SystemExit) as end:
        main._leave(3)
    assert (end.value.code, left, bool(flushed)) == (3, [3] if used else [], used)

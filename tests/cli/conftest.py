"""Commands run in the tests' own process, without the seconds a new one needs to import torch."""

import subprocess
import sys

import pytest

from forked import Command
from frostlab.cli.main import main


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `frostlab ARGUMENTS` here; return its exit code and its output."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["frostlab", *arguments])
        # under `python -m pytest`, usage lines would name pytest
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, int(code or 0), *capfd.readouterr())  # type: ignore[call-overload]

    return run

"""The cases of a test: some are tried by default, the others in the slow tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_unless(default: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test, of which those outside `default` are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in default else pytest.mark.slow,
        )
        for case in cases
    ]

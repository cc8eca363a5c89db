"""What the tests on a GPU share."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


@contextmanager
def _no_waiting() -> Iterator[None]:
    with warnings.catch_warnings():  # torch calls the mode a prototype after it has set it
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A context in which the host must not wait for the device."""
    return _no_waiting

"""Every fuzz target, for a few seconds; `make fuzz` runs 100,000 inputs and more."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import slow_unless
from frostlab.errors import BadInput, FrostlabError
from fuzz.campaign import Tally, corpus, load_targets, run_chunk, try_input
from fuzz.mutate import Target, inputs

TARGETS = load_targets()


@pytest.mark.parametrize("count", slow_unless([20], [20, 200]))
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_are_read_or_refused_in_one_line(name: str, count: int) -> None:
    target, began = TARGETS[name], time.monotonic()
    for data in [*corpus(name), *target.seeds()]:
        assert try_input(name, target, data) is None
    for data in inputs(name, target, 0, 0, count):
        assert try_input(name, target, data) is None
        if time.monotonic() - began > 5:  # a slow machine tries fewer inputs
            break


@pytest.mark.parametrize("name", TARGETS)
def test_a_valid_example_is_accepted(name: str, tmp_path: Path) -> None:
    """Otherwise every mutation of it would be refused at the first check."""
    refused = 0
    seeds = TARGETS[name].seeds()
    for number, data in enumerate(seeds):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            TARGETS[name].check(data, folder)
        except FrostlabError:
            refused += 1
    assert refused < len(seeds)


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        (lambda data, folder: _raise(KeyError("x")), "traceback"),
        (lambda data, folder: _raise(BadInput("two\nlines")), "traceback"),
        (lambda data, folder: bytearray(10 << 30), "traceback"),  # beyond the address space
        (lambda data, folder: bytearray(b"x") * (200 << 20), "memory"),
        (lambda data, folder: os._exit(3), "crash"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on
def test_the_campaign_notices(  # type: ignore[no-untyped-def]
    check, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzz.campaign.GIGABYTE", 100 << 20)
    tally = Tally({}, [])
    target = Target(lambda: [b"x"], check)
    run_chunk("bad", target, 0, 0, 1, tally, multiprocessing.get_context("fork"))
    assert [failure.kind for failure in tally.failures] == [kind]
    assert tally.tried == {"bad": 1}


def busy(data: bytes, folder: Path) -> None:
    while True:
        pass


@pytest.mark.parametrize("hang", [lambda data, folder: time.sleep(30), busy])
def test_the_campaign_notices_a_hang(
    monkeypatch: pytest.MonkeyPatch, hang: Callable[[bytes, Path], None]
) -> None:
    monkeypatch.setattr("fuzz.campaign.SECONDS", 0.05)
    target = Target(lambda: [b"x"], hang)
    failure = try_input("slow", target, b"x")
    assert failure is not None
    assert failure.kind == "hang"


def test_inputs_depend_only_on_the_seed() -> None:
    target = Target(lambda: [b'{"a": [1, 2]}'], lambda data, folder: None, "json")
    first, again, other = (list(inputs("t", target, seed, 0, 200)) for seed in (0, 0, 1))
    assert first == again != other
    assert list(inputs("t", target, 0, 100, 100)) == first[100:]
    assert len(set(first)) > 100

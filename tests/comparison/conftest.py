"""Finished comparisons that several test files only read."""

import pytest

import frostlab as fl
from comparing import HEARING, LANGUAGE, compare


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> fl.Comparison:
    """A small comparison of three arms at six seeds, with a round of whole runs."""
    folder = tmp_path_factory.mktemp("comparison") / "one"
    return compare(folder, arms=["baseline", "oelm", "oelm-random"], seeds=6, rounds=1)


@pytest.fixture(scope="session")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> fl.Comparison:
    """Language models whose runs are shorter than an epoch, with timed steps and two rounds."""
    recipe = {**LANGUAGE, "train": {"steps": 8, "batch": 8, "threads": 1},
              "evaluate": {"every": 2, "batch": 256}}  # fmt: skip
    folder = tmp_path_factory.mktemp("comparison") / "language"
    return compare(folder, recipe=recipe, rounds=2, clock={"seconds": 0.01})


@pytest.fixture(scope="session")
def heard(tmp_path_factory: pytest.TempPathFactory) -> fl.Comparison:
    """A comparison of three decoders of EEG at two seeds."""
    return fl.compare(HEARING, seeds=2, out=tmp_path_factory.mktemp("compared") / "it")

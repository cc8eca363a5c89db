"""Small finished comparisons and their reports, made once per process; tests only read them."""

import shutil
from pathlib import Path

import pytest

import frostlab as fl
from comparing import GROWN, HEARING, SMALL, compare
from frostlab.pages.write import report
from trained import recipe_of

Factory = pytest.TempPathFactory


@pytest.fixture(scope="session")
def compared(tmp_path_factory: Factory) -> Path:
    """Three arms at five seeds, watched."""
    arms = ["baseline", "oelm", "oelm-random"]
    recipe = SMALL | {"watch": {"every_n_steps": 2}}
    folder = tmp_path_factory.mktemp("compared") / "three"
    return compare(folder, arms=arms, seeds=5, recipe=recipe).folder


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: Factory) -> Path:
    """Two arms at two seeds, with two learning rates and timed steps."""
    tune = [{"key": "optim.lr", "values": [0.001, 0.003]}]
    folder = tmp_path_factory.mktemp("compared") / "tuned"
    return compare(folder, tune=tune, clock={"seconds": 0.01}).folder


@pytest.fixture(scope="session")
def spoken(tmp_path_factory: Factory) -> Path:
    """Two arms of a language model of text at two seeds; effects are ratios of perplexity."""
    recipe = recipe_of("gpt") | {"treatment": "baseline"}
    return compare(tmp_path_factory.mktemp("compared") / "language", recipe=recipe).folder


@pytest.fixture(scope="session")
def heard(tmp_path_factory: Factory) -> Path:
    """Three EEG decoders at two seeds; it takes seconds, so tests of it are marked slow."""
    return fl.compare(HEARING, seeds=2, out=tmp_path_factory.mktemp("compared") / "eeg").folder


@pytest.fixture(scope="session")
def grown(tmp_path_factory: Factory) -> Path:
    """Three arms of which two grow in stages; it takes seconds, so tests of it are marked slow."""
    values = GROWN | {"clock": None}
    return fl.compare(values, out=tmp_path_factory.mktemp("compared") / "grown").folder


@pytest.fixture(scope="session")
def reported(compared: Path, tmp_path_factory: Factory) -> Path:
    """The comparison of three arms with its report."""
    folder = tmp_path_factory.mktemp("reported") / "three"
    shutil.copytree(compared, folder)
    report(folder)
    return folder

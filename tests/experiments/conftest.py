"""A tiny group, carried out as published and fairly, once a session."""

from pathlib import Path

import pytest

import frostlab as fl
from tiny_group import write_group


@pytest.fixture(scope="session")
def group_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_group(tmp_path_factory.mktemp("group"))


@pytest.fixture(scope="session")
def published(group_file: Path) -> fl.GroupResult:
    """The first comparison of the group as published, at two seeds; the other is not run."""
    out = group_file.parent / "comparisons" / "mine-as-published"
    return fl.compare_group(group_file, as_published=True, only="rates", seeds=2, out=out)


@pytest.fixture(scope="session")
def fair(group_file: Path, published: fl.GroupResult) -> fl.GroupResult:
    """The fair comparison of the group at two seeds, in a folder beside the published one."""
    out = group_file.parent / "comparisons" / "mine"
    return fl.compare_group(str(group_file), seeds=2, out=out)

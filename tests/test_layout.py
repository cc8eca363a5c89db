"""The package keeps its own rules: who imports whom, how long a file gets, what is public."""

import ast
import re
from pathlib import Path

import pytest

import frostlab as fl

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "frostlab"

# Each room imports only from itself and from the rooms before it.
ORDER = (
    "errors",
    "recipe",
    "recipes",
    "comparisons",
    "data",
    "scoring",
    "models",
    "anatomy",
    "surgery",
    "records",
    "flow",
    "training",
    "bench",
    "compare",
    "report",
    "integrations",
    "cli",
    "__main__",
)
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> set[str]:
    """The rooms a module imports, wherever in it the import stands."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    rooms = {name.split(".")[1] for name in names if name.startswith("frostlab.")}
    return rooms - {"__version__"}


def out_of_order(path: Path, text: str) -> set[str]:
    place = ORDER.index(room_of(path))
    return {room for room in imported_rooms(ast.parse(text)) if ORDER.index(room) > place}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_import_only_from_those_above(path: Path) -> None:
    if path == SOURCE / "__init__.py":  # the front door names everything, lazily
        return
    assert room_of(path) in ORDER
    assert not out_of_order(path, path.read_text())


def test_the_order_test_can_fail() -> None:
    wrong = "def f():\n    from frostlab.surgery import freeze\n"
    assert out_of_order(SOURCE / "anatomy" / "x.py", wrong) == {"surgery"}
    assert out_of_order(SOURCE / "models" / "x.py", "import frostlab.anatomy.rows") == {"anatomy"}


def test_files_stay_short() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in FILES}
    long = {name: count for name, count in lengths.items() if count > 260}
    assert not long


def test_every_public_name_is_there_and_documented() -> None:
    for name in fl.__all__:
        assert getattr(fl, name).__doc__, name
    assert "anatomy" in dir(fl)
    with pytest.raises(AttributeError, match="no attribute 'freze'"):
        fl.freze  # noqa: B018


def test_the_readme_maps_every_file() -> None:
    """Each file or its folder has a line in the README's map."""
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^ *([\w./-]+?)/? {2,}", text, re.MULTILINE))
    for path in FILES:
        parts = path.relative_to(SOURCE).parts
        assert parts[-1] in named or (len(parts) > 1 and parts[0] in named), path

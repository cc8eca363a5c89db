"""The house keeps its rules: import order, length and number of files, names, the README's map."""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.version import Version

import frostlab as fl

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "frostlab"

# Each room imports only from itself and from the rooms before it.
ORDER = (
    "errors",
    "text",
    "html",
    "charts",
    "drawing",
    "fonts",
    "storage",
    "launcher",
    "typed",
    "devices",
    "recipe",
    "recipes",
    "comparisons",
    "groups",
    "data",
    "envelopes",
    "models",
    "roles",
    "surgery",
    "records",
    "timing",
    "flow",
    "integrations",
    "training",
    "matrix",
    "comparison",
    "use",
    "experiments",
    "bench",
    "pages",
    "cli",
    "__main__",
)
STRANGERS = {"bench": "comparison"}  # neither imports the other
TRAINING = (
    "distributed",
    "batches",
    "step",
    "treatment",
    "stages",
    "progress",
    "state",
    "setup",
    "restore",
    "samples",
    "evaluate",
    "eeg_report",
    "tasks",
    "step_log",
    "loop",
    "run",
)
# The assembly line from a recipe to a step, and the few modules that may call its parts: whoever
# needs a model, batches or a step of a recipe gets them from `training/setup.py`.
ASSEMBLY = {
    "build_for": {"training/setup.py", "bench/whole_run.py"},  # the benchmark's peer has no recipe
    "treat": {"training/setup.py", "training/restore.py"},  # restoring: without new values
    "build_prefix": {"training/setup.py", "bench/workloads.py"},
    "Feed": {"training/setup.py"},
    "build_step": {"training/setup.py", "bench/peers.py"},
    "build_optimizer": {"training/setup.py", "training/step/__init__.py", "bench/peers.py"},
    "EagerStep": {"training/setup.py", "training/step/__init__.py"},
    "CompiledStep": {"training/step/__init__.py"},
    "CapturedStep": {"training/step/__init__.py"},
}
MOST_LINES = 600
MOST_MODULES = 14  # in one folder
# Base names that several rooms use, each for the same role.
SAME_ROLE = {
    "load", "show", "figures", "plan", "run", "runner", "splits", "treatment",
}  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = [path for path in FILES if path.name not in ("__init__.py", "__main__.py")]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> set[str]:
    """What a module imports of frostlab, wherever in it the import stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("frostlab.")} - {"frostlab.__version__"}


def out_of_order(path: Path, text: str) -> set[str]:
    """The imports that go down the order of rooms, or of modules inside training."""
    room, wrong = room_of(path), set()
    for name in imported_modules(ast.parse(text)):
        other = name.split(".")[1]
        if ORDER.index(other) > ORDER.index(room) or STRANGERS.get(room) == other:
            wrong.add(other)
        if other == room == "training":
            wrong |= _out_of_order_in_training(path, name.split(".")[2])
    return wrong


def _out_of_order_in_training(path: Path, other: str) -> set[str]:
    own = path.relative_to(SOURCE / "training").parts[0].removesuffix(".py")
    if own == "__init__" or other not in TRAINING:
        return set()
    return {other} if TRAINING.index(other) > TRAINING.index(own) else set()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_import_only_from_those_above(path: Path) -> None:
    if path == SOURCE / "__init__.py":  # the front door names everything, lazily
        return
    assert room_of(path) in ORDER
    assert not out_of_order(path, path.read_text())


def test_the_order_test_can_fail() -> None:
    wrong = "def f():\n    from frostlab.surgery.freeze import freeze\n"
    assert out_of_order(SOURCE / "roles" / "x.py", wrong) == {"surgery"}
    assert out_of_order(SOURCE / "models" / "x.py", "import frostlab.roles.parts") == {"roles"}
    apart = "from frostlab.comparison.plan import Plan"
    assert out_of_order(SOURCE / "bench" / "x.py", apart) == {"comparison"}
    later = "from frostlab.training.loop import train"
    assert out_of_order(SOURCE / "training" / "setup.py", later) == {"loop"}


def test_every_module_of_training_has_its_place_in_the_order() -> None:
    there = {path.relative_to(SOURCE / "training").parts[0].removesuffix(".py") for path in MODULES
             if room_of(path) == "training"}  # fmt: skip
    assert there == set(TRAINING)


def calls_of(text: str, name: str) -> bool:
    """Whether a module calls a function of this name."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id == name for call in nodes)


@pytest.mark.parametrize("part", ASSEMBLY)
def test_there_is_one_assembly_line(part: str) -> None:
    callers = {str(p.relative_to(SOURCE)) for p in FILES if calls_of(p.read_text(), part)}
    assert callers == ASSEMBLY[part]


def test_files_stay_readable() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in FILES}
    assert not {name: count for name, count in lengths.items() if count > MOST_LINES}


def test_folders_stay_small() -> None:
    folders: dict[Path, int] = defaultdict(int)
    for path in MODULES:
        folders[path.parent] += 1
    assert not {str(folder): count for folder, count in folders.items() if count > MOST_MODULES}


def test_a_base_name_recurs_only_for_the_same_role() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        places[path.stem].append(str(path.relative_to(SOURCE)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not {name: where for name, where in twice.items() if name not in SAME_ROLE}
    assert set(twice) >= SAME_ROLE, "a name in the list no longer recurs"


def test_no_public_name_is_a_package_too() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    rooms |= {path.stem for path in SOURCE.glob("*.py")}
    assert not rooms & set(fl.__all__)


def test_every_public_name_is_there_and_documented() -> None:
    for name in fl.__all__:
        assert getattr(fl, name).__doc__, name
    assert "anatomy" in dir(fl)
    assert list(fl.__all__) == sorted(fl._HOMES), "the two tables name the same"
    with pytest.raises(AttributeError, match="no attribute 'freze'"):
        fl.freze  # noqa: B018


def test_the_readme_maps_every_room() -> None:
    """Each room has a line in the README's map; one line names the modules outside the rooms."""
    source_map = (ROOT / "README.md").read_text().partition("\nsrc/frostlab/\n")[2]
    lines, _, modules = source_map.partition("\ntests/")[0].partition("\n  *.py ")
    rooms = set(re.findall(r"^ {2}(\w+)/ {2,}", lines, re.M))
    assert rooms == {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    _, colon, names = re.sub(r"\([^)]*\)", "", modules).partition(":")
    assert colon
    assert set(re.findall(r"\w+", names)) == {path.stem for path in SOURCE.glob("*.py")}


def test_the_oldest_versions_are_those_that_are_tested() -> None:
    """floor.txt, with which `make floor` tests, has the lower bounds of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    extras = set(project["optional-dependencies"]) - {"dev"}
    wanted = [text for name in extras for text in project["optional-dependencies"][name]]
    bounds = dict(text.lower().split(">=") for text in [*project["dependencies"], *wanted])
    assert all(">=" in text or "[" in text for group in groups for text in group)
    lines = (ROOT / "floor.txt").read_text().lower().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert tested.keys() == bounds.keys()
    for name, version in tested.items():
        if name != "torch":  # said in floor.txt
            assert Version(version) >= Version(bounds[name]), name
            release, bound = Version(version).release, Version(bounds[name]).release
            assert release[: len(bound)] == bound, name

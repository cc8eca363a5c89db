"""YAML from anyone: a value, or one line that names the file; never a hang, never code."""

import os
from pathlib import Path

import pytest

from frostlab import BadInput
from frostlab.recipe.bounded_yaml import MOST_VALUES, parse_yaml, read_yaml
from frostlab.recipe.load import load_recipe, parse_settings, recipe_from, recipe_name

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
HOSTILE = {  # YAML → the words that its error has
    BOMB: "me.yaml: too many values",
    "&a [*a]": "nested too deeply",
    "&a {b: *a}": "nested too deeply",
    "[" * 5000: "line 1: nested too deeply",
    "{a: " * 5000: "line 1: nested too deeply",
    "[" + "a," * 50_000 + "]": "line 1: too many values",
    "a: " + "x" * 300_000: "more than 256 KiB",
    "a: " + "x" * 2_000_000: "is larger than 1 MiB",
    "a: 1\n? [a]\n: b": "line 2: a key should be a text",
    "a: !!int ''": "line 1: '' is not a valid !!int",
    "a: !!bool x": "line 1: 'x' is not a valid !!bool",
    "a: !!timestamp x": "line 1: could not determine a constructor for the tag",
    "a: !!binary aGk=": "line 1: could not determine a constructor for the tag",
    "a: !!python/object/apply:os.system [exit]": "line 1: could not determine a constructor",
    "a: &a {b: 1}\nc: {<<: *a}": "line 2: merge keys (<<) are not supported",
    "a: 1\na: 2": "line 2: the key `a` is given twice",
    "a:\n\tb: 1": "line 2: ",
    "a: \0": "not YAML",
    'a: "\\0"': "a '\\x00' has a null character",
    'a: "\\uD800"': "a '\\ud800' has a null character or half a surrogate pair",
    'a: "\\UFFFFFFFF"': "not YAML",
    "a: {b: .inf}": "a.b = inf should be a finite number",
    "a: [1, .nan]": "a.1 = nan should be a finite number",
    f"a: {'9' * 400}": "has more than 100 characters",
    "a: 1e400": "a = inf should be a finite number",
    f"a: {'1:1' * 50_000}": "has more than 100 characters",
}


@pytest.mark.parametrize(("text", "problem"), HOSTILE.items(), ids=lambda text: repr(text)[:30])
def test_hostile_yaml_is_refused_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "me.yaml"
    path.write_text(text)
    for load in (read_yaml, lambda path: load_recipe(str(path))):
        with pytest.raises(BadInput) as caught:
            load(path)
        line = str(caught.value)
        assert line.startswith(str(path))
        assert problem in line
        assert "\n" not in line
        assert len(line) < 500


@pytest.mark.parametrize("key", ["on", "5", "null", "2024-01-01", "1.5"])
def test_every_key_is_a_text(tmp_path: Path, key: str) -> None:
    assert parse_yaml(f"{key}: x", "f") == {key: "x"}
    (tmp_path / "me.yaml").write_text(f"{key}: x")
    with pytest.raises(BadInput, match=f"me.yaml: {key} is not a key"):
        load_recipe(str(tmp_path / "me.yaml"))


def test_good_yaml_is_read_as_before() -> None:
    text = "\ufeffa: &x [1, 2.5, 1e-4, yes, null]\nb: *x\nc: 2024-01-01\nd: {}\n"
    values = [1, 2.5, 1e-4, True, None]
    assert parse_yaml(text, "f") == {"a": values, "b": values, "c": "2024-01-01", "d": {}}
    many = "\n".join(f"k{i}: {i}" for i in range(MOST_VALUES - 1))
    assert len(parse_yaml(many, "f")) == MOST_VALUES - 1


def test_only_regular_utf8_files_are_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    zero = tmp_path / "zero.yaml"
    zero.symlink_to("/dev/zero")
    utf16 = tmp_path / "utf16.yaml"
    utf16.write_bytes("seed: 1".encode("utf-16"))
    problems = {pipe: "regular", zero: "regular", utf16: "UTF-8", tmp_path / "a\0.yaml": "path"}
    for path, problem in problems.items():
        with pytest.raises(BadInput, match=problem):
            load_recipe(str(path))


def test_values_of_python_have_the_same_limits() -> None:
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(BadInput, match="^recipe: a.a.*nested too deeply"):
        recipe_from(deep)
    with pytest.raises(BadInput, match="^recipe: a recipe is a mapping"):
        recipe_from([])  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="^settings: the key 3 is not a text"):
        load_recipe("docstrings-gpt", {3: 4})  # type: ignore[dict-item]
    with pytest.raises(BadInput, match="^settings: model.config.x = nan should be"):
        load_recipe("docstrings-gpt", {"model.config": {"x": float("nan")}})


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("__class__=1", "__class__ is not a key"),
        ("model.__class__.__init__=1", "model.__class__ is not a key"),
        ("a..b=1", "should be key=value"),
        ("=1", "should be key=value"),
        (".".join("a" * 50_000) + "=1", "nested too deeply"),
        ("about=" + "x" * 1_000_000, "more than 256 KiB of YAML"),
        ("about='" + "x" * 100_000, "is not a valid value"),
        ("x" * 10_000 + "=1", "is not a key"),
        ("seed=" + "x" * 10_000, "seed = 'xxx"),
        ("optim.lr=\udc80", "is not a valid value"),
        ("optim.lr=.inf", "--set optim.lr=.inf: the value = inf should be a finite number"),
        ("seed=&a [*a]", "nested too deeply"),
    ],
)
def test_hostile_settings_are_refused_in_a_short_line(setting: str, problem: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_recipe("docstrings-gpt", parse_settings([setting]))
    line = str(caught.value)
    assert line.startswith("--set ")
    assert problem in line
    assert "\n" not in line
    assert len(line) < 600


def test_recipes_that_extend_themselves_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "link.yaml").symlink_to("a.yaml")
    for spelling in ("./a.yaml", "../d/a.yaml", "link.yaml", str(folder / "a.yaml")):
        (folder / "a.yaml").write_text(f"extends: {spelling}")
        with pytest.raises(BadInput, match="extends itself") as caught:
            load_recipe(str(folder / "a.yaml"))
        assert str(caught.value).count("→") == 1
    for i in range(30):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml")
    with pytest.raises(BadInput, match="20.yaml ends a chain of more than 20 recipes"):
        load_recipe(str(tmp_path / "0.yaml"))


def test_a_recipe_name_is_one_path_part() -> None:
    assert recipe_name("..yaml") == "recipe"
    assert recipe_name("../..") == "recipe"
    assert recipe_name("a\n\x1b[31m/b.yaml") == "b"
    assert recipe_name("\x1b[31mx.yaml") == "31mx"
    assert len(recipe_name("x" * 10_000)) == 100

"""Records are read as their schema says, or refused by the key that does not fit."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from frostlab import typed
from frostlab.errors import BadInput
from frostlab.typed import check_schema, read


@dataclass(frozen=True)
class Inner:
    values: list[float]
    pair: tuple[int, str] | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    status: Literal["finished", "failed"]
    inner: Inner
    by_stage: dict[str, Inner]
    steps: int | None
    rate: float | dict[str, float] = 0.0
    flag: bool = False


GOOD = {
    "name": "x",
    "status": "finished",
    "inner": {"values": [1, 2.5], "pair": [3, "a"]},
    "by_stage": {"one": {"values": []}},
    "steps": None,
}


def test_values_become_dataclasses() -> None:
    outer = read(Outer, GOOD, "result.json")
    assert outer.inner == Inner([1, 2.5], (3, "a"))
    assert outer.by_stage["one"].pair is None
    assert not outer.flag


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "^result.json: name should be a text, but is 3$"),
        ({"steps": True}, "steps should be a whole number, but is True"),
        ({"steps": 2.5}, "steps should be a whole number"),
        ({"flag": 1}, "flag should be true or false"),
        ({"status": "done"}, "status should be 'finished' or 'failed', but is 'done'"),
        ({"inner": []}, "inner should be an object"),
        ({"inner": {"values": [1, "2"]}}, "inner.values.1 should be a number, but is '2'"),
        ({"inner": {"values": [1.5, 2**70]}}, "inner.values.1 should be a number of at most 64"),
        ({"inner": {"values": [], "pair": [1]}}, "inner.pair should be a list of 2 values"),
        ({"by_stage": {"one": {"value": []}}}, "by_stage.one.value is not a key; did you mean"),
        ({"by_stage": {"one": {}}}, "by_stage.one.values is missing"),
        ({"rate": "x"}, "rate should be a number or an object, but is 'x'"),
        ({"rate": {"new": "x"}}, "rate.new should be a number, but is 'x'"),
        ({"naem": "x"}, "naem is not a key; did you mean `name`?"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read(Outer, GOOD | change, "result.json")


def test_something_else_than_an_object() -> None:
    with pytest.raises(BadInput, match="^result.json: it should be an object, but is None$"):
        read(Outer, None, "result.json")


def test_a_file_of_another_schema_is_refused_with_both_schemas() -> None:
    assert check_schema({"schema": 3}, 3, "plan.json") == {"schema": 3}
    for values, message in (
        ({"schema": 2}, "plan.json has schema 2, and this frostlab reads 3; make it again"),
        ({"schema": "3\n"}, r"plan.json has schema '3\\n', and this frostlab reads 3; make"),
        ({}, "plan.json has no schema, and this frostlab reads 3; make it again"),
        ([], "plan.json is not a JSON object$"),
        (None, "plan.json is not a JSON object$"),
    ):
        with pytest.raises(BadInput, match=f"^{message}"):
            check_schema(values, 3, "plan.json", "; make it again")


def test_no_other_module_compares_schemas() -> None:
    source = Path(str(typed.__file__)).parent
    own = r"""get\("(schema|format)"|\["(schema|format)"\]|\bschema [!=]= |this frostlab reads"""
    others = [path for path in source.rglob("*.py") if path != source / "typed.py"]
    assert not [str(path) for path in others if re.search(own, path.read_text())]

"""The facts about metrics, words of verdicts and optimizers stand in one place each."""

import ast
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from comparing import rules_for
from frostlab.comparison.judging.verdict import MEANINGS
from frostlab.pages import chart_parts
from frostlab.pages.content import FORMATS
from frostlab.pages.one_run.run_report import metric_format
from frostlab.recipe.settings import METRICS, OPTIMIZERS, MetricFacts, all_metrics, metric_facts
from frostlab.training.evaluate import COMPUTED

SOURCE = Path(__file__).parents[1] / "src" / "frostlab"


def test_every_metric_of_a_text_task_is_computed_and_has_facts() -> None:
    assert set(COMPUTED) == set(METRICS) - {"envelope"}
    for task, functions in COMPUTED.items():
        assert set(functions) == set(METRICS[task])


@pytest.mark.parametrize("name", all_metrics())
def test_a_metric_has_all_facts_where_metrics_are_listed(name: str) -> None:
    facts = metric_facts(name)
    least, most = facts.bounds
    assert -math.inf < least < most, "charts cut intervals off at its bounds"
    of_errors = facts.compared_by == "error rate"
    assert not of_errors or (facts.bounds == (0.0, 1.0) and not facts.lower_is_better)
    assert (facts.margin is None) == (name == "loss"), "the default margin of comparisons"
    rules = rules_for(name)
    assert (rules.lower_is_better, rules.log) == (
        facts.lower_is_better, facts.compared_by == "ratio"
    )  # fmt: skip
    assert rules.of_errors == of_errors
    assert metric_format(name) == facts.form in FORMATS
    stages = [{"metrics": {name: 0.25}}, {"metrics": {name: 0.5}}]
    better = FORMATS[f"change of {name}"](stages)
    assert better.startswith("-" if facts.lower_is_better else "+")
    rows = [{"low": least - 1, "high": least + 0.5}]
    assert chart_parts.cut_off(rows, name)
    assert rows[0] == {"low": least, "high": least + 0.5}


def test_the_facts_of_an_unknown_metric_are_the_defaults() -> None:
    assert metric_facts("mine") == MetricFacts()
    assert metric_format("mine") == "number"


def collections(text: str) -> list[set[object]]:
    """Return the constants in each list, tuple, set and dict (its keys) of a module."""
    members = [
        node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        for node in ast.walk(ast.parse(text))
    ]
    return [{item.value for item in items if isinstance(item, ast.Constant)} for items in members]


@cache
def modules() -> dict[str, list[set[object]]]:
    return {
        str(path.relative_to(SOURCE)): collections(path.read_text())
        for path in SOURCE.rglob("*.py")
    }


def listed(constants: Iterable[set[object]], names: Iterable[str]) -> set[object]:
    """Return the most names that a module has in one list, tuple, set or dict."""
    wanted = set[object](names)
    return max((values & wanted for values in constants), key=len, default=set())


def lists_of(names: Iterable[str], fewest: int) -> dict[str, set[object]]:
    """Return the modules that list at least `fewest` of the names, with the names."""
    listings = {module: listed(constants, names) for module, constants in modules().items()}
    return {module: listing for module, listing in listings.items() if len(listing) >= fewest}


def test_two_modules_list_metrics() -> None:
    lists = lists_of(set(all_metrics()) - {"loss"}, 2)
    assert lists.pop("comparison/judging/pairing.py") == {"accuracy", "macro_f1"}, (
        "follow from predictions"
    )
    assert set(lists) <= {"recipe/settings.py", "training/evaluate.py"}
    shares = collections("SHARES = ('accuracy', 'macro_f1')")
    assert listed(shares, all_metrics()) == {"accuracy", "macro_f1"}


def test_two_modules_list_the_words_of_verdicts() -> None:
    lists = lists_of(MEANINGS, 3)
    faster_slower_same = lists.pop("pages/languages/sentences.py")
    assert faster_slower_same == {"better", "worse", "no difference found"}
    assert set(lists) == {"comparison/judging/verdict.py", "pages/languages/words.py"}


def test_one_module_lists_optimizers() -> None:
    assert set(lists_of(OPTIMIZERS, 2)) == {"recipe/settings.py"}

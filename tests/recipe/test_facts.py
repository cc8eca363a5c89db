"""Metrics have one table of facts, from which everything that knows metrics by name derives."""

import ast
import math
from pathlib import Path

import pytest

from frostlab.comparison.plan import rules_for
from frostlab.pages import figures
from frostlab.pages.content import FORMATS
from frostlab.pages.one_run.run_report import metric_format
from frostlab.recipe.settings import METRICS, MetricFacts, all_metrics, metric_facts
from frostlab.training.evaluate import COMPUTED

SOURCE = Path(__file__).parents[2] / "src" / "frostlab"
# Two metrics that follow from a run's predictions, from which a comparison computes them again.
RECOMPUTED = {"comparison/pairing.py": {"accuracy", "macro_f1"}}


def test_every_metric_of_a_text_task_is_computed_and_has_facts() -> None:
    assert set(COMPUTED) == set(METRICS) - {"envelope"}
    for task, functions in COMPUTED.items():
        assert set(functions) == set(METRICS[task])


@pytest.mark.parametrize("name", all_metrics())
def test_a_metric_has_all_facts_where_metrics_are_listed(name: str) -> None:
    facts = metric_facts(name)
    least, most = facts.bounds
    assert -math.inf < least < most, "charts cut intervals off at its bounds"
    is_share = facts.bounds == (0.0, 1.0)
    assert (facts.form == "percent") == (facts.compared_by == "error rate") == is_share
    assert (facts.margin is None) == (name == "loss"), "the default margin of comparisons"
    rules = rules_for(name)
    assert (rules.lower_is_better, rules.log) == (
        facts.lower_is_better, facts.compared_by == "ratio"
    )  # fmt: skip
    assert rules.of_errors == is_share
    assert metric_format(name) == facts.form in FORMATS
    stages = [{"metrics": {name: 0.25}}, {"metrics": {name: 0.5}}]
    better = FORMATS[f"change of {name}"](stages)
    assert better.startswith("-" if facts.lower_is_better else "+")
    rows = [{"low": least - 1, "high": least + 0.5}]
    assert figures.cut_off(rows, name)
    assert rows[0] == {"low": least, "high": least + 0.5}


def test_the_facts_of_an_unknown_metric_are_the_defaults() -> None:
    assert metric_facts("mine") == MetricFacts()
    assert metric_format("mine") == "number"


def listed_metrics(text: str) -> set[str]:
    """Return the metrics that a module names in one list, tuple, set or dict."""
    known, found = set(all_metrics()) - {"loss"}, set[str]()
    for node in ast.walk(ast.parse(text)):
        members = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        names = {member.value for member in members if isinstance(member, ast.Constant)} & known
        found |= names if len(names) > 1 else set()
    return found


def test_no_other_module_lists_metrics() -> None:
    lists = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*.py")
        if (names := listed_metrics(path.read_text()))
    }
    tables = {"recipe/settings.py", "training/evaluate.py"}
    assert {path: names for path, names in lists.items() if path not in tables} == RECOMPUTED
    assert listed_metrics("SHARES = ('accuracy', 'macro_f1')") == {"accuracy", "macro_f1"}

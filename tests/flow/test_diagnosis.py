"""The targets of a run: for any recipe, and reached only together."""

from pathlib import Path

import pytest

import frostlab as fl
from frostlab.flow.diagnosis import FLOW_TARGETS, Target, diagnose, targets_of, targets_table
from hearing import hearing
from tiny import tiny


def test_targets_pass_only_together() -> None:
    good = Target("pearson", 0.31, 0.3)
    assert targets_table((good,)).startswith("targets: pass\n  validation pearson  0.31")
    for bad in (Target("pearson", 0.3, 0.3), Target("pearson", None, 0.3)):
        assert targets_table((good, bad)).startswith("targets: fail")


def test_a_target_below_which_a_metric_should_fall() -> None:
    assert Target("perplexity", 19.0, 20.0).reached
    assert not Target("perplexity", 20.0, 20.0).reached
    assert "validation perplexity  19  wanted < 20  pass" in targets_table(
        (Target("perplexity", 19.0, 20.0),)
    )


@pytest.mark.parametrize(
    ("recipe", "metric", "wanted"),
    [
        (tiny(watch={}), None, None),
        (tiny(watch={}, evaluate__target=0.01), "accuracy", 0.01),
        (tiny(watch={}, evaluate__metric="loss", evaluate__target=50.0), "loss", 50.0),
    ],
)
def test_a_recipe_says_what_is_wanted_of_its_metric(
    recipe: dict[str, object], metric: str | None, wanted: float | None, tmp_path: Path
) -> None:
    record = fl.run(recipe, out=tmp_path / "run")
    targets = targets_of(diagnose(record.folder))
    expected = [] if metric is None else [(metric, wanted)]
    assert [(t.name, t.wanted) for t in targets] == expected
    for target in targets:
        assert target.value == record.result.best.value
        assert target.reached


def test_envelopes_are_wanted_to_correlate_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    record = fl.run(hearing(train__epochs=1, watch={}), out=tmp_path / "run")
    assert diagnose(record.folder).wanted == FLOW_TARGETS | {"pearson": 0.3}
    values = (record.folder / "recipe.yaml").read_text()
    (record.folder / "recipe.yaml").write_text(values.replace("target: null", "target: 0.2"))
    assert diagnose(record.folder).wanted["pearson"] == 0.2
    (record.folder / "recipe.yaml").write_text("another version: of frostlab")
    assert diagnose(record.folder).wanted == FLOW_TARGETS | {"pearson": 0.3}

"""Groups of experiments: shipped ones are valid, and errors take one line."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from frostlab import BadInput
from frostlab.recipe.groups import group_names, load_group
from frostlab.recipe.load import shipped_experiments


@pytest.mark.parametrize("name", group_names())
def test_every_shipped_group_is_valid_and_described(name: str) -> None:
    group = load_group(name)
    assert group.name == name
    assert 20 < len(group.about) < 110
    for comparison in group.published:
        recipes = [group.recipe(arm) for arm in group.arms(comparison)]
        assert len({recipe.data.name for recipe in recipes}) == 1, "arms share their data"


def test_every_experiment_is_in_a_group() -> None:
    grouped = {name for group in group_names() for name in load_group(group).experiments}
    assert set(shipped_experiments()) <= grouped


def test_a_group_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text("extends: docstrings-demo\noptim: {lr: 1e-4}\n")
    (tmp_path / "mine.yaml").write_text(
        "about: mine\n"
        "experiments: {docstrings-demo: {reported: {accuracy: 0.5}}, slow.yaml: {optional: true}}\n"
        "published: {rates: [docstrings-demo, slow.yaml]}\n"
        "fair:\n"
        "  rates: {recipe: docstrings-demo, arms: [baseline, oelm]}\n"
        "  decay: {recipe: docstrings-demo, arms: [baseline, oelm], tune: decay}\n"
        "  shipped: eeg-scales\n"
    )
    group = load_group(str(tmp_path / "mine.yaml"))
    assert group.name == "mine"
    assert group.recipe("slow.yaml").optim.lr == 1e-4, "a path is relative to the group's file"
    assert group.arms("rates") == ("docstrings-demo", "slow.yaml")
    assert group.experiments["docstrings-demo"].reported == {"accuracy": 0.5}
    tuned = {name: comparison["tune"] for name, comparison in group.fair.items()}
    assert tuned == {"rates": "lr", "decay": "decay", "shipped": "lr"}
    assert group.fair["shipped"]["recipe"] == "eeg-conformer-v2"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"abuot": "x"}, "abuot is not a key of a group; did you mean `about`?"),
    ({"about": None}, "about None: Input should be a valid string"),
    ({"experiments": {"gpt-1": {}}}, "no recipe is called gpt-1; did you mean `gpt-0"),
    ({"experiments": {"gpt-01": {"optionl": True}}},
     "experiments.gpt-01.optionl is not a key of a group; did you mean `optional`?"),
    ({"published": {"a": ["gpt-01"]}}, "published.a.arms needs two or more different experiments"),
    ({"published": {"a": ["gpt-01", "gpt-01"]}}, "published.a.arms needs two or more different"),
    ({"published": {"a": ["gpt-01", "gpt-03"]}},
     "published.a: gpt-03 is not among the group's experiments; did you mean `gpt-0"),
    ({"published": {"a": {"arms": "gpt-01"}}}, "published.a.arms should be a list of experiments"),
    ({"published": {"a": 3}}, "published.a 3: Input should be an object"),
    ({"interactions": [dict.fromkeys(("question", "arm", "comparison", "against", "arms"), "a")]},
     "interactions.0.arms is not a key of a group; did you mean `arm`?"),
    ({"published": {}}, "the group has no comparison; add published or fair"),
    ({"fair": {"a": "grwoth"}},
     "fair.a 'grwoth': no comparison is called grwoth; did you mean `growth`?"),
    ({"fair": {"a": [1]}}, "fair.a [1]: Input should be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "problem"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_group_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    values: dict[str, Any] = {
        "about": "mine",
        "experiments": {"gpt-01": {}, "gpt-02": {}},
        "published": {"tinystories": ["gpt-01", "gpt-02"]},
    }
    path = tmp_path / "group.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    with pytest.raises(BadInput) as caught:
        load_group(str(path))
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_groups_that_are_not_there() -> None:
    with pytest.raises(BadInput, match="no group is called 'phase33'; did you mean `phase3`"):
        load_group("phase33")
    with pytest.raises(BadInput, match=r"nowhere\.yaml cannot be read"):
        load_group("nowhere.yaml")

"""Looks are counted over all folders in which one question was asked."""

from pathlib import Path
from typing import Any

import pytest

from comparing import compare, plan
from frostlab.comparison.judging import looks
from frostlab.comparison.judging.looks import Looks, take_look
from frostlab.comparison.plan import Plan
from frostlab.errors import BadInput
from frostlab.storage import cache_folder


def results(plan: Plan, shift: float = 0.0, **changed: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        plan.recipe_of(arm, seed).digest: 0.5 + 0.01 * seed + shift
        for arm in plan.arms
        for seed in plan.seeds
    }
    for arm in plan.arms:
        if arm.name in changed:
            values[plan.recipe_of(arm, 0).digest] = changed[arm.name]
    return values


def look(plan: Plan, folder: Path, shift: float = 0.0, known: Any = (), **changed: Any) -> Looks:
    return take_look(plan, folder, results(plan, shift, **changed), known)


def test_another_folder_metric_or_list_of_seeds_is_another_look(tmp_path: Path) -> None:
    first = plan(seeds=6)
    assert look(first, tmp_path / "a").number == 1
    assert look(first, tmp_path / "a").number == 1  # the same results again
    assert look(first, tmp_path / "copy").number == 1  # copied runs give the same results
    chosen = plan(seeds=[0, 2, 4, 6, 8])
    again = look(chosen, tmp_path / "b")
    assert again.number == 2
    assert [(each.folder, each.metric) for each in again.earlier] == [
        (str(tmp_path / "a"), "accuracy")
    ]
    assert look(plan(seeds=6, metric="loss"), tmp_path / "c").number == 3
    assert look(plan(seeds=8), tmp_path / "a").number == 4
    assert look(first, tmp_path / "a").number == 1


def test_a_failed_run_that_comes_back_is_another_look(tmp_path: Path) -> None:
    made = plan(seeds=6)
    assert look(made, tmp_path, oelm="failed").number == 1
    assert look(made, tmp_path).number == 2


def test_other_questions_are_not_counted(tmp_path: Path) -> None:
    look(plan(), tmp_path / "a")
    assert look(plan(arms=["baseline", "oelm-random"]), tmp_path / "b").number == 1
    assert look(plan(arms=["oelm", "oelm-random"]), tmp_path / "c").number == 1
    assert look(plan(set={"train.epochs": 9}), tmp_path / "d").number == 1
    assert look(plan(arms=["baseline", "oelm-random", "oelm"]), tmp_path / "e", 0.1).number == 4


@pytest.mark.parametrize(
    "again",
    [
        {"arms": ["oelm", "baseline"], "seeds": 8},
        {"set": {"watch.every_n_steps": 7}, "seeds": 8},
        {"alpha": 0.2},
        {"contrasts": [{"question": "Is it?", "arm": "oelm", "against": "baseline"}]},
        {"tune": {"values": [1e-3, 3e-3]}},
        {"looks": 2, "seeds": 8},
    ],
)
def test_the_same_question_in_other_words_is_another_look(
    again: dict[str, Any], tmp_path: Path
) -> None:
    first = look(plan(), tmp_path / "a")
    other = plan(**again)
    more = {"a run that was tried": 0.5} if "tune" in again else {}
    second = take_look(other, tmp_path / "b", results(other) | more, ())
    assert (first.number, second.number) == (1, 2)
    assert (first.spent, second.spent) == (0.0, 0.05)


def test_an_arms_name_changes_nothing(tmp_path: Path) -> None:
    look(plan(), tmp_path / "a")
    renamed = plan(arms=["baseline", {"name": "mine", "treatment": "oelm"}])
    assert look(renamed, tmp_path / "b", 0.1).number == 2


def test_a_folder_remembers_its_looks_on_another_machine(tmp_path: Path) -> None:
    made = plan(seeds=6)
    first = look(made, tmp_path)
    (cache_folder(None) / looks.REGISTER).unlink()
    more = plan(seeds=8)
    second = look(more, tmp_path, known=[first.current])
    assert (second.number, second.spent) == (2, 0.05)
    (cache_folder(None) / looks.REGISTER).write_bytes(b"{\n[1]\n\xff" * 3)
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        look(more, tmp_path)
    (cache_folder(None) / looks.REGISTER).write_text('{"recipe": 3}\n[\nnull\n{"rec')
    assert look(more, tmp_path).number == 1  # lines that are no looks count as none
    assert look(made, tmp_path).number == 2  # a line that was cut off takes no other with it


def test_a_look_without_a_verdict_does_not_count(tmp_path: Path) -> None:
    assert look(plan(seeds=4), tmp_path / "a").number == 1
    assert look(plan(seeds=6), tmp_path / "b").number == 1


@pytest.mark.slow
def test_the_page_names_the_siblings_and_what_is_left_of_alpha(tmp_path: Path) -> None:
    compare(tmp_path / "a", seeds=5)
    second = compare(tmp_path / "b", seeds=[1, 2, 3, 4, 5])
    text = second.page.read_text()
    assert second.evidence.look == 2
    (earlier,) = second.evidence.earlier_looks
    assert earlier.folder == str(tmp_path / "a")
    assert "look 2 at this question: it spends 0.0125 of alpha" in text
    assert "earlier look: " in text

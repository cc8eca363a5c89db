"""The page and the terminal show what was found."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

import frostlab as fl
from comparing import LANGUAGE, LAYERS, compare
from frostlab.comparison.evidence import (
    Answer,
    StageSummary,
    TunedSetting,
    TuningPoint,
    VariedFact,
)
from frostlab.comparison.measures.show import run_times, step_times
from frostlab.comparison.page import page, show
from frostlab.text import NONE
from fuzz.targets_pages import tokens


def test_the_page_says_what_was_found(made: fl.Comparison) -> None:
    text = made.page.read_text()
    for verdict in made.verdicts.values():
        assert verdict.sentence in text
    assert "by digest" in text
    assert text.count("| finished |") == 18
    for question in ("How large is the gap?", "Is OELM faster?", "Is orthogonality needed?"):
        assert question in text


def test_the_page_says_what_every_arm_does(made: fl.Comparison) -> None:
    text = made.page.read_text()
    assert "- **baseline** (the baseline): everything trains\n" in text
    assert "- **oelm**: query and key of every head: orthogonal, frozen; the rest trains\n" in text
    hot = replace(
        made.evidence,
        plan=made.evidence.plan.model_copy(
            update={"arms": tuple(arm.model_copy(update={"set": {"optim.lr": 0.01}})
                                  for arm in made.evidence.plan.arms)}
        ),
    )  # fmt: skip
    assert "with standard deviation 0.02, frozen; the rest trains; set: optim.lr 0.01\n" in page(
        hot
    )


def test_the_page_shows_the_share_of_clipped_steps(made: fl.Comparison) -> None:
    rows = {name: line.split("|") for line in made.page.read_text().splitlines()
            for name in made.evidence.arms if line.startswith(f"| {name} | 6 of 6 |")}  # fmt: skip
    for name, arm in made.evidence.arms.items():
        shares = [run.clipped_steps / run.steps for run in arm.runs]
        assert rows[name][-2].strip() == f"{fmean(shares):.1%}"
    assert len({cells[-2] for cells in rows.values()}) > 1
    without = replace(made.evidence, arms={
        name: replace(arm, runs=tuple(replace(run, clipped_steps=None) for run in arm.runs))
        for name, arm in made.evidence.arms.items()
    })  # fmt: skip
    assert f"% | {NONE} |\n" in page(without)


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_language_model(seeds: int, tmp_path: Path) -> None:
    found = compare(tmp_path / "c", recipe=LANGUAGE, seeds=seeds)
    assert "P(cost > 1.05 ×)" in found.page.read_text()


def test_the_page_answers_the_questions(tmp_path: Path) -> None:
    found = fl.compare(LAYERS | {"seeds": 2}, out=tmp_path / "c")
    text = found.page.read_text()
    assert "1. **Do two layers help?** too few seeds to judge two against one" in text
    assert (
        "2. **Does freezing hurt with two?** too few seeds to judge two-frozen against two" in text
    )
    assert "The five questions" not in text
    assert "- Compared settings: model.layers." in text
    assert "- two: model.layers 2" in text
    assert not found.evidence.refused_pairs  # other weights, as models of other sizes have
    for verdict in (answer.verdict for answer in found.evidence.contrasts):
        ours, theirs = (
            [run.metrics["accuracy"] for run in found.evidence.arms[name].runs]
            for name in (verdict.arm, verdict.baseline)
        )
        gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
        assert verdict.paired.effect == pytest.approx(sum(gaps) / 2)


def test_the_terminal_shows_its_own_questions(heard: fl.Comparison) -> None:
    said = show(heard.evidence, heard.page)
    assert "Better? too few seeds" in said
    assert "Is orthogonality needed?" not in said


EVIL = "a|b <img src=x onerror=alert(1)> [x](javascript:alert(1)) `c` \x1b[31m\ud800\n# d"


def test_hostile_texts_are_shown_not_obeyed(made: fl.Comparison) -> None:
    evidence = made.evidence
    verdicts = {
        name: replace(verdict, sentence=EVIL, notes=(EVIL,))
        for name, verdict in evidence.verdicts.items()
    }
    answer = Answer(EVIL, "value", next(iter(verdicts.values())))
    arms = {
        name: replace(arm, runs=tuple(replace(run, error=EVIL, folder=EVIL) for run in arm.runs))
        for name, arm in evidence.arms.items()
    }
    spoilt = replace(
        evidence, caution=EVIL, contrasts=(answer,), arms=arms,
        made=replace(evidence.made, machine=EVIL, command=EVIL, versions={EVIL: EVIL}),
        varied_facts=(VariedFact(EVIL, {EVIL: (0,)}),),
        verdicts=verdicts,
        confounds=dict.fromkeys(evidence.confounds, (EVIL,)),
    )  # fmt: skip
    text = page(spoilt)
    assert all(line.isprintable() for line in text.split("\n"))
    found = tokens(text)
    assert not {"html_inline", "html_block", "image", "code_inline"} & {t.type for t in found}
    links = [token.attrs["href"] for token in found if token.type == "link_open"]
    assert len(links) == 18
    assert all(link.startswith("a%7Cb%20%3Cimg") for link in links)
    assert sum(token.type == "h1" or token.tag == "h1" for token in found) == 2  # open and close
    said = show(spoilt, Path(EVIL))
    assert all(line.isprintable() for line in said.split("\n"))
    said.encode()


def test_the_page_says_what_the_runs_were_trained_on(made: fl.Comparison) -> None:
    section = made.page.read_text().split("## Data\n\n")[1].split("\n\n## ")[0]
    data = made.evidence.data
    assert data is not None
    for name, split in data.splits.items():
        assert f"| {name} | {split.examples:,} |" in section
        assert split.digest[:16] in section


def test_bars_of_tuning_have_one_scale_for_all_arms(made: fl.Comparison) -> None:
    def curve(*means: float) -> tuple[TuningPoint, ...]:
        return tuple(TuningPoint(10.0**-n, mean, None, None, (), (), 0)
                     for n, mean in enumerate(means, 1))  # fmt: skip

    names = list(made.evidence.arms)
    curves = dict(zip(names, [curve(0.0, 0.5), curve(0.5, 1.0), curve(0.5, 0.5)], strict=True))
    tuned = TunedSetting("optim.lr", (0.01, 0.1), False, dict.fromkeys(names, 0.1),
                         dict.fromkeys(names, False), curves)  # fmt: skip
    lines = page(replace(made.evidence, tuning=(tuned,))).splitlines()
    bars = [line.count("▇") for line in lines if "▇" in line]
    assert bars[1] == bars[2] == bars[4] == bars[5]  # equal scores have equal bars
    assert bars[0] < bars[1] < bars[3]


@pytest.mark.parametrize(
    ("first", "last", "change"), [(0.5, 0.6, "+20.00%"), (-0.1, 0.1, "+200.00%"), (0.0, 0.1, "")]
)
def test_a_stage_that_improved_has_a_positive_change(
    first: float, last: float, change: str, made: fl.Comparison
) -> None:
    evidence = made.evidence
    stages = tuple(StageSummary(name, "pearson", best, 1.0, 1.0, 5, 9)
                   for name, best in (("one", first), ("two", last)))  # fmt: skip
    arm = evidence.arms[evidence.baseline]
    runs = tuple(replace(run, stages=stages) for run in arm.runs)
    arms = {**evidence.arms, evidence.baseline: replace(arm, runs=runs)}
    text = page(replace(evidence, arms=arms)).partition("## Stages")[2]
    row = next(line for line in text.splitlines() if "| two |" in line)
    assert row.strip("| ").split("|")[-1].strip() == (change or "1")


def test_every_column_of_times_has_a_name(spoken: fl.Comparison) -> None:
    for section in (step_times, run_times):
        head = section(spoken.evidence).partition("\n")[0]
        assert head
        assert all(title.strip() for title in head.strip("|").split("|"))

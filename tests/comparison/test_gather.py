"""Evidence from whole comparisons: runs, pairs, verdicts, subjects, gradients, stages."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import frostlab as fl
from comparing import GROWN, HEARING, LANGUAGE, compare, plant, reseal
from frostlab.comparison.evidence import RefusedPair
from frostlab.comparison.gather import _at_chance
from frostlab.comparison.load import make_plan
from frostlab.comparison.measures.eeg import subject_tests
from frostlab.comparison.run import judge_again
from frostlab.flow.diagnosis import diagnose
from frostlab.records.folder import RunRecord
from frostlab.records.manifest import write_manifest


def test_every_file_is_there_and_agrees(made: fl.Comparison) -> None:
    evidence = made.evidence
    assert set(evidence.arms) == {"baseline", "oelm", "oelm-random"}
    assert set(made.verdicts) == {"oelm", "oelm-random"}
    for name, arm in evidence.arms.items():
        for run in arm.runs:
            record = RunRecord(made.folder / run.folder)
            assert record.result.seed == run.seed
            assert record.metrics == run.metrics
            assert record.result.treatment == name
    values = [run.metrics["accuracy"] for run in evidence.arms["oelm"].runs]
    base = [run.metrics["accuracy"] for run in evidence.arms["baseline"].runs]
    effect = sum(a - b for a, b in zip(values, base, strict=True)) / 6
    assert made.verdicts["oelm"].paired.effect == pytest.approx(effect)
    assert len(evidence.rounds["oelm"].seconds) == 1
    assert evidence.rounds["oelm"].paired.effect > 0
    assert len(evidence.mcnemar["oelm"]) == 6


def test_orthogonality_knows_of_confounds(tmp_path: Path) -> None:
    arms = ["baseline", "oelm", {"name": "oelm-random", "treatment": "oelm-random",
                                 "set": {"optim.lr": 0.01}}]  # fmt: skip
    found = compare(tmp_path / "c", arms=arms, allow_confounds=["lr"], seeds=1)
    assert found.evidence.orthogonality.word == "confounded"


def test_a_perplexity_beyond_numbers_counts_as_failed(tmp_path: Path) -> None:
    hot = {"name": "hot", "treatment": "oelm", "set": {"optim.lr": 300.0, "optim.clip": None}}
    given = {"recipe": LANGUAGE, "arms": ["baseline", hot], "allow_confounds": ["lr", "clip"]}
    for _ in range(2):
        found = compare(tmp_path / "c", seeds=1, **given)
    (run,) = found.evidence.arms["hot"].runs
    assert run.status != "finished" or run.metrics["perplexity"] is None
    verdict = found.verdicts["hot"]
    assert verdict.missing == {"hot": 1}
    assert verdict.paired is not None
    assert verdict.paired.high is None


def test_a_caution_is_shown_and_other_data_are_not_paired(tmp_path: Path) -> None:
    found = compare(tmp_path / "c")
    assert "Caution" not in found.page.read_text()
    for name in ("baseline", "oelm"):
        plant(tmp_path / "c" / "runs" / f"{name}-s0" / "result.json", caution="selected on it")
        plant(tmp_path / "c" / "runs" / f"{name}-s1" / "digests.json", data="another")
    reseal(tmp_path / "c")
    again = compare(tmp_path / "c")
    assert "Caution: selected on it." in again.page.read_text()
    (refused,) = again.evidence.refused_pairs
    assert (refused.seed, refused.reason) == (
        1, "the data differ from those of the first finished run (baseline, seed 0)",
    )  # fmt: skip
    assert again.verdicts["oelm"].paired.n == 1
    assert again.evidence.pairs == 1
    (kept, _) = again.evidence.arms["oelm"].runs
    summary = again.evidence.arms["oelm"].metrics["accuracy"]
    assert (summary.n, summary.mean) == (1, kept.metrics["accuracy"])
    values = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert values["oelm_freeze"]["performance"]["best_accuracy"] == kept.metrics["accuracy"]


def edit_report(run: Path, **metrics: float) -> None:
    """Change reported metrics in the result and in the events, and write a new manifest."""
    report = {**RunRecord(run).result.report, **metrics}
    plant(run / "result.json", report=report)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event.get("split") == "report":
            event["metrics"] = report
    (run / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    write_manifest(run)


def test_an_edited_run_is_refused_and_no_look_is_taken(tmp_path: Path) -> None:
    compare(tmp_path / "c", seeds=1)
    evidence = (tmp_path / "c" / "evidence.json").read_text()
    run = tmp_path / "c" / "runs" / "oelm-s0"
    report = RunRecord(run).result.report
    plant(run / "result.json", report={**report, "accuracy": 1.0})
    with pytest.raises(fl.BadInput) as refused:
        compare(tmp_path / "c", seeds=1)
    assert str(refused.value) == (
        f"{run / 'result.json'} was changed after it was written; delete {run} to train it again"
    )
    write_manifest(run)  # the manifest fits, but the events do not
    with pytest.raises(fl.BadInput, match=r"reported metrics are not those in events\.jsonl"):
        judge_again(tmp_path / "c")
    events = (run / "events.jsonl").read_text()
    edit_report(run, accuracy=1.0)  # the events fit, too, but the predictions do not
    with pytest.raises(fl.BadInput, match=r"report\.accuracy is 1\.0, but predictions\.json gives"):
        judge_again(tmp_path / "c")
    (run / "events.jsonl").write_text(events)
    plant(run / "result.json", report=report)
    edit_report(run, macro_f1=1.0)
    with pytest.raises(fl.BadInput, match=r"report\.macro_f1 is 1\.0, but predictions\.json gives"):
        judge_again(tmp_path / "c")
    assert (tmp_path / "c" / "evidence.json").read_text() == evidence
    shutil.rmtree(run)
    assert compare(tmp_path / "c", seeds=1).evidence.look == 1


@pytest.fixture(scope="module")
def assayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with trials, rounds and an assay; tests edit copies of it."""
    folder = tmp_path_factory.mktemp("assayed") / "c"
    compare(folder, seeds=1, rounds=1, tune={"values": [1e-3, 3e-3]}, assay=True)
    return folder


@pytest.mark.parametrize("where", ["repeat/baseline*-s0", "rounds/oelm*-r1", "assay/s0"])
def test_an_edited_run_is_refused_wherever_it_is(where: str, assayed: Path, tmp_path: Path) -> None:
    shutil.copytree(assayed, tmp_path / "c")
    (run,) = (tmp_path / "c").glob(where)
    (run / "predictions.json").unlink()
    with pytest.raises(fl.BadInput, match=r"predictions\.json is missing; delete"):
        judge_again(tmp_path / "c")


@pytest.mark.parametrize("name", ["plan.json", "tuning.json", "assay.json"])
def test_edited_inputs_of_a_comparison_are_refused(
    name: str, assayed: Path, tmp_path: Path
) -> None:
    shutil.copytree(assayed, tmp_path / "c")
    path = tmp_path / "c" / name
    path.write_text(path.read_text() + "\n")
    with pytest.raises(fl.BadInput, match=f"{name} was changed after it was written; restore it"):
        judge_again(tmp_path / "c")


def test_stages_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fl.compare(GROWN, out=tmp_path / "c", progress=True)
    lines = capsys.readouterr().err.splitlines()
    evidence, text = found.evidence, found.page.read_text()
    assert evidence.refused_pairs == ()  # the same examples in the same order
    assert evidence.timing is None
    assert "step timing is skipped, because steps differ between stages" in lines
    verdicts = {answer.question: answer.verdict for answer in evidence.contrasts}
    gains = {
        name: [
            math.log(run.stages[1].best / run.stages[0].best) for run in evidence.arms[name].runs
        ]
        for name in ("deep", "grown")
    }
    gap = [a - b for a, b in zip(gains["deep"], gains["grown"], strict=True)]
    assert abs(sum(gap)) > 1e-4
    assert verdicts["Is it easier?"].paired.effect == pytest.approx(math.exp(sum(gap) / 2))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines()]
    place = next(i for i, row in enumerate(rows) if row[:2] == ["grown", "one layer"])
    first, second = rows[place], rows[place + 1]
    runs = evidence.arms["grown"].runs
    bests = [sum(run.stages[i].best for run in runs) / len(runs) for i in range(2)]
    assert (first[-1], second[-1]) == ("", f"{1 - bests[1] / bests[0]:+.2%}")
    assert second[:2] == ["", "grown"]


@pytest.mark.parametrize(("split", "people"), [("report", 3), ("unseen", 2)])
def test_subjects_are_pairs(heard: fl.Comparison, split: str, people: int) -> None:
    found = heard.evidence.subjects
    assert set(found) == {"report", "unseen"}
    test, other = (found[split].subjects[arm] for arm in ("v2", "head"))
    z = {}
    for arm in ("v1", "v2"):
        scores = [
            RunRecord(heard.folder / "runs" / f"{arm}-s{s}").envelope_scores[0][split]
            for s in (0, 1)
        ]
        of_seeds = [[np.arctanh(each.r) for each in one["model"].subjects] for one in scores]
        z[arm] = np.mean(of_seeds, axis=0)
    assert (test.n, test.seeds) == (people, 2)
    assert test.r == pytest.approx(np.tanh(z["v2"].mean()) - np.tanh(z["v1"].mean()))
    low, high = sorted([test.p, other.p])
    holm = {low: min(1, 2 * low), high: min(1, max(2 * low, high))}
    assert [each.p_adjusted for each in (test, other)] == [holm[test.p], holm[other.p]]
    assert test.better == (z["v2"] > z["v1"]).sum()
    assert test.z.effect == pytest.approx((z["v2"] - z["v1"]).mean())
    assert test.p == pytest.approx(stats.ttest_rel(z["v2"], z["v1"]).pvalue)
    apart = np.tanh(z["v2"]) - np.tanh(z["v1"])
    assert test.p_signed == pytest.approx(stats.wilcoxon(apart).pvalue)


def test_a_refused_run_is_no_pair(heard: fl.Comparison) -> None:
    plan = make_plan(HEARING, {"seeds": 2})
    runs = {
        (arm.name, s): RunRecord(heard.folder / "runs" / f"{arm.name}-s{s}")
        for arm in plan.arms
        for s in plan.seeds
    }
    found = subject_tests(plan, runs, [RefusedPair("v2", 0, "for a test")])["report"]
    assert [found.subjects[arm].seeds for arm in ("v2", "head")] == [1, 2]
    of_both = [runs[arm, 1].metrics["pearson"] for arm in ("v2", "v1")]
    assert found.subjects["v2"].r == pytest.approx(of_both[0] - of_both[1])


def test_every_arm_stands_beside_the_ridge_decoder(heard: fl.Comparison) -> None:
    ridge = heard.evidence.subjects["report"].ridge["v1"]
    runs = [run.metrics for run in heard.evidence.arms["v1"].runs]
    apart = [metrics["pearson"] - metrics["ridge"] for metrics in runs]
    assert ridge.effect == pytest.approx(np.mean(apart))
    assert ridge.n == 2
    text = heard.page.read_text()
    assert "## Subjects" in text
    assert "r − ridge, over seeds" in text


def test_segments_are_scored_as_in_the_challenge(heard: fl.Comparison) -> None:
    found = heard.evidence.segments
    assert set(found) == set(heard.evidence.arms)
    score = {}
    for arm in ("v1", "v2"):
        runs = [run.metrics for run in heard.evidence.arms[arm].runs]
        by_key = {
            "seen": "segment_pearson", "seen_std": "segment_std",
            "unseen": "segment_pearson_unseen", "unseen_std": "segment_std_unseen",
            "score": "challenge",
        }  # fmt: skip
        for name, metric in by_key.items():
            wanted = np.mean([metrics[metric] for metrics in runs])
            assert found[arm][name].summary.mean == pytest.approx(wanted)
        score[arm] = np.array([metrics["challenge"] for metrics in runs])
    assert found["v1"]["score"].against is None
    against = found["v2"]["score"].against
    assert (against.n, against.log) == (2, False)
    assert against.effect == pytest.approx((score["v2"] - score["v1"]).mean())
    text = heard.page.read_text()
    assert "## Segments" in text
    assert f"| {score['v2'].mean():.4f} ± {score['v2'].std(ddof=1):.4f} |" in text
    assert f"| {against.effect:+.4f} [" in text


def test_gradients_of_the_front_stand_beside(heard: fl.Comparison) -> None:
    found = heard.evidence.flow
    for arm in ("v1", "v2"):
        runs = [diagnose(heard.folder / "runs" / f"{arm}-s{s}") for s in (0, 1)]
        ratios = [list(run.flows.values())[-1].depth_ratios().front_ratio for run in runs]
        assert found[arm]["front_ratio"].summary.mean == pytest.approx(np.mean(ratios))
        updates = []
        for run in runs:
            flow = list(run.flows.values())[-1]
            front = [i for i, part in enumerate(flow.parts) if part.layer in (0, 1)]
            updates.append(
                np.median([np.median([r.ratio(i) for i in front]) for r in flow.reports])
            )
        assert found[arm]["update"].summary.mean == pytest.approx(np.mean(updates))
    assert found["v1"]["front_ratio"].against is None
    means = [found[arm]["weight_change"].summary for arm in ("v1", "v2")]
    against = found["v2"]["weight_change"].against
    assert against.n == 2
    assert against.effect == pytest.approx(means[1].mean / means[0].mean, rel=0.2)
    assert "front/output gradient" in heard.page.read_text()


def test_pearson_is_better_when_higher(heard: fl.Comparison) -> None:
    rules = heard.evidence.plan.rules
    assert (rules.metric, rules.lower_is_better, rules.log) == ("pearson", False, False)


@pytest.mark.parametrize(("accuracy", "at_chance"), [(0.9, True), (0.92, True), (0.3, False)])
def test_far_below_chance_is_not_chance(accuracy: float, at_chance: bool) -> None:
    """Nine of ten examples have one class: whoever is right on 3 of 10 has learned something."""
    predictions = SimpleNamespace(labels=[0] * 540 + [1] * 60)
    runs: Any = SimpleNamespace(
        plan=SimpleNamespace(rules=SimpleNamespace(metric="accuracy")),
        seeds_of=lambda arm: [0],
        summaries={("a", 0): SimpleNamespace(finished=True, metrics={"accuracy": accuracy})},
        records={("a", 0): SimpleNamespace(predictions=predictions)},
    )
    assert _at_chance(runs, "a") is at_chance

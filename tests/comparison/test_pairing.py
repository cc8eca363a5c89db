"""Two runs are a pair only if their digests agree."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

import frostlab as fl
from comparing import LAYERS, SMALL, compare, own_data, plant, reseal
from frostlab.comparison.evidence import ComparedOrder
from frostlab.comparison.judging.pairing import PairingFacts, steps_compared, why_unpaired
from frostlab.comparison.run import judge_again
from frostlab.records.folder import RunRecord
from frostlab.training.batches.batch import Order
from frostlab.training.batches.feed import Feed
from tiny import tiny
from zoo import SIZES


def why_unpaired_at(one: Path, other: Path) -> str | None:
    return why_unpaired(*(PairingFacts.of(RunRecord(folder)) for folder in (one, other)))


@pytest.mark.parametrize("planted", ["data", "order", "weights", "precision"])
def test_a_planted_difference_keeps_runs_apart(
    planted: str, made: fl.Comparison, tmp_path: Path
) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for path, arm in ((one, "baseline"), (other, "oelm")):
        shutil.copytree(made.folder / "runs" / f"{arm}-s0", path)
    assert why_unpaired_at(one, other) is None
    digests = json.loads((other / "digests.json").read_text())
    events = (other / "events.jsonl").read_text()
    if planted == "data":
        digests["data"] = "another"
    elif planted == "weights":
        key = next(key for key in digests["weights"] if key not in digests["touched"])
        digests["weights"][key] = "another"
    elif planted == "order":
        events = events.replace(RunRecord(other).result.order_digest, "another")
    else:
        events = events.replace('"precision": "float32"', '"precision": "bfloat16"')
    (other / "digests.json").write_text(json.dumps(digests))
    (other / "events.jsonl").write_text(events)
    reason = why_unpaired_at(one, other)
    assert reason is not None
    assert {"order": "order of examples", "weights": "initial weights"}.get(
        planted, planted
    ) in reason


ENVIRONMENT = [  # section, key, its value in the other run, and the fact that the reason names
    ("code", "digest", "0" * 64, "frostlab's code"),
    ("versions", "torch", "1.0", "torch"),
    ("versions", "scipy", "1.0", "scipy"),
    ("versions", "python", "3.0", "python"),
    ("device_name", None, "another", "the device's name"),
    ("numerics", "cpu_capability", "another", "cpu capability"),
    ("numerics", "deterministic", "another", "deterministic"),
    ("numerics", "cuda_matmul", "tf32", "cuda matmul"),
    ("numerics", "cudnn_convolution", "another", "cudnn convolution"),
    ("variables", "ONEDNN_MAX_CPU_ISA", "another", "ONEDNN_MAX_CPU_ISA"),
]


@pytest.mark.parametrize(("section", "key", "value", "fact"), ENVIRONMENT)
@pytest.mark.parametrize("file", ["environment.json", "environment-1.json"])
def test_another_environment_keeps_runs_apart(
    file: str,
    section: str,
    key: str | None,
    value: str,
    fact: str,
    made: fl.Comparison,
    tmp_path: Path,
) -> None:
    """The second file is that of a run that was resumed elsewhere."""
    one, other = (made.folder / "runs" / f"{arm}-s0" for arm in ("baseline", "oelm"))
    shutil.copytree(other, tmp_path / "other")
    values = json.loads((other / "environment.json").read_text())
    before = values[section] if key is None else values[section][key]
    values[section] = value if key is None else {**values[section], key: value}
    (tmp_path / "other" / file).write_text(json.dumps(values))
    reason = why_unpaired_at(one, tmp_path / "other")
    assert reason is not None
    assert reason.startswith(f"{fact} differs ({str(before)[:16]}")
    assert value[:16] in reason
    assert (", " in reason) == (file == "environment-1.json")


def test_another_environment_of_a_seed_is_said_and_of_an_arm_refused(tmp_path: Path) -> None:
    compare(tmp_path / "c", seeds=2)
    assert (
        "libraries and frostlab's code are equal" in (tmp_path / "c" / "comparison.md").read_text()
    )
    runs = tmp_path / "c" / "runs"
    for arm in ("baseline", "oelm"):
        path = runs / f"{arm}-s1" / "environment.json"
        versions = json.loads(path.read_text())["versions"]
        plant(path, versions=versions | {"torch": "1.0"})
    reseal(tmp_path / "c")
    found = judge_again(tmp_path / "c")
    assert not found.evidence.refused_pairs
    (fact,) = found.evidence.varied_facts
    assert (fact.name, fact.seeds["1.0"]) == ("torch", (1,))
    assert f"- torch is not the same in all runs: {versions['torch']} (seed 0); 1.0 (seed 1)." in (
        found.page.read_text()
    )
    plant(runs / "oelm-s0" / "environment.json", versions=versions | {"torch": "1.0"})
    reseal(tmp_path / "c")
    (refused,) = judge_again(tmp_path / "c").evidence.refused_pairs
    assert (refused.seed, refused.reason) == (0, f"torch differs ({versions['torch']} and 1.0)")


def test_pretrained_weights_are_compared_between_arms_and_seeds(tmp_path: Path) -> None:
    compare(tmp_path / "c", seeds=2)
    runs = tmp_path / "c" / "runs"
    plant(runs / "oelm-s0" / "digests.json", source="another")
    for arm in ("baseline", "oelm"):
        plant(runs / f"{arm}-s1" / "digests.json", source="changed")
    reseal(tmp_path / "c")
    between_arms, between_seeds = judge_again(tmp_path / "c").evidence.refused_pairs
    assert between_arms.reason == "the pretrained weights differ (None and another)"
    assert between_seeds.reason.startswith("the pretrained weights differ from those of ")
    assert between_seeds.reason.endswith(", seed 0")


def test_a_seed_that_starts_from_other_weights_is_refused(tmp_path: Path) -> None:
    """The folder of the pretrained model changes between two calls, and only one weight of it."""
    config = transformers.BertConfig(**SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    recipe = tiny(
        model={"kind": "pretrained", "name": str(tmp_path / "bert")},
        tokenizer={"kind": "words", "size": 20},
        data={"name": "own", "path": str(own_data(tmp_path / "own.csv")), "length": 8},
        train__epochs=1,
    )
    first = compare(tmp_path / "c", recipe=recipe, seeds=1)
    assert first.evidence.made.source is not None
    assert f"; pretrained weights {first.evidence.made.source}." in first.page.read_text()
    weights = load_file(tmp_path / "bert" / "model.safetensors")
    weights["bert.encoder.layer.0.attention.self.query.weight"][0, 0] += 1
    save_file(weights, tmp_path / "bert" / "model.safetensors", {"format": "pt"})
    (refused,) = compare(tmp_path / "c", recipe=recipe, seeds=2).evidence.refused_pairs
    assert refused.seed == 1
    assert refused.reason.startswith("the pretrained weights differ from those of ")


CHANGED = {
    "data": "the data differ from those of the first finished run (",
    "source": "the pretrained weights differ from those of ",
}


def test_contrasts_know_of_changed_files(tmp_path: Path) -> None:
    fl.compare(LAYERS | {"seeds": 2}, out=tmp_path / "c")
    paths = [tmp_path / "c" / "runs" / f"{arm}-s1" / "digests.json"
             for arm in ("two", "two-frozen")]  # fmt: skip  # not the baseline
    digests = [path.read_text() for path in paths]
    for key, reason in CHANGED.items():
        for path, text in zip(paths, digests, strict=True):
            path.write_text(text)
            plant(path, **{key: "changed"})
        reseal(tmp_path / "c")
        _, frozen = judge_again(tmp_path / "c").evidence.contrasts
        assert frozen.verdict.word == "unproven"
        assert f"seed 1: {reason}" in frozen.verdict.sentence


@pytest.mark.slow
def test_tuning_knows_of_changed_files(tmp_path: Path) -> None:
    tuned = compare(tmp_path / "t", tune={"values": [1e-3, 3e-3]}, seeds=2)
    chosen = {run.folder for run in tuned.evidence.arms["oelm"].runs}
    runs = {path: str(path.relative_to(tuned.folder)) in chosen
            for path in tuned.folder.glob("runs/oelm@*-s1")}  # fmt: skip
    assert set(runs.values()) == {True, False}
    for run, (key, reason) in itertools.product(runs, CHANGED.items()):
        digests = (run / "digests.json").read_text()
        plant(run / "digests.json", **{key: "changed"})
        reseal(tuned.folder)
        again = judge_again(tuned.folder).verdicts["oelm"]
        assert again.word == "unproven"
        assert f"a run that does not fit, {run.name}: {reason}" in again.sentence
        (run / "digests.json").write_text(digests)


def test_a_planted_harm_that_was_trained_elsewhere_proves_nothing(tmp_path: Path) -> None:
    compare(tmp_path / "c", seeds=1, assay=True)
    plant(tmp_path / "c" / "assay" / "s0" / "digests.json", data="changed")
    reseal(tmp_path / "c")
    assay = judge_again(tmp_path / "c").evidence.assay
    assert assay is not None
    assert assay.verdict.word == "unproven"


SHORT = {**SMALL, "train": {**SMALL["train"], "epochs": None, "steps": 3}}


def test_another_order_within_the_first_epoch_is_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six steps; only the last batch of one run has another order."""
    real = Feed.order

    def swapped(self: Feed, epoch: int) -> Order:
        order = [rows.copy() for rows in real(self, epoch)]
        order[2][[0, 1]] = order[2][[1, 0]]
        return order

    fl.run({**SHORT, "treatment": "none"}, out=tmp_path / "one")
    fl.run({**SHORT, "treatment": "oelm"}, out=tmp_path / "two")
    assert why_unpaired_at(tmp_path / "one", tmp_path / "two") is None
    monkeypatch.setattr(Feed, "order", swapped)
    fl.run({**SHORT, "treatment": "oelm"}, out=tmp_path / "other")
    reason = why_unpaired_at(tmp_path / "one", tmp_path / "other")
    assert "the order of examples differs in the first 3 steps (" in (reason or "")


def test_runs_of_other_lengths_are_compared_over_the_steps_of_both(tmp_path: Path) -> None:
    """The page says which of these steps could not be compared."""
    arms = [{"name": name, "set": {"train.steps": steps}}
            for name, steps in (("four", 4), ("long", 13), ("epoch", 6))]  # fmt: skip
    values = LAYERS | {"recipe": SHORT, "arms": arms, "vary": ["train.steps"], "contrasts": [],
                       "seeds": 1}  # fmt: skip
    found = fl.compare(values, out=tmp_path / "c")
    facts = {name: PairingFacts.of(RunRecord(found.folder / "runs" / f"{name}-s0"))
             for name in ("four", "long", "epoch")}  # fmt: skip
    assert steps_compared(facts["four"], facts["four"]) == (4, 4)
    assert steps_compared(facts["long"], facts["epoch"]) == (6, 6), "an epoch has six steps"
    assert steps_compared(facts["long"], facts["four"]) == (4, 0)
    assert found.evidence.partly_compared == (
        ComparedOrder("long", "four", 0, 4, 0), ComparedOrder("epoch", "four", 0, 4, 0),
    )  # fmt: skip
    text = found.page.read_text()
    assert (
        "long and four seed 0: the order of examples was compared for the first 0 of the 4" in text
    )
    assert "by digest" not in text


def test_a_run_resumed_elsewhere_is_no_pair(tmp_path: Path) -> None:
    found = compare(tmp_path / "c", seeds=1)
    folders = [found.folder / "runs" / f"{name}-s0" for name in ("baseline", "oelm")]
    assert why_unpaired_at(*folders) is None
    events = (folders[1] / "events.jsonl").read_text().splitlines()
    began = next(e for e in map(json.loads, events) if e["kind"] == "start")
    machine = {key: began[key] for key in ("at", "device", "processes", "threads", "runs_at_once")}
    resumed = {"kind": "resume", "step": 99, "precision": "bfloat16", **machine}
    with (folders[1] / "events.jsonl").open("a") as file:
        file.write(json.dumps(resumed) + "\n")
    assert "precision differs" in (why_unpaired_at(*folders) or "")


def test_other_weights_of_one_size_are_still_no_pair(tmp_path: Path) -> None:
    """What varies says nothing of them."""
    arms = [{"name": "one", "set": {}}, {"name": "long", "set": {"train.epochs": 2}}]
    values = LAYERS | {"arms": arms, "vary": ["train.epochs"], "contrasts": [], "seeds": 1}
    found = fl.compare(values, out=tmp_path / "c")
    assert not found.evidence.refused_pairs
    digests = tmp_path / "c" / "runs" / "long-s0" / "digests.json"
    digests.write_text(digests.read_text().replace('"weights": {', '"weights": {"more": "0",'))
    (tmp_path / "c" / "evidence.json").unlink()
    reseal(tmp_path / "c")
    (refused,) = fl.compare(values, out=tmp_path / "c").evidence.refused_pairs
    assert refused.reason == "only one of the two runs has the weights more"


def test_the_facts_of_a_run_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    real = PairingFacts.of

    def counted(record: RunRecord) -> PairingFacts:
        folders.append(record.folder.name)
        return real(record)

    monkeypatch.setattr(PairingFacts, "of", counted)
    fl.compare(LAYERS | {"seeds": 2}, out=tmp_path / "c")
    names = ("one", "two", "two-frozen")
    assert sorted(folders) == sorted(f"{name}-s{seed}" for name in names for seed in (0, 1))

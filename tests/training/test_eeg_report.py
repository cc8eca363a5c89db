"""Runs on recordings: windows, the loss, what is reported, resuming, two processes."""

import json
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import pearsonr

from forked import attempt, outcome
from frostlab.data.eeg.recordings import Recording, Signals, Windows
from frostlab.data.prepare import prepare
from frostlab.envelopes.correlation import stitch, window_starts
from frostlab.envelopes.ridge import fit_ridge
from frostlab.envelopes.scores import score_recordings
from frostlab.envelopes.scores_json import SCORES
from frostlab.errors import BadInput, FrostlabError
from frostlab.models.build import build_for
from frostlab.recipe.load import load_recipe, recipe_from, shipped_recipes
from frostlab.recipe.model import EnvelopeLoss
from frostlab.recipe.settings import StepDecay
from frostlab.records.finding.show import show
from frostlab.records.folder import RunRecord
from frostlab.records.schema import EvaluationEvent, StepEvent
from frostlab.storage import seal
from frostlab.training.batches.batch import WindowExamples, order_digest
from frostlab.training.batches.feed import Feed
from frostlab.training.distributed import Compute, World, preserve_buffers
from frostlab.training.eeg_report import draw_run, recording_metrics
from frostlab.training.evaluate import evaluate
from frostlab.training.restore import best_model, check_same_data
from frostlab.training.run import run
from frostlab.training.setup import _has_unused
from frostlab.training.stages import Entered, Stage, enter_stage, lr_scales, stages_of
from frostlab.training.state import StageModel
from frostlab.training.step.compiled import CompiledStep
from frostlab.training.step.envelope_loss import (
    EnvelopeObjective,
    pearson,
    window_losses,
)
from frostlab.training.step.optimizer import build_optimizer
from frostlab.training.tasks import TASKS
from hearing import hearing
from tiny import tiny

TASK = TASKS["envelope"]

CPU = torch.device("cpu")


def test_a_metric_of_windows_is_reported_next_to_those_of_recordings() -> None:
    draw = np.random.default_rng(0)
    heard = [
        Recording(name, name, draw.normal(size=(640, 2)).astype(np.float32),
                  draw.normal(size=640).astype(np.float32))
        for name in ("a", "b")
    ]  # fmt: skip
    scores = score_recordings({each.name: each.eeg[:, 0] for each in heard}, heard, 64.0)
    model = {"report": scores, "unseen": scores}
    metrics = recording_metrics(model, {}, {"pearson": 0.25, "loss": 2.0, "mae": 0.5})
    assert list(metrics)[:3] == ["pearson", "loss", "mae"]
    assert (metrics["loss"], metrics["mae"], metrics["window_pearson"]) == (2.0, 0.5, 0.25)
    assert metrics["pearson"] == scores.summary.mean != 0.25


def counted(samples: int, subject: str) -> Recording:
    """A recording whose values say where they are from."""
    signal = np.arange(samples, dtype=np.float32)
    return Recording(f"{subject} {samples}", subject, np.stack([signal, -signal], 1), signal + 0.5)


def windows(hop: int | None) -> Windows:
    recordings = (counted(50, "a"), counted(30, "b"), counted(33, "c"))
    return Windows(recordings, (1, 0, -1), 10, hop, "counted")


def prepared(**changes: Any) -> tuple[Any, Signals]:
    recipe = recipe_from(hearing(**changes))
    found = prepare(recipe)
    assert isinstance(found, Signals)
    return recipe, found


@pytest.mark.parametrize("hop", [None, 4])
def test_windows_stay_inside_a_recording_and_keep_its_subject(hop: int | None) -> None:
    split = windows(hop)
    examples = WindowExamples(split)
    seen = []
    for epoch in range(20):
        for rows in examples.epoch_order(4, 3, epoch, bucket=False):
            batch = examples.collate(rows)
            steps = batch.inputs["eeg"][:, 1:] - batch.inputs["eeg"][:, :-1]
            assert (steps == torch.tensor([1.0, -1.0])).all(), "one sample after the other"
            assert torch.equal(batch.targets, batch.inputs["eeg"][..., 0] + 0.5)
            owners = split.owners(rows)
            assert batch.inputs["subject"].tolist() == [(1, 0, -1)[n] for n in owners]
            assert batch.scored == batch.examples == len(rows)
            assert batch.tokens == batch.padded_tokens == 10 * len(rows)
            firsts = batch.inputs["eeg"][:, 0, 0]
            seen += [(int(n), int(at)) for n, at in zip(owners, firsts, strict=True)]
    assert max(at for n, at in seen if n == 0) <= 40
    starts = {at for n, at in seen if n == 2}
    assert (starts <= {0, 4, 8, 12, 16, 20, 23}) == (hop == 4)
    assert {n for n, _ in seen} == {0, 1, 2}


def test_the_order_follows_seed_and_epoch_down_to_the_sample() -> None:
    examples = WindowExamples(windows(None))

    def digest(seed: int, epoch: int) -> str:
        return reduce(order_digest, examples.epoch_order(4, seed, epoch, bucket=False), "")

    assert digest(0, 0) == digest(0, 0)
    assert len({digest(0, 0), digest(0, 1), digest(1, 0)}) == 3
    drawn = [sorted(np.concatenate(examples.epoch_order(4, 0, e, False))) for e in range(2)]
    assert drawn[0] != drawn[1], "other windows, not only another order"
    fixed = WindowExamples(windows(4))
    kept = [sorted(np.concatenate(fixed.epoch_order(4, 0, e, False))) for e in range(2)]
    assert kept[0] == kept[1]
    assert len(examples) == 5 + 3 + 3
    assert all(len(np.concatenate(examples.epoch_order(4, 0, e, False))) == 11 for e in range(3))


def test_no_rows_make_a_window_that_counts_for_nothing() -> None:
    recipe, data = prepared()
    objective = TASK.objective(build_for(recipe, data), recipe).eval()
    examples = WindowExamples(data.splits["tune"])
    nothing, some = (examples.collate(np.array(rows, np.int64)) for rows in ([], [3, 70]))
    assert (nothing.scored, nothing.tokens, nothing.inputs["eeg"].shape[0]) == (0, 0, 1)
    lost = objective(nothing)
    lost.backward()
    assert lost.item() == 0.0
    assert all(not p.grad.any() for p in objective.parameters() if p.grad is not None)
    one, two = (TASK.tally(objective, data, CPU) for _ in range(2))
    with torch.no_grad():
        one.add(objective(some, want="logits"), some)
        for batch in (some, nothing):
            two.add(objective(batch, want="logits"), batch)
    assert one.metrics(World()) == two.metrics(World())


@pytest.mark.parametrize("kind", ["pearson", "pearson-l1", "mse-pearson", "multiscale"])
def test_the_loss_a_recipe_names_is_what_is_differentiated(kind: str) -> None:
    recipe, data = prepared(loss={"kind": kind})
    objective = TASK.objective(build_for(recipe, data), recipe).eval()
    assert isinstance(objective, EnvelopeObjective)
    examples = WindowExamples(data.splits["tune"])
    rows = examples.evaluation_order(5)[0]
    batch = examples.collate(rows)
    said = objective(batch, want="logits")
    wanted = window_losses(kind, said, batch.targets)  # type: ignore[arg-type]
    assert torch.allclose(objective(batch), wanted.sum())
    metrics = evaluate(TASK, objective, data, data.splits["tune"], 5,
                       Compute(CPU, torch.float32))  # fmt: skip
    whole = examples.collate(data.splits["tune"].grid)
    said = objective(whole, want="logits").detach()
    loss = window_losses(kind, said, whole.targets).mean()  # type: ignore[arg-type]
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["pearson"] == pytest.approx(float(pearson(said, whole.targets).mean()), abs=1e-6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return run(hearing(), out=tmp_path_factory.mktemp("eeg") / "run")


def test_the_report_is_of_whole_recordings_of_the_best_weights(finished: RunRecord) -> None:
    _, data = prepared()
    decoded = np.load(finished.folder / "decoded.npz")
    heard = np.load(finished.folder / "heard.npz")
    assert set(heard) == set(decoded)
    ridge = fit_ridge(data.splits["train"].recordings, data.rate)
    for split, ending in (("report", ""), ("unseen", "_unseen")):
        recordings = data.splits[split].recordings
        for who, metric in (("model", "pearson"), ("ridge", "ridge")):
            z: dict[str, list[float]] = {}
            for each in recordings:
                said = decoded[each.name] if who == "model" else ridge.predict(each)
                assert said.shape == each.envelope.shape
                assert np.array_equal(heard[each.name], each.envelope)
                z.setdefault(each.subject, []).append(np.arctanh(pearsonr(said, each.envelope)[0]))
            r = np.tanh(np.mean([np.mean(own) for own in z.values()]))
            assert finished.metrics[metric + ending] == pytest.approx(float(r), abs=1e-5)
    assert finished.result.best.metric == "pearson"
    kept = finished.result.scores["unseen"]["model"]
    assert kept.mean == finished.metrics["pearson_unseen"]
    assert kept.digest == finished.envelope_scores[0]["unseen"]["model"].digest


def test_recordings_are_decoded_without_dropout_from_windows_that_overlap(
    finished: RunRecord,
) -> None:
    _, data = prepared()
    model = best_model(finished)
    (each,) = data.splits["unseen"].recordings[:1]
    starts = window_starts(len(each), 64, 32)
    with torch.no_grad():
        parts = [
            model(torch.from_numpy(each.eeg[None, at : at + 64].copy()), torch.tensor([-1]))[0]
            for at in starts
        ]
    wanted = stitch(torch.stack(parts).numpy(), starts, len(each))
    decoded = np.load(finished.folder / "decoded.npz")[each.name]
    assert np.abs(decoded - wanted).max() < 1e-5


def test_weights_that_were_not_reported_are_refused(finished: RunRecord, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    moved = tmp_path / "run" / finished.result.checkpoint / "model.safetensors"
    weights = load_file(moved)
    weights["head.4.bias"] += 1e-3
    save_file(weights, moved)
    with pytest.raises(FrostlabError, match="model.safetensors is damaged"):
        best_model(RunRecord(tmp_path / "run"))
    seal(moved.parent)  # the checksums now fit the other weights
    with pytest.raises(BadInput, match="does not hold the reported weights"):
        best_model(RunRecord(tmp_path / "run"))
    other = prepared(data__seed=1)[1]
    with pytest.raises(BadInput, match="have changed since the run"):
        check_same_data(finished, other)


def test_a_run_shows_its_scores_and_refuses_edited_ones(finished: RunRecord) -> None:
    shown = show(finished.folder)
    for line in ("subjects not trained on:", "an upper bound on the r", "chance ≤", "  ridge  0."):
        assert line in shown
    (scores, _), report = finished.envelope_scores, finished.metrics
    seen, unseen = (scores[split]["model"].segments for split in ("report", "unseen"))
    assert report["challenge"] == pytest.approx(2 / 3 * seen.mean + unseen.mean / 3)
    assert (report["segment_pearson"], report["segment_std"]) == (seen.mean, seen.std)
    assert f"{unseen} (1)  " in shown
    assert f"{report['challenge']:.3f}\n" in shown
    assert "segments by subject:" in shown
    path = finished.folder / SCORES
    text = path.read_text()
    moved, swapped, lost, better = (json.loads(text) for _ in range(4))
    better["challenge"]["model"]["score"] += 0.1
    moved["splits"]["report"]["model"]["recordings"][0]["r"] += 0.1
    swapped["splits"]["report"] = dict(
        zip(("ridge", "model"), swapped["splits"]["report"].values(), strict=True)
    )
    del lost["splits"]["unseen"]
    try:
        for said in (moved, swapped, lost, better):
            path.write_text(json.dumps(said))
            assert "these scores were edited" in show(finished.folder)
            with pytest.raises(BadInput, match="scores.json: these scores were edited"):
                _ = RunRecord(finished.folder).envelope_scores
    finally:
        path.write_text(text)


@pytest.mark.slow
def test_a_page_is_drawn_from_a_run(finished: RunRecord, tmp_path: Path) -> None:
    page = draw_run(finished.folder)
    assert page == finished.folder / "envelopes" / "index.html"
    text = page.read_text()
    for said in ("<h2>subjects not trained on</h2>", "ridge", "heard"):
        assert said in text
    assert sum(f">{name}<" in text for name in prepared()[1].channels) == 10, "the largest"
    drawn = {path.stem for path in page.parent.glob("*.png")}
    assert drawn >= {"r-report", "r-unseen", "excerpt-1", "excerpt-2", "kernels", "channels"}
    text_run = run(tiny(train__epochs=1), out=tmp_path / "text")
    with pytest.raises(BadInput, match="a run for classification; a page with figures needs"):
        draw_run(text_run.folder)


def test_a_page_without_what_was_decoded(finished: RunRecord) -> None:
    path = finished.folder / "decoded.npz"
    kept = path.read_bytes()
    try:
        for damage in (path.unlink, lambda: path.write_bytes(b"PK\x03\x04 no archive")):
            damage()
            with pytest.raises(BadInput, match="decoded.npz cannot be read"):
                draw_run(finished.folder)
    finally:
        path.write_bytes(kept)


def test_other_loss_other_weights(finished: RunRecord, tmp_path: Path) -> None:
    other = run(hearing(loss={"kind": "pearson"}), out=tmp_path / "run")
    assert other.result.weights_digest != finished.result.weights_digest
    assert other.digests.weights == finished.digests.weights
    assert other.result.order_digest == finished.result.order_digest


def test_it_learns(tmp_path: Path) -> None:
    changes = {"train__epochs": 8, "model__dropout": 0.0, "data__snr": 10.0, "data__hop": 32}
    assert run(hearing(**changes), out=tmp_path / "run").metrics["pearson"] > 0.4


def test_accumulating_changes_nothing(tmp_path: Path) -> None:
    changes = {"train__epochs": 1, "model__dropout": 0.0}
    whole, parts = (
        run(hearing(**changes, train__accumulate=n), out=tmp_path / str(n)) for n in (1, 4)
    )
    steps = [[e.loss for e in each.events(StepEvent)] for each in (whole, parts)]
    assert steps[0][0] == pytest.approx(steps[1][0], rel=1e-4)


@pytest.mark.parametrize(
    ("moment", "count"),
    [
        ("step", 9),
        pytest.param("update", 6, marks=pytest.mark.slow),
        pytest.param("report", 1, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_it_is_the_same_bit_for_bit(
    moment: str, count: int, tmp_path: Path
) -> None:
    changes = {"train__epochs": 3, "train__checkpoint": 3, "evaluate__every": 5}
    recipe = hearing(**changes, model__norm="batch")
    assert attempt(recipe, tmp_path / "whole") == 0
    assert attempt(recipe, tmp_path / "run", moment, count) == -9
    assert not (tmp_path / "run" / "result.json").exists()
    assert attempt(recipe, tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    stopped, whole = (RunRecord(tmp_path / name).envelope_scores[0] for name in ("run", "whole"))
    assert stopped["report"]["model"].digest == whole["report"]["model"].digest


def test_surgery_works_on_decoders_of_recordings(finished: RunRecord, tmp_path: Path) -> None:
    frozen = run(hearing(treatment="oelm"), out=tmp_path / "run")
    assert all(e.frozen_verified == 8 for e in frozen.events(EvaluationEvent))
    untouched = set(frozen.digests.weights) - set(frozen.digests.touched)
    mine, theirs = frozen.digests.weights, finished.digests.weights
    assert untouched
    assert all(mine[key] == theirs[key] for key in untouched)
    assert frozen.digests.touched


def test_a_pass_that_tries_something_out_moves_no_statistics() -> None:
    recipe, data = prepared(model__norm="batch")
    objective = TASK.objective(build_for(recipe, data), recipe).train()
    batch = WindowExamples(data.splits["tune"]).collate(np.array([0, 64]))
    before = [buffer.clone() for buffer in objective.buffers()]
    with preserve_buffers(objective):
        objective(batch)
    assert before
    assert all(map(torch.equal, before, objective.buffers()))
    current = StageModel(0, Stage("train", 1), Entered(), objective)
    two = Compute(CPU, torch.float32, World(size=2))
    assert not _has_unused(current, recipe, data, TASK, two)
    assert all(map(torch.equal, before, objective.buffers())), "looking for unused ones"
    optimizer = build_optimizer(objective.model, recipe.optim, fused=False)
    step = CompiledStep(objective, optimizer, Compute(CPU, torch.float32), None, compiles=False)
    step._try_compiling([batch], batch.scored)
    assert all(map(torch.equal, before, objective.buffers())), "trying out compiled code"
    objective(batch)
    assert not all(map(torch.equal, before, objective.buffers()))


def test_looks_and_schedules_are_counted_in_epochs(tmp_path: Path) -> None:
    schedule = {"every": "2 epochs", "factor": 0.5}
    record = run(
        hearing(train__epochs=5, train__checkpoint=1, evaluate__every="2 epochs",
                optim={"lr": 1e-3, "warmup": 0.0, "schedule": schedule}),
        out=tmp_path / "run",
    )  # fmt: skip
    per_epoch = record.result.steps // 5
    looks = [e.step for e in record.events(EvaluationEvent)]
    assert looks == [2 * per_epoch, 4 * per_epoch, 5 * per_epoch, 5 * per_epoch], "and the report"
    rates = {e.step: e.rate for e in record.events(StepEvent)}
    assert rates[2 * per_epoch] == pytest.approx(1e-3)
    assert rates[4 * per_epoch] == pytest.approx(5e-4)
    assert rates[5 * per_epoch] == pytest.approx(2.5e-4)


def test_front_and_head_have_rates_of_their_own() -> None:
    rates = {"layers[0:1]": 1e-4, "layers[1:]": 3e-4, "head": 1e-3, "old": 2e-4}
    recipe, data = prepared(stages=[{"lr": rates}])
    model = build_for(recipe, data)
    (stage,) = stages_of(recipe, len(data.splits["train"]))
    enter_stage(model, recipe, stage, 0, Entered())
    shares = lr_scales(model, stage, 0, Entered())
    assert stage.optim(recipe.optim).lr == 1e-3
    for name, share in shares.items():
        part = name.split(".")[0] if not name.startswith("blocks") else name[:8]
        wanted = {"blocks.0": 0.1, "blocks.1": 0.3, "head": 1.0}.get(part, 0.2)
        assert share == pytest.approx(wanted), name
    assert set(shares) == {name for name, _ in model.named_parameters()}


def test_a_gpu_meets_two_shapes_at_most() -> None:
    """A captured step has a graph a shape: whole batches, and an epoch's last."""
    recipe, data = prepared()
    feed = Feed(WindowExamples(data.splits["train"]), recipe.train, 0, Compute(CPU, torch.float32))
    shapes = {
        tuple(tuple(t.shape) for t in part.tensors())
        for epoch in range(3)
        for rows in feed.order(epoch)
        for part in feed(rows)
    }
    assert len(shapes) <= 2
    kinds = {t.dtype for t in feed(feed.order(0)[0])[0].tensors()}
    assert kinds == {torch.float32, torch.int64}


WRONG = [
    ({"train__batching": "packed"}, "train.batching packed is for tokens"),
    ({"train__cache_prefix": "memory"}, "train.cache_prefix is for tokens"),
    ({"supervise": {"layers": "all"}}, "supervise.layers is for language models"),
    ({"tokenizer": {"kind": "words"}}, "is made of signals; tokenizer must be null"),
    ({"evaluate__metric": "accuracy"}, "does not exist for envelope; there are pearson, loss"),
    (
        {"model": {"kind": "gpt"}},
        "data.name eeg-simulated has data.task envelope: use model.kind conformer",
    ),
    (
        {"data": {"name": "majority"}},
        "model.kind conformer is for envelope; data.name majority has data.task cla",
    ),
    ({"data__subject": 3}, "data.subject is not a key; did you mean `subjects`?"),
    ({"loss": {"kind": "pearsn"}}, "did you mean `pearson`?"),
    (
        {"loss": {"kind": "multiscale", "scales": [1, 33]}},
        "loss.scales has 33, which leaves fewer than two samples of data.length 64; the largest",
    ),
    ({"loss": {"kind": "multiscale"}, "data__length": 15}, "the largest that fits is 7"),
    (
        {"evaluate__every": "two epochs"},
        "should be a number of steps, `epoch`, or e.g. `10 epochs`",
    ),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_what_makes_no_sense_is_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as error:
        recipe_from(hearing(**changes))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_loss_of_envelopes_is_refused_for_text() -> None:
    with pytest.raises(BadInput, match="loss is for envelope; data.task classification"):
        recipe_from({"loss": {"kind": "pearson"}})


def test_recordings_that_cannot_be_scored_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(BadInput, match="shifts of at least 2 s; 100 are needed"):
        run(hearing(data__seconds=4.5), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_path_in_place_of_simulated_data_is_the_challenges_folder(tmp_path: Path) -> None:
    recipe = load_recipe("eeg-conformer-v2", {"data.path": f"{tmp_path}/split_data"})
    assert recipe.data.name == "eeg-challenge"
    assert recipe.data.task == "envelope"
    with pytest.raises(BadInput, match="split_data"):
        run(recipe, out=tmp_path / "run")


@pytest.mark.slow
def test_the_challenges_folder_trains_and_reports(tmp_path: Path) -> None:
    _, data = prepared()
    names = {"train": "train", "tune": "val", "report": "test"}
    for role, word in names.items():
        for each in data.splits[role].recordings:
            start = tmp_path / f"{word}_-_{each.subject}_-_story"
            np.save(f"{start}_-_eeg.npy", each.eeg)
            np.save(f"{start}_-_envelope.npy", each.envelope)
    small = {key: value for key, value in hearing()["model"].items() if key != "kind"}
    recipe = load_recipe(
        "eeg-conformer-v2",
        {
            "data": {"path": str(tmp_path), "length": 64},
            "train.epochs": 1,
            "train.threads": 1,
            "model": small,
        },
    )
    record = run(recipe, out=tmp_path / "run")
    assert set(record.envelope_scores[0]) == {"report"}
    simulated = fit_ridge(data.splits["train"].recordings, data.rate)
    r = [np.arctanh(pearsonr(simulated.predict(each), each.envelope)[0])
         for each in data.splits["report"].recordings]  # fmt: skip
    assert record.metrics["ridge"] == pytest.approx(float(np.tanh(np.mean(r))), abs=1e-3)


def test_published_recipes_are_the_sources() -> None:
    assert sum(name.startswith("eeg-") for name in shipped_recipes()) == 9
    recipe = load_recipe("eeg-conformer-v2-published")
    model = recipe.model.model_dump()
    assert [model[key] for key in ("width", "layers", "heads", "hidden", "kernel", "dropout")] == [
        256, 8, 4, 1024, 31, 0.3,
    ]  # fmt: skip
    assert [model[key] for key in ("residual", "head", "gradient_scale")] == ["gated", "mlp", 2.0]
    assert (recipe.optim.betas, recipe.optim.eps, recipe.optim.decay) == ((0.9, 0.98), 1e-9, 0.0)
    assert (recipe.optim.lr, recipe.optim.warmup, recipe.optim.clip) == (1e-4, 0.0, None)
    assert recipe.optim.schedule == StepDecay(every="50 epochs", factor=0.9)
    assert recipe.loss == EnvelopeLoss(kind="mse-pearson")
    assert (recipe.train.batch, recipe.train.epochs) == (64, 1000)
    assert (recipe.train.drop_last, recipe.train.precision) == (True, "float32")
    assert (model["variant"], recipe.data.windows) == ("published", 10)
    assert (recipe.evaluate.every, recipe.metric) == ("10 epochs", "pearson")
    assert (recipe.data.length, recipe.data.rate, recipe.data.subjects) == (640, 64.0, 71)


@pytest.mark.parametrize(
    ("name", "layers", "switches"),
    [
        ("v1-published", 8, ["none", "linear", 1.0]),
        ("conservative-published", 8, ["plain", "mlp", 1.5]),
        ("aggressive-published", 8, ["gated", "mlp", 3.0]),
        ("v1", 4, ["none", "linear", 1.0]),
        ("v2", 4, ["gated", "mlp", 2.0]),
        ("conservative", 4, ["plain", "mlp", 1.5]),
        ("aggressive", 12, ["gated", "mlp", 3.0]),
    ],
)
def test_recipes_have_the_switches_they_are_called_by(
    name: str, layers: int, switches: list[Any]
) -> None:
    model = load_recipe(f"eeg-conformer-{name}").model.model_dump()
    assert [model[key] for key in ("residual", "head", "gradient_scale")] == switches
    assert model["layers"] == layers

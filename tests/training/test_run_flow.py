"""A watched run: the numbers of a plain loop, the weights of a run that nobody watched."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import frostlab as fl
from cases import slow_unless
from forked import attempt
from frostlab.comparison.load import make_plan
from frostlab.data.prepare import prepare
from frostlab.flow.judge import FROZEN
from frostlab.flow.measurements import flows_of, load_flow
from frostlab.models.build import build_model
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import Optim, Train
from frostlab.records.schema import StepEvent, SteppingEvent
from frostlab.training import run as running
from frostlab.training.batches.batch import token_examples
from frostlab.training.batches.feed import Feed
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.eager import EagerStep, seed_step
from frostlab.training.step.objective import Objective, logits_of
from frostlab.training.step.optimizer import build_optimizer, rate_at
from frostlab.training.treatment import treat
from packed import build
from stages import progressive
from stepping import epochs
from tiny import tiny

CPU = torch.device("cpu")
ALL = {"every_n_steps": 3, "distance": True, "gradient_cosine": True}


def close(found: fl.Flow, wanted: fl.Flow, rel: float, quantities: tuple[str, ...] = ()) -> None:
    """The same numbers; `found` has been rounded to 5 digits."""
    assert found.parts == wanted.parts
    assert [r.step for r in found.reports] == [r.step for r in wanted.reports]
    for mine, theirs in zip(found.reports, wanted.reports, strict=True):
        for name in quantities or ("gradient", "before_clip", "weight", "update", "distance"):
            # Adam's first steps are blind to size: where a gradient is rounding, so is its update
            assert mine.values[name] == pytest.approx(
                theirs.values[name], rel=rel, abs=1e-5, nan_ok=True
            ), (mine.step, name)
        assert mine.rates == pytest.approx(theirs.rates, rel=1e-4)
        assert mine.largest == pytest.approx(theirs.largest, rel=rel, abs=1e-6)
        assert mine.ranges == pytest.approx(theirs.ranges, rel=rel, abs=1e-5)


def plain_flow(recipe_values: dict[str, Any], every: int = 3) -> fl.Flow:
    """The recipe's run as anybody would write it, watched through the optimizer's hooks."""
    recipe = recipe_from(recipe_values)
    prepared = prepare(recipe)
    model = build_model(recipe, prepared.vocabulary, prepared.classes, prepared.pad)
    treat(model, recipe)
    optimizer = build_optimizer(model, recipe.optim, fused=False)
    plain = recipe.train.model_copy(update={"accumulate": 1})
    examples = token_examples(prepared, prepared.splits["train"], CPU)
    feed = Feed(examples, plain, recipe.seed, Compute(CPU, torch.float32))
    assert recipe.train.epochs is not None
    batches = [rows for epoch in range(recipe.train.epochs) for rows in feed.order(epoch)]
    half = recipe.train.precision == "bf16"
    with fl.watch(
        model.train(), optimizer, every_n_steps=every, distance=True, gradient_cosine=True
    ) as flow:
        for step, rows in enumerate(batches):
            (batch,) = feed(rows)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                logits = logits_of(model, batch.inputs)
            F.cross_entropy(logits.float(), batch.targets).backward()
            flow.before_clip()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip or math.inf)
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, len(batches), recipe.optim)
            optimizer.step()
            optimizer.zero_grad()
    return flow


@pytest.mark.parametrize(
    ("changes", "rel"),
    [
        ({"optim__clip": 0.3}, 2e-3),
        ({"train__accumulate": 2}, 2e-3),
        ({"train__precision": "bf16"}, 2e-2),
        ({"treatment": "oelm"}, 2e-3),
        pytest.param({"train__step": "compiled"}, 2e-2, marks=[
            pytest.mark.slow, pytest.mark.filterwarnings("ignore"),
        ]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_run_has_the_numbers_of_a_plain_loop(
    changes: dict[str, Any], rel: float, tmp_path: Path
) -> None:
    recipe = tiny(model__dropout=0.0, optim__lr=1e-4, train__epochs=1, watch=ALL, **changes)
    record = fl.run(recipe, out=tmp_path / "run")
    found = load_flow(record.folder)
    close(found, plain_flow(recipe), rel)
    assert [r.step for r in found.reports] == [1, 4, 7]
    norms = [x for e in record.events(StepEvent) for x in e.norm]
    for step, norm in found.norms("before_clip").items():
        assert norm == pytest.approx(norms[step - 1], rel=1e-4)
    clipped = min(1.0, (changes.get("optim__clip") or 1.0) / norms[0])
    assert found.norms()[1] == pytest.approx(norms[0] * clipped, rel=1e-4)
    assert record.result.stepping[-1].how == changes.get("train__step", "eager")
    frozen = {n for n, v in found.verdicts().items() if v.word == FROZEN}
    assert bool(frozen) == found.verified == ("treatment" in changes)


def test_watching_changes_no_weight(tmp_path: Path) -> None:
    everything = {
        "every_n_steps": 2,
        "distance": True,
        "gradient_cosine": True,
        "dead_units": True,
        "attention_entropy": True,
    }
    records = [
        fl.run(tiny(watch=asked, train__accumulate=2), out=tmp_path / str(i))
        for i, asked in enumerate((None, {"every_n_steps": 1}, everything))
    ]
    first = records[0].result
    for record in records:
        for key in ("weights_digest", "order_digest", "report", "best"):
            assert getattr(record.result, key) == getattr(first, key)
    last = load_flow(records[2].folder).reports[-1]
    assert set(last.dead) == {"blocks.0.down", "blocks.1.down"}
    assert {name: len(heads) for name, heads in last.entropy.items()} == {
        "attention[0]": 2, "attention[1]": 2,
    }  # fmt: skip
    assert all(0 < x <= 1 for heads in last.entropy.values() for x in heads)
    assert not all(map(math.isnan, last.values["gradient_cosine"]))
    with pytest.raises(
        fl.BadInput, match="was not watched; run it with --set watch.every_n_steps=10"
    ):
        load_flow(records[0].folder)
    assert [e.reason for e in records[2].events(SteppingEvent)] == [
        "watch.dead_units and watch.attention_entropy need eager steps"
    ]


def test_language_models_in_pieces_are_watched_too(tmp_path: Path) -> None:
    """Their loss never calls the model as a whole; a hook on it would change what runs."""
    asked = {"every_n_steps": 2, "dead_units": True, "attention_entropy": True}
    plain, watched = (
        fl.run(progressive(stages=[], watch=w), out=tmp_path / str(w is None))
        for w in (None, asked)
    )
    assert watched.result.weights_digest == plain.result.weights_digest
    last = load_flow(watched.folder).reports[-1]
    assert list(last.entropy) == ["attention[0]"]
    assert list(last.dead)


def stopped_after(steps: int, recipe: dict[str, Any], out: Path, patch: Any) -> None:
    asked = iter([False] * steps + [True] * 100)

    @contextmanager
    def interrupted() -> Iterator[Callable[[], bool]]:
        yield lambda: next(asked)

    with patch.context() as inside:
        inside.setattr(running, "interruptions", interrupted)
        with pytest.raises(fl.RunFailed):
            fl.run(recipe, out=out)


def test_a_resumed_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(watch=ALL)
    whole = load_flow(fl.run(recipe, out=tmp_path / "whole").folder)
    stopped_after(5, recipe, tmp_path / "run", monkeypatch)
    early = load_flow(tmp_path / "run")
    assert early.reports == whole.reports[: len(early.reports)]
    assert 0 < len(early.reports) < len(whole.reports)
    fl.run(recipe, out=tmp_path / "run", resume=True)
    found = load_flow(tmp_path / "run")
    exact = ("gradient", "before_clip", "weight", "update", "distance", "weight_cosine")
    close(found, whole, rel=1e-9, quantities=exact)
    agreed = [math.isnan(r.of("gradient_cosine", 0)) for r in found.reports]
    assert agreed == [True, False, True, False, False, False], "no gradient before the first"
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"kind": "flow", "step": 9, "gradi')
    assert load_flow(tmp_path / "run").reports == found.reports


def test_what_was_done_twice_counts_once(tmp_path: Path) -> None:
    folder = fl.run(tiny(watch={"every_n_steps": 3}), out=tmp_path / "run").folder
    before, file = load_flow(folder), folder / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    (parts,) = [{**e, "step": 8} for e in events if e["kind"] == "flow_parts"]
    again = [{**e, "weight": [7.0] * len(before.parts)} for e in events
             if e["kind"] == "flow" and e["step"] > 8]  # fmt: skip
    shape = {"device": "cpu", "precision": "float32", "processes": 1, "threads": 1,
             "runs_at_once": 1}  # fmt: skip
    resumed = {"kind": "resume", "at": 1.0, "step": 8, **shape}
    lines = [resumed, parts, *again[:2]]
    with file.open("a") as end:
        end.writelines(json.dumps(line) + "\n" for line in lines)
    found = load_flow(folder)
    assert found.series("head", "weight") == {
        **{step: x for step, x in before.series("head", "weight").items() if step <= 8},
        10: 7.0, 13: 7.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_ends_with_the_flow_of_one_that_was_not(tmp_path: Path) -> None:
    """Killed after an epoch's checkpoint, it does some steps again."""
    recipe = tiny(watch={"every_n_steps": 2, "distance": True}, model__dropout=0.0)
    assert attempt(recipe, tmp_path / "run", "update", 13) == -9
    assert attempt(recipe, tmp_path / "run") == 0
    whole = load_flow(fl.run(recipe, out=tmp_path / "whole").folder)
    assert load_flow(tmp_path / "run").reports == whole.reports


def test_reports_are_on_disk_when_a_run_is_killed(tmp_path: Path) -> None:
    recipe = tiny(watch={"every_n_steps": 2}, model__dropout=0.0)
    assert attempt(recipe, tmp_path / "run", "update", 6) == -9  # long before a block of steps
    assert [report.step for report in load_flow(tmp_path / "run").reports] == [1, 3, 5]


def test_every_stage_is_watched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = progressive(watch={"every_n_steps": 3, "distance": True})
    plain = fl.run(progressive(), out=tmp_path / "plain")
    record = fl.run(recipe, out=tmp_path / "run")
    assert record.result.weights_digest == plain.result.weights_digest
    flows = flows_of(record.folder)
    assert list(flows) == ["1", "grown", "3"]
    assert {name: [r.step for r in flow.reports] for name, flow in flows.items()} == {
        "1": [1, 4, 7], "grown": [9, 12], "3": [13, 16],
    }  # fmt: skip
    assert load_flow(record.folder).reports == flows["3"].reports
    assert load_flow(record).reports == flows["3"].reports
    assert load_flow(str(record.folder)).reports == flows["3"].reports
    assert load_flow(record.folder, "grown").reports == flows["grown"].reports
    layers = {name: {p.layer for p in flow.parts} for name, flow in flows.items()}
    assert layers == {"1": {None, 0}, "grown": {None, 0, 1}, "3": {None, 0, 1}}
    learning = {p.name for p in flows["grown"].parts if p.state == "trainable"}
    assert {name.partition(".")[0] for name in learning} == {"layers[1]", "head"}
    assert flows["grown"].verified
    assert not flows["1"].verified
    assert set(flows["3"].reports[0].rates) == {1e-5, 1e-3}
    for flow in flows.values():
        first = flow.reports[0]
        moved = [i for i, p in enumerate(flow.parts) if p.state == "trainable"]
        assert [first.of("distance", i) for i in moved] == pytest.approx(
            [first.ratio(i) for i in moved], rel=1e-3, nan_ok=True
        ), "a stage's start is where it begins"
        assert not flow.frozen_by_accident()
    stopped_after(10, recipe, tmp_path / "part", monkeypatch)
    fl.run(recipe, out=tmp_path / "part", resume=True)
    for name, flow in flows_of(tmp_path / "part").items():
        assert flow.reports == flows[name].reports, name
    with pytest.raises(fl.BadInput, match="no stage `grow`; did you mean `grown`?"):
        load_flow(record.folder, "grow")


def taken(kind: type[EagerStep], parts: int, **more: Any) -> tuple[fl.Flow, EagerStep]:
    """A watched step over batches of a few shapes."""
    model = build("gpt classifier").train()
    optimizer = build_optimizer(model, Optim(), fused=True)
    step = kind(Objective(model), optimizer, Compute(CPU, torch.float32), 0.5, **more)
    step.flow = fl.watch(
        model, optimizer, every_n_steps=3, distance=True, gradient_cosine=True
    ).start(hooks=False)
    for i, batch in enumerate(epochs("gpt classifier", 14, packed=True)):
        seed_step(0, i, 0, CPU)
        step(batch * parts, parts * batch[0].scored, 1e-3)
    step.flow.stop()
    return step.flow, step


@pytest.mark.parametrize("parts", slow_unless([2], [1, 2]))
def test_captured_steps_are_measured_as_eager_ones(parts: int) -> None:
    """A stand-in for graphs runs the recorded work again; measured steps have their own."""
    recorded: list[str] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        recorded.append("graph")
        return work

    wanted, _ = taken(EagerStep, parts)
    found, step = taken(CapturedStep, parts, compiles=False, record=record)
    quantities = ("gradient", "before_clip", "weight", "update", "distance", "gradient_cosine")
    close(found, wanted, 1e-4, quantities)
    assert [r.step for r in found.reports] == [1, 4, 7, 10, 13]
    assert isinstance(step, CapturedStep)
    measured = [also for _, also in step._graphs]
    assert 0 < sum(measured) < len(measured) == len(recorded)


def test_only_measured_steps_may_fail_to_be_captured() -> None:
    holder: list[CapturedStep] = []

    class Kept(CapturedStep):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            holder.append(self)

    def record(work: Callable[[], None]) -> Callable[[], None]:
        def refuse(share: Any) -> None:
            if holder[0]._recording:
                raise RuntimeError("out of memory\nand more")

        with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
            patch.setattr(holder[0], "_update", lambda factor, broken: refuse(factor))
            work()
        return work

    wanted, _ = taken(EagerStep, 1)
    found, step = taken(Kept, 1, compiles=False, record=record)
    close(found, wanted, 1e-4)
    assert step.kind == "captured"
    assert step.reason == "measured steps run without a graph: out of memory"
    assert isinstance(step, CapturedStep)
    assert step._graphs
    assert not any(measured for _, measured in step._graphs)


def test_looking_inside_takes_eager_steps() -> None:
    model = build("gpt classifier")
    step = build_step(Objective(model), Optim(), Train(step="compiled"),
                      Compute(CPU, torch.float32), steps=9, watches_inside=True)  # fmt: skip
    assert (step.kind, step.reason) == (
        "eager", "watch.dead_units and watch.attention_entropy need eager steps",
    )  # fmt: skip


def test_a_run_that_diverges_keeps_what_it_saw(tmp_path: Path) -> None:
    recipe = tiny(watch={"every_n_steps": 1}, optim={"lr": 1e30, "clip": None})
    with pytest.raises(fl.RunFailed, match="not finite"):
        fl.run(recipe, out=tmp_path / "run")
    steps = [r.step for r in load_flow(tmp_path / "run").reports]
    assert steps == list(range(1, len(steps) + 1))
    assert steps


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match="is not a run: it has no events"):
        load_flow(tmp_path)


def test_the_digest_knows_of_watching_only_when_there_is_some() -> None:
    plain = recipe_from(tiny())
    assert recipe_from(tiny(watch=None)).digest == plain.digest
    assert (
        recipe_from(tiny(watch={})).digest == recipe_from(tiny(watch={"every_n_steps": 10})).digest
    )
    assert len({plain.digest, recipe_from(tiny(watch={})).digest,
                recipe_from(tiny(watch={"every_n_steps": 5})).digest}) == 3  # fmt: skip
    arms = "baseline,oelm"
    plan = make_plan("docstrings-demo", {"arms": arms})
    watched = make_plan("docstrings-demo", {"arms": arms}, settings={"watch.every_n_steps": 5})
    assert watched.digest != plan.digest
    with pytest.raises(
        fl.BadInput, match="watch.every_steps is not a key; did you mean `every_n_steps`?"
    ):
        recipe_from(tiny(watch={"every_steps": 5}))

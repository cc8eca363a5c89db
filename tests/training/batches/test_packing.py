"""Rows that hold several examples: what is in them, how wide they are, what runs do with them."""

import dataclasses
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import frostlab as fl
from frostlab.data.tokens import Tokens
from frostlab.models.stack import GPTStack
from frostlab.recipe.load import recipe_from
from frostlab.recipe.settings import Optim, Train
from frostlab.training.batches.batch import (
    IGNORED,
    Batch,
    TokenExamples,
    epoch_order,
    micro_batches,
    row_lengths,
    token_examples,
)
from frostlab.training.batches.feed import Feed
from frostlab.training.batches.packing import Shapes, least_padding, pack, shapes_for
from frostlab.training.distributed import Compute, World
from frostlab.training.step import build_step
from frostlab.training.step.compiled import shape_key
from frostlab.training.step.objective import Objective, check_stack
from packed import PAD, build, classifies, exactly, prepared, tokens
from tiny import tiny


def naive(data: Tokens, rows: list[int]) -> list[tuple[list[int], list[int]]]:
    """What is read and what is to be answered, example by example, one token after another."""
    made = []
    for row in rows:
        ids = [int(x) for x in data.ids[data.starts[row] : data.stops[row]]]
        if data.labels is not None:
            made.append((ids, [int(data.labels[row])]))
            continue
        early = 0 if data.scored_from is None else int(data.scored_from[row])
        answers = [x if place >= early else IGNORED for place, x in enumerate(ids)]
        made.append((ids[:-1], answers[1:]))
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, Shapes((16, 40, 128), 14, 9)]),
    st.randoms(use_true_random=False),
)
def test_a_packed_row_equals_a_loop(
    lengths: list[int], labels: bool, early: bool, shapes: Shapes | None, draw: object
) -> None:
    data = tokens(lengths, labels=labels)
    if early and not labels:
        first = np.array([length // 2 for length in lengths], np.int32)
        data = dataclasses.replace(data, scored_from=first)
    rows = list(range(len(lengths)))
    draw.shuffle(rows)  # type: ignore[attr-defined]
    batch = pack(data, np.array(rows), PAD, shapes=shapes)
    assert batch.packing is not None
    bounds, width = batch.packing.bounds.tolist(), batch.inputs["input_ids"].shape[1]
    ids, targets = batch.inputs["input_ids"][0].tolist(), batch.targets.flatten().tolist()
    wanted = naive(data, rows)
    for i, (read, answers) in enumerate(wanted):
        begin, end = bounds[i], bounds[i + 1]
        assert ids[begin:end] == read
        assert (targets[i : i + 1] if labels else targets[begin:end]) == answers
        assert batch.packing.owners[begin:end].tolist() == [i] * len(read)
        assert batch.packing.places[begin:end].tolist() == list(range(len(read)))
    real = sum(len(read) for read, _ in wanted)
    assert (batch.tokens, batch.examples) == (real, len(rows))
    assert batch.scored == sum(a != IGNORED for _, answers in wanted for a in answers)
    assert bounds[-1] == width
    assert len(bounds) == len(batch.packing.firsts) + 2
    assert ids[real:] == [PAD] * (width - real)
    if shapes is None:
        assert width == real
    else:
        assert width in shapes.widths
        assert len(bounds) == 16
    assert batch.packing.longest >= max(width - real, *(len(read) for read, _ in wanted))


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=11))
def test_widths_waste_as_little_as_any_eight_could(rows: dict[int, int]) -> None:
    needed = np.array(sorted(rows)) * 64
    counts = np.array([rows[n // 64] for n in needed])

    def wasted(widths: tuple[int, ...]) -> int:
        return sum(
            int(c) * (min(w for w in widths if w >= n) - n)
            for n, c in zip(needed, counts, strict=True)
        )

    found = least_padding(needed, counts, 8)
    others = combinations(needed[:-1].tolist(), min(7, len(needed) - 1))
    assert len(found) <= 8
    assert max(found) == needed[-1]
    assert wasted(found) == min(wasted((*widths, int(needed[-1]))) for widths in others)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=9),
    st.integers(0, 3000),
)
def test_a_width_is_chosen_only_if_it_saves_more_than_it_costs(
    rows: dict[int, int], cost: int
) -> None:
    needed, counts = np.array(sorted(rows)), np.array([rows[n] for n in sorted(rows)])

    def total(widths: tuple[int, ...]) -> int:
        padded = (int(c) * min(w for w in widths if w >= n) for n, c in rows.items())
        return sum(padded) + cost * len(widths)

    every = [
        (*widths, int(needed[-1]))
        for count in range(len(needed))
        for widths in combinations(needed[:-1].tolist(), count)
    ]
    assert total(least_padding(needed, counts, 9, cost)) == min(map(total, every))


@pytest.mark.parametrize("steps", [10, 1000, 10**6])
def test_padded_batches_have_few_widths_where_a_width_takes_time(steps: int) -> None:
    """The device is only named: making batches needs none."""
    data = tokens(np.random.default_rng(0).integers(2, 400, 3000).tolist(), labels=True)
    train, cost = recipe_from(tiny(train={"batch": 8, "epochs": 2})).train, 100_000.0

    def widths(device: str, steps: int | None) -> list[int]:
        kind, limit = torch.device(device), int(data.lengths.max())
        examples = TokenExamples(data, PAD, limit=limit if kind.type == "cuda" else None)
        feed = Feed(examples, train, 0, Compute(kind, torch.float32))
        if steps is not None:
            feed.use_few_widths(steps, cost)
        made = [(rows, feed(rows)[0]) for epoch in range(2) for rows in feed.order(epoch)]
        found = [batch.inputs["input_ids"].shape[1] for _, batch in made]
        for (rows, batch), width in zip(made, found, strict=True):
            assert width >= data.lengths[rows].max()
            assert batch.tokens == data.lengths[rows].sum()
        return found

    every, few = widths("cuda", None), widths("cuda", steps)
    assert len(set(widths("cpu", steps))) > 100, "the CPU pads to the longest example"
    assert set(few) <= set(every)
    assert len(set(every)) > 20
    assert len(set(few)) == {10: 1, 1000: len(set(few)), 10**6: len(set(every))}[steps]
    totals = [steps * 8 * sum(w) / len(w) + cost * len(set(w)) for w in (few, every)]
    assert totals[0] <= 1.001 * totals[1]
    if steps == 1000:
        assert 2 < len(set(few)) < 10


def test_batches_of_a_fixed_width_have_one_shape() -> None:
    """Else the cost of compiling counts shapes that never occur."""
    data = tokens(np.random.default_rng(0).integers(2, 400, 3000).tolist(), labels=True)
    train = recipe_from(tiny(train={"batch": 8, "epochs": 2})).train
    examples = TokenExamples(data, PAD, limit=int(data.lengths.max()), width=512)
    feed = Feed(examples, train, 0, Compute(torch.device("cuda"), torch.float32))
    feed.use_few_widths(10**6, 1.0)
    assert feed.number_of_shapes == 1
    assert {feed(rows)[0].inputs["input_ids"].shape[1] for rows in feed.order(0)} == {512}


@pytest.mark.parametrize("count", [64, 60])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batching", ["padded", "fixed", "packed"])
def test_whether_all_processes_meet_one_shape(count: int, drop_last: bool, batching: str) -> None:
    """Captured steps of several processes rely on it: they must replay a graph together."""
    data = tokens(np.random.default_rng(0).integers(2, 30, count).tolist(), labels=True)
    settings = {"batch": 8, "accumulate": 2, "drop_last": drop_last, "batching": batching}
    train = Train.model_validate(settings)
    examples = TokenExamples(data, PAD, width=32 if batching == "fixed" else None)
    feeds = [
        Feed(examples, train, 0, Compute(torch.device("cpu"), torch.float32, World(rank, 2)))
        for rank in (0, 1)
    ]
    shapes = {shape_key([part]) for f in feeds for e in (0, 1) for r in f.order(e) for part in f(r)}
    assert {feed.one_shape for feed in feeds} == {len(shapes) == 1}
    assert (len(shapes) == 1) == (batching == "fixed" and (drop_last or count == 64))


@pytest.mark.parametrize(("most", "batch"), [(60, 32), (30, 32), (30, 8)])
def test_rows_of_an_epoch_fit_few_shapes(most: int, batch: int) -> None:
    data = tokens(np.random.default_rng(1).integers(2, most, 1000).tolist(), labels=True)
    order = epoch_order(data.lengths, batch, 0, 0, bucket=False)
    parts = [part for rows in order for part in micro_batches(rows, 0, 1, 1)]
    shapes = shapes_for(data, parts)
    made = [pack(data, part, PAD, shapes=shapes) for part in parts]
    assert {b.inputs["input_ids"].shape[1] for b in made} <= set(shapes.widths)
    assert len({shape_key([b]) for b in made}) <= 10, "the longest sequence counts, too"
    real, held = sum(b.tokens for b in made), sum(b.inputs["input_ids"].numel() for b in made)
    assert real / held > (0.94 if batch == 32 else 0.8)
    longer = int(max(shapes.widths)) + 1  # a later epoch may have one
    assert shapes.width(longer) >= longer
    assert shapes.width(longer) % 64 == 0


def test_no_rows_make_a_row_that_counts_for_nothing() -> None:
    model = Objective(build("gpt classifier"))
    batch = pack(tokens(labels=True), np.zeros(0, np.int64), PAD)
    loss = model(batch)
    loss.backward()
    assert batch.scored == batch.examples == batch.tokens == 0
    assert float(loss.detach()) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt classifier", "decoder", "bert classifier", "gpt2"])
@pytest.mark.parametrize("parts", [1, 2])
def test_packed_steps_train_as_padded_ones(name: str, parts: int) -> None:
    data = prepared(labels=classifies(name))
    compute = Compute(torch.device("cpu"), torch.float32)

    def losses(batching: str) -> list[float]:
        objective = Objective(exactly(name).eval())  # no dropout
        train = Train.model_validate({"batch": 12, "accumulate": parts, "batching": batching})
        step = build_step(objective, Optim(lr=3e-3), train, compute, steps=5)
        examples = token_examples(data, data.splits["train"], compute.device)
        feed = Feed(examples, train, 0, compute)
        made = []
        for rows in feed.order(0):
            batches = feed(rows)
            assert all((b.packing is not None) == (batching == "packed") for b in batches)
            scored = sum(b.scored for b in batches)
            made.append(float(step(batches, scored, 3e-3).loss))
        return made

    padded = losses("padded")
    assert losses("packed") == pytest.approx(padded, rel=1e-6)  # losses are rounded to float32
    assert len(set(padded)) == 5, "the weights move"


def test_a_packed_run_records_what_it_saved(tmp_path: Path) -> None:
    for split, word in (("train", "word"), ("test", "other")):
        rows = [f"{f'{word}{i} ' * (1 + i % 17)}end,{'ab'[i % 2]}" for i in range(90)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *rows]))
    shares = {}
    for batching in ("packed", "padded", "bucketed", "fixed"):
        recipe = tiny(
            data={"name": "own", "path": str(tmp_path), "length": 24},
            tokenizer={"kind": "words", "size": 50},
            model__dropout=0.0,
            train__batching=batching,
            train__epochs=1,
        )
        record = fl.run(recipe, runs=tmp_path)
        clocks = record.result.clocks
        shares[batching] = clocks.padding_share
        assert clocks.packing_efficiency == (1.0 if batching == "packed" else None)
    assert shares["packed"] == 0.0 < shares["bucketed"] < shares["padded"]
    # 90 texts of 1 + i % 17 words and an end, less those held out, in rows of 24
    assert shares["padded"] < shares["fixed"] == pytest.approx(1 - 10 / 24, abs=0.02)


class SquaredError(Objective):
    """A loss of another task than those that ship: the squared error of one output."""

    def loss_of(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return (logits[:, 0] - batch.targets).square().sum()


def test_a_packed_model_is_checked_by_the_loss_of_its_task() -> None:
    data = prepared(lengths=[3, 8, 5, 12], labels=True)
    labels = np.array([0.25, 0.5, 0.125, 1.0], np.float32)
    split = dataclasses.replace(data.splits["train"], labels=labels)  # type: ignore[arg-type]
    data = dataclasses.replace(data, splits={"train": split})
    objective = SquaredError(build("gpt classifier"))
    check_stack(objective, data, types=False, packs=True)
    batch = pack(split, np.arange(4), PAD)
    assert batch.targets.tolist() == labels.tolist(), "targets need not be classes"


def test_a_model_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 16}  # fmt: skip
    model = {"kind": "pretrained", "name": "roberta", "weights": False, "config": small}
    said = (
        "train.batching packed and train.cache_prefix do not support "
        "RobertaForSequenceClassification; they support gpt"
    )
    with pytest.raises(fl.BadInput, match=said):
        fl.run(tiny(model=model, train__batching="packed"), runs=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", ["majority", "induction"])
def test_pieces_that_answer_otherwise_are_refused(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A language model is trained in pieces even when it is not packed."""
    read = GPTStack.read

    def other(self: GPTStack, *given: Any) -> torch.Tensor:
        return 0.5 * read(self, *given)

    monkeypatch.setattr(GPTStack, "read", other)
    batching = "packed" if task == "majority" else "bucketed"
    data = {"name": task, "examples": 64, "length": 16, "symbols": 16}
    with pytest.raises(fl.BadInput, match="GPT run layer by layer gives a loss of"):
        fl.run(tiny(data=data, train__batching=batching), runs=tmp_path)
    assert not list(tmp_path.iterdir())


def test_lengths_that_are_read() -> None:
    assert row_lengths(tokens([3, 5], labels=True)).tolist() == [3, 5]
    assert row_lengths(tokens([3, 5], labels=False)).tolist() == [2, 4]

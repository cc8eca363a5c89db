"""Frozen first layers: they leave no graph behind, and their cached outputs change nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import frostlab as fl
from frostlab.data.cache import cache_folder
from frostlab.models.stack import take_apart
from frostlab.recipe.settings import Train
from frostlab.training import prefix as prefixes
from frostlab.training.batching import evaluation_order
from frostlab.training.objective import Objective
from frostlab.training.packing import pack
from frostlab.training.prefix import build_prefix, prefix_depth
from packed import PAD, build, classifies, prepared
from tiny import tiny

LEARNED = ("embedding", "position", "layers[0]")
ROTARY = ("embedding", "layers[0]")
FROZEN = {
    "gpt classifier": LEARNED, "gpt": LEARNED, "decoder": ROTARY, "gpt2": LEARNED,
    "llama": ROTARY, "bert classifier": ("all", "!layers[-1]", "!head"),
}  # fmt: skip


def frozen(name: str) -> torch.nn.Module:
    model = build(name).eval()  # no dropout
    fl.freeze(model, *FROZEN[name])
    return model


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_first_layers_leave_no_graph_behind(name: str) -> None:
    model, seen = frozen(name), {}
    stack = take_apart(model)
    assert stack is not None
    for i, layer in enumerate(stack.layers):
        layer.register_forward_hook(lambda m, a, out, i=i: seen.update({i: out.requires_grad}))
    data = prepared(labels=classifies(name)).splits["train"]
    Objective(model)(pack(data, evaluation_order(data.lengths, 6)[0], PAD)).backward()
    assert seen == {0: False, 1: True}
    assert prefix_depth(model) == 1


def test_how_deep_the_frozen_layers_go() -> None:
    model = build("gpt classifier")
    assert prefix_depth(model) == 0
    fl.freeze(model, "layers[0]")
    assert prefix_depth(model) == 0, "the embedding below it learns"
    fl.freeze(model, "embedding", "position")
    assert prefix_depth(model) == 0
    fl.freeze(model, "embedding", "position", "layers[1]")
    assert prefix_depth(model) == 0, "a layer above one that learns is no prefix"
    fl.freeze(model, "embedding", "position", "layers[0:2]")
    assert prefix_depth(model) == 2
    assert prefix_depth(torch.nn.Linear(2, 2)) == 0, "not known"


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", FROZEN)
def test_cached_layers_change_no_loss_and_no_gradient(name: str, where: str) -> None:
    model, data = frozen(name), prepared(labels=classifies(name), pairs="bert" in name)
    objective, types = Objective(model), "bert" in name
    train = Train.model_validate({"cache_prefix": where})
    kept = build_prefix(model, data, train, torch.float32, types=types)
    tokens = data.splits["train"]
    calls: list[int] = []
    stack = take_apart(model)
    assert stack is not None
    stack.layers[0].register_forward_hook(lambda *args: calls.append(1))
    for rows in evaluation_order(tokens.lengths, 7)[:4]:
        made = []
        for table in (None, kept.starts):
            objective.prefix = None if table is None else kept
            model.zero_grad()
            loss = objective(pack(tokens, rows, PAD, types=types, table=table))
            loss.backward()
            made.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
        for plain, cached in zip(*made, strict=True):
            torch.testing.assert_close(cached, plain, rtol=1e-5, atol=1e-6)
    assert len(calls) == 4, "cached, the first layer is not called"


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_run_with_its_prefix_cached(where: str, tmp_path: Path) -> None:
    usual = tiny(model__dropout=0.0, treatment={"freeze": list(LEARNED)})
    records = [
        fl.run({**usual, "train": {**usual["train"], "cache_prefix": kept}}, runs=tmp_path)
        for kept in (None, where, where)
    ]
    losses = [[x for e in r.events() if e["kind"] == "step" for x in e["loss"]] for r in records]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == losses[1]
    facts = [e for r in records[1:] for e in r.events() if e["kind"] == "prefix"]
    assert [f["reused"] for f in facts] == [False, where == "disk"]
    assert [(f["where"], f["depth"], f["bytes"]) for f in facts] == [
        (where, 1, 256 * 12 * 16 * 4)
    ] * 2
    assert min(e["frozen_verified"] for e in records[1].events() if "frozen_verified" in e) > 0


def tables() -> list[Path]:
    return sorted((cache_folder(None) / "prefixes").glob("*/vectors"))


def test_a_table_is_kept_under_what_it_depends_on(tmp_path: Path) -> None:
    def kept(**changes: Any) -> set[Path]:
        before = set(tables())
        recipe = tiny(
            model__dropout=0.0, treatment={"freeze": list(LEARNED)}, train__cache_prefix="disk"
        )
        for name, value in changes.items():
            section, _, key = name.partition("__")
            recipe[section] = {**recipe[section], key: value} if key else value
        fl.run(recipe, runs=tmp_path)
        return set(tables()) - before

    assert kept(seed=71), "other weights"
    assert not kept(seed=71)
    assert not kept(seed=71, optim__lr=1e-4), "which only the layers above feel"
    assert kept(seed=71, data__examples=192), "other data"
    assert kept(seed=71, model__heads=4), "another model with weights of the same shape"
    assert kept(seed=71, train__precision="bf16")


def test_a_spoilt_table_is_made_again(tmp_path: Path) -> None:
    recipe = tiny(
        seed=72, model__dropout=0.0, treatment={"freeze": list(LEARNED)}, train__cache_prefix="disk"
    )
    before = set(tables())
    first = fl.run(recipe, runs=tmp_path)
    (made,) = set(tables()) - before
    made.write_bytes(bytes(len(made.read_bytes())))
    second = fl.run(recipe, runs=tmp_path)
    assert made.read_bytes().strip(b"\0")
    (fact,) = [e for e in second.events() if e["kind"] == "prefix"]
    assert not fact["reused"]
    assert second.metrics == first.metrics


def test_old_tables_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, size in enumerate((30, 40, 20)):
        folder = tmp_path / f"table{i}"
        folder.mkdir()
        (folder / "about.json").write_text(json.dumps({"bytes": size}))
        os.utime(folder, (i, i) if i != 0 else (9, 9))  # the first was used last
    prefixes._make_room(tmp_path, 45, 100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["table0", "table2"]
    prefixes._make_room(tmp_path, 80, 100)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"treatment": "oelm"}, "needs frozen layers below the first that learns"),
        ({"model__dropout": 0.1}, "needs frozen layers without dropout"),
        ({"train__cache_gb": 1e-4}, r"would take 0.0 GB; train.cache_gb allows 0.0001"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    usual: dict[str, Any] = {
        "model__dropout": 0.0, "treatment": {"freeze": list(LEARNED)},
        "train__cache_prefix": "memory",
    }  # fmt: skip
    with pytest.raises(fl.BadInput, match=f"train.cache_prefix {said}"):
        fl.run(tiny(**{**usual, **changes}), runs=tmp_path)
    assert not list(tmp_path.iterdir())

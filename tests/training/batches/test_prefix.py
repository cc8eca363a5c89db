"""Frozen first layers: they leave no graph behind, and their cached outputs change nothing."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostlab as fl
from cases import slow_unless
from frostlab import storage
from frostlab.errors import DamagedCache
from frostlab.models.stack import take_apart
from frostlab.recipe.settings import Train
from frostlab.records.schema import EvaluationEvent, PrefixEvent, StepEvent
from frostlab.storage import SEAL, cache_folder
from frostlab.training.batches.batch import evaluation_order
from frostlab.training.batches.packing import pack
from frostlab.training.batches.prefix import build_prefix, cached_table, prefix_depth
from frostlab.training.step.objective import Objective
from packed import PAD, build, classifies, exactly, prepared
from tiny import tiny

LEARNED = ("embedding", "position", "layers[0]")
ROTARY = ("embedding", "layers[0]")
FROZEN = {
    "gpt classifier": LEARNED, "gpt": LEARNED, "decoder": ROTARY, "gpt2": LEARNED,
    "llama": ROTARY, "bert classifier": ("all", "!layers[-1]", "!head"),
}  # fmt: skip


def frozen(name: str) -> torch.nn.Module:
    model = exactly(name).eval()  # no dropout
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
    kept = build_prefix(model, data, train, torch.float64, types=types)
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
            loss = objective(pack(tokens, rows, PAD, types=types, cached_starts=table))
            loss.backward()
            made.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
        for plain, cached in zip(*made, strict=True):
            torch.testing.assert_close(cached, plain, rtol=1e-10, atol=1e-10)
    assert len(calls) == 4, "cached, the first layer is not called"


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_run_with_its_prefix_cached(where: str, tmp_path: Path) -> None:
    usual = tiny(model__dropout=0.0, treatment={"freeze": list(LEARNED)})
    records = [
        fl.run({**usual, "train": {**usual["train"], "cache_prefix": kept}}, runs=tmp_path)
        for kept in (None, where, where)
    ]
    losses = [[x for e in r.events(StepEvent) for x in e.loss] for r in records]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == losses[1]
    facts = [e for r in records[1:] for e in r.events(PrefixEvent)]
    assert [f.reused for f in facts] == [False, where == "disk"]
    assert [(f.where, f.depth, f.bytes) for f in facts] == [(where, 1, 256 * 12 * 16 * 4)] * 2
    assert min(e.frozen_verified for e in records[1].events(EvaluationEvent)) > 0


def tables() -> list[Path]:
    return sorted((cache_folder(None) / "prefixes").glob("*/vectors"))


def test_a_table_is_kept_under_what_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path / "cache"))

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

    assert kept(seed=70)
    assert kept(seed=71), "other weights"
    assert not kept(seed=71)
    assert not kept(seed=71, optim__lr=1e-4), "which only the layers above feel"
    assert kept(seed=71, data__examples=192), "other data"
    assert kept(seed=71, model__heads=4), "another model with weights of the same shape"
    assert kept(seed=71, train__precision="bf16")


@pytest.mark.parametrize(
    "spoil", slow_unless(["gone", "one bit"], ["zeroed", "cut", "gone", "one bit", "no facts"])
)
def test_a_spoilt_table_is_made_again(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path / "cache"))
    recipe = tiny(
        seed=72, model__dropout=0.0, treatment={"freeze": list(LEARNED)}, train__cache_prefix="disk"
    )
    first = fl.run(recipe, runs=tmp_path)
    (made,) = tables()
    content = made.read_bytes()
    if spoil == "zeroed":
        made.write_bytes(bytes(len(content)))
    elif spoil == "cut":
        made.write_bytes(content[:100])
    elif spoil == "one bit":
        made.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    else:
        (made if spoil == "gone" else made.with_name(SEAL)).unlink()
    with pytest.warns(DamagedCache, match="is built again, because "):
        second = fl.run(recipe, runs=tmp_path)
    assert made.read_bytes() == content
    (fact,) = second.events(PrefixEvent)
    assert not fact.reused
    assert second.metrics == first.metrics


def test_a_large_table_is_hashed_again_only_if_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(storage, "_LARGE", 1000)
    monkeypatch.setattr(storage, "_SETTLED", -(10**9))  # as if it was written long ago
    hashed: list[str] = []
    compute = storage.checksums
    monkeypatch.setattr(storage, "checksums", lambda *a: hashed.extend(a[1]) or compute(*a))

    def take() -> tuple[float, bool]:
        table, reused = cached_table("x", (32, 16), torch.float64, 10**6, lambda t: t.fill_(3.0))
        return float(table.sum()), reused

    assert take() == (3.0 * 32 * 16, False)
    assert hashed == ["vectors"], "it was sealed"
    assert take() == take() == (3.0 * 32 * 16, True)
    assert hashed == ["vectors"]
    time.sleep(0.02)  # longer than a tick of the file system's clock
    (path,) = tables()
    content = bytearray(path.read_bytes())
    content[77] ^= 1
    path.write_bytes(content)
    with pytest.warns(DamagedCache, match="is built again, because vectors"):
        assert take() == (3.0 * 32 * 16, False)
    assert take() == (3.0 * 32 * 16, True)


def test_old_tables_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path))
    folder = tmp_path / "prefixes"

    def keep(key: str, rows: int) -> bool:
        return cached_table(key, (rows, 10), torch.float32, 4000, lambda t: t.fill_(rows))[1]

    def names() -> list[str]:
        return sorted(path.name for path in folder.iterdir() if path.is_dir())

    assert not any(keep(key, 30) for key in ("a", "b", "c"))
    os.utime(folder / "a", (1, 1))
    os.utime(folder / "b", (2, 2))
    assert keep("a", 30), "found, and used just now"
    (folder / ".d.00.tmp").mkdir()  # what a killed process left
    assert not keep("d", 40)
    assert names() == ["a", "c", "d"]
    assert not keep("e", 100)
    assert names() == ["e"]


def test_a_table_that_another_run_removes_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path))
    table, _ = cached_table("a", (30, 10), torch.float32, 1200, lambda t: t.fill_(7))
    cached_table("b", (30, 10), torch.float32, 1200, lambda t: t.fill_(8))
    assert not (tmp_path / "prefixes" / "a").exists()
    assert table.unique().tolist() == [7.0]


def test_a_disk_without_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        fl.BadInput, match=r"cannot be built or read \(No space left on device\); if"
    ):
        cached_table("a", (30, 10), torch.float32, 1200, lambda t: None)
    assert [path.name for path in (tmp_path / "prefixes").iterdir() if path.is_dir()] == []


def test_examples_without_a_token_to_read_spoil_no_other_row() -> None:
    model, data = frozen("decoder"), prepared(lengths=[9] * 32 + [1, 1], labels=False)
    kept = build_prefix(model, data, Train(cache_prefix="memory"), torch.float64, types=False)
    alone = prepared(lengths=[9] * 32, labels=False)
    usual = build_prefix(model, alone, Train(cache_prefix="memory"), torch.float64, types=False)
    torch.testing.assert_close(kept.table, usual.table, rtol=1e-10, atol=1e-10)


def test_a_thawed_layer_is_not_looked_up() -> None:
    model, data = frozen("gpt classifier"), prepared(labels=True)
    objective = Objective(model)
    objective.prefix = build_prefix(
        model, data, Train(cache_prefix="memory"), torch.float32, types=False
    )
    tokens = data.splits["train"]
    batch = pack(tokens, np.arange(4), PAD, cached_starts=objective.prefix.starts)
    objective(batch)
    fl.thaw(model)
    with pytest.raises(fl.FrostlabError, match="a weight was thawed after the cache was built"):
        objective(batch)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"treatment": "oelm"}, "needs frozen layers below the first trainable layer"),
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

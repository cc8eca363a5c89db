"""What can be asked of a flow, what it refuses, and what measuring never does."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Adafactor

import frostlab as fl
from flowing import adamw, batch, loss_at, tiny_gpt, watched
from frostlab.flow.activity import (
    attention_probabilities,
    dead_fraction,
    entropy,
    saturated_fraction,
)
from frostlab.flow.probe import Probe
from frostlab.flow.tensors import read_layout


def test_a_saved_flow_is_the_same_flow(tmp_path: Path) -> None:
    model = tiny_gpt()
    fl.freeze(model, "layers[1].key")
    flow = watched(model, adamw(model), distance=True, dead_units=True, attention_entropy=True)
    loaded = fl.load_flow(flow.save(tmp_path / "flow.json"))
    assert type(loaded) is fl.Flow
    assert loaded.to_dict() == flow.to_dict()
    assert loaded.verdicts() == flow.verdicts()
    assert loaded.depth_ratios() == flow.depth_ratios()
    assert loaded.table() == flow.table()
    frame = loaded.to_frame()
    assert len(frame) == len(flow.parts) * len(flow.reports)
    assert frame[frame.part == "layers[1].key"].ratio.isna().all()
    assert frame[frame.part == "head"]["update"].gt(0).all()


def test_a_broken_flow_can_be_saved(tmp_path: Path) -> None:
    model = tiny_gpt()
    flow = watched(model, adamw(model), lambda s: loss_at(model, s) * torch.nan, steps=3)
    assert flow.first_broken() == (1, "embedding")
    loaded = fl.load_flow(flow.save(tmp_path / "flow.json"))
    assert loaded.first_broken() == (1, "embedding")
    assert math.isnan(loaded.norms()[1])
    assert loaded.verdicts() == flow.verdicts()


def test_the_table_shows_frozen_parts_without_numbers() -> None:
    model = tiny_gpt()
    fl.freeze(model, "query")
    flow = watched(model, adamw(model))
    lines = {line.split()[0]: line.split()[1:] for line in flow.table().splitlines() if line}
    assert lines["layers[0].query"] == ["–", "–", "–", "–", "frozen", "on", "purpose"]
    assert lines["layers[0].key"][-1] == "learning"
    assert "before clip" not in flow.table()
    assert flow.table().splitlines()[-1].startswith("front/output gradient ")


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    model = tiny_gpt()
    optimizer = adamw(model)
    flow = watched(model, optimizer, steps=1)
    text = tmp_path / "x.json"
    text.write_text("{")
    other = tmp_path / "y.json"
    other.write_text(json.dumps({"schema": 9}))
    half = tmp_path / "z.json"
    half.write_text(json.dumps({"schema": 1, "model": "GPT", "optimizer": "AdamW"}))
    cases: list[tuple[Any, str]] = [
        (lambda: fl.watch(model, optimizer, every_n_steps=0),
         "every_n_steps is 0; give a whole number"),
        (lambda: fl.watch(model, "adam"), "no torch.optim.Optimizer"),  # type: ignore[arg-type]
        (lambda: fl.watch(model, []), "no torch.optim.Optimizer"),
        (lambda: fl.watch(nn.ReLU(), optimizer), "no parameters to watch"),
        (lambda: flow.series("layers[0].qery", "ratio"), "did you mean `layers[0].query`?"),
        (lambda: flow.series("head", "size"), "is not measured; choose from ratio, gradient"),
        (lambda: flow.norms("ratio"), "`ratio` is not a norm"),
        (lambda: flow.save(tmp_path / "no" / "flow.json"), "does not exist"),
        (lambda: fl.load_flow(tmp_path / "none.json"), "No such file"),
        (lambda: fl.load_flow(text), "is not JSON"),
        (lambda: fl.load_flow(other), "is not a flow of schema 1"),
        (lambda: fl.load_flow(half), "z.json is damaged"),
        (lambda: fl.load_flow(half, "train"), "is not a run, so it has no stage `train`"),
        (lambda: fl.load_flow(fl.RunRecord(tmp_path / "none")), "none is not a run"),
        (lambda: fl.watch(torch.compile(model), optimizer, dead_units=True),
         "before torch.compile"),
        (lambda: fl.watch(model.requires_grad_(False), optimizer), "nothing requires a gradient"),
    ]  # fmt: skip
    for call, said in cases:
        with pytest.raises(fl.BadInput) as caught:
            call()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_hooks_and_copies_go_with_the_watch() -> None:
    model = tiny_gpt()
    optimizer = adamw(model)
    flow = fl.watch(model, optimizer, every_n_steps=1, dead_units=True, attention_entropy=True)
    with flow:
        with pytest.raises(fl.BadInput, match="already watching"):
            flow.start()
        loss_at(model, 0).backward()
        optimizer.step()
        assert flow._probe is not None
        assert flow._probe._updates._before == []
    assert flow._probe is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    optimizer.step()
    assert [report.step for report in flow.reports] == [1]


class Seen(TorchDispatchMode):
    """The operations that ran, and the bytes that were alive at most."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", [{}, {"distance": True, "gradient_cosine": True}])
def test_measuring_never_looks_at_a_value(asked: dict[str, bool]) -> None:
    """Whatever reads a value waits for the device, and cannot be captured in a graph."""
    model = tiny_gpt()
    fl.freeze(model, "layers[0].query")
    optimizer = adamw(model)
    loss_at(model, 0).backward()
    probe = Probe(read_layout(model, [optimizer]), [optimizer], **asked)
    with Seen() as seen:
        for _ in range(2):
            probe.before_clip()
            probe.before_step(torch.tensor(0.5))
            probe.after_step()
    assert "aten::_foreach_norm.Scalar" in seen.names
    waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")
    assert not [name for name in seen.names if name.split("::")[1].split(".")[0] in waits]
    assert probe.values.data_ptr() == probe.views["gradient"].data_ptr()


def test_a_tensor_as_learning_rate_is_read_on_the_device() -> None:
    model = tiny_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    flow = watched(model, optimizer, steps=1)
    assert flow.reports[0].rates == pytest.approx((1e-3,))


def test_an_optimizer_without_a_learning_rate_is_watched() -> None:
    """Such as Adafactor, which makes its own from the weights."""
    model = tiny_gpt()
    lost = {id(p) for p in model.blocks[1].up.parameters()}
    kept = [p for p in model.parameters() if id(p) not in lost]
    flow = watched(model, Adafactor(kept), steps=6)
    assert all(math.isnan(rate) for report in flow.reports for rate in report.rates)
    assert list(flow.frozen_by_accident()) == ["layers[1].up"]
    words = {v.word for n, v in flow.verdicts().items() if n != "layers[1].up"}
    assert words == {"learning"}
    assert "of its weights" in flow.verdicts()["head"].why


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_numbers() -> None:
    plain, compiled = tiny_gpt(), tiny_gpt()
    expected = watched(plain, adamw(plain), steps=3, every_n_steps=1)
    found = watched(torch.compile(compiled), adamw(compiled), steps=3, every_n_steps=1)  # type: ignore[arg-type]
    assert found.parts == expected.parts
    for mine, theirs in zip(found.reports, expected.reports, strict=True):
        for quantity in ("gradient", "weight", "update"):
            assert mine.values[quantity] == pytest.approx(
                theirs.values[quantity], rel=1e-2, abs=1e-6
            )


def test_dead_and_saturated_units() -> None:
    made = torch.randn(4, 3, 8).relu() + 0.1
    made[..., :2] = 0.0
    assert float(dead_fraction(made)) == float(dead_fraction(made[0, 0])) == 0.25
    assert float(saturated_fraction(torch.tensor([0.001, 0.5, 0.999, 0.2]), 0.0, 1.0)) == 0.5
    model = tiny_gpt()
    with torch.no_grad():
        model.blocks[1].up.bias[:8] = -100.0
    flow = watched(model, adamw(model), steps=3, dead_units=True)
    for report in flow.reports:
        assert report.dead["blocks.1.down"] == 0.25
        assert report.dead["blocks.0.down"] == 0.0


def test_entropy_of_heads() -> None:
    even = torch.full((2, 1, 4, 5), 0.2)
    sharp = F.one_hot(torch.zeros(2, 1, 4, dtype=torch.long), 5).float()
    found = entropy(torch.cat([even, sharp], 1))
    assert found.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("hidden", ["nothing", "causal", "padding", "added"])
@pytest.mark.parametrize("kv", [4, 2])
def test_chances_are_those_torch_mixes_values_with(hidden: str, kv: int) -> None:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, kv, 5, 8), torch.randn(2, kv, 5, 8)
    given: dict[str, Any] = {"enable_gqa": kv != 4, "is_causal": hidden == "causal"}
    if hidden == "padding":
        given["attn_mask"] = (torch.arange(5) < 3).expand(2, 1, 5, 5)
    if hidden == "added":
        given["attn_mask"] = torch.randn(2, 1, 5, 5)
    expected = F.scaled_dot_product_attention(query, key, value, **given)
    found = attention_probabilities(query, key, value, **given) @ value.repeat_interleave(
        4 // kv, 1
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_attention_is_seen_however_it_is_computed(way: str) -> None:
    import transformers

    from zoo import SIZES

    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, attn_implementation=way)
    model = transformers.BertForSequenceClassification(config).train()
    with torch.no_grad():  # the second head of the first layer looks at one token only
        own = model.bert.encoder.layer[0].attention.self
        own.query.bias[8:16], own.key.weight[8:16] = 1000.0, own.key.weight[8:16] * 1000.0

    def loss(step: int) -> Tensor:
        ids, classes = batch(step)
        return model(input_ids=ids, labels=classes).loss

    flow = watched(model, adamw(model, lr=0.0), loss, steps=3, attention_entropy=True)
    for report in flow.reports:
        assert set(report.entropy) == {"attention[0]", "attention[1]"}
        assert report.entropy["attention[0]"][1] < 0.3
        rest = [*report.entropy["attention[0]"][2:], *report.entropy["attention[1]"]]
        assert min(rest) > 0.9


def test_what_no_anatomy_knows_is_watched_by_module() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[2].requires_grad_(False)

    def loss(step: int) -> Tensor:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    flow = watched(model, optimizer, loss)
    assert [part.name for part in flow.parts] == ["0", "2", "4"]
    words = [verdict.word for verdict in flow.verdicts().values()]
    assert words == ["learning", "frozen on purpose", "learning"]
    assert "its bits did not change" in flow.verdicts()["2"].why
    assert flow.depth_ratios().output > 0


def test_layers_with_activations_between_them_are_counted_as_layers() -> None:
    made = [nn.Linear(4, 4) if i % 2 == 0 else nn.ReLU() for i in range(9)]
    model = nn.Sequential(*made)
    found = read_layout(model, [adamw(model)])
    names = [[found.names[i] for i in end] for end in (found.front, found.back, found.output)]
    assert [name for end in names for name in end if name.endswith("weight")] == [
        "0.weight", "2.weight", "4.weight", "6.weight", "8.weight",
    ]  # fmt: skip


def test_a_group_added_while_watched_is_seen() -> None:
    """Also one that holds what required a gradient all the time."""
    model = tiny_gpt()
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in head)]
    optimizer = torch.optim.AdamW(rest, lr=1e-3)
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(6):
            if step == 3:
                assert list(flow.frozen_by_accident()) == ["head"]
                optimizer.add_param_group({"params": head, "lr": 2e-3})
            loss_at(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [report.rates for report in flow.reports] == [(1e-3,)] * 3 + [(1e-3, 2e-3)] * 3
    assert flow.frozen_by_accident() == {}
    assert [update > 0 for update in flow.series("head", "update").values()] == [False] * 3 + [
        True
    ] * 3


@pytest.mark.parametrize("at", ["bottom", "top"])
def test_layers_added_while_watched_keep_the_past_of_the_others(at: Any) -> None:
    model = tiny_gpt()
    optimizer = adamw(model)
    old = {id(p) for p in model.parameters()}
    with fl.watch(model, optimizer, every_n_steps=1) as flow:
        for step in range(4):
            if step == 2:
                before = {part: flow.series(part, "gradient") for part in ("head", "layers[0].key")}
                fl.grow(model, layers=1, at=at)
                new = [p for p in model.parameters() if id(p) not in old]
                optimizer.add_param_group({"params": new})
            loss_at(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    was, came = ("layers[1]", "layers[0]") if at == "bottom" else ("layers[0]", "layers[3]")
    for name, part in (("head", "head"), ("layers[0].key", f"{was}.key")):
        assert dict(list(flow.series(part, "gradient").items())[:2]) == before[name]
    seen = flow.series(f"{came}.down", "weight")
    assert [math.isnan(weight) for weight in seen.values()] == [True, True, False, False]
    assert len(flow.table().splitlines()) > len(flow.parts)

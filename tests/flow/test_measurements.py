"""Flows are saved, read and refused whole."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import frostlab as fl
from flowing import adamw, loss_at, tiny_gpt, watched


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


def test_a_frame_without_pandas_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fl.BadInput, match=r"Flow.to_frame .* pip install 'frostlab\[data\]'"):
        fl.Flow("GPT", "AdamW").to_frame()


def test_a_broken_flow_can_be_saved(tmp_path: Path) -> None:
    model = tiny_gpt()
    flow = watched(model, adamw(model), lambda s: loss_at(model, s) * torch.nan, steps=3)
    assert flow.first_broken() == (1, "embedding")
    loaded = fl.load_flow(flow.save(tmp_path / "flow.json"))
    assert loaded.first_broken() == (1, "embedding")
    assert math.isnan(loaded.norms()[1])
    assert loaded.verdicts() == flow.verdicts()


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
         "every_n_steps is 0; pass a whole number"),
        (lambda: fl.watch(model, "adam"), "is not a torch.optim.Optimizer"),  # type: ignore[arg-type]
        (lambda: fl.watch(model, []), "is not a torch.optim.Optimizer"),
        (lambda: fl.watch(nn.ReLU(), optimizer), "no parameters to watch"),
        (lambda: flow.series("layers[0].qery", "ratio"), "did you mean `layers[0].query`?"),
        (lambda: flow.series("head", "size"), "is not measured; choose from ratio, gradient"),
        (lambda: flow.norms("ratio"), "`ratio` is not a norm"),
        (lambda: flow.save(tmp_path / "no" / "flow.json"), "does not exist"),
        (lambda: fl.load_flow(tmp_path / "none.json"), "No such file"),
        (lambda: fl.load_flow(text), "x.json is not valid JSON"),
        (lambda: fl.load_flow(other), "has schema 9, and this frostlab reads 1; `flow.save`"),
        (lambda: fl.load_flow(half), "z.json: moved is missing"),
        (lambda: fl.load_flow(half, "train"), "is not a run, so it has no stage `train`"),
        (lambda: fl.load_flow(fl.RunRecord(tmp_path / "none")), "none is not a run"),
        (lambda: fl.watch(torch.compile(model), optimizer, dead_units=True),
         "need a model without torch.compile"),
        (lambda: fl.watch(model.requires_grad_(False), optimizer), "nothing requires a gradient"),
    ]  # fmt: skip
    for call, said in cases:
        with pytest.raises(fl.BadInput) as caught:
            call()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)

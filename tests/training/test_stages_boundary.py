"""Boundaries: the optimizer's state goes on by name, and runs go on from any moment."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import frostlab as fl
from forked import attempt, outcome
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.load import load_recipe, recipe_from
from frostlab.recipe.settings import Optim
from frostlab.records.checkpoint import checkpoints_in, resumable
from frostlab.records.folder import RunRecord
from frostlab.records.schema import StageEvent
from frostlab.storage import file_digest, seal
from frostlab.training.stages import Entered, enter_stage, stages_of, state_by_slot, surviving_state
from frostlab.training.step.optimizer import build_optimizer, optimizer_tensors, restore_optimizer
from frostlab.training.treatment import count_parameters
from stages import progressive


def decoder(layers: int = 2) -> Decoder:
    return Decoder(DecoderConfig(vocabulary=11, width=8, layers=layers, heads=2, hidden=8))


def stepped(model: nn.Module) -> torch.optim.AdamW:
    """An optimizer with a step behind it, each tensor's moments different."""
    optimizer = build_optimizer(model, Optim(), fused=False)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optimizer.step()
    return optimizer


def crossed(
    model: nn.Module, second: dict[str, Any], first: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], Any]:
    """Cross into a second stage in place; return what survives, and the optimizer before."""
    recipe = recipe_from(progressive(stages=[first or {}, second]))
    stages = stages_of(recipe, 64)
    entered = enter_stage(model, recipe, stages[0], 0, Entered())
    optimizer = stepped(model)
    kept = state_by_slot(model, optimizer)
    entered = enter_stage(model, recipe, stages[1], 1, entered)
    return surviving_state(model, entered, kept), optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD])
def test_the_state_of_another_optimizer_is_put_back(kind: Any) -> None:
    """Not every optimizer has a fused form."""
    model = decoder()
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    one, other = (kind(model.parameters(), lr=0.1, **more) for _ in range(2))
    one.defaults.pop("fused", None)
    other.defaults.pop("fused", None)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    one.step()
    restore_optimizer(model, other, optimizer_tensors(model, one))
    for p in model.parameters():
        assert other.state[p].keys() == one.state[p].keys() != set()
        for key, value in one.state[p].items():
            assert torch.equal(other.state[p][key], value)


@pytest.mark.parametrize(("at", "place"), [("top", 2), ("bottom", 0), (1, 1)])
def test_the_state_of_survivors_follows_their_layers(at: Any, place: int) -> None:
    """A layer added below moves the others up, and their names with them."""
    model = decoder()
    layers = list(model.blocks)
    found, optimizer = crossed(model, {"add": {"at": at}})
    for name, p in model.named_parameters():
        state = optimizer.state.get(p)
        assert (state is None) == name.startswith(f"blocks.{place}.")
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert (f"{name}//{key}" in found) == (state is not None)
            if state is not None:
                assert torch.equal(found[f"{name}//{key}"], state[key]), name
    assert [layer in layers for layer in model.blocks].index(False) == place


def test_new_layers_are_drawn_apart_from_everything_else() -> None:
    recipe = recipe_from(progressive(stages=[{}, {"add": {}}]))

    def drawn(index: int, state: int) -> Tensor:
        model = decoder()
        torch.manual_seed(state)
        enter_stage(model, recipe, stages_of(recipe, 64)[1], index, Entered())
        assert torch.initial_seed() == state
        return model.blocks[2].up.weight

    assert torch.equal(drawn(1, 5), drawn(1, 6))
    assert not torch.equal(drawn(1, 5), drawn(2, 5))


def test_the_published_counts_of_parameters() -> None:
    """3 layers, then 4, of which the fourth and the head learn."""
    model = Decoder(DecoderConfig(layers=3))
    recipe = load_recipe("progressive-standard")
    counts, entered = [count_parameters(model)], Entered()
    for index, stage in enumerate(stages_of(recipe, 10_000)):
        entered = enter_stage(model, recipe, stage, index, entered)
        counts.append(count_parameters(model))
    assert [c["total"] for c in counts] == [9_135_232, 9_135_232, 9_200_896]
    assert counts[2]["trainable"] == 4_534_784


def test_what_stops_learning_leaves_no_state() -> None:
    model = decoder()
    found, _ = crossed(model, {"train": ["layers[1]", "head"]})
    named = {name.rpartition("//")[0] for name in found}
    assert named == {
        n for n, _ in model.named_parameters() if n[:8] == "blocks.1" or n[:4] == "head"
    }


def test_the_rows_of_a_split_projection_keep_their_own_moments() -> None:
    model = GPT(GPTConfig(vocabulary=11, positions=8, width=8, layers=1, heads=2, hidden=8))
    whole = model.blocks[0].qkv.weight
    found, optimizer = crossed(model, {"train": ["value", "up"]})
    ((name, value),) = [(n, v) for n, v in found.items() if "qkv" in n and "weight//exp_avg" in n
                        and not n.endswith("_sq")] or [("", None)]  # fmt: skip
    assert value is not None
    assert torch.equal(value, optimizer.state[whole]["exp_avg"][16:])
    fresh = build_optimizer(model, Optim(), fused=False)
    restore_optimizer(model, fresh, found, partly=True)
    held = fresh.state[model.get_parameter(name.rpartition("//")[0])]
    assert held["exp_avg"].shape == (8, 8)
    assert float(held["step"]) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("value", "query key value"), ("value", "query value"), ("query value", "value"),
        ("query value", "key value"), ("query key", "value"),
    ],
)  # fmt: skip
def test_rows_keep_their_moments_if_others_begin_or_cease_to_learn(before: str, after: str) -> None:
    model = GPT(GPTConfig(vocabulary=11, positions=8, width=8, layers=1, heads=2, hidden=8))
    old, new = before.split(), after.split()
    found, optimizer = crossed(model, {"train": new}, {"train": old})
    states = [state for p, state in optimizer.state.items() if p.ndim == 2]
    names = [name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2]
    if not set(old) & set(new):
        assert found == {}
        return
    ((state,), (name,)) = states, names
    assert float(found[f"{name}//step"]) == 1
    for key in ("exp_avg", "exp_avg_sq"):
        moments = dict(zip(old, state[key].split(8), strict=True))
        rows = [moments.get(role, torch.zeros(8, 8)) for role in new]
        assert torch.equal(found[f"{name}//{key}"], torch.cat(rows))
    restore_optimizer(model, build_optimizer(model, Optim(), fused=False), found, partly=True)


def test_a_run_goes_on_after_more_rows_begin_to_learn(tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [{"steps": 3, "train": ["value", "up"]}, {"steps": 3}]
    model = {"kind": "gpt", "width": 16, "layers": 1, "heads": 2}
    recipe = progressive(model=model, stages=stages)
    assert attempt(recipe, tmp_path / "whole") == 0
    for moment, count in (("boundary", 1), ("step", 5)):
        assert attempt(recipe, tmp_path / moment, moment, count) == -9
        assert attempt(recipe, tmp_path / moment) == 0
        assert outcome(tmp_path / moment) == outcome(tmp_path / "whole")
    last, _ = resumable(tmp_path / "whole")
    assert last is not None
    steps = {n[:-6]: int(v) for n, v in last.optimizer().items() if n.endswith("//step")}
    for name, step in steps.items():
        assert step == (6 if "qkv" in name or "up" in name else 3), name


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_keeps_the_state_or_does_not(keep: bool, tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [
        {"steps": 3}, {"steps": 3, "train": ["head"], "keep_state": keep},
    ]  # fmt: skip
    run = fl.run(progressive(stages=stages), runs=tmp_path)
    last, _ = resumable(run.folder)
    assert last is not None
    state = last.optimizer()
    assert state.keys() == {f"head.weight//{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert float(state["head.weight//step"]) == (6 if keep else 3)


# Stage 1 ends early after step 5, with its best at 4; checkpoints 5 and 11 are of boundaries. Only
# stage 2 has frozen weights, which stage 3 removes with the checkpoints of stage 2.
KILLED = progressive(
    evaluate={"every": 1, "patience": 1, "batch": 256},
    train={"batch": 32, "steps": 5, "threads": 1, "checkpoint": 2},
    stages=[{"lr": 0.3, "steps": 12}, {"add": {}, "train": ["layers[1]", "head"]},
            {"add": {"layers": 2}, "lr": {"new": 1e-3, "old": 1e-4}}],
)  # fmt: skip
MOMENTS = [
    ("boundary", 1), ("clean-up", 11), ("frozen", 6), ("half removed", 1),  # of stages alone
    *(pytest.param(moment, count, marks=pytest.mark.slow) for moment, count in (
        ("step", 2), ("boundary", 2), ("step", 6), ("rename", 17), ("half an event", 26),
        ("step", 13), ("clean-up", 5), ("step", 8), ("rename", 20), ("half a file", 9),
        ("report", 1),
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert attempt(KILLED, folder) == 0
    found = outcome(folder)
    assert [stage["steps"] for stage in found["stages"]] == [5, 5, 5]
    assert [stage["stopped_early"] for stage in found["stages"]] == [True, False, False]
    assert found["stages"][0]["best"]["step"] == 4
    assert found["frozen"] == []
    return found


@pytest.mark.parametrize(("moment", "count"), MOMENTS)
def test_killed_in_any_stage_and_at_a_boundary(
    moment: str, count: int, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    assert attempt(KILLED, folder, moment, count) == -9
    assert attempt(KILLED, folder) == 0
    assert outcome(folder) == uninterrupted
    names = [e.name for e in RunRecord(folder).events(StageEvent)]
    assert names == ["1", "2", "3"], "each is said once"


def test_the_moments_are_at_the_boundary(tmp_path: Path) -> None:
    """One kill comes before the boundary's checkpoint, one while the older ones are still there."""
    places = []
    for moment, count in (("boundary", 2), ("clean-up", 11)):
        assert attempt(KILLED, tmp_path / moment, moment, count) == -9
        found = checkpoints_in(tmp_path / moment)
        places.append([(c.step, c.stage) for c in found])
    assert places == [[(9, 1), (10, 1)], [(9, 1), (10, 1), (10, 2)]]


def test_frozen_digests_are_renewed_and_kept(tmp_path: Path) -> None:
    """What moves under a resumed run is noticed: digests come from the boundary, not from now."""
    folder = tmp_path / "run"
    assert attempt(KILLED, folder, "step", 8) == -9
    checkpoint, _ = resumable(folder)
    assert checkpoint is not None
    assert checkpoint.stage == 1
    (path,) = folder.glob("checkpoints/frozen-*/frozen.safetensors")
    weights = load_file(path)
    weights["tokens.weight"] += 1
    save_file(weights, path)
    seal(path.parent)
    (checkpoint.folder / "frozen.json").write_text(json.dumps(
        asdict(checkpoint.frozen()) | {"sha256": file_digest(path.parent / "checksums.json")}
    ))  # fmt: skip
    seal(checkpoint.folder)
    with pytest.raises(fl.FrostlabError, match="1 frozen tensor moved: tokens.weight"):
        fl.run(KILLED, out=folder, resume=True)

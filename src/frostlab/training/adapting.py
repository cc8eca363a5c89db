"""PEFT's adapters around the projections a selection names; their draw is a seed's own."""

import hashlib
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from frostlab.anatomy import Anatomy, Part, Slot, survey
from frostlab.errors import BadInput, FrostlabError
from frostlab.recipe.treatment import LowRank, Scales

_WHERE = "treatment.peft.select"


def adapt(model: nn.Module, wanted: LowRank | Scales, seed: int) -> set[str]:
    """Put adapters into a model, in place, and return their keys; its outputs stay what they were.

    PEFT draws from torch's generator, which is set aside meanwhile: nothing else is drawn anew.
    """
    peft = _peft()
    found, slots = survey(model)
    chosen = _chosen(found, slots, wanted.select)
    targets = {part.name.rpartition(".")[0]: part for part in chosen}
    config = _config(peft, wanted, targets, transposed=any(part.axis for part in chosen))
    with torch.random.fork_rng([]):
        torch.manual_seed(_seed(seed))
        peft.inject_adapter_in_model(config, model)
    found, slots = survey(model)
    if {s.adapts for s in slots.values() if s.adapts is not None} != targets.keys():
        raise FrostlabError(f"{_WHERE}: PEFT adapted other modules than it was asked to")
    return {part.key for part in found.select("adapter")}


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError:
        raise BadInput("treatment.peft needs PEFT: pip install 'frostlab[peft]'") from None
    return peft


def _chosen(found: Anatomy, slots: dict[str, Slot], selections: tuple[str, ...]) -> list[Part]:
    """The weights a selection names: whole projections, for adapters go around those."""
    try:
        chosen = [part for part in found.select(*selections) if part.kind == "weight"]
    except BadInput as error:
        raise BadInput(f"{_WHERE}: {error}") from None
    if not chosen:
        raise BadInput(f"{_WHERE}: names biases alone; adapters go around weights")
    keys = {part.key for part in chosen}
    for part in chosen:
        if part.role == "head":
            raise BadInput(f"{_WHERE}: {part.name} is of the head, which learns as a whole")
        projection = isinstance(slots[part.name].owner, nn.Linear) or part.axis == 1
        if not part.matmul or not projection or part.ties:
            raise BadInput(
                f"{_WHERE}: {part.name} ({part.role}) is no projection of its own; "
                "select among query, key, value, output, up, gate, down"
            )
        held = [other for other in found.parts if other.name == part.name]
        if not {other.key for other in held} <= keys:
            roles = ", ".join(other.role for other in held)
            raise BadInput(
                f"{_WHERE}: {part.name} holds {roles} in one; select all of them, or none"
            )
    return chosen


def _config(peft: Any, wanted: LowRank | Scales, targets: dict[str, Part], transposed: bool) -> Any:
    """PEFT's own settings; patterns match whole paths, where lists would match endings."""
    every = _pattern(targets)
    if isinstance(wanted, LowRank):
        return peft.LoraConfig(
            r=wanted.r,
            lora_alpha=wanted.alpha,
            lora_dropout=wanted.dropout,
            target_modules=every,
            use_dora=wanted.method == "dora",
            fan_in_fan_out=transposed,
        )
    down = [path for path, part in targets.items() if part.role == "down"]
    return peft.IA3Config(
        target_modules=every,
        feedforward_modules=_pattern(down) if down else [],
        fan_in_fan_out=transposed,
    )


def _pattern(paths: Iterable[str]) -> str:
    return "|".join(map(re.escape, paths))


def _seed(seed: int) -> int:
    """A seed for adapters alone: none that the model, the data or a step is seeded with."""
    return int.from_bytes(hashlib.sha256(f"adapters {seed}".encode()).digest()[:8], "big") >> 1

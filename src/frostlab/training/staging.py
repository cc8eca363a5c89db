"""What a stage does to a model: layers are added, some weights learn, each at its rate."""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.anatomy import Rows, anatomy, survey
from frostlab.data import Material
from frostlab.errors import BadInput, UnknownArchitecture
from frostlab.recipe import Recipe
from frostlab.recipe.stages import WORDS
from frostlab.surgery import thaw
from frostlab.surgery.freezing import learn_only
from frostlab.surgery.growing import grow
from frostlab.training.distributed import whole
from frostlab.training.prefix import check_prefix, prefix_depth
from frostlab.training.stages import Stage
from frostlab.training.supervision import resolve

Kept = dict[str, list[tuple[Rows, dict[str, Tensor]]]]  # an optimizer's state, by slot


@dataclass(frozen=True)
class Entered:
    """What entering a stage left: where the newest layers are, and what tensors were called."""

    new: tuple[str, ...] = ()  # prefixes of the layers added last
    before: dict[str, str] | None = None  # old names by new ones, where layers moved
    changed: tuple[str, ...] = ()  # old tensors that growing changed

    def is_new(self, name: str) -> bool:
        """Whether a tensor is in one of the newest layers."""
        return any(name.startswith(f"{prefix}.") for prefix in self.new)


def enter(model: nn.Module, recipe: Recipe, stage: Stage, index: int, last: Entered) -> Entered:
    """Add a stage's layers and set what learns; the same seed and stage draw the same layers."""
    if not recipe.stages:
        return last
    entered = Entered(last.new)
    if stage.add is not None:
        entered = _grow(model, recipe, stage, index)
    chosen = _learning(model, recipe, stage, index)
    if not chosen:
        raise BadInput(f"stages.{index}.train trains nothing: the treatment freezes all of it")
    learn_only(model, chosen)
    return entered


def _grow(model: nn.Module, recipe: Recipe, stage: Stage, index: int) -> Entered:
    add = stage.add
    assert add is not None
    text = hashlib.sha256(f"{recipe.seed}/stage {index}".encode()).digest()
    try:
        thaw(model)
        before = list(survey(model)[1])
        with torch.random.fork_rng([]):
            torch.manual_seed(int.from_bytes(text[:8], "little") >> 1)
            grown = grow(model, add.layers, add.at, add.init)
    except BadInput as error:
        raise _at(f"stages.{index}.add", error) from None
    made = Entered(grown.names)
    after = [name for name in survey(model)[1] if not made.is_new(name)]
    return Entered(grown.names, dict(zip(after, before, strict=True)), grown.changed)


def _learning(model: nn.Module, recipe: Recipe, stage: Stage, index: int) -> set[str]:
    """The parts that learn: those selected, less what the treatment freezes."""
    found, frozen = anatomy(model), recipe.surgery.frozen
    chosen = {part.key for part in found.parts if part.state != "fixed"}
    try:
        if stage.train is not None:
            chosen &= {part.key for part in found.select(*stage.train)}
    except BadInput as error:
        raise _at(f"stages.{index}.train", error) from None
    return chosen - {part.key for part in found.select(*frozen)} if frozen else chosen


def shares_of(model: nn.Module, stage: Stage, index: int, entered: Entered) -> dict[str, float]:
    """Each trainable parameter's share of the stage's rate, by name; empty: all of it.

    A selection's rate comes before that of `new` and `old`; two that overlap are refused.
    """
    if not stage.rates:
        return {}
    (found, slots), at = survey(model), f"stages.{index}.lr"
    named: dict[str, str] = {}
    learning = [part for part in found.parts if part.state == "trainable"]
    for selection in (key for key in stage.rates if key not in WORDS):
        try:
            keys = {part.key for part in found.select(selection)}
        except BadInput as error:
            raise _at(f"{at}.{selection}", error) from None
        for part in (part for part in learning if part.key in keys):
            other = named.setdefault(part.key, selection)
            if other != selection:
                raise BadInput(f"{at}: `{other}` and `{selection}` both name {part.key}")
    if "new" in stage.rates and not entered.new:
        raise BadInput(f"{at}.new: no layer has been added by then; add one with stages.*.add")
    names = {id(p): name for name, p in model.named_parameters()}
    given: dict[str, str] = {}
    for part in learning:
        word = named.get(part.key, "new" if entered.is_new(part.name) else "old")
        if word not in stage.rates:
            raise BadInput(f"{at} has no rate for {part.key}, which learns; add `{word}`")
        name = names[id(slots[part.name].piece_of(part.rows).parameter)]
        other = given.setdefault(name, word)
        if other != word:
            raise BadInput(f"{at}: `{other}` and `{word}` share one tensor, {part.name}")
    for key in stage.rates:
        if key not in given.values():
            raise BadInput(f"{at}.{key}: all that it could give a rate to is frozen in this stage")
    assert stage.lr is not None
    return {name: stage.rates[word] / stage.lr for name, word in given.items()}


def kept_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Kept:
    """The optimizer's state, whole, by the slots of the model and the rows it is of."""
    return {
        slot.name: [
            (piece.rows, {key: whole(value) for key, value in state.items()})
            for piece in slot.pieces
            if (state := optimizer.state.get(piece.parameter))
        ]
        for slot in survey(model)[1].values()
    }


def survivors(model: nn.Module, entered: Entered, kept: Kept) -> dict[str, Tensor]:
    """What of the state before a boundary is of tensors that go on learning, as `name//key`."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = {}
    for slot in survey(model)[1].values():
        before = slot.name if entered.before is None else entered.before.get(slot.name, "")
        for piece in slot.pieces:
            name = names.get(id(piece.parameter))
            for rows, state in kept.get(before, []) if name is not None else []:
                for key, value in state.items():
                    if rows == piece.rows or not value.ndim:
                        found[f"{name}//{key}"] = value
                    elif len(rows) == rows.size:  # it was whole: a frozen part was split off
                        found[f"{name}//{key}"] = piece.rows.take(value, slot.axis).contiguous()
    return _complete(found)


def _complete(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what has lost its moments: a step count alone is no state."""
    whole_ones = {name.rpartition("//")[0] for name, value in found.items() if value.ndim}
    return {name: value for name, value in found.items() if name.rpartition("//")[0] in whole_ones}


def rehearse(
    model: nn.Module,
    recipe: Recipe,
    stages: Sequence[Stage],
    prepared: Material,
    precision: torch.dtype,
) -> None:
    """Go through all stages on a copy: what cannot be is refused before anything is written."""
    if not recipe.stages:
        if recipe.train.cache_prefix is not None:
            check_prefix(model, prepared, recipe.train, precision)
        resolve(recipe.supervise, model)
        return
    copied, entered, cached = copy.deepcopy(model), Entered(), False
    for index, stage in enumerate(stages):
        try:
            entered = enter(copied, recipe, stage, index, entered)
        except UnknownArchitecture as error:
            raise _at("stages", error) from None
        shares_of(copied, stage, index, entered)
        try:
            resolve(stage.supervise, copied)
        except BadInput as error:
            raise _at(f"stages.{index}", error) from None
        last = index == len(stages) - 1
        if recipe.train.cache_prefix is not None and (
            prefix_depth(copied) or (last and not cached)
        ):
            check_prefix(copied, prepared, recipe.train, precision)
            cached = True


def _at(where: str, error: Any) -> BadInput:
    return BadInput(f"{where}: {error}")

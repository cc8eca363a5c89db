"""An arm built for timing, exactly as a run builds it, and fed from a short list of batches.

The learning rate is 0: an update costs what it always costs, and every block does the same work,
because no weight moves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import nn

from frostlab.compare.turns import BATCHES, Clock
from frostlab.data import Material
from frostlab.errors import BadInput, nearest
from frostlab.models.building import build_for
from frostlab.recipe import Recipe
from frostlab.training.batching import Order
from frostlab.training.choosing import build_step
from frostlab.training.compiled import shape_of
from frostlab.training.devices import choose_precision
from frostlab.training.distributed import World
from frostlab.training.envelopes import objective_for
from frostlab.training.feed import Feed
from frostlab.training.objective import check_pieces
from frostlab.training.optimizer import optimizer_tensors
from frostlab.training.prefix import build_prefix, check_prefix
from frostlab.training.stages import total_steps
from frostlab.training.step import Diverged, Outcome, seed_step
from frostlab.training.stopwatch import Meter
from frostlab.training.supervision import resolve
from frostlab.training.treating import treat, wants_types

CONTROL = "baseline again"
_LEAST = {"cuda": 0.05, "mps": 0.05}  # seconds a block; elsewhere:
_LEAST_ELSEWHERE = 0.2
_TRIED = 4  # batches
_PATIENCE = 10.0  # seconds to meet more batches than these


class Side:
    """One arm on its device: model, optimizer, step and feed; warmed up while it is alone."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        prepared: Material,
        device: torch.device,
        order: Order | None = None,
        again: bool = False,
    ) -> None:
        self.recipe, self.model, self.device = recipe, model, device
        train = recipe.train
        meter = Meter(device)
        precision, types = choose_precision(train, device), wants_types(self.model)
        objective, packs = objective_for(self.model, recipe), train.batching == "packed"
        check_pieces(objective, prepared, types, packs or train.cache_prefix is not None)
        if train.cache_prefix is not None:
            check_prefix(self.model, prepared, train, precision)
        objective.supervision = resolve(recipe.supervise, self.model)
        self.model.to(device)
        objective.train()
        if train.cache_prefix is not None:
            objective.prefix = build_prefix(self.model, prepared, train, precision, types)
        self.feed = Feed(prepared, train, recipe.seed, World(), device, types, objective.prefix)
        self.step = build_step(
            objective, recipe.optim, train, precision, device, World(),
            steps=total_steps(train, len(self.feed.examples)),
        )  # fmt: skip
        self.order = self.feed.order(0)[:BATCHES] if order is None else order
        self.scored = [self.feed.examples.scored(rows) for rows in self.order]
        if not again or self.step.kind != "eager":
            self._meet_every_shape(shorten=order is None)
        self.prepare_seconds, self.peak_bytes = meter.read()

    def take(self, places: Sequence[int]) -> Outcome:
        """Take a step on each of these batches, as the loop of a run does."""
        for place in places:
            parts = self.feed(self.order[place])
            seed_step(self.recipe.seed, place, 0, self.device)
            outcome = self.step(parts, self.scored[place], 0.0)
        return outcome

    def _meet_every_shape(self, shorten: bool) -> None:
        """Take a step on every batch; where shapes are prepared for, until each is replayed.

        Where steps are slow the list may be shortened.
        """
        met, began = set(), perf_counter()
        times = 1 if self.step.kind == "eager" else 3
        for place, rows in enumerate(self.order):
            slow = times == 1 and perf_counter() - began > _PATIENCE
            if shorten and slow and place >= _TRIED:
                self.order = self.order[:place]
                return
            shape = shape_of(self.feed(rows))
            outcome = self.take([place] * (1 if shape in met else times))
            met.add(shape)
            loss, norm, broken = outcome.values.tolist()
            if broken >= 0:
                raise Diverged(place, self.step.name_of(int(broken)), loss)
            if not (abs(loss) < torch.inf and norm < torch.inf):
                raise Diverged(place, "the loss", loss)

    def first_places(self) -> list[int]:
        """Few batches that tell how long a step takes."""
        return [place % len(self.order) for place in range(_TRIED)]

    @property
    def optimizer_bytes(self) -> int:
        """What the optimizer keeps beside weights and gradients."""
        return sum(t.nbytes for t in optimizer_tensors(self.model, self.step.optimizer).values())

    def model_bytes(self, learns: bool) -> int:
        """The parameters, all or those that learn; a tied one counts once."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad or not learns)


def check_arms(recipes: Mapping[str, Recipe], baseline: str) -> None:
    """Refuse arms that cannot be timed side by side on the same batches."""
    if baseline not in recipes:
        hint = nearest(baseline, recipes)
        raise BadInput(f"time_arms: baseline {baseline} is none of {', '.join(recipes)}{hint}")
    if CONTROL in recipes:
        raise BadInput(f"time_arms: an arm is called `{CONTROL}`, which is the control's name")
    base = recipes[baseline]
    for name, recipe in recipes.items():
        for what, mine, theirs in (
            ("data", recipe.data, base.data),
            ("tokenizer", recipe.tokenizer, base.tokenizer),
            ("seed", recipe.seed, base.seed),
            ("train.batch", recipe.train.batch, base.train.batch),
            ("train.threads", recipe.train.threads, base.train.threads),
        ):
            if mine != theirs:
                raise BadInput(
                    f"time_arms: {what} of {name} is {mine}, of {baseline} {theirs}; "
                    "arms are timed on the same batches in one process"
                )


@dataclass(frozen=True)
class Treated:
    """An arm's model on the CPU, with the treatment done; sides work with copies of it."""

    recipe: Recipe
    model: nn.Module


def treat_all(
    recipes: Mapping[str, Recipe], prepared: Material, baseline: str
) -> dict[str, Treated]:
    """Build the models of the baseline, of its control and of every other arm.

    All are treated before any takes a step: a treatment makes every graph be captured anew.
    """
    made: dict[str, Treated] = {}
    for name in (baseline, *(name for name in recipes if name != baseline)):
        recipe = recipes[name]
        model = build_for(recipe, prepared)
        treat(model, recipe)
        made[name] = Treated(recipe, model)
        made.setdefault(CONTROL, made[baseline])
    return made


def build_sides(
    arms: Mapping[str, Treated],
    prepared: Material,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
    order: Order | None = None,
) -> dict[str, Side]:
    """Build a side for every arm, one after another, each warmed up while it is alone.

    Args:
        order: of the batches, where sides are built anew; the first ones make it.
    """
    sides: dict[str, Side] = {}
    again = order is not None
    for name, arm in arms.items():
        side = Side(arm.recipe, deepcopy(arm.model), prepared, device, order, again)
        sides[name], order = side, side.order
        say(f"{name}: {side.step.kind} steps ({side.step.reason}), {side.prepare_seconds:.1f} s")
    return sides


def block_for(sides: Mapping[str, Side], clock: Clock) -> int:
    """Steps a block, so that the fastest arm's is long enough for the clock."""
    least = _LEAST.get(clock.device.type, _LEAST_ELSEWHERE)
    spent = min(clock.block(partial(s.take, s.first_places())).host for s in sides.values())
    needed = least * _TRIED / spent
    if needed > BATCHES:
        return BATCHES * math.ceil(needed / BATCHES)
    return 1 << math.ceil(math.log2(max(1.0, needed)))

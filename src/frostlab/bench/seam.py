"""The one place where benchmarks touch the steps, packing and caches of frostlab.training."""

from torch import Tensor, nn

from frostlab.bench.setting import Feed, Setting, Wanted
from frostlab.data import Prepared, Tokens
from frostlab.recipe.settings import Optim, Train
from frostlab.training.batching import Batch, Order
from frostlab.training.choosing import build_step
from frostlab.training.distributed import World
from frostlab.training.objective import Objective
from frostlab.training.packing import pack, row_lengths, shapes_for
from frostlab.training.prefix import Prefix, build_prefix

_PLENTY = 10**5  # steps a schedule may count on


class Stepper:
    """A step of the kind that was wanted, if it can be had; what it became is asked later."""

    def __init__(
        self,
        model: nn.Module,
        optim: Optim,
        wanted: Wanted,
        setting: Setting,
        prefix: Prefix | None = None,
    ) -> None:
        objective = Objective(model.to(setting.device).train())
        objective.prefix, self._rate = prefix, optim.lr
        self._step = build_step(
            objective,
            optim,
            Train(step=wanted),
            setting.precision,
            setting.device,
            World(),
            steps=_PLENTY,
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Take a step; the loss stays on the device."""
        return self._step([batch], batch.scored, self._rate).loss

    @property
    def how(self) -> tuple[str, str]:
        """Which kind of step is taken, and why."""
        return self._step.kind, self._step.reason


def packed(tokens: Tokens, order: Order, pad: int) -> tuple[Feed, list[int]]:
    """Batches packed into few static widths; and a step of each width, for warming up."""
    shapes, lengths = shapes_for(tokens, order), row_lengths(tokens)
    fits = [shapes.width(int(lengths[rows].sum())) for rows in order]

    def feed(step: int) -> Batch:
        return pack(tokens, order[step % len(order)], pad, shapes=shapes)

    return feed, [fits.index(width) for width in dict.fromkeys(fits)]


def prefixed(
    model: nn.Module, tokens: Tokens, order: Order, setting: Setting, cached: bool
) -> tuple[Prefix | None, Feed]:
    """The cache of a model's frozen prefix (None uncached), and the batches that go with it."""
    shapes, prefix = shapes_for(tokens, order), None
    if cached:
        prepared = Prepared("classification", 2, 0, 0, {"train": tokens}, {}, None, {}, "", None)
        wanted = Train(cache_prefix="memory")
        prefix = build_prefix(model, prepared, wanted, setting.precision, types=False)
    table = None if prefix is None else prefix.starts

    def feed(step: int) -> Batch:
        return pack(tokens, order[step % len(order)], 0, shapes=shapes, table=table)

    return prefix, feed

"""The one place where benchmarks touch the steps, packing and caches of frostlab.training."""

from typing import Any

from torch import Tensor, nn

from frostlab.bench.catalogue import NotAvailable
from frostlab.bench.setting import Feed, Setting, Wanted
from frostlab.data import Tokens
from frostlab.recipe.settings import Optim
from frostlab.training.batching import Batch, Order, budgets, pack
from frostlab.training.choosing import build_step

_PLENTY = 10**5  # steps a schedule may count on


class Stepper:
    """A step of the kind that was wanted, if it can be had; what it became is asked later."""

    def __init__(
        self, model: nn.Module, optim: Optim, wanted: Wanted, setting: Setting, prefix: Any = None
    ) -> None:
        self._rate = optim.lr
        self._built = build_step(
            model.to(setting.device).train(),
            optim,
            wanted,
            setting.precision,
            device=setting.device,
            steps=_PLENTY,
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Take a step; the loss stays on the device."""
        return self._built.step([batch], batch.scored, self._rate).loss

    @property
    def how(self) -> tuple[str, str]:
        """Which kind of step is taken, and why."""
        return self._built.kind, self._built.reason


def packed(tokens: Tokens, order: Order, pad: int) -> tuple[Feed, list[int]]:
    """Batches packed into few static widths; and a step of each width, for warming up."""
    widths = sorted(budgets(tokens, order))
    sums = [int(tokens.lengths[rows].sum()) for rows in order]
    fits = [next(width for width in widths if width >= need) for need in sums]
    most = max(map(len, order))

    def feed(step: int) -> Batch:
        place = step % len(order)
        return pack(tokens, order[place], pad, budget=fits[place], examples=most)

    return feed, [fits.index(width) for width in dict.fromkeys(fits)]


def prefixed(
    model: nn.Module, tokens: Tokens, order: Order, setting: Setting, cached: bool
) -> tuple[Any, Feed]:
    """The cache of a model's frozen prefix (None uncached), and the batches that go with it."""
    raise NotAvailable("needs a cache of the frozen prefix's outputs, which is not there yet")

"""What freezing gains: query and key, and a whole prefix."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from frostlab.anatomy import anatomy
from frostlab.anatomy.savings import savings
from frostlab.bench.catalogue import NotAvailable
from frostlab.bench.ceilings import step_work
from frostlab.bench.checking import agree, sharpened, step_losses, tidy
from frostlab.bench.classifying import FINE_TUNING
from frostlab.bench.made import SMALL_VOCABULARY, bert, drawn_feed, only_first
from frostlab.bench.measuring import Result, result_of
from frostlab.bench.rounds import Driver, Step, interleave, looped
from frostlab.bench.setting import Setting
from frostlab.bench.sides import Feed, Ours
from frostlab.surgery import freeze


def frozen_qk(setting: Setting) -> Iterator[Result]:
    """The same captured step with query and key frozen, and with everything trained."""
    for batch in (2, 4) if setting.small else (32, 256):
        yield _frozen_qk(setting, batch, 16 if setting.small else 128)
        tidy()


def _frozen_qk(setting: Setting, batch: int, length: int) -> Result:
    feed = drawn_feed(batch, length, SMALL_VOCABULARY if setting.small else 30522, 2)
    wanted = "captured" if setting.cuda else "auto"

    def side(frozen: bool, dropout: float, which: Feed) -> Ours:
        model = sharpened(bert(setting, dropout), "classifier")
        if frozen:
            freeze(model, "query", "key")
        return Ours(model, which, FINE_TUNING, setting, wanted)

    first = only_first(feed)
    mine, other = (step_losses(side(frozen, 0.0, first).step)[:1] for frozen in (True, False))
    check = agree(mine, other, setting.precision)  # later losses differ: other weights learn
    kept: list[Ours] = []

    def built(frozen: bool) -> Step:
        kept.append(side(frozen, 0.1, feed))
        return kept[-1].step

    def theirs() -> Driver:
        return looped(built(False))

    times = interleave(
        lambda: built(True), theirs, setting.device,
        rounds=setting.rounds_or(40), every=setting.every, seconds=setting.seconds,
    )  # fmt: skip
    whole, part = bert(setting), bert(setting)
    freeze(part, "query", "key")
    bound = savings(anatomy(part), length).speed_up
    works = [step_work(model, length, batch * length) for model in (part, whole)]
    serial = [work.least(setting.ceilings)["serial_ms"] for work in works]
    timed = times.to_dict()
    return result_of(
        setting,
        times,
        works[0],
        batch,
        case=f"{batch} × {length}",
        check=check,
        step=(kept[0].built.kind, kept[0].built.reason),
        notes=("ours: query and key frozen; theirs: everything trained, the same kind of step",),
        extra={
            "theirs_step": kept[1].built.kind,
            "flop_bound": bound,
            "flop_and_traffic_bound": serial[1] / serial[0],
            "gain_share": (timed["faster"] - 1) / (bound - 1),
        },
    )


@dataclass(frozen=True)
class PrefixSides:
    """Our step with the prefix's outputs kept, theirs computing them every time."""

    cached: Ours
    uncached: Ours


def prefix_sides(setting: Setting, dropout: float, feed: Feed, frozen_layers: int) -> PrefixSides:
    """Build both sides of `frozen-prefix` over the same batches, the same layers frozen.

    The seam for frostlab.training.prefix: return an `Ours` whose feed or model takes the
    prefix's outputs from the cache, and one that does not.
    """
    raise NotAvailable("needs a cache of the frozen prefix's outputs, which is not there yet")


def frozen_prefix(setting: Setting) -> Iterator[Result]:
    """Twelve layers, all but the last frozen with the embeddings, the prefix cached or not."""
    batch, length, layers = (2, 16, 2) if setting.small else (32, 128, 12)
    feed = drawn_feed(batch, length, SMALL_VOCABULARY if setting.small else 30522, 2)
    checked = prefix_sides(setting, 0.0, only_first(feed), layers - 1)
    check: dict[str, Any] = agree(
        step_losses(checked.cached.step), step_losses(checked.uncached.step), setting.precision
    )
    sides = prefix_sides(setting, 0.0, feed, layers - 1)
    times = interleave(
        lambda: sides.cached.step, lambda: looped(sides.uncached.step), setting.device,
        rounds=setting.rounds_or(40), every=setting.every, seconds=setting.seconds,
    )  # fmt: skip
    model = prefix_frozen(setting, layers - 1)
    yield result_of(
        setting,
        times,
        step_work(model, length, batch * length),
        batch,
        case=f"{batch} × {length}",
        check=check,
        step=(sides.cached.built.kind, sides.cached.built.reason),
        notes=("the ceiling still counts the prefix's forward pass: it is the uncached side's",),
    )


def prefix_frozen(setting: Setting, layers: int) -> nn.Module:
    """BERT with the embeddings and the first layers frozen; dropout off, as a cache needs."""
    model = bert(setting, 0.0)
    freeze(model, "embedding", "position", f"layers[0:{layers}]")
    return model

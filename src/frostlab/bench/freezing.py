"""What freezing gains: query and key, and a whole prefix."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from frostlab.anatomy import anatomy
from frostlab.anatomy.savings import savings
from frostlab.bench.ceilings import step_work
from frostlab.bench.checking import agree, sharpened, step_losses, tidy
from frostlab.bench.classifying import FINE_TUNING
from frostlab.bench.made import SMALL_VOCABULARY, bert, drawn, drawn_feed, only_first, prefixed_feed
from frostlab.bench.measuring import Result, result_of
from frostlab.bench.rounds import Driver, Step, looped
from frostlab.bench.setting import Feed, Setting
from frostlab.bench.sides import Ours
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.surgery import freeze

Build = Callable[[Setting, int], nn.Module]


def frozen_qk(setting: Setting) -> Iterator[Result]:
    """The same captured step with query and key frozen, and with everything trained."""
    for batch in (2, 4) if setting.small else (32, 256):
        yield _frozen_qk(setting, batch, 16 if setting.small else 128)
        tidy()


def _frozen_qk(setting: Setting, batch: int, length: int) -> Result:
    feed = drawn_feed(batch, length, SMALL_VOCABULARY if setting.small else 30522, 2)

    def side(frozen: bool, dropout: float, which: Feed) -> Ours:
        model = sharpened(bert(setting, dropout), "classifier")
        if frozen:
            freeze(model, "query", "key")
        return Ours(model, which, FINE_TUNING, setting)

    first = only_first(feed)
    mine, other = (step_losses(side(frozen, 0.0, first).step)[:1] for frozen in (True, False))
    check = agree(mine, other, setting.precision)  # later losses differ: other weights learn
    kept: list[Ours] = []

    def built(frozen: bool) -> Step:
        kept.append(side(frozen, 0.1, feed))
        return kept[-1].step

    def theirs() -> Driver:
        return looped(built(False))

    times = setting.interleave(lambda: built(True), theirs, rounds=40)
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
        step=kept[0].how,
        notes=("ours: query and key frozen; theirs: everything trained, the same kind of step",),
        extra={
            "theirs_step": kept[1].how[0],
            "flop_bound": bound,
            "flop_and_traffic_bound": serial[1] / serial[0],
            "gain_share": (timed["faster"] - 1) / (bound - 1),
        },
    )


def frozen_prefix(setting: Setting) -> Iterator[Result]:
    """Twelve layers, all but the last frozen with the embeddings, the prefix cached or not.

    BERT as a classifier, and decoders as a stage finds them that trains a new layer and the head:
    as wide as published, where the head is most of the arithmetic, and wide enough that it is not.
    """
    if setting.small:
        cases = [(_bert, 2, 16, 2), (_decoder(16), 4, 8, 0)]
    else:
        cases = [(_bert, 32, 128, 2), (_decoder(64), 64, 32, 0), (_decoder(1024), 64, 128, 0)]
    for case in cases:
        yield _frozen_prefix(setting, *case)
        tidy()


def _frozen_prefix(setting: Setting, build: Build, batch: int, length: int, classes: int) -> Result:
    layers = 2 if setting.small else 12
    vocabulary = SMALL_VOCABULARY if setting.small else 8000
    tokens = drawn(32 * batch, length if classes else length + 1, vocabulary, classes)
    order = list(np.arange(32 * batch).reshape(32, batch))

    def side(cached: bool, one: bool) -> Ours:
        model = build(setting, layers).to(setting.device)
        prefix, feed = prefixed_feed(model, tokens, order, setting, cached)
        return Ours(model, only_first(feed) if one else feed, FINE_TUNING, setting, prefix=prefix)

    mine, other = (step_losses(side(cached, True).step) for cached in (True, False))
    check = agree(mine, other, setting.precision)
    kept: list[Ours] = []

    def built(cached: bool) -> Step:
        kept.append(side(cached, False))
        return kept[-1].step

    times = setting.interleave(lambda: built(True), lambda: looped(built(False)), rounds=40)
    model = build(setting, 1)
    name = type(model).__name__.removesuffix("ForSequenceClassification")
    work, whole = (step_work(m, length, batch * length) for m in (model, build(setting, layers)))
    return result_of(
        setting,
        times,
        work,
        batch,
        case=f"{name} d {_width(model)}, {batch} × {length}",
        check=check,
        step=kept[0].how,
        notes=(
            "no dropout; filling the cache is in our prepare_s, and in no step",
            "the ceiling is that of the last layer alone",
        ),
        extra={"theirs_step": kept[1].how[0], "flop_bound": whole.flops / work.flops},
    )


def _width(model: nn.Module) -> int:
    config: Any = model.config
    return int(getattr(config, "width", None) or config.hidden_size)


def _bert(setting: Setting, layers: int) -> nn.Module:
    """BERT without dropout, everything below its last layer frozen."""
    model: Any = sharpened(bert(setting, 0.0, layers), "classifier")
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:-1]):
        part.requires_grad_(False)
    return model


def _decoder(width: int) -> Build:
    """Progressive-training decoders with a vocabulary of 8,000, frozen likewise."""

    def build(setting: Setting, layers: int) -> nn.Module:
        torch.manual_seed(0)
        words = SMALL_VOCABULARY if setting.small else 8000
        config = DecoderConfig(vocabulary=words, width=width, hidden=4 * width, layers=layers)
        model = Decoder(config)
        for part in (model.tokens, *list(model.blocks)[:-1]):
            part.requires_grad_(False)
        return model

    return build

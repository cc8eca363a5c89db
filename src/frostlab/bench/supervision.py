"""Deep supervision: every layer predicts the next token through one wide head."""

from collections.abc import Iterator

import torch
from torch import Tensor

from frostlab.bench.ceilings import Work, step_work
from frostlab.bench.checking import agree, step_losses
from frostlab.bench.classifying import PRETRAINING
from frostlab.bench.made import drawn_feed, only_first
from frostlab.bench.measuring import Result, result_of
from frostlab.bench.rounds import Driver, Step, looped
from frostlab.bench.setting import Setting
from frostlab.bench.sides import Ours
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.recipe.settings import Supervise
from frostlab.training.batching import Batch
from frostlab.training.objective import Objective, summed_loss
from frostlab.training.supervision import Supervision, language_stack, resolve


class PlainLogits(Objective):
    """Every layer's logits, all kept, then cross-entropy in float32."""

    def supervised_loss(self, batch: Batch, supervision: Supervision) -> Tensor:
        stack = language_stack(self.model, "plain logits")
        vectors = self.vectors(stack, batch, supervision.layers)
        losses = [
            weight * summed_loss(stack.head(x), batch.targets)
            for weight, x in zip(supervision.weights, vectors, strict=True)
        ]
        return torch.stack(losses).sum()


def decoder_config(small: bool) -> DecoderConfig:
    """The progressive-training model; small: V 400."""
    return DecoderConfig(vocabulary=400, width=16) if small else DecoderConfig()


def supervised(kind: type[Objective], config: DecoderConfig, layers: Supervise) -> Objective:
    """A fresh decoder whose layers are supervised in a way."""
    torch.manual_seed(0)
    objective = kind(Decoder(config))
    objective.supervision = resolve(layers, objective.model)
    return objective


def deep_work(config: DecoderConfig, length: int, tokens: int) -> Work:
    """A step with every layer supervised: the head works once more for each but the last."""
    work = step_work(Decoder(config), length, tokens)
    head = 6 * config.vocabulary * config.width * (config.layers - 1) * tokens  # there and back
    return Work(work.flops + head, work.parameters)


def deep_supervision(setting: Setting) -> Iterator[Result]:
    """The fused loss against plain logits, all else the same."""
    batch, length = (4, 8) if setting.small else (64, 32)
    config = decoder_config(setting.small)
    feed = drawn_feed(batch, length + 1, config.vocabulary, 0)
    kept: list[Ours] = []

    def side(kind: type[Objective]) -> Ours:
        objective = supervised(kind, config, Supervise(layers="all"))
        return Ours(objective, only_first(feed), PRETRAINING, setting)

    def built(kind: type[Objective]) -> Step:
        kept.append(side(kind))
        return kept[-1].step

    def theirs() -> Driver:
        return looped(built(PlainLogits))

    mine, other = (step_losses(side(kind).step) for kind in (Objective, PlainLogits))
    check = agree(mine, other, setting.precision)
    times = setting.interleave(lambda: built(Objective), theirs, rounds=40)
    yield result_of(
        setting,
        times,
        deep_work(config, length, batch * length),
        batch * length,
        case=f"{config.layers} layers, {batch} × {length}",
        check=check,
        step=kept[0].how,
        notes=(f"theirs: plain logits, {': '.join(kept[1].how)}",),
    )

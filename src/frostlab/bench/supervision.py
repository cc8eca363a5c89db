"""The benchmark of deep supervision, a loss at every layer.

Our side fuses the loss with the head, in chunks of tokens; their side keeps all logits in memory.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from frostlab.bench.cases import PRETRAINING, assemble_result
from frostlab.bench.catalogue import Result
from frostlab.bench.peers import FrostlabLoop, check_losses, first_losses, reset_torch
from frostlab.bench.workloads import BenchSettings, first_batch_only, random_feed
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.recipe.settings import Supervise
from frostlab.timing.flops import StepWork, step_work
from frostlab.timing.interleave import Step, as_driver
from frostlab.training.batches.batch import Batch
from frostlab.training.step.objective import (
    Objective,
    Supervision,
    language_stack,
    resolve_supervision,
    summed_loss,
)


class PlainLogits(Objective):
    """An objective without the fused loss: it keeps the float32 logits of all supervised layers."""

    def supervised_loss(self, batch: Batch, supervision: Supervision) -> Tensor:
        stack = language_stack(self.model, "plain logits")
        vectors = self.head_inputs(stack, batch, supervision.layers)
        losses = [
            weight * summed_loss(stack.head(x), batch.targets)
            for weight, x in zip(supervision.weights, vectors, strict=True)
        ]
        return torch.stack(losses).sum()


def decoder_config(small: bool) -> DecoderConfig:
    """Return the config of the decoder of docs/progressive.md, or of a small variant of it."""
    return DecoderConfig(vocabulary=400, width=16) if small else DecoderConfig()


def supervised(
    cls: type[Objective], config: DecoderConfig, layers: Supervise, frozen: int = 0
) -> Objective:
    """Build an untrained decoder, with an objective that has a loss at each of these layers.

    The first `frozen` layers do not train; if there are any, the embedding does not either.
    """
    torch.manual_seed(0)
    objective = cls(partly_frozen(config, frozen))
    objective.supervision = resolve_supervision(layers, objective.model)
    return objective


def partly_frozen(config: DecoderConfig, frozen: int) -> Decoder:
    """Build a decoder whose first `frozen` layers and, if there are any, embedding are frozen."""
    model = Decoder(config)
    for part in (model.tokens, *list(model.blocks)[:frozen]) if frozen else ():
        part.requires_grad_(False)
    return model


def deep_work(config: DecoderConfig, length: int, tokens: int, frozen: int = 0) -> StepWork:
    """Return the work of a step that supervises every layer and applies the head to each."""
    work = step_work(partly_frozen(config, frozen), length, tokens)
    # Matrix products of the head at each layer but the last (`work` includes the last): forward,
    # weight gradient and, unless everything below is frozen, input gradient.
    products = 3 * (config.layers - 1) - frozen
    return StepWork(
        work.flops + 2 * products * config.vocabulary * config.width * tokens, work.parameters
    )


def deep_supervision(settings: BenchSettings) -> Iterator[Result]:
    """Train a decoder with a loss at every layer: fused with the head, against plain logits.

    The first case trains four layers. The other two are the phases of progressive training: phase 1
    trains three layers; phase 2 adds a layer and trains only it and the head, with a loss at all
    four layers. Each case is also timed against `standard`: a loss at the last layer only.
    """
    config = decoder_config(settings.small)
    yield _deep_supervision(settings, config, "4 layers")
    phases = []
    for name, layers, frozen in (("phase 1, 3 layers", 3, 0), ("phase 2, 3 of 4 layers", 4, 3)):
        reset_torch()
        phase = _deep_supervision(settings, replace(config, layers=layers), name, frozen)
        phases.append(phase)
        if frozen:  # phase 2: compare both phases together
            deep, standard = (
                sum(phase[key] for phase in phases) for key in ("deep_ms", "standard_ms")
            )
            phase["phases_over_standard"] = deep / standard
        yield phase


def _deep_supervision(
    settings: BenchSettings, config: DecoderConfig, name: str, frozen: int = 0
) -> Result:
    batch, length = (4, 8) if settings.small else (64, 32)
    feed = random_feed(batch, length + 1, config.vocabulary, 0)
    every_layer = Supervise(layers="all", frozen=bool(frozen))
    loops: list[FrostlabLoop] = []

    def loop(cls: type[Objective], layers: Supervise = every_layer) -> FrostlabLoop:
        objective = supervised(cls, config, layers, frozen)
        return FrostlabLoop(objective, first_batch_only(feed), PRETRAINING, settings)

    def built(cls: type[Objective], layers: Supervise = every_layer) -> Step:
        loops.append(loop(cls, layers))
        return loops[-1].step

    our_losses, their_losses = (first_losses(loop(cls).step) for cls in (Objective, PlainLogits))
    check = check_losses(our_losses, settings.precision, theirs=their_losses)
    times = settings.interleave(
        lambda: built(Objective), lambda: as_driver(built(PlainLogits)), rounds=40
    )
    against_last = settings.interleave(
        lambda: built(Objective), lambda: as_driver(built(Objective, Supervise())), rounds=40
    ).to_dict()
    tokens = batch * length
    work = deep_work(config, length, tokens, frozen)
    standard = step_work(partly_frozen(config, frozen), length, tokens)
    return assemble_result(
        settings,
        times.to_dict(),
        work,
        tokens,
        case=f"{name}{' frozen' if frozen else ''}, {batch} × {length}",
        check=check,
        step=loops[0].kind_and_reason,
        notes=(
            "theirs: all logits in memory, {} step ({})".format(*loops[1].kind_and_reason),
            f"a step with a loss at every layer takes {against_last['ratio']:.2f} times as long as "
            "one with a loss at the last layer only",
        ),
        extra={
            "deep_ms": against_last["ours_ms"],
            "standard_ms": against_last["theirs_ms"],
            "over_standard": against_last["ratio"],
            "over_standard_p10": against_last["ratio_p10"],
            "over_standard_p90": against_last["ratio_p90"],
            "flops_over_standard": work.flops / standard.flops,
        },
    )

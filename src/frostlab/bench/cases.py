"""Classifiers: BERT against the Hugging Face Trainer, GPT against our own eager step."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostlab.bench.peers import (
    STEPS,
    FedBatches,
    HuggingFace,
    Ours,
    Plain,
    agree,
    grouped,
    sharpened,
    step_losses,
    tidy,
)
from frostlab.bench.runner import Result, result_of
from frostlab.bench.workloads import (
    SMALL_VOCABULARY,
    Feed,
    Setting,
    bert,
    drawn,
    drawn_feed,
    examples_of,
    gpt,
    only_first,
    packed_feed,
    padding_collator,
    prefixed_feed,
    text,
)
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.recipe.settings import Optim, StepKind, Supervise
from frostlab.roles.read import anatomy
from frostlab.surgery.freeze import freeze
from frostlab.timing.flops import Work, savings, step_work
from frostlab.timing.interleave import Driver, Step, looped
from frostlab.training.batches.batch import Batch, collate, epoch_order, padding_limit
from frostlab.training.step.objective import (
    Objective,
    Supervision,
    language_stack,
    resolve_supervision,
    summed_loss,
)

FINE_TUNING = Optim(lr=2e-5)
PRETRAINING = Optim(lr=3e-4, decay=0.1, betas=(0.9, 0.95))
_CALM = Optim(lr=2e-6)  # a sharpened GPT overshoots at more, and rounding grows into differences


def bert_finetune(setting: Setting) -> Iterator[Result]:
    """Full batches; the Trainer is handed the same ones."""
    batch, length = (4, 16) if setting.small else (32, 128)
    vocabulary = SMALL_VOCABULARY if setting.small else 30522
    feed = drawn_feed(batch, length, vocabulary, 2)
    check = _same_losses(setting, only_first(feed), only_first(feed))
    kept: list[Ours] = []

    def ours() -> Step:
        kept.append(Ours(bert(setting), feed, FINE_TUNING, setting))
        return kept[0].step

    def theirs() -> Driver:
        return HuggingFace(bert(setting), FedBatches(feed), FINE_TUNING, setting).drive

    times = setting.interleave(ours, theirs, rounds=30)
    yield result_of(
        setting,
        times,
        step_work(bert(setting), length, batch * length),
        batch,
        case=f"{batch} × {length}",
        check=check,
        step=kept[0].how,
        notes=("drawn ids, no padding",),
    )


def sst2_epoch(setting: Setting) -> Iterator[Result]:
    """An epoch at real lengths: ours packed, the Trainer with all it offers."""
    prepared = text(setting, "sst2", 128, 30000)
    tokens, batch = prepared.splits["train"], 4 if setting.small else 32
    order = [rows for rows in epoch_order(tokens.lengths, batch, 0, 0, False) if len(rows) == batch]
    feed, one_each = packed_feed(tokens, order, prepared.pad)
    check = _same_losses(
        setting, only_first(feed), lambda _: collate(tokens, order[0], prepared.pad)
    )
    kept: list[Ours] = []

    def ours() -> Step:
        made = Ours(bert(setting), feed, FINE_TUNING, setting)
        made.warm_up(one_each)
        kept.append(made)
        return made.step

    def theirs() -> Driver:
        return HuggingFace(
            bert(setting), examples_of(tokens), FINE_TUNING, setting,
            collator=padding_collator(prepared.pad), batch=batch,
            **grouped(), torch_compile=setting.on_gpu,
        ).drive  # fmt: skip

    every, warm = setting.every, 30 if setting.on_gpu else 3
    times = setting.interleave(ours, theirs, max(1, (len(order) - warm) // every), warm)
    mean = float(tokens.lengths.mean())
    covered = len(times.ours) * every / len(order)
    yield result_of(
        setting,
        times,
        step_work(bert(setting), round(mean), batch * mean),
        batch,
        case=f"{batch} × {mean:.1f} on average",
        check=check,
        step=kept[0].how,
        notes=(
            f"{covered:.1%} of the epoch was timed, after {warm} steps of warm-up",
            "byte pairs learned from the set, not BERT's own word pieces",
            *(() if setting.on_gpu else ("the Trainer does not compile on the CPU here",)),
        ),
        whole=True,
        extra={"mean_length": mean, "epoch_timed": covered},
    )


def _same_losses(setting: Setting, ours: Feed, theirs: Feed) -> dict[str, Any]:
    """Both sides on one batch, dropout off; the Trainer without torch.compile."""

    def model() -> nn.Module:
        return sharpened(bert(setting, dropout=0.0), "classifier")

    mine = step_losses(Ours(model(), ours, FINE_TUNING, setting).step)
    other = HuggingFace(model(), FedBatches(theirs), FINE_TUNING, setting)
    return agree(mine, other.first_losses(STEPS), setting.precision)


def gpt_imdb(setting: Setting) -> Iterator[Result]:
    """GPT as a classifier: the chosen step, packed where lengths differ, against the eager one."""
    batch, length = (4, 16) if setting.small else (16, 512)
    if setting.data_dir is not None and (setting.data_dir / "imdb").is_dir():
        prepared = text(setting, "imdb", length, 16000)
        tokens, pad, vocabulary = prepared.splits["train"], prepared.pad, prepared.vocabulary
        limit = padding_limit(tokens, setting.device)
        order = epoch_order(tokens.lengths, batch, 0, 0, True)
        order = [rows for rows in order if len(rows) == batch]
        mean, note = float(tokens.lengths.mean()), "IMDB at its real lengths: ours packed"
        feed, one_each = packed_feed(tokens, order, pad)

        padded: Feed = lambda step: collate(tokens, order[step % len(order)], pad, limit=limit)  # noqa: E731

    else:
        vocabulary, mean, one_each = 16000, float(length), []
        feed = padded = drawn_feed(
            batch, length, SMALL_VOCABULARY if setting.small else vocabulary, 2
        )  # fmt: skip
        note = "drawn ids of full length, not IMDB: no --data-dir with imdb"

    def model(dropout: float) -> nn.Module:
        return gpt(setting, vocabulary, 2, dropout)

    def losses(which: Feed, wanted: StepKind) -> list[float]:
        checked = sharpened(model(0.0), "head")
        return step_losses(Ours(checked, only_first(which), _CALM, setting, wanted).step)

    check = agree(losses(feed, "captured"), losses(padded, "eager"), setting.precision)
    kept: list[Ours] = []

    def ours() -> Step:
        made = Ours(model(0.1), feed, PRETRAINING, setting)
        made.warm_up(one_each)
        kept.append(made)
        return made.step

    def theirs() -> Driver:
        return looped(Ours(model(0.1), padded, PRETRAINING, setting, "eager").step)

    times = setting.interleave(ours, theirs, rounds=30)
    yield result_of(
        setting,
        times,
        step_work(model(0.1), round(mean), batch * mean),
        batch,
        case=f"{batch} × {mean:.0f}",
        check=check,
        step=kept[0].how,
        notes=(note,),
        whole=bool(one_each),
    )


VOCABULARY = 50304


def gpt_language_8(setting: Setting) -> Iterator[Result]:
    """Eight sequences a step: launches count."""
    yield _language(setting, 2 if setting.small else 8)


def gpt_language_64(setting: Setting) -> Iterator[Result]:
    """Sixty-four sequences a step: the head counts."""
    yield _language(setting, 4 if setting.small else 64)


def _language(setting: Setting, batch: int) -> Result:
    """No dropout on either side, as nanoGPT pretrains."""
    length, vocabulary = (16, SMALL_VOCABULARY) if setting.small else (512, VOCABULARY)
    feed = drawn_feed(batch, length + 1, vocabulary, 0)
    first = only_first(feed)

    def plain(which: bool) -> Plain:
        model = gpt(setting, vocabulary, 0, 0.0)
        return Plain(model, first if which else feed, PRETRAINING, setting)

    mine = Ours(gpt(setting, vocabulary, 0, 0.0), first, PRETRAINING, setting)
    check = agree(step_losses(mine.step), step_losses(plain(True).step), setting.precision)
    del mine
    kept: list[Ours] = []

    def ours() -> Step:
        kept.append(Ours(gpt(setting, vocabulary, 0, 0.0), feed, PRETRAINING, setting))
        return kept[0].step

    def theirs() -> Driver:
        return looped(plain(False).step)

    times = setting.interleave(ours, theirs, rounds=40)
    return result_of(
        setting,
        times,
        step_work(gpt(setting, vocabulary, 0, 0.0), length, batch * length),
        batch * length,
        case=f"{batch} × {length}",
        check=check,
        step=kept[0].how,
        notes=(
            "drawn ids, no dropout; causal attention counts half",
            *(() if setting.on_gpu else ("the plain loop does not compile on the CPU here",)),
        ),
    )


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


class PlainLogits(Objective):
    """Every layer's logits, all kept, then cross-entropy in float32."""

    def supervised_loss(self, batch: Batch, supervision: Supervision) -> Tensor:
        stack = language_stack(self.model, "plain logits")
        vectors = self.head_inputs(stack, batch, supervision.layers)
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
    objective.supervision = resolve_supervision(layers, objective.model)
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

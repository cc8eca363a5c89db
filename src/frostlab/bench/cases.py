"""The benchmark functions. Each builds several training loops and times their steps in turn.

The loops are the sides of a benchmark; before the timing, their losses are compared. `ours` is
frostlab. `theirs` is the Hugging Face Trainer, nanoGPT's loop, or frostlab without the feature that
is measured. `loop`, a third side of most benchmarks, is a short loop with torch.compile's
reduce-overhead mode.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from frostlab.bench.catalogue import Result
from frostlab.bench.peers import (
    CHECKED_STEPS,
    CompileMode,
    FeedDataset,
    FrostlabLoop,
    PlainLoop,
    TrainerLoop,
    check_losses,
    enlarge_head,
    first_losses,
    group_by_length,
    reset_torch,
)
from frostlab.bench.workloads import (
    SMALL_VOCABULARY,
    BenchSettings,
    Feed,
    bert,
    first_batch_only,
    gpt,
    load_text,
    packed_feed,
    padded_feed,
    padding_collator,
    prefix_feed,
    random_feed,
    random_tokens,
    trainer_examples,
)
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.recipe.settings import Optim, StepKind
from frostlab.roles.read import anatomy
from frostlab.surgery.freeze import freeze
from frostlab.timing.flops import CEILING_FORMULA, StepWork, savings, step_work
from frostlab.timing.interleave import Driver, Step, as_driver
from frostlab.training.batches.batch import collate, epoch_order, padding_limit

FINE_TUNING = Optim(lr=2e-5)
PRETRAINING = Optim(lr=3e-4, decay=0.1, betas=(0.9, 0.95))
# For the loss check of the GPT classifier, whose head has enlarged weights (`enlarge_head`): at a
# higher learning rate, training overshoots and rounding errors grow.
_SLOW = Optim(lr=2e-6)
VOCABULARY = 50304
Build = Callable[[BenchSettings, int], nn.Module]  # builds a model with the given number of layers


def bert_finetune(settings: BenchSettings) -> Iterator[Result]:
    """Fine-tune BERT on full-length batches; the Trainer gets the same batches."""
    batch, length = (4, 16) if settings.small else (32, 128)
    vocabulary = SMALL_VOCABULARY if settings.small else 30522
    feed = random_feed(batch, length, vocabulary, 2)
    check = _check_against_trainer(settings, first_batch_only(feed), first_batch_only(feed))
    loops: list[FrostlabLoop] = []

    def ours() -> Step:
        loops.append(FrostlabLoop(bert(settings), feed, FINE_TUNING, settings))
        return loops[0].step

    def theirs() -> Driver:
        return TrainerLoop(bert(settings), FeedDataset(feed), FINE_TUNING, settings).drive

    def loop() -> Step:
        return PlainLoop(bert(settings), feed, FINE_TUNING, settings, "reduce-overhead").step

    times = settings.interleave(ours, theirs, rounds=30, loop=loop)
    yield assemble_result(
        settings,
        times.to_dict(),
        step_work(bert(settings), length, batch * length),
        batch,
        case=f"{batch} × {length}",
        check=check,
        step=loops[0].kind_and_reason,
        notes=("random ids, no padding",),
    )


def sst2_epoch(settings: BenchSettings) -> Iterator[Result]:
    """Fine-tune BERT on SST-2 at its real lengths: packed batches against an optimized Trainer."""
    prepared = load_text(settings, "sst2", 128, 30000)
    tokens, batch = prepared.splits["train"], 4 if settings.small else 32
    order = [rows for rows in epoch_order(tokens.lengths, batch, 0, 0, False) if len(rows) == batch]
    feed, step_of_each_width = packed_feed(tokens, order, prepared.pad)
    by_length = [rows for rows in epoch_order(tokens.lengths, batch, 0, 0, True)
                 if len(rows) == batch]  # fmt: skip
    padded = padded_feed(tokens, by_length, prepared.pad, settings.device)
    check = _check_against_trainer(
        settings, first_batch_only(feed), lambda _: collate(tokens, order[0], prepared.pad)
    )
    loops: list[FrostlabLoop] = []

    def ours() -> Step:
        loop = FrostlabLoop(bert(settings), feed, FINE_TUNING, settings)
        loop.warm_up(step_of_each_width)
        loops.append(loop)
        return loop.step

    def theirs() -> Driver:
        return TrainerLoop(
            bert(settings), trainer_examples(tokens), FINE_TUNING, settings,
            collator=padding_collator(prepared.pad), batch=batch,
            **group_by_length(), torch_compile=settings.on_gpu,
        ).drive  # fmt: skip

    steps, warm_up = settings.steps_per_round, 30 if settings.on_gpu else 3
    rounds = max(1, (len(order) - warm_up) // steps)
    loop = _padded_loop(settings, lambda: bert(settings), padded, FINE_TUNING)
    times = settings.interleave(ours, theirs, rounds, warm_up, loop)
    mean = float(tokens.lengths.mean())
    timed = len(times.ours.seconds) * steps / len(order)
    yield assemble_result(
        settings,
        times.to_dict(mean=True),
        step_work(bert(settings), round(mean), batch * mean),
        batch,
        case=f"{batch} × {mean:.1f} on average",
        check=check,
        step=loops[0].kind_and_reason,
        notes=(
            f"{timed:.1%} of the epoch was timed, after {warm_up} steps of warm-up",
            "the tokens are byte pairs learned from the dataset, not BERT's own word pieces",
            *(() if settings.on_gpu else ("the Trainer does not compile on the CPU here",)),
        ),
        extra={"mean_length": mean, "epoch_timed": timed},
    )


def _padded_loop(
    settings: BenchSettings,
    model: Callable[[], nn.Module],
    padded: tuple[Feed, list[int]],
    optim: Optim,
) -> Callable[[], Step]:
    """Return a function that builds the reduce-overhead loop, warmed up for each padded width."""

    def build() -> Step:
        feed, step_of_each_width = padded
        dynamic = True if len(step_of_each_width) > 1 else None  # None: torch decides
        loop = PlainLoop(model(), feed, optim, settings, "reduce-overhead", dynamic)
        loop.warm_up(step_of_each_width)
        return loop.step

    return build


def _check_against_trainer(settings: BenchSettings, ours: Feed, theirs: Feed) -> dict[str, Any]:
    """Compare the losses on one batch without dropout; the Trainer and the loop do not compile."""

    def model() -> nn.Module:
        return enlarge_head(bert(settings, dropout=0.0), "classifier")

    our_losses = first_losses(FrostlabLoop(model(), ours, FINE_TUNING, settings).step)
    trainer = TrainerLoop(model(), FeedDataset(theirs), FINE_TUNING, settings)
    loop = PlainLoop(model(), theirs, FINE_TUNING, settings, None)
    return check_losses(
        our_losses, settings.precision, theirs=trainer.first_losses(CHECKED_STEPS),
        loop=first_losses(loop.step),
    )  # fmt: skip


def gpt_imdb(settings: BenchSettings) -> Iterator[Result]:
    """Train GPT as a classifier: CUDA graphs on packed batches against eager steps on padded ones.

    Without `imdb` in the data folder, all sides get the same batches of random ids of one length.
    """
    batch, length = (4, 16) if settings.small else (16, 512)
    if settings.data_dir is not None and (settings.data_dir / "imdb").is_dir():
        prepared = load_text(settings, "imdb", length, 16000)
        tokens, pad, vocabulary = prepared.splits["train"], prepared.pad, prepared.vocabulary
        limit = padding_limit(tokens, settings.device)
        order = epoch_order(tokens.lengths, batch, 0, 0, True)
        order = [rows for rows in order if len(rows) == batch]
        mean = float(tokens.lengths.mean())
        note = "IMDB at its real lengths: ours packed, theirs padded"
        feed, step_of_each_width = packed_feed(tokens, order, pad)

        their_feed: Feed = lambda step: collate(tokens, order[step % len(order)], pad, limit=limit)  # noqa: E731
        padded = padded_feed(tokens, order, pad, settings.device)
    else:
        vocabulary, mean, step_of_each_width = 16000, float(length), []
        feed = their_feed = random_feed(
            batch, length, SMALL_VOCABULARY if settings.small else vocabulary, 2
        )  # fmt: skip
        padded = feed, [0]
        note = "random ids of full length, because no --data-dir with imdb was given"

    def model(dropout: float) -> nn.Module:
        return gpt(settings, vocabulary, 2, dropout)

    def losses(batches: Feed, kind: StepKind | None) -> list[float]:
        checked, one_batch = enlarge_head(model(0.0), "head"), first_batch_only(batches)
        if kind is None:
            return first_losses(PlainLoop(checked, one_batch, _SLOW, settings, None).step)
        return first_losses(FrostlabLoop(checked, one_batch, _SLOW, settings, kind).step)

    check = check_losses(
        losses(feed, "captured"), settings.precision, theirs=losses(their_feed, "eager"),
        loop=losses(padded[0], None),
    )  # fmt: skip
    loops: list[FrostlabLoop] = []

    def ours() -> Step:
        loop = FrostlabLoop(model(0.1), feed, PRETRAINING, settings)
        loop.warm_up(step_of_each_width)
        loops.append(loop)
        return loop.step

    def theirs() -> Driver:
        return as_driver(FrostlabLoop(model(0.1), their_feed, PRETRAINING, settings, "eager").step)

    loop = _padded_loop(settings, lambda: model(0.1), padded, PRETRAINING)
    times = settings.interleave(ours, theirs, rounds=30, loop=loop)
    yield assemble_result(
        settings,
        times.to_dict(mean=bool(step_of_each_width)),
        step_work(model(0.1), round(mean), batch * mean),
        batch,
        case=f"{batch} × {mean:.0f}",
        check=check,
        step=loops[0].kind_and_reason,
        notes=(note,),
    )


def gpt_language_8(settings: BenchSettings) -> Iterator[Result]:
    """Pretrain GPT with 8 sequences per step, a batch so small that kernel launches matter."""
    yield _language(settings, 2 if settings.small else 8)


def gpt_language_64(settings: BenchSettings) -> Iterator[Result]:
    """Pretrain GPT with 64 sequences per step, where the head takes most of the time."""
    yield _language(settings, 4 if settings.small else 64)


def _language(settings: BenchSettings, batch: int) -> Result:
    """Train GPT as a language model without dropout, against nanoGPT's loop."""
    length, vocabulary = (16, SMALL_VOCABULARY) if settings.small else (512, VOCABULARY)
    feed = random_feed(batch, length + 1, vocabulary, 0)
    first = first_batch_only(feed)

    def frostlab(batches: Feed) -> FrostlabLoop:
        return FrostlabLoop(gpt(settings, vocabulary, 0, 0.0), batches, PRETRAINING, settings)

    def plain(batches: Feed, mode: CompileMode) -> PlainLoop:
        return PlainLoop(gpt(settings, vocabulary, 0, 0.0), batches, PRETRAINING, settings, mode)

    check = check_losses(
        first_losses(frostlab(first).step), settings.precision,
        theirs=first_losses(plain(first, "default").step),
        loop=first_losses(plain(first, "reduce-overhead").step),
    )  # fmt: skip
    loops: list[FrostlabLoop] = []

    def ours() -> Step:
        loops.append(frostlab(feed))
        return loops[0].step

    def theirs() -> Driver:
        return as_driver(plain(feed, "default").step)

    def loop() -> Step:
        return plain(feed, "reduce-overhead").step

    times = settings.interleave(ours, theirs, rounds=40, loop=loop)
    return assemble_result(
        settings,
        times.to_dict(),
        step_work(gpt(settings, vocabulary, 0, 0.0), length, batch * length),
        batch * length,
        case=f"{batch} × {length}",
        check=check,
        step=loops[0].kind_and_reason,
        notes=(
            "random ids, no dropout; in the FLOPs, causal attention counts half",
            *(() if settings.on_gpu else ("the plain loops do not compile on the CPU here",)),
        ),
    )


def frozen_qk(settings: BenchSettings) -> Iterator[Result]:
    """Fine-tune BERT with query and key frozen, against the same step with everything trained."""
    for batch in (2, 4) if settings.small else (32, 256):
        yield _frozen_qk(settings, batch, 16 if settings.small else 128)
        reset_torch()


def _frozen_qk(settings: BenchSettings, batch: int, length: int) -> Result:
    feed = random_feed(batch, length, SMALL_VOCABULARY if settings.small else 30522, 2)

    def model(frozen: bool, dropout: float) -> nn.Module:
        built = enlarge_head(bert(settings, dropout), "classifier")
        if frozen:
            freeze(built, "query", "key")
        return built

    def step(frozen: bool, dropout: float, batches: Feed) -> FrostlabLoop:
        return FrostlabLoop(model(frozen, dropout), batches, FINE_TUNING, settings)

    first = first_batch_only(feed)
    ours, theirs = (first_losses(step(frozen, 0.0, first).step) for frozen in (True, False))
    plain = PlainLoop(model(True, 0.0), first, FINE_TUNING, settings, None)
    # `theirs` trains all weights, so only its first loss must agree
    check = check_losses(ours, settings.precision, loop=first_losses(plain.step))
    check |= check_losses(ours[:1], settings.precision, theirs=theirs[:1])
    loops: list[FrostlabLoop] = []

    def built(frozen: bool) -> Step:
        loops.append(step(frozen, 0.1, feed))
        return loops[-1].step

    def loop() -> Step:
        frozen = model(True, 0.1)
        return PlainLoop(frozen, feed, FINE_TUNING, settings, "reduce-overhead").step

    times = settings.interleave(
        lambda: built(True), lambda: as_driver(built(False)), rounds=40, loop=loop
    )
    trained, frozen = bert(settings), bert(settings)
    freeze(frozen, "query", "key")
    bound = savings(anatomy(frozen), length).speed_up
    works = [step_work(model, length, batch * length) for model in (frozen, trained)]
    serial = [settings.ceilings.lower_bounds(work)["serial_ms"] for work in works]
    timed = times.to_dict()
    return assemble_result(
        settings,
        timed,
        works[0],
        batch,
        case=f"{batch} × {length}",
        check=check,
        step=loops[0].kind_and_reason,
        notes=("ours: query and key frozen; theirs: everything trained, the same kind of step",),
        extra={
            "theirs_step": loops[1].kind_and_reason[0],
            "flop_bound": bound,
            "flop_and_traffic_bound": serial[1] / serial[0],
            "gain_share": (timed["faster"] - 1) / (bound - 1),
        },
    )


def frozen_prefix(settings: BenchSettings) -> Iterator[Result]:
    """Train the last of twelve layers, with and without a cache of the frozen layers' outputs.

    The models are BERT as a classifier and two decoders as language models; their heads are trained
    too. In the decoder of width 64, the head needs most of the FLOPs; in that of width 1024, the
    layers need most. At small scale, there are two layers and one decoder.
    """
    if settings.small:  # model, examples per step, tokens per example, classes
        cases = [(_bert, 2, 16, 2), (_decoder(16), 4, 8, 0)]
    else:
        cases = [(_bert, 32, 128, 2), (_decoder(64), 64, 32, 0), (_decoder(1024), 64, 128, 0)]
    for case in cases:
        yield _frozen_prefix(settings, *case)
        reset_torch()


def _frozen_prefix(
    settings: BenchSettings, build: Build, batch: int, length: int, classes: int
) -> Result:
    layers = 2 if settings.small else 12
    vocabulary = SMALL_VOCABULARY if settings.small else 8000
    tokens = random_tokens(32 * batch, length if classes else length + 1, vocabulary, classes)
    order = list(np.arange(32 * batch).reshape(32, batch))

    def loop(cached: bool, one_batch: bool) -> FrostlabLoop:
        model = build(settings, layers).to(settings.device)
        prefix, feed = prefix_feed(model, tokens, order, settings, cached)
        batches = first_batch_only(feed) if one_batch else feed
        return FrostlabLoop(model, batches, FINE_TUNING, settings, prefix=prefix)

    our_losses, their_losses = (first_losses(loop(cached, True).step) for cached in (True, False))
    check = check_losses(our_losses, settings.precision, theirs=their_losses)
    loops: list[FrostlabLoop] = []

    def built(cached: bool) -> Step:
        loops.append(loop(cached, False))
        return loops[-1].step

    times = settings.interleave(lambda: built(True), lambda: as_driver(built(False)), rounds=40)
    last, full = build(settings, 1), build(settings, layers)
    name = type(last).__name__.removesuffix("ForSequenceClassification")
    work, uncached_work = (step_work(model, length, batch * length) for model in (last, full))
    return assemble_result(
        settings,
        times.to_dict(),
        work,
        batch,
        case=f"{name} d {_width(last)}, {batch} × {length}",
        check=check,
        step=loops[0].kind_and_reason,
        notes=(
            "no dropout; the step times do not include filling the cache, ours_prepare_s does",
            "the ceiling counts only the work of the last layer and the head",
        ),
        extra={
            "theirs_step": loops[1].kind_and_reason[0],
            "flop_bound": uncached_work.flops / work.flops,
        },
    )


def _width(model: nn.Module) -> int:
    config: Any = model.config
    return int(getattr(config, "width", None) or config.hidden_size)


def _bert(settings: BenchSettings, layers: int) -> nn.Module:
    """Build BERT without dropout, with everything below its last layer frozen."""
    model: Any = enlarge_head(bert(settings, 0.0, layers), "classifier")
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:-1]):
        part.requires_grad_(False)
    return model


def _decoder(width: int) -> Build:
    """Return a function that builds a decoder of this width, frozen like `_bert`."""

    def build(settings: BenchSettings, layers: int) -> nn.Module:
        torch.manual_seed(0)
        vocabulary = SMALL_VOCABULARY if settings.small else 8000
        config = DecoderConfig(vocabulary=vocabulary, width=width, hidden=4 * width, layers=layers)
        model = Decoder(config)
        for part in (model.tokens, *list(model.blocks)[:-1]):
            part.requires_grad_(False)
        return model

    return build


def assemble_result(
    settings: BenchSettings,
    times: dict[str, Any],
    work: StepWork,
    items: float,
    *,
    case: str,
    check: dict[str, Any],
    step: tuple[str, str],
    notes: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
) -> Result:
    """Assemble the result of a benchmark.

    Args:
        times: both sides' times, as `PairTimes.to_dict` returns them.
        items: examples or tokens per step, in the benchmark's unit.
        case: the name of the variant in the table.
        check: the result of `check_losses`.
        step: the kind of our step (captured, compiled or eager), and the reason for it.
        extra: further keys of the result.
    """
    benchmark, ceilings = settings.benchmark, settings.ceilings
    seconds = times["ours_ms"] / 1e3
    bounds = ceilings.lower_bounds(work)
    spec = ceilings.spec_flops
    result: Result = {
        "benchmark": benchmark.name,
        "case": case,
        "scale": "small" if settings.small else "full",
        "status": "measured",
        "work": benchmark.work,
        "against": benchmark.against,
        "precision": str(settings.precision).removeprefix("torch."),
        **times,
        "unit": benchmark.unit,
        "ours_per_s": items / seconds,
        "theirs_per_s": items / (times["theirs_ms"] / 1e3),
        "ours_step": step[0],
        "ours_step_reason": step[1],
        **bounds,
        "of_ceiling": bounds["ceiling_ms"] / times["ours_ms"],
        "ceiling_is": CEILING_FORMULA,
        "flops": work.flops,
        "trainable": work.parameters,
        "mfu": work.flops / seconds / ceilings.matmul_flops,
        "mfu_of_spec": None if spec is None else work.flops / seconds / spec,
        **check,
        **(extra or {}),
        "notes": list(notes),
    }
    target = benchmark.target_of(case)
    result["target"] = str(target)
    comparable = settings.on_gpu and not settings.small
    result["reached"] = target.reached(result) if comparable else None
    return result

"""Classifiers: BERT against the Hugging Face Trainer, GPT against our own eager step."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from frostlab.bench.ceilings import step_work
from frostlab.bench.checking import STEPS, agree, sharpened, step_losses
from frostlab.bench.made import (
    SMALL_VOCABULARY,
    bert,
    drawn_feed,
    examples_of,
    gpt,
    only_first,
    packed_feed,
    padding_collator,
    text,
)
from frostlab.bench.measuring import Result, result_of
from frostlab.bench.rounds import Driver, Step, looped
from frostlab.bench.setting import Feed, Setting
from frostlab.bench.sides import FedBatches, HuggingFace, Ours, grouped
from frostlab.recipe.settings import Optim, StepKind
from frostlab.training.batching import collate, epoch_order, widest

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
            **grouped(), torch_compile=setting.cuda,
        ).drive  # fmt: skip

    every, warm = setting.every, 30 if setting.cuda else 3
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
            *(() if setting.cuda else ("the Trainer does not compile on the CPU here",)),
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
        most = widest(tokens, setting.device)
        order = epoch_order(tokens.lengths, batch, 0, 0, True)
        order = [rows for rows in order if len(rows) == batch]
        mean, note = float(tokens.lengths.mean()), "IMDB at its real lengths: ours packed"
        feed, one_each = packed_feed(tokens, order, pad)

        padded: Feed = lambda step: collate(tokens, order[step % len(order)], pad, most=most)  # noqa: E731

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

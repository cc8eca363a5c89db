"""Language modelling: GPT Medium-512 against the loop that nanoGPT made known."""

from collections.abc import Iterator

from frostlab.bench.ceilings import step_work
from frostlab.bench.checking import agree, step_losses
from frostlab.bench.classifying import PRETRAINING
from frostlab.bench.made import SMALL_VOCABULARY, drawn_feed, gpt, only_first
from frostlab.bench.measuring import Result, result_of
from frostlab.bench.rounds import Driver, Step, looped
from frostlab.bench.setting import Setting
from frostlab.bench.sides import Ours, Plain

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
            *(() if setting.cuda else ("the plain loop does not compile on the CPU here",)),
        ),
    )

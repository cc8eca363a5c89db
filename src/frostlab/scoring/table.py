"""Decoders side by side as text: model, linear baseline, chance, and the best there could be."""

from collections.abc import Mapping

from frostlab.scoring.matching import Tally
from frostlab.scoring.scores import EnvelopeScores, Summary


def scores_table(decoders: Mapping[str, EnvelopeScores], best: float | None = None) -> str:
    """One line for each decoder, with what chance gives, and the best achievable r if known."""
    head = ["", "r [95 %]", "median", "std", "chance ≤", "p", "p ≤ 0.05"]
    told = any(scores.summary.attended is not None for scores in decoders.values())
    head += [f"match {_seconds(decoders)}"] + ["r other", "attended"] * told
    head += ["of best"] * (best is not None)
    rows = [
        _row(name, scores.summary, told, best, scores.settings.null_shifts)
        for name, scores in decoders.items()
    ]
    lines = _aligned([head, *rows])
    if best is not None:
        lines.append(f"best achievable r: {best:.3f}")
    some = next(iter(decoders.values())).summary
    lines.append(
        f"{some.subjects} subject{'s' * (some.subjects != 1)}, {some.recordings} recordings; "
        "r: mean by Fisher's z over subjects, with its t interval; chance: 95 of 100 means with "
        "mismatched envelopes are below"
    )
    return "\n".join(lines)


def _row(name: str, found: Summary, told: bool, best: float | None, shifts: int) -> list[str]:
    least = 1 / (1 + shifts)
    cells = [
        name,
        f"{found.mean:.3f}{_between(found.low, found.high)}",
        f"{found.median:.3f}",
        "–" if found.std is None else f"{found.std:.3f}",
        f"{found.null.high:.3f}",
        f"{'≤ ' * (found.null.p <= least)}{found.null.p:.2g}",
        f"{found.above} of {found.subjects}",
        _share(found.match),
    ]
    if told:
        other = "–" if found.mean_other is None else f"{found.mean_other:.3f}"
        cells += [other, "–" if found.attended is None else _share(found.attended)]
    return cells + ([] if best is None else [f"{found.mean / best:.1%}" if best else "–"])


def _seconds(decoders: Mapping[str, EnvelopeScores]) -> str:
    lengths = sorted({scores.settings.window for scores in decoders.values()})
    return ", ".join(f"{each:g} s" for each in lengths)


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def _share(tally: Tally) -> str:
    accuracy, interval = tally.accuracy, tally.interval()
    if accuracy is None or interval is None:
        return "–"
    return f"{accuracy:.1%} [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

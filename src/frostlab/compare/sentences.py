"""Numbers as they stand in a sentence."""

from frostlab.compare.statistics import Paired


def effect_of(pair: Paired | None) -> str:
    """The effect and its interval: "+0.012 (95 %: +0.004 to +0.02)", as a ratio "0.93 ×"."""
    if pair is None:
        return "no pair of values"
    shown = "{:.4g} ×" if pair.log else "{:+.4g}"
    if pair.n < 2:
        return shown.format(pair.effect)
    level = f"{100 * (1 - pair.alpha):.4g} %"
    return f"{shown.format(pair.effect)} ({level}: {' to '.join(_ends(pair))})"


def probability(p: float, count: int, things: str) -> str:
    """The p value, and over how many arms or questions it was adjusted."""
    if p != p:
        return "no p"
    shown = "p < 0.0001" if p < 0.0001 else f"p = {p:.3g}"
    return f"{shown} after Holm over {count} {things}" if count > 1 else shown


def seeds_of(n: int) -> str:
    """ "6 paired seeds"."""
    return f"{n} paired seed{'s' * (n != 1)}"


def size_of(effect: float, log: bool) -> str:
    """An effect without its sign: "0.012", or "3.4 %" of a ratio."""
    return f"{100 * effect:.3g} %" if log else f"{effect:.3g}"


def _ends(pair: Paired) -> tuple[str, str]:
    shown = "{:.4g}" if pair.log else "{:+.4g}"
    return shown.format(pair.low), shown.format(pair.high)

"""Numbers of a comparison as words."""

from collections.abc import Iterable, Sequence
from typing import Any


def effect(paired: dict[str, Any] | None) -> str:
    """A paired effect with its interval, where it has one."""
    if paired is None or paired["effect"] is None:
        return "–"
    sign, unit = ("", " ×") if paired["log"] else ("+", "")
    between = [paired["low"], paired["high"]]
    interval = "" if None in between else " [" + ", ".join(f"{x:{sign}.4g}" for x in between) + "]"
    return f"{paired['effect']:{sign}.4g}{interval}{unit}"


def ratio(values: dict[str, Any] | None) -> str:
    """A ratio with its interval."""
    if values is None or values["ratio"] is None:
        return "–"
    between = [values["low"], values["high"]]
    interval = "" if None in between else f" [{between[0]:.4f}, {between[1]:.4f}]"
    return f"{values['ratio']:.4f}{interval}"


def mean_and_std(spread: dict[str, Any] | None) -> str:
    """A mean, and the standard deviation where there are several."""
    if spread is None:
        return "–"
    return f"{spread['mean']:.4g}" + ("" if spread["n"] < 2 else f" ± {spread['std']:.2g}")


def mebibytes(value: float | None) -> str:
    """Bytes as MiB."""
    return "–" if value is None else f"{value / 2**20:,.0f} MiB"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

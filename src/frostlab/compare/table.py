"""A comparison on a terminal: the table, the verdicts, and where the page is."""

from pathlib import Path
from typing import Any

from frostlab.compare.answers import answers
from frostlab.compare.words import effect, mean_and_std, ratio
from frostlab.records.words import number


def show(evidence: dict[str, Any], page: Path) -> str:
    """A few lines that say what was found."""
    metric = evidence["plan"]["rules"]["metric"]
    verdicts = evidence["verdicts"][metric]
    timing = evidence["timing"]
    rows = []
    for name, arm in evidence["arms"].items():
        found, parameters = arm["metrics"].get(metric), arm["parameters"]
        verdict = verdicts.get(name)
        timed = None if timing is None else timing["arms"].get(name)
        rows.append([
            name,
            mean_and_std(found),
            "" if verdict is None else effect(verdict["paired"]),
            "–" if parameters is None else f"{parameters['trainable'] / parameters['total']:.1%}",
            number(None if timed is None else timed["ms"]),
            "" if name == evidence["baseline"] else ratio(timed),
            "" if verdict is None else verdict["word"],
        ])  # fmt: skip
    head = ["arm", metric, "against baseline", "trainable", "ms a step", "ratio", "verdict"]
    lines = [*_aligned([head, *rows]), ""]
    lines += [f"{name}: {verdict['sentence']}" for name, verdict in verdicts.items()]
    if timing is not None and not timing["proven"]:
        lines.append(f"timing is unproven: {'; '.join(timing['reasons'])}")
    own = [(each["question"], each["sentence"]) for each in evidence["contrasts"]]
    lines += ["", *(f"{question} {said}" for question, said in own or answers(evidence))]
    return "\n".join([*lines, "", f"page: {page}"])


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

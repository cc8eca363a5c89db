"""A flow's verdict in one sentence, and its verdicts grouped for a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frostlab.flow.rules import (
    DECAYING,
    EXPLODING,
    FROZEN,
    LEARNING,
    MOVED,
    SCALED,
    SLOW,
    STILL,
    UNKNOWN,
    Rules,
)

if TYPE_CHECKING:
    from frostlab.flow.flow import Flow

BAD = {  # a word, said of one part and of several; these are what a healthy run has none of
    STILL: ("does not learn", "do not learn"),
    DECAYING: ("is moved by weight decay alone", "are moved by weight decay alone"),
    EXPLODING: ("explodes", "explode"),
    MOVED: ("moved though it is frozen", "moved though they are frozen"),
}
_ODD = {
    SLOW: ("is slow", "are slow"),
    SCALED: ("has a gradient scale that is undone", "have a gradient scale that is undone"),
    UNKNOWN: ("is not known yet", "are not known yet"),
}
_TOO_EARLY = "one step has been measured, and who learns is told from the second on"
_NAMED = 5  # parts in a sentence


@dataclass(frozen=True)
class Finding:
    """Parts that got the same word and the same advice; why is that of the first one."""

    word: str
    why: str
    hint: str
    alarming: bool
    parts: tuple[str, ...]


def findings_of(flow: "Flow") -> list[Finding]:
    """What the verdicts say, gathered; what learns or is frozen on purpose comes last."""
    found: dict[tuple[str, str], list[str]] = {}
    verdicts = flow.verdicts()
    for name, verdict in verdicts.items():
        found.setdefault((verdict.word, verdict.hint), []).append(name)
    made = [
        Finding(word, verdicts[names[0]].why, hint, verdicts[names[0]].alarming, tuple(names))
        for (word, hint), names in found.items()
    ]
    return sorted(made, key=lambda each: (LEARNING, FROZEN).count(each.word))


def sentence_of(flow: "Flow") -> str:
    """How many parts do not learn, and which: "7 of 24 parts do not learn: layers[1].norm, …"."""
    if not flow.reports:
        return "no step has been measured yet"
    words = {name: verdict.word for name, verdict in flow.verdicts().items()}
    frozen = sum(word == FROZEN for word in words.values())
    learning = sum(part.state == "trainable" for part in flow.parts)
    said = []
    for word, (one, many) in (BAD | _ODD).items():
        names = [name for name, found in words.items() if found == word]
        count = len(flow.parts) if word == MOVED else learning
        if names:
            verb = one if len(names) == 1 else many
            said.append(f"{len(names)} of {count} parts {verb}: {listed(names, _NAMED)}")
    if (broken := flow.first_broken()) is not None:
        said.append(f"NaN or infinity was first seen at step {broken[0]}, in {broken[1]}")
    if not any(word in BAD or word == UNKNOWN for word in words.values()):
        told = len(flow.reports) >= Rules().fewest
        first = f"all {learning} parts that should learn do" if told else _TOO_EARLY
        said.insert(0, first)
    if frozen:
        said.append(f"{frozen} {'is' if frozen == 1 else 'are'} frozen on purpose")
    return "; ".join(said)


def listed(names: Sequence[str], most: int) -> str:
    """The first few of many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

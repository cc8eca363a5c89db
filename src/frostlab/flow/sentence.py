"""A flow's verdict in one sentence, and its verdicts grouped for a table."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from frostlab.flow.rules import FROZEN, LEARNING

if TYPE_CHECKING:
    from frostlab.flow.flow import Flow


@dataclass(frozen=True)
class Finding:
    """Parts that got the same word and the same advice; why is that of the first one."""

    word: str
    why: str
    hint: str
    parts: tuple[str, ...]

    def some(self, most: int = 3) -> str:
        """Their names, the first few of many."""
        more = len(self.parts) - most
        named = ", ".join(self.parts[:most])
        return f"{named} and {more} more" if more > 0 else named


def findings_of(flow: "Flow") -> list[Finding]:
    """What the verdicts say, gathered; what learns or is frozen on purpose comes last."""
    found: dict[tuple[str, str], list[str]] = {}
    verdicts = flow.verdicts()
    for name, verdict in verdicts.items():
        found.setdefault((verdict.word, verdict.hint), []).append(name)
    made = [
        Finding(word, verdicts[names[0]].why, hint, tuple(names))
        for (word, hint), names in found.items()
    ]
    return sorted(made, key=lambda each: (LEARNING, FROZEN).count(each.word))


def sentence_of(flow: "Flow") -> str:
    """Say what is wrong, or that nothing is: "7 of 24 parts do not learn: layers[1].norm, …"."""
    if not flow.reports:
        return "No step has been measured yet."
    verdicts, count = flow.verdicts(), len(flow.parts)
    accidents = [name for name, verdict in verdicts.items() if verdict.accident]
    others = {n: v for n, v in verdicts.items() if v.alarming and not v.accident}
    frozen = sum(verdict.word == FROZEN for verdict in verdicts.values())
    said = []
    if accidents:
        named = Finding("", "", "", tuple(accidents)).some()
        verb = "does" if len(accidents) == 1 else "do"
        said.append(f"{len(accidents)} of {count} parts {verb} not learn by accident: {named}.")
    for word in dict.fromkeys(verdict.word for verdict in others.values()):
        names = tuple(name for name, verdict in others.items() if verdict.word == word)
        verb = "is" if len(names) == 1 else "are"
        said.append(f"{len(names)} of {count} {verb} {word}: {Finding('', '', '', names).some()}.")
    if (broken := flow.first_broken()) is not None:
        said.insert(0, f"NaN or infinity, first seen at step {broken[0]} in {broken[1]}.")
    if not said:
        said.append(f"All {count - frozen} parts that should learn do.")
    if frozen:
        said.append(f"{frozen} {'is' if frozen == 1 else 'are'} frozen on purpose.")
    return " ".join(said)

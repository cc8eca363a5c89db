"""A diagnosis: what the flow of a run says, in one sentence first."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.flow.judge import (
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
from frostlab.flow.measurements import Flow, Report, flows_of
from frostlab.records.index import read_run
from frostlab.storage import finite


@dataclass(frozen=True)
class Diagnosis:
    """A run, its flow by stage, and what to think of it."""

    folder: Path
    status: str
    error: str | None
    step: int | None
    metric: str | None  # of the last evaluation, or of the best once the run has ended
    value: float | None
    flows: dict[str, Flow]

    @property
    def healthy(self) -> bool | None:
        """Whether all that should learn does, and nothing blew up; None if no step was measured."""
        words = {v.word for flow in self.flows.values() for v in flow.verdicts().values()}
        if self.status == "diverged" or words & set(BAD):
            return False
        return True if any(flow.reports for flow in self.flows.values()) else None

    @property
    def sentences(self) -> list[str]:
        """What to think of every stage, then of the run if it did not end well."""
        several = len(self.flows) > 1
        said = [
            (f"stage {name}: " if several else "") + sentence_of(flow)
            for name, flow in self.flows.items()
        ]
        if self.status in ("diverged", "failed"):
            said.append(f"the run {self.status}: {self.error}")
        return said

    @property
    def validation(self) -> str | None:
        """The metric on the split that selects, and what was wanted of it."""
        if self.metric is None or self.value is None:
            return None
        wanted = WANTED.get(self.metric)
        beside = "" if wanted is None else f" ({_reached(self.value, wanted)})"
        return f"validation {self.metric} {self.value:.4g}{beside}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON."""
        stages = {
            name: {
                "verdict": sentence_of(flow),
                "verdicts": {
                    part: vars(v) | {"accident": v.accident} for part, v in flow.verdicts().items()
                },
                "depth_ratios": flow.depth_ratios().to_dict(),
                "flow": flow.to_dict(),
            }
            for name, flow in self.flows.items()
        }
        about = {
            "run": str(self.folder), "status": self.status, "error": self.error, "step": self.step,
            "healthy": self.healthy, "verdict": self.sentences, "metric": self.metric,
            "value": self.value, "wanted": WANTED,
        }  # fmt: skip
        return finite({**about, "stages": stages})


def diagnose(folder: Path) -> Diagnosis:
    """Read what a finished or running run has measured."""
    flows = flows_of(folder)
    if not flows:
        again = f"`frostlab diagnose {folder / 'recipe.yaml'}` trains a little of it and looks"
        raise BadInput(
            f"{folder} was not watched: run it with --set watch.every_n_steps=10, or {again}"
        )
    run = read_run(folder)
    return Diagnosis(folder, run.status, run.error, run.steps, run.metric, run.value, flows)


def _reached(value: float, wanted: float) -> str:
    return f"wanted > {wanted:g}, {'reached' if value > wanted else 'not reached'}"


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


WANTED = {"front_ratio": 0.1, "weight_change": 0.01, "pearson": 0.3}  # more than this
WORDS = ((0.01, "vanishing"), (0.1, "weak"), (0.5, "fair"))


@dataclass(frozen=True)
class DepthRatios:
    """Front: layers 0 and 1; back: the last two; output: the head. NaN where there is none.

    A tensor's gradient size is max |g| at the last report, a group's the mean over its tensors.
    Weight change is the mean over front tensors of |range - first range| / first range, where a
    tensor had a range (all ones has none); one report alone tells of no change.
    """

    front: float
    back: float
    output: float
    weight_change: float

    @property
    def front_ratio(self) -> float:
        """Gradient of the front over that of the output."""
        return _over(self.front, self.output)

    @property
    def back_ratio(self) -> float:
        """Gradient of the back over that of the output."""
        return _over(self.back, self.output)

    @property
    def word(self) -> str:
        """Vanishing, weak, fair or good."""
        ratio = self.front_ratio
        if math.isnan(ratio):
            return "unknown"
        return next((word for limit, word in WORDS if ratio < limit), "good")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the ratios and their word."""
        return asdict(self) | {
            "front_ratio": self.front_ratio, "back_ratio": self.back_ratio, "word": self.word
        }  # fmt: skip


def depth_ratios(reports: Sequence[Report]) -> DepthRatios:
    """See the ends at the last report, and the front's weights since the first."""
    if not reports:
        return DepthRatios(math.nan, math.nan, math.nan, math.nan)
    first, last = reports[0].ranges, reports[-1].ranges
    changes = [
        abs(last[name] - start) / start for name, start in first.items() if name in last and start
    ]
    change = sum(changes) / len(changes) if changes and len(reports) > 1 else math.nan
    return DepthRatios(**reports[-1].largest, weight_change=change)


def front_ratios(reports: Sequence[Report]) -> dict[int, float]:
    """The front's gradient over the output's by step; NaN where either is unknown."""
    return {r.step: DepthRatios(**r.largest, weight_change=math.nan).front_ratio for r in reports}


def _over(size: float, output: float) -> float:
    return size / output if output else math.nan


_NAMES = {
    "front_ratio": "front/output gradient",
    "weight_change": "front weight change",
    "pearson": "validation pearson",
}


@dataclass(frozen=True)
class Target:
    """What was measured, and what more than was wanted; None where it could not be measured."""

    name: str
    value: float | None
    wanted: float

    @property
    def reached(self) -> bool:
        """Whether it was measured and is above."""
        return self.value is not None and self.value > self.wanted

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "reached": self.reached}


def targets_of(found: Diagnosis) -> tuple[Target, ...]:
    """The targets of a run's last stage."""
    ends = list(found.flows.values())[-1].depth_ratios()
    values = {
        "front_ratio": ends.front_ratio,
        "weight_change": ends.weight_change,
        found.metric: found.value,
    }
    known = {name: v for name, v in values.items() if v is not None and math.isfinite(v)}
    return tuple(Target(name, known.get(name), wanted) for name, wanted in WANTED.items())


def targets_table(targets: tuple[Target, ...]) -> str:
    """A line a target, under pass or fail."""
    rows = [
        (_NAMES[t.name], "–" if t.value is None else f"{t.value:.4g}", f"wanted > {t.wanted:g}",
         "pass" if t.reached else "fail")
        for t in targets
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    said = "pass" if all(t.reached for t in targets) else "fail"
    return "\n  ".join([f"trial: {said}", *(line.rstrip() for line in lines)])

"""Diagnosis of a run: parts that do not learn, gradients of the first and last layers, targets.

A target is a value that a run should surpass, such as a validation correlation of 0.3. A flow holds
the reports of a run, one for each measured step. A part is all tensors of one role, such as query,
in one layer or outside the layers. The front is the first two layers, the output is the head.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.flow.judge import (
    EXPLODING,
    FROZEN,
    LEARNING,
    MOVED,
    SCALED,
    SLOW,
    STILL,
    UNDRIVEN,
    UNKNOWN,
    Rules,
)
from frostlab.flow.measurements import Flow, Report, flows_of
from frostlab.recipe.settings import metric_facts
from frostlab.records.finding.index import read_run
from frostlab.records.folder import RunRecord
from frostlab.storage import finite
from frostlab.text import NONE, columns

FLOW_TARGETS = {"front_ratio": 0.1, "weight_change": 0.01}  # field of `DepthRatios` → target
# (limit, word): the first word whose limit is above the front ratio describes this ratio, which is
# the gradient size of the front divided by that of the output (see `DepthRatios`). The word is no
# verdict, because an optimizer that divides gradients by their size also learns from small ones.
RATIO_WORDS = ((0.01, "very small"), (0.1, "small"), (0.5, "fair"))
_TITLES = {"front_ratio": "front/output gradient", "weight_change": "front weight change"}

UNHEALTHY = {  # verdict → the verb for one part, the verb for several parts
    STILL: ("does not learn", "do not learn"),
    UNDRIVEN: ("is moved without a gradient", "are moved without a gradient"),
    EXPLODING: ("explodes", "explode"),
    MOVED: ("moved though it is frozen", "moved though they are frozen"),
}
_NOTABLE = {  # further verdicts that a summary mentions, with their verbs
    SLOW: ("is slow", "are slow"),
    SCALED: (
        "has a gradient scale that the optimizer undoes",
        "have a gradient scale that the optimizer undoes",
    ),
    UNKNOWN: ("has no verdict yet", "have no verdict yet"),
}
_TOO_EARLY = "only one step has been measured; most verdicts need two"
_MOST_NAMES = 5  # maximum number of parts that a sentence names
_DEPTHS = ("front", "back", "output")


@dataclass(frozen=True)
class Diagnosis:
    """The state of a run, its flow for each stage, and its targets."""

    folder: Path
    status: str
    error: str | None
    step: int | None
    metric: str | None
    value: float | None  # best value of the metric; for an unfinished run, the best so far
    flows: dict[str, Flow]
    wanted: dict[str, float] = field(default_factory=lambda: dict(FLOW_TARGETS))  # name → target

    @property
    def caution(self) -> str | None:
        """A warning about the run's numbers, e.g. that its data are a stand-in for missing data."""
        return next((flow.caution for flow in self.flows.values()), None)

    @property
    def healthy(self) -> bool | None:
        """False if the run diverged or a verdict is in `UNHEALTHY`.

        Otherwise True, or None if no step has been measured.
        """
        words = {v.word for flow in self.flows.values() for v in flow.verdicts().values()}
        if self.status == "diverged" or words & set(UNHEALTHY):
            return False
        return True if any(flow.reports for flow in self.flows.values()) else None

    @property
    def sentences(self) -> list[str]:
        """One sentence per stage, and one more if the run diverged or failed."""
        several = len(self.flows) > 1
        sentences = [
            (f"stage {name}: " if several else "") + sentence_of(flow)
            for name, flow in self.flows.items()
        ]
        if self.status in ("diverged", "failed"):
            sentences.append(f"the run {self.status}: {self.error}")
        return sentences

    @property
    def validation(self) -> str | None:
        """The validation metric, and whether its target, if any, is reached; None if unknown."""
        if self.metric is None or self.value is None:
            return None
        text = f"validation {self.metric} {self.value:.4g}"
        if self.metric not in self.wanted:
            return text
        target = Target(self.metric, self.value, self.wanted[self.metric])
        return f"{text} ({target.condition}, {'reached' if target.reached else 'not reached'})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
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
            "value": self.value, "wanted": self.wanted, "caution": self.caution,
        }  # fmt: skip
        return finite({**about, "stages": stages})


def diagnose(folder: Path) -> Diagnosis:
    """Read the flows of a finished or running run, and the targets of its recipe."""
    flows = flows_of(folder)
    if not flows:
        command = f"`frostlab diagnose {folder / 'recipe.yaml'}`"
        raise BadInput(
            f"{folder} was not watched: run it with --set watch.every_n_steps=10, or train it for "
            f"a few watched steps with {command}"
        )
    run = read_run(folder)
    return Diagnosis(
        folder, run.status, run.error, run.steps, run.metric, run.value, flows,
        _wanted(folder, run.metric),
    )  # fmt: skip


def _wanted(folder: Path, metric: str | None) -> dict[str, float]:
    """Return a run's targets by name: `evaluate.target`, or the metric's default target.

    If the metric has a default target, as only `pearson` (EEG) does, `FLOW_TARGETS` are added.
    """
    target = None
    try:
        recipe = RunRecord(folder).recipe
    except BadInput:
        pass  # damaged, or written by another version: use the metric's default target
    else:
        metric, target = recipe.metric, recipe.evaluate.target
    default = None if metric is None else metric_facts(metric).target
    wanted = default if target is None else target
    if metric is None or wanted is None:
        return {}
    return (FLOW_TARGETS if default is not None else {}) | {metric: wanted}


@dataclass(frozen=True)
class Target:
    """A target of a run, and the measured value (None: not measured)."""

    name: str
    value: float | None
    wanted: float

    @property
    def reached(self) -> bool:
        """Whether the measured value is strictly better than the target."""
        if self.value is None:
            return False
        if metric_facts(self.name).lower_is_better:
            return self.value < self.wanted
        return self.value > self.wanted

    @property
    def condition(self) -> str:
        """The condition as text: "wanted > 0.1"."""
        return f"wanted {'<' if metric_facts(self.name).lower_is_better else '>'} {self.wanted:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "reached": self.reached}


def targets_of(diagnosis: Diagnosis) -> tuple[Target, ...]:
    """Compare a run with the targets of its recipe; `FLOW_TARGETS` apply to the last stage.

    If reports show that nothing in the first two layers is trainable, `FLOW_TARGETS` are left out;
    if they show that the head has no gradient, `front_ratio` is left out.
    """
    flow = list(diagnosis.flows.values())[-1]
    ratios, reports = flow.depth_ratios(), flow.reports
    front_learns = not reports or any(report.ranges for report in reports)
    head_learns = not reports or any(math.isfinite(r.largest["output"]) for r in reports)
    applies = {"front_ratio": front_learns and head_learns, "weight_change": front_learns}
    values = {
        "front_ratio": ratios.front_ratio,
        "weight_change": ratios.weight_change,
        diagnosis.metric: diagnosis.value,
    }
    measured = {name: v for name, v in values.items() if v is not None and math.isfinite(v)}
    return tuple(
        Target(name, measured.get(name), wanted)
        for name, wanted in diagnosis.wanted.items()
        if applies.get(name, True)
    )


def targets_table(targets: Sequence[Target]) -> str:
    """Return a heading that says whether all targets are reached, and one line per target."""
    rows = [
        (
            _TITLES.get(target.name, f"validation {target.name}"),
            NONE if target.value is None else f"{target.value:.4g}",
            target.condition,
            "pass" if target.reached else "fail",
        )
        for target in targets
    ]
    passed = all(target.reached for target in targets)
    return "\n  ".join([f"targets: {'pass' if passed else 'fail'}", *columns(rows)])


@dataclass(frozen=True)
class Finding:
    """A group of parts with the same verdict and hint; `why` is the reason for the first part."""

    word: str
    why: str
    hint: str
    alarming: bool
    parts: tuple[str, ...]


def findings_of(flow: Flow) -> list[Finding]:
    """Group parts by verdict and hint; parts that learn or are frozen on purpose come last."""
    groups: dict[tuple[str, str], list[str]] = {}
    verdicts = flow.verdicts()
    for name, verdict in verdicts.items():
        groups.setdefault((verdict.word, verdict.hint), []).append(name)
    findings = [
        Finding(word, verdicts[names[0]].why, hint, verdicts[names[0]].alarming, tuple(names))
        for (word, hint), names in groups.items()
    ]
    return sorted(findings, key=lambda finding: (LEARNING, FROZEN).count(finding.word))


def sentence_of(flow: Flow) -> str:
    """Summarise the verdicts: "7 of 24 parts do not learn: layers[1].up, …"."""
    if not flow.reports:
        return "no step has been measured yet"
    words = {name: verdict.word for name, verdict in flow.verdicts().items()}
    frozen = sum(word == FROZEN for word in words.values())
    trainable = sum(part.state == "trainable" for part in flow.parts)
    clauses = []
    for word, (singular, plural) in (UNHEALTHY | _NOTABLE).items():
        names = [name for name, own_word in words.items() if own_word == word]
        count = len(flow.parts) if word == MOVED else trainable
        if names:
            verb = singular if len(names) == 1 else plural
            clauses.append(
                f"{len(names)} of {count} parts {verb}: {join_names(names, _MOST_NAMES)}"
            )
    if (broken := flow.first_broken()) is not None:
        clauses.append(f"NaN or infinity was first seen at step {broken[0]}, in {broken[1]}")
    if not any(word in UNHEALTHY or word == UNKNOWN for word in words.values()):
        enough = len(flow.reports) >= Rules().fewest
        clauses.insert(0, f"all {trainable} parts that should learn do" if enough else _TOO_EARLY)
    if frozen:
        clauses.append(f"{frozen} {'is' if frozen == 1 else 'are'} frozen on purpose")
    return "; ".join(clauses)


def join_names(names: Sequence[str], most: int) -> str:
    """Join at most `most` names, and append the number of the remaining names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(frozen=True)
class DepthRatios:
    """Gradient sizes of the first layers, the last layers and the head; NaN where unknown.

    `front` is the first two layers, `back` is the last two layers, `output` is the head. The size
    of each is the largest |gradient| of a tensor at one report, averaged over the tensors with a
    gradient; `depth_ratios` takes the last report.

    `weight_change` compares the range (max - min) of each front tensor at the first and the last
    report: it is the mean of |last - first| / first, without tensors whose first range is 0, and
    NaN for a single report.
    """

    front: float
    back: float
    output: float
    weight_change: float

    @property
    def front_ratio(self) -> float:
        """Gradient size of the front divided by the gradient size of the output."""
        return _quotient(self.front, self.output)

    @property
    def back_ratio(self) -> float:
        """Gradient size of the back divided by the gradient size of the output."""
        return _quotient(self.back, self.output)

    @property
    def word(self) -> str:
        """The size of the front ratio as a word: very small, small, fair, good or unknown."""
        ratio = self.front_ratio
        if math.isnan(ratio):
            return "unknown"
        return next((word for limit, word in RATIO_WORDS if ratio < limit), "good")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, including the ratios and the word."""
        return asdict(self) | {
            "front_ratio": self.front_ratio, "back_ratio": self.back_ratio, "word": self.word
        }  # fmt: skip


def depth_ratios(reports: Sequence[Report]) -> DepthRatios:
    """Return the gradient sizes at the last report, and the weight change since the first."""
    if not reports:
        return DepthRatios(math.nan, math.nan, math.nan, math.nan)
    first, last = reports[0].ranges, reports[-1].ranges
    changes = [
        abs(last[name] - start) / start for name, start in first.items() if name in last and start
    ]
    change = sum(changes) / len(changes) if changes and len(reports) > 1 else math.nan
    return DepthRatios(**_sizes(reports[-1]), weight_change=change)


def front_ratios(reports: Sequence[Report]) -> dict[int, float]:
    """Return the front ratio by step; NaN where a gradient size is unknown or the output's is 0."""
    return {r.step: DepthRatios(**_sizes(r), weight_change=math.nan).front_ratio for r in reports}


def _sizes(report: Report) -> dict[str, float]:
    return dict.fromkeys(_DEPTHS, math.nan) | report.largest


def _quotient(size: float, output: float) -> float:
    return size / output if output else math.nan

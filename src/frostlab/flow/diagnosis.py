"""A diagnosis: what the flow of a run says, in one sentence first."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.flow.flow import Flow
from frostlab.flow.front import WANTED
from frostlab.flow.recorded import flows_of
from frostlab.flow.sentence import BAD, sentence_of
from frostlab.records.folder import finite
from frostlab.records.index import read_run


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
                "ends": flow.ends().to_dict(),
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
        raise BadInput(f"{folder} was not watched: run it with --set watch.every=10, or {again}")
    run = read_run(folder)
    return Diagnosis(folder, run.status, run.error, run.steps, run.metric, run.value, flows)


def _reached(value: float, wanted: float) -> str:
    return f"wanted > {wanted:g}, {'reached' if value > wanted else 'not reached'}"

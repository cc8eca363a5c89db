"""Rules of thumb of a published EEG study: a steady gradient norm, and what to try in trouble.

docs/eeg.md repeats this study of a Conformer. By the study's rule, the norm of the whole gradient
(`Gradient/norm` in TensorBoard) stays between 1 and 10; the study also has advice for three
troubles. Both are shown with the run's own numbers, and no run fails because of them.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from frostlab.errors import BadInput
from frostlab.flow.diagnosis import Diagnosis, Target, targets_of
from frostlab.flow.judge import EXPLODING
from frostlab.recipe.model import ConformerModel
from frostlab.records.folder import RunRecord
from frostlab.records.schema import StepEvent
from frostlab.storage import finite

LEAST_NORM, MOST_NORM = 1.0, 10.0  # the study's range of the gradient's norm
STEADY = 0.95  # the norm is steady if at least this fraction of the steps is within the range
_SCALE_NOTE = "Adam undoes a constant gradient scale, so do not expect much of the scale alone"

Settings = dict[str, float | None]  # the run's values of the settings that the study changes


@dataclass(frozen=True)
class NormCheck:
    """The norm of the whole gradient before clipping, in the second half of a run's steps."""

    steps: int
    median: float
    low: float  # 5 % quantile
    high: float  # 95 % quantile
    within: float  # fraction of these steps whose norm is between 1 and 10

    @property
    def steady(self) -> bool:
        """Whether the norm is steady by the study's rule of thumb."""
        return self.within >= STEADY

    @property
    def line(self) -> str:
        """The check as a sentence."""
        return (
            f"norm of the gradient in the last {self.steps} steps: median {self.median:.4g}, 5 % "
            f"and 95 % quantiles {self.low:.4g} and {self.high:.4g}, within {LEAST_NORM:g} to "
            f"{MOST_NORM:g} in {self.within:.0%} of these steps: "
            f"{'steady' if self.steady else 'not steady'} by the study's rule of thumb (at least "
            f"{STEADY:.0%})"
        )


def check_norms(norms: Sequence[float]) -> NormCheck | None:
    """Check the second half of the gradient norms of a run's steps; None without any step."""
    last = sorted(norms[len(norms) // 2 :])
    if not last:
        return None
    within = sum(LEAST_NORM <= norm <= MOST_NORM for norm in last) / len(last)
    low, high = (last[round(share * (len(last) - 1))] for share in (0.05, 0.95))
    return NormCheck(len(last), median(last), low, high, within)


@dataclass(frozen=True)
class Hint:
    """The study's advice for one trouble."""

    trouble: str  # a description with the measured numbers
    settings: dict[str, float]  # setting → value that the study advises
    text: str  # the advice, with the run's own values


@dataclass(frozen=True)
class EEGHints:
    """The study's rules of thumb, applied to a run."""

    norm: NormCheck | None  # None if no step was recorded
    hints: tuple[Hint, ...]

    @property
    def lines(self) -> list[str]:
        """The check and the hints, a line each."""
        lines = [] if self.norm is None else [self.norm.line]
        return lines + [f"{hint.trouble}: {hint.text}" for hint in self.hints]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        norm = None if self.norm is None else asdict(self.norm) | {"steady": self.norm.steady}
        return finite({"gradient_norm": norm, "hints": [asdict(hint) for hint in self.hints]})


def eeg_hints(diagnosis: Diagnosis) -> EEGHints | None:
    """Apply the study's rules of thumb to an EEG run with a Conformer; None for other runs."""
    record = RunRecord(diagnosis.folder)
    try:
        recipe = record.recipe
    except BadInput:
        return None  # damaged, or written by another version
    model = recipe.model
    if recipe.data.task != "envelope" or not isinstance(model, ConformerModel):
        return None
    have = {
        "model.gradient_scale": model.gradient_scale,
        "optim.lr": recipe.optim.lr,
        "optim.clip": recipe.optim.clip,
    }
    norms = [
        math.inf if norm is None else norm
        for event in record.events(StepEvent)
        for norm in event.norm
    ]
    norm = check_norms(norms)
    missed = {t.name: t for t in targets_of(diagnosis) if t.value is not None and not t.reached}
    hints = (
        _small_gradients(missed.get("front_ratio"), have),
        _unstable(diagnosis, norm, have),
        _no_gain(missed.get("pearson"), diagnosis, model),
    )
    return EEGHints(norm, tuple(hint for hint in hints if hint is not None))


def _small_gradients(missed: Target | None, have: Settings) -> Hint | None:
    if missed is None:
        return None
    wanted = {"model.gradient_scale": 3.0, "optim.lr": 2e-4}
    settings = {key: value for key, value in wanted.items() if (have[key] or 0.0) < value}
    trouble = f"front/output gradient {missed.value:.4g} ({missed.condition})"
    return Hint(
        trouble, settings, _advice("gradients that stay small", settings, wanted, have, "or")
    )


def _unstable(diagnosis: Diagnosis, norm: NormCheck | None, have: Settings) -> Hint | None:
    exploding = [
        part
        for flow in diagnosis.flows.values()
        for part, verdict in flow.verdicts().items()
        if verdict.word == EXPLODING
    ]
    if diagnosis.status == "diverged":
        trouble = "the run diverged"
    elif exploding:
        trouble = f"{exploding[0]} explodes"
    elif norm is not None and norm.high > MOST_NORM:
        trouble = f"the norm of the gradient is above {MOST_NORM:g} (95 % quantile {norm.high:.4g})"
    else:
        return None
    wanted = {"model.gradient_scale": 1.5, "optim.lr": 5e-5, "optim.clip": 1.0}
    settings = {
        key: value for key, value in wanted.items() if (now := have[key]) is None or now > value
    }
    return Hint(trouble, settings, _advice("unstable training", settings, wanted, have, "and"))


def _no_gain(missed: Target | None, diagnosis: Diagnosis, model: ConformerModel) -> Hint | None:
    if missed is None:
        return None
    ratios = next(reversed(diagnosis.flows.values())).depth_ratios()
    text = (
        "if the result does not improve, the study checks its settings (here "
        f"model.residual={model.residual}, model.head={model.head}, "
        f"model.gradient_scale={model.gradient_scale:g}), the front/output gradient "
        f"({ratios.front_ratio:.4g}) and the front weight change ({ratios.weight_change:.4g})"
    )
    return Hint(f"validation pearson {missed.value:.4g} ({missed.condition})", {}, text)


def _advice(
    trouble: str,
    settings: dict[str, float],
    wanted: dict[str, float],
    have: Settings,
    joint: str,
) -> str:
    if not settings:
        tried = ", ".join(f"{key}={value:g}" for key, value in wanted.items())
        return f"for {trouble}, the study tries {tried}; this run already goes as far or further"
    values = [
        f"{key}={value:g} (here {'none' if have[key] is None else f'{have[key]:g}'})"
        for key, value in settings.items()
    ]
    listed = f" {joint} ".join([", ".join(values[:-1]), values[-1]] if values[1:] else values)
    note = f"; {_SCALE_NOTE}" if "model.gradient_scale" in settings else ""
    return f"for {trouble}, the study tries {listed}{note}"

"""What else happened during a timing: other processes, the GPU's state, a baseline that drifts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from frostlab.records.telemetry import Gpu, Telemetry, wanted_gpu

_BUSY = 0.1  # of all cores
_DRIFTED = 0.05


@dataclass(frozen=True)
class Drift:
    """How the baseline's blocks changed while time passed, like compared with like."""

    halves: float  # the second half's time over the first's
    per_minute: float  # the change of the log, from a regression on time

    @property
    def drifted(self) -> bool:
        """Whether the machine was another at the end."""
        return abs(self.halves - 1) > _DRIFTED


def drift_of(seconds: Sequence[float], when: Sequence[float], starts: Sequence[int]) -> Drift:
    """Compare halves, and regress on time, each block only with those of the same batches."""
    logs, times = np.log(np.asarray(seconds, float)), np.asarray(when, float)
    kinds, late = np.asarray(starts), np.arange(len(logs)) >= len(logs) // 2
    steps: list[float] = []
    for kind in np.unique(kinds):
        same = kinds == kind
        if (same & late).any() and (same & ~late).any():
            steps.append(float(np.median(logs[same & late]) - np.median(logs[same & ~late])))
        logs[same] -= logs[same].mean()
        times[same] -= times[same].mean()
    spread = float(times @ times)
    slope = float(times @ logs) / spread if spread else 0.0
    return Drift(float(np.exp(np.mean(steps))) if steps else 1.0, 60 * slope)


@dataclass(frozen=True)
class Watched:
    """What others did meanwhile, and what the sampler saw."""

    cores: int
    cores_of_others: float | None  # busy on average with other processes; None: not known
    others_on_gpu: int | None  # processes; None: no GPU, or NVML does not say
    telemetry: dict[str, Any]

    def complaints(self) -> list[str]:
        """Why a timing among such company proves nothing."""
        found = []
        if self.cores_of_others is not None and self.cores_of_others > _BUSY * self.cores:
            found.append(
                f"other processes kept {self.cores_of_others:.1f} of {self.cores} cores busy"
            )
        if self.others_on_gpu:
            found.append(f"other processes on the GPU: {self.others_on_gpu}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


class Watching:
    """Looks around while its `with` block runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = str(device)
        self._telemetry = Telemetry(self._device)
        self._on_gpu: list[int | None] = []

    def __enter__(self) -> Self:
        self._on_gpu.append(others_on_gpu(self._device))
        self._telemetry.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._telemetry.__exit__(*error)
        self._on_gpu.append(others_on_gpu(self._device))

    def watched(self) -> Watched:
        """All that was seen."""
        seen = self._telemetry.summary()
        cores = psutil.cpu_count() or 1
        ours, all_of_it = (seen[f"{who}_cpu_percent"]["mean"] for who in ("process", "system"))
        others = None
        if ours is not None and all_of_it is not None:
            others = max(0.0, (all_of_it * cores - ours) / 100)
        known = [count for count in self._on_gpu if count is not None]
        return Watched(cores, others, max(known, default=None), seen)


def others_on_gpu(device: str) -> int | None:
    """How many other processes hold the GPU; in a container ours has another number there."""
    try:
        gpu = Gpu(wanted_gpu(device))
        on_it = {p.pid for p in gpu.ask("nvmlDeviceGetComputeRunningProcesses")}
    except Exception:  # a driver fails in ways of its own
        return None
    return max(0, len(on_it) - 1)

"""How a run goes, shown: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

import typer

_EVERY = 10.0  # seconds between plain lines


class Bar:
    """Epoch, loss, speed and remaining time on one line that moves."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = None
        self._drawn = 0.0

    def begin(
        self, step: int, steps: int, per_epoch: int, caution: str | None, stage_began: int
    ) -> None:
        """Show an empty bar."""
        if caution:
            self._progress.console.print(f"caution: {caution}", highlight=False)
        self._per_epoch, self._began, self._first = per_epoch, time.monotonic(), step
        self._stage = stage_began
        self._task = self._progress.add_task(
            "", total=steps, completed=step, epoch=self._epoch(step + 1), loss="–",
            speed="– steps/s",
        )  # fmt: skip
        self._progress.start()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, highlight=False, markup=False)

    def stage(self, line: str, step: int, steps: int) -> None:
        """Say which stage begins; the one before may have ended early."""
        self.say(line)
        self._stage = step
        self._progress.update(self._task, total=steps)

    def advance(self, step: int, loss: float | None) -> None:
        """Move the bar, at most ten times a second."""
        now = time.monotonic()
        if now - self._drawn < 0.1:
            return
        self._drawn = now
        speed = (step - self._first) / max(now - self._began, 1e-9)
        self._progress.update(
            self._task,
            completed=step,
            epoch=self._epoch(step),
            loss="–" if loss is None else f"{loss:.4f}",
            speed=f"{speed:.1f} steps/s",
        )

    def _epoch(self, step: int) -> str:
        return str((step - self._stage - 1) // self._per_epoch + 1)

    def evaluated(self, step: int, metrics: dict[str, float], best: bool) -> None:
        """Print an evaluation above the bar."""
        self._progress.update(self._task, completed=step)
        self._progress.console.print(_line(step, metrics, best), highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class Lines:
    """A line every few seconds and at every evaluation."""

    def begin(
        self, step: int, steps: int, per_epoch: int, caution: str | None, stage_began: int
    ) -> None:
        """Say how much there is to do."""
        if caution:
            _say(f"caution: {caution}")
        self._steps, self._per_epoch, self._stage = steps, per_epoch, stage_began
        self._began = self._said = time.monotonic()
        self._first = step
        _say(f"step {step} of {steps}, {per_epoch} an epoch")

    def say(self, line: str) -> None:
        """Print a line."""
        _say(line)

    def stage(self, line: str, step: int, steps: int) -> None:
        """Say which stage begins; the one before may have ended early."""
        _say(line)
        self._stage, self._steps = step, steps

    def advance(self, step: int, loss: float | None) -> None:
        """Say where it is, now and then."""
        now = time.monotonic()
        if now - self._said < _EVERY:
            return
        self._said = now
        speed = (step - self._first) / (now - self._began)
        left = (self._steps - step) / speed if speed else 0.0
        shown = "" if loss is None else f"  loss {loss:.4f}"
        epoch = (step - self._stage - 1) // self._per_epoch + 1
        _say(f"step {step}  epoch {epoch}{shown}  {speed:.1f} steps/s  {left:.0f} s left")

    def evaluated(self, step: int, metrics: dict[str, float], best: bool) -> None:
        """Say what an evaluation gave."""
        _say(_line(step, metrics, best))

    def close(self) -> None:
        """Nothing is left open."""


def display() -> Bar | Lines:
    """A bar if somebody watches, else lines."""
    return Bar() if sys.stderr.isatty() else Lines()


def _line(step: int, metrics: dict[str, float], best: bool) -> str:
    shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "layers")
    return f"step {step}  {shown}{'  (best)' if best else ''}"


def _say(line: str) -> None:
    typer.echo(line, err=True)

"""Progress of a run on stderr: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from frostlab.cli.options import echo, is_first_process
from frostlab.text import plain

_EVERY = 10.0  # least number of seconds between plain lines


def display() -> "Bar | Lines | None":
    """Return a bar on a terminal, else lines; None in every process but the first."""
    if not is_first_process():
        return None
    return Bar() if sys.stderr.isatty() else Lines()


class Bar:
    """One moving line with epoch, steps, loss, speed and the time left."""

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
        self._last_drawn = 0.0

    def begin(
        self, step: int, steps: int, per_epoch: int, caution: str | None, stage_began: int
    ) -> None:
        """Show the bar at `step` of `steps`; the current stage began at step `stage_began`."""
        if caution:
            self.say(f"caution: {caution}")
        self._per_epoch, self._started, self._first_step = per_epoch, time.monotonic(), step
        self._stage_began = stage_began
        self._task = self._progress.add_task(
            "", total=steps, completed=step, epoch=self._epoch(step + 1), loss="–",
            speed="– steps/s",
        )  # fmt: skip
        self._progress.start()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(plain(line), highlight=False, markup=False, emoji=False)

    def stage(self, line: str, step: int, steps: int) -> None:
        """Announce a stage; `steps`, the run's total, shrinks if the stage before ended early."""
        self.say(line)
        self._stage_began = step
        self._progress.update(self._task, total=steps)

    def advance(self, step: int, loss: float | None) -> None:
        """Move the bar, at most ten times a second."""
        now = time.monotonic()
        if now - self._last_drawn < 0.1:
            return
        self._last_drawn = now
        speed = (step - self._first_step) / max(now - self._started, 1e-9)
        self._progress.update(
            self._task,
            completed=step,
            epoch=self._epoch(step),
            loss="–" if loss is None else f"{loss:.4f}",
            speed=f"{speed:.1f} steps/s",
        )

    def _epoch(self, step: int) -> str:
        return str(_epoch_of(step, self._stage_began, self._per_epoch))

    def evaluated(self, step: int, metrics: dict[str, float], best: bool) -> None:
        """Print an evaluation above the bar."""
        self._progress.update(self._task, completed=step)
        self.say(_evaluation_line(step, metrics, best))

    def close(self) -> None:
        """Stop the bar and leave it on the screen."""
        self._progress.stop()


class Lines:
    """A plain line every ten seconds, and at every evaluation."""

    def begin(
        self, step: int, steps: int, per_epoch: int, caution: str | None, stage_began: int
    ) -> None:
        """Print `step` of `steps`; the current stage began at step `stage_began`."""
        if caution:
            self.say(f"caution: {caution}")
        self._steps, self._per_epoch, self._stage_began = steps, per_epoch, stage_began
        self._started = self._last_printed = time.monotonic()
        self._first_step = step
        self.say(f"step {step} of {steps}, {per_epoch} per epoch")

    def say(self, line: str) -> None:
        """Print a line."""
        echo(plain(line), err=True)

    def stage(self, line: str, step: int, steps: int) -> None:
        """Announce a stage; `steps`, the run's total, shrinks if the stage before ended early."""
        self.say(line)
        self._stage_began, self._steps = step, steps

    def advance(self, step: int, loss: float | None) -> None:
        """Print step, epoch, loss and speed, at most every _EVERY seconds."""
        now = time.monotonic()
        if now - self._last_printed < _EVERY:
            return
        self._last_printed = now
        speed = (step - self._first_step) / (now - self._started)
        left = (self._steps - step) / speed if speed else 0.0
        loss_text = "" if loss is None else f"  loss {loss:.4f}"
        epoch = _epoch_of(step, self._stage_began, self._per_epoch)
        self.say(f"step {step}  epoch {epoch}{loss_text}  {speed:.1f} steps/s  {left:.0f} s left")

    def evaluated(self, step: int, metrics: dict[str, float], best: bool) -> None:
        """Print an evaluation."""
        self.say(_evaluation_line(step, metrics, best))

    def close(self) -> None:
        """Do nothing: lines need no closing."""


def _epoch_of(step: int, stage_began: int, per_epoch: int) -> int:
    """Return the epoch of a step, counted from 1 at the beginning of its stage."""
    return (step - stage_began - 1) // per_epoch + 1


def _evaluation_line(step: int, metrics: dict[str, float], best: bool) -> str:
    values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "layers")
    return f"step {step}  {values}{'  (best)' if best else ''}"

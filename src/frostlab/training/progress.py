"""The progress of a run or a comparison: a bar, plain lines, or nothing.

A `Display` follows one run and draws on a screen. The screens are `Terminal`, `Notebook`, `Lines`
and `Nowhere`; `choose_screen` chooses among them.
"""

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from markupsafe import Markup, escape

from frostlab.errors import BadInput
from frostlab.launcher import rank
from frostlab.text import hms, plain, short

_READ_SECONDS = 0.4  # most seconds between readings of the loss; bars may be drawn less often
_LABEL = 24  # longest name of a run, in characters, so that a bar fits 80 columns
_SHOWN_LINES = 20  # lines that a notebook shows above the bar; it only counts earlier lines


@dataclass(frozen=True)
class Bar:
    """The state of a run that a bar shows."""

    label: str  # name of the run; empty if there is only one
    step: int
    steps: int  # the most steps that the run can take
    per_epoch: int  # steps per epoch
    epoch: int  # counted from 1 at the beginning of the stage
    loss: float | None
    speed: float | None  # steps per second; None before the first step
    seconds: float  # since the bar appeared

    @property
    def left(self) -> float | None:
        """Return the seconds that the remaining steps take at this speed."""
        return (self.steps - self.step) / self.speed if self.speed else None

    @property
    def title(self) -> str:
        """Return the text before the bar: the run's name, or else the epoch."""
        return short(plain(self.label), _LABEL) if self.label else f"epoch {self.epoch}"

    @property
    def numbers(self) -> str:
        """Return loss and speed; a bar with a name has room for the loss alone."""
        loss = "–" if self.loss is None else f"{self.loss:.4f}"
        speed = "–" if self.speed is None else f"{self.speed:.1f}"
        return f"loss {loss}" if self.label else f"loss {loss}  {speed} steps/s"


class Screen(Protocol):
    """A place that shows lines and one bar."""

    every: float  # least number of seconds between two drawings of the bar
    is_live: bool  # whether the bar is redrawn in place

    def line(self, text: str) -> None:
        """Show a line."""

    def begin(self, bar: Bar) -> None:
        """Show the bar of a run, in the place of an earlier one."""

    def draw(self, bar: Bar) -> None:
        """Redraw the bar."""

    def end(self, keep: bool) -> None:
        """Stop drawing; remove the bar unless `keep`."""


def choose_screen(progress: bool | None) -> Screen:
    """Return the screen for a `progress` argument.

    None stands for True on a terminal or in a notebook, else for False. True shows lines where no
    bar can be drawn. With torchrun, only the first process shows anything.
    """
    if progress is not None and not isinstance(progress, bool):
        raise BadInput(f"progress {progress!r:.40} should be True, False or None")
    if progress is False or rank() != 0:
        return Nowhere()
    if _in_notebook():
        return Notebook()
    if sys.stderr.isatty():
        return Terminal()
    return Lines() if progress else Nowhere()


def _in_notebook() -> bool:
    """Return whether the program runs in a Jupyter kernel; IPython's terminal is not one."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Display:
    """The display of one run's progress on a screen."""

    def __init__(self, screen: Screen, label: str = "") -> None:
        self._screen = screen
        self._label = label  # a labelled run is one of several: its bar is removed at its end
        self._step = self._first_step = self._steps = self._stage_began = 0
        self._per_epoch = 1
        self._loss: float | None = None
        self._read_loss: Callable[[], float | None] = lambda: None
        self._began: float | None = None
        self._last_drawn = self._next_reading = 0.0
        self._between_readings = (
            min(screen.every, _READ_SECONDS) if math.isfinite(screen.every) else math.inf
        )

    def begin(
        self, step: int, steps: int, per_epoch: int, caution: str | None, stage_began: int
    ) -> None:
        """Show the bar at `step`.

        `steps` is the most steps that the run can take, and `stage_began` the number of steps
        before the current stage. `caution` is a warning about the run's numbers, shown first.
        """
        if caution:
            self.say(f"caution: {caution}")
        self._step = self._first_step = step
        self._steps, self._per_epoch, self._stage_began = steps, per_epoch, stage_began
        self._began = self._last_drawn = time.monotonic()
        self._next_reading = self._began + self._between_readings
        self._screen.begin(self._bar())

    def say(self, line: str) -> None:
        """Show a line, unless this is one of several runs, of which only the bar is shown."""
        if not self._label:
            self._screen.line(line)

    def stage(self, line: str, step: int, steps: int) -> None:
        """Announce a stage; `steps`, the run's total, shrinks if the stage before ended early."""
        self.say(line)
        self._stage_began, self._steps = step, steps

    def advance(self, step: int, loss: Callable[[], float | None]) -> None:
        """Note a step; redraw the bar as often as the screen allows.

        On a GPU, `loss` starts to copy the loss, and returns the value that the previous call
        copied. This function therefore calls `loss` more often than the screen prints lines, so
        that no line shows an old loss.
        """
        self._step, self._read_loss, now = step, loss, time.monotonic()
        if now < self._next_reading:
            return
        self._loss, self._next_reading = loss(), now + self._between_readings
        if now - self._last_drawn >= self._screen.every:
            self._last_drawn = now
            self._screen.draw(self._bar())

    def evaluated(self, step: int, metrics: dict[str, Any], best: bool) -> None:
        """Show an evaluation, and read the loss for the bar."""
        if math.isfinite(self._between_readings):
            self._loss = self._read_loss()
        shown = (f"{name} {value:.4f}" for name, value in metrics.items() if name != "layers")
        self.say(f"step {step}  {'  '.join(shown)}{'  (best)' if best else ''}")

    def close(self) -> None:
        """End the bar: the bar of a single run stays, that of one of several runs is removed."""
        if self._began is None:
            return
        if self._screen.is_live:
            self._screen.draw(self._bar())
        self._screen.end(keep=not self._label)
        self._began = None

    def _bar(self) -> Bar:
        assert self._began is not None, "begin comes first"
        seconds = time.monotonic() - self._began
        taken = self._step - self._first_step
        return Bar(
            label=self._label,
            step=self._step,
            steps=self._steps,
            per_epoch=self._per_epoch,
            epoch=max(0, self._step - self._stage_began - 1) // self._per_epoch + 1,
            loss=self._loss,
            speed=taken / seconds if taken and seconds > 0 else None,
            seconds=seconds,
        )


class Nowhere:
    """A screen that shows nothing."""

    every, is_live = math.inf, False

    def line(self, text: str) -> None:
        """Show nothing."""

    def begin(self, bar: Bar) -> None:
        """Show nothing."""

    def draw(self, bar: Bar) -> None:
        """Show nothing."""

    def end(self, keep: bool) -> None:
        """Do nothing."""


class Lines:
    """Plain lines on stderr: the progress every ten seconds, and the messages of the run."""

    every, is_live = 10.0, False

    def line(self, text: str) -> None:
        """Print a line; a run goes on if nobody reads its lines any more, as after `| head`."""
        with suppress(OSError):
            print(plain(text), file=sys.stderr, flush=True)

    def begin(self, bar: Bar) -> None:
        """Print the number of steps."""
        self.line(f"step {bar.step} of {bar.steps}, {bar.per_epoch} per epoch")

    def draw(self, bar: Bar) -> None:
        """Print the step, the bar's title and numbers, and the time left."""
        left = f"  {bar.left:.0f} s left" if bar.left is not None else ""
        self.line(f"step {bar.step}  {bar.title}  {bar.numbers}{left}")

    def end(self, keep: bool) -> None:
        """Do nothing: lines need no end."""


class Terminal:
    """Lines on stderr, and under them one moving bar."""

    every, is_live = 0.1, True

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
        from rich.table import Column

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),  # if tight, the bar shrinks
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left"),
            console=Console(stderr=True),
        )
        self._task: Any = None

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(plain(text), highlight=False, markup=False, emoji=False)

    def begin(self, bar: Bar) -> None:
        """Show a new bar in the place of an earlier one."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task("", total=bar.steps, numbers="")
        self.draw(bar)
        self._progress.start()

    def draw(self, bar: Bar) -> None:
        """Move the bar; rich redraws it in a thread of its own."""
        self._progress.update(
            self._task, total=bar.steps, completed=bar.step, description=bar.title,
            numbers=bar.numbers,
        )  # fmt: skip

    def end(self, keep: bool) -> None:
        """Stop the bar, and hide it unless it is kept."""
        self._progress.update(self._task, visible=keep)
        self._progress.stop()


class Notebook:
    """One output of a notebook's cell that is updated in place; it needs no widgets."""

    every, is_live = 0.25, True

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._bar: Bar | None = None
        self._handle: Any = None  # IPython's handle of the output

    def line(self, text: str) -> None:
        """Show a line above the bar."""
        self._lines.append(plain(text))
        self._show()

    def begin(self, bar: Bar) -> None:
        """Show a bar."""
        self.draw(bar)

    def draw(self, bar: Bar) -> None:
        """Redraw the bar."""
        self._bar = bar
        self._show()

    def end(self, keep: bool) -> None:
        """Remove the bar unless it is kept."""
        if not keep:
            self._bar = None
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        bundle = {"text/plain": self._text(), "text/html": str(self._html())}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _shown_lines(self) -> list[str]:
        hidden = len(self._lines) - _SHOWN_LINES
        lines = self._lines[-_SHOWN_LINES:]
        return [f"… {hidden} more above", *lines] if hidden > 0 else lines

    def _text(self) -> str:
        if self._bar is None:
            return "\n".join(self._shown_lines())
        bar = self._bar
        return "\n".join([*self._shown_lines(), f"{bar.title}  {_after_bar(bar)}"])

    def _html(self) -> Markup:
        lines, bar = escape("\n".join(self._shown_lines())), self._bar
        html = Markup("<pre>{}</pre>").format(lines) if lines else Markup()
        if bar is not None:
            html += Markup(
                '<div style="font-family: monospace">{} <progress value="{}" max="{}"></progress> '
                "{}</div>"
            ).format(bar.title, bar.step, bar.steps, _after_bar(bar))
        return html


def _after_bar(bar: Bar) -> str:
    return f"{bar.step}/{bar.steps}  {bar.numbers}  {hms(bar.seconds)}  {hms(bar.left)} left"

"""Reading events.jsonl, the events of a run.

A resumed run repeats the steps after the checkpoint that it resumed from, and appends their events.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from frostlab.errors import BadInput
from frostlab.records.schema import (
    EVENTS,
    EndEvent,
    EvaluationEvent,
    Event,
    FlowPartsEvent,
    NoteEvent,
    ResumeEvent,
    StageEvent,
    StartEvent,
    event_of,
    read_event,
)
from frostlab.storage import LINE_BYTES, open_regular
from frostlab.typed import read_objects

_Kind = TypeVar("_Kind", bound=Event)
_INFINITE = float("inf")
_BLOCK = 1 << 20  # bytes of events.jsonl that are read at once, from its end


def read_events(
    path: Path, *kinds: type[_Kind], damaged: list[str] | None = None
) -> Iterator[_Kind]:
    """Yield the events of some kinds (by default all), including repeated ones; see `effective`.

    A line that is no JSON object is left out, as is a truncated last line. An event with wrong keys
    or values is an error. With `damaged`, such an event is left out, too, and for each line that
    is left out, except a truncated last one, the reason is added to this list.
    """

    def refuse(error: BadInput) -> None:
        if damaged is None:
            raise error
        damaged.append(str(error).removeprefix(f"{path.parent}{os.sep}"))

    try:
        for line, values in read_objects(path, _other_kinds(kinds)):
            where = f"{path} line {line}"
            if values is None:
                if damaged is not None:
                    refuse(BadInput(f"{where} is not a JSON object"))
                continue
            try:
                event = event_of(values, where)
            except BadInput as error:
                refuse(error)
            else:
                if isinstance(event, kinds or Event):
                    yield event  # type: ignore[misc]  # without kinds, _Kind is Event
    except FileNotFoundError:
        return
    except BadInput as error:  # the rest of the file cannot be read
        refuse(error)


@cache
def _other_kinds(kinds: tuple[type[Event], ...]) -> tuple[bytes, ...]:
    """Return how lines of other kinds begin; an empty `kinds` means all, so there are no others."""
    others = [name for name, kind in EVENTS.items() if kinds and not issubclass(kind, kinds)]
    return tuple(f'{{"kind": "{name}"'.encode() for name in others)


# A resumed run repeats the events after the checkpoint that it resumed from, so the functions below
# drop the old ones. Start, resume and note events are always kept. An end event and the evaluation
# for the report are dropped if the run was resumed after them.


def effective(events: Iterable[Event]) -> list[Event]:
    """Return the events that no resumed run repeated."""
    kept: list[Event] = []
    least = _INFINITE  # the least step from which a later part of the run resumed
    for event in reversed(list(events)):
        if _least_resume_of(event) <= least:
            kept.append(event)
        if isinstance(event, ResumeEvent):
            least = min(least, event.step)
    return kept[::-1]


class LatestEvents:
    """The events that no resumed run repeated, from the last to the first.

    The file is read only as far as needed. Lines that are no valid events are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = _lines_backwards(path)
        self._least = _INFINITE

    def next(self, *kinds: type[_Kind]) -> _Kind | None:
        """Return the next earlier event of some kinds; None if there is none."""
        skipped = _other_kinds((*kinds, ResumeEvent))
        for line in self._lines:
            if line.startswith(skipped):
                continue
            with suppress(BadInput):
                event = read_event(line, self._path)
                counts = event is not None and _least_resume_of(event) <= self._least
                if isinstance(event, ResumeEvent):
                    self._least = min(self._least, event.step)
                if counts and isinstance(event, kinds):
                    return event
        return None


def effective_values(path: Path, *kinds: type[Event]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and values of events of some kinds that no resumed run repeated.

    This is for pages with a million events: only the value of `step` is checked, because a check of
    every value would take longer than reading the file; and only a few lines are in memory at once.
    """
    # the last resume first: line number, and the least step of this and all later resumes
    resumes: list[tuple[int, int]] = []
    for line, values in reversed(list(_steps(path, (ResumeEvent,)))):
        later = [step for _, step in resumes[-1:]]
        resumes.append((line, min([values["step"], *later])))
    for line, values in _steps(path, kinds):
        while resumes and resumes[-1][0] < line:
            resumes.pop()
        facts = values["kind"], values["step"], values.get("checkpoint")
        if not resumes or _least_resume(*facts) <= resumes[-1][1]:
            yield line, values


def _steps(path: Path, kinds: tuple[type[Event], ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and values of events of some kinds; check only the value of `step`."""
    names = {name for name, kind in EVENTS.items() if issubclass(kind, kinds)}
    for line, values in read_objects(path, _other_kinds(kinds)):
        if values is not None and isinstance(values.get("kind"), str) and values["kind"] in names:
            if type(step := values.get("step")) is not int:
                where = f"{path} line {line}"
                raise BadInput(f"{where}: step should be a whole number, but is {step!r:.60}")
            yield line, values


def _least_resume_of(event: Event) -> float:
    return _least_resume(event.kind, event.step, getattr(event, "checkpoint", None))


def _least_resume(kind: str, step: int, checkpoint: object) -> float:
    """Return the least step from which a run can resume without dropping this event."""
    if kind in (StartEvent.kind, ResumeEvent.kind, NoteEvent.kind):
        return -_INFINITE
    if kind in (StageEvent.kind, FlowPartsEvent.kind):  # a resume at this step repeats them
        return step + 1
    is_report = kind == EvaluationEvent.kind and checkpoint is not None
    return _INFINITE if is_report or kind == EndEvent.kind else step


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file from the last to the first; read them only as needed."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        position, line, complete = file.seek(0, os.SEEK_END), b"", False
        while position > 0 and len(line) <= LINE_BYTES:
            size = min(_BLOCK, position)
            position -= size
            file.seek(position)
            first, *lines = (file.read(size) + line).split(b"\n")
            if not complete:  # the text after the last line break was truncated by a crash
                if not lines:
                    continue
                lines.pop()
                complete = True
            line = first
            yield from reversed(lines)
        if complete and position == 0:
            yield line


def start_of(folder: Path) -> StartEvent | None:
    """Return the start event of a run's folder; None if the folder holds no run."""
    event = next(read_events(folder / "events.jsonl"), None)
    return event if isinstance(event, StartEvent) else None

"""A snapshot of a model's anatomy: what users hold and ask."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from frostlab.roles.parts import Part, State
from frostlab.roles.selection import select


@dataclass(frozen=True)
class Layer:
    """One layer of a stack, with its parts."""

    stack: str
    index: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Anatomy:
    """A snapshot of a model: its parts, in the model's order."""

    model: str
    parts: tuple[Part, ...]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of every stack, in order; layers that share weights list the same parts."""
        found: dict[str, dict[int, list[Part]]] = {}
        for part in self.parts:
            for index in part.layers:
                found.setdefault(part.stack, {}).setdefault(index, []).append(part)
        return tuple(
            Layer(stack, index, tuple(parts))
            for stack, layers in found.items()
            for index, parts in sorted(layers.items())
        )

    def select(self, *selections: str) -> tuple[Part, ...]:
        """Return the parts that the selections name (see the selection language)."""
        return select(self.parts, selections, self.model)

    def with_frozen(self, *selections: str) -> "Anatomy":
        """Return this anatomy as it would be with exactly these parts frozen."""
        return self.with_state(
            {part.key for part in self.select(*selections)} if selections else ()
        )

    def with_state(self, frozen: Collection[str]) -> "Anatomy":
        """Return this anatomy as it would be with exactly the parts of these keys frozen."""

        def state(part: Part) -> State:
            if part.state == "fixed":
                return "fixed"
            return "frozen" if part.key in frozen else "trainable"

        return replace(self, parts=tuple(replace(p, state=state(p)) for p in self.parts))

    def count(self, *states: State) -> int:
        """Count the parameters in any of these states, or all of them."""
        return sum(p.parameters for p in self.parts if not states or p.state in states)

    @property
    def fixed(self) -> tuple[Part, ...]:
        """What the architecture itself holds fixed."""
        return tuple(p for p in self.parts if p.state == "fixed")

    def table(self) -> str:
        """Return the anatomy as text, layers that are alike drawn once."""

        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "model": self.model,
            "parameters": self.count(),
            "trainable": self.count("trainable"),
            "frozen": self.count("frozen"),
            "fixed": self.count("fixed"),
            "layers": len(self.layers),
            "parts": [part.to_dict() for part in self.parts],
        }


_HEADER = ("role", "shape", "heads", "layout", "parameters", "state", "weight")
_RIGHT = (4,)


def as_text(anatomy: Anatomy) -> str:
    """Draw an anatomy: what stands outside the layers, then the layers, then totals."""
    blocks: list[tuple[str, list[tuple[str, ...]]]] = []
    stacks = list(dict.fromkeys(layer.stack for layer in anatomy.layers))
    outside = [part for part in anatomy.parts if not part.layers]
    if outside:
        blocks.append(("outside the layers", [_row(part, part.name) for part in outside]))
    for stack in stacks:
        own = [layer for layer in anatomy.layers if layer.stack == stack]
        for run in _alike(own):
            blocks.append((_title(run), [_row(p, _inner(p)) for p in run[0].parts]))
    rows = [_HEADER, *(row for _, block in blocks for row in block)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [f"{anatomy.model}", "", _line(_HEADER, widths)]
    for title, block in blocks:
        lines += ["", title, *(_line(row, widths) for row in block)]
    return "\n".join([*lines, "", *totals(anatomy)])


def totals(anatomy: Anatomy) -> list[str]:
    """The counts, a line a state that occurs."""
    everything = anatomy.count()
    lines = [f"{'parameters':<12}{everything:>16,}"]
    for state in ("trainable", "frozen", "fixed"):
        count = anatomy.count(state)
        if count or state == "trainable":
            lines.append(f"{state:<12}{count:>16,}  {count / max(everything, 1):.1%}")
    return lines


def _row(part: Part, name: str) -> tuple[str, ...]:
    role = ("cross." if part.place.cross else "") + part.role
    role += ".bias" if part.kind == "bias" else ""
    heads = ""
    if part.heads and part.kind == "weight":
        heads = f"{part.heads.of(part.role)} × {part.heads.size}"
    layout = part.layout if part.rows is not None else ""
    tie = f"  (also {part.ties[0].name})" if part.ties else ""
    shape = "×".join(map(str, part.shape)) or "scalar"
    return role, shape, heads, layout, f"{part.parameters:,}", part.state, name + tie


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        text.rjust(width) if i in _RIGHT else text.ljust(width)
        for i, (text, width) in enumerate(zip(row, widths, strict=True))
    )
    return ("  " + "  ".join(cells)).rstrip()


def _inner(part: Part) -> str:
    """A part's name below its layer: what follows the layer's number."""
    segments = part.name.split(".")
    numbers = [i for i, segment in enumerate(segments) if segment.isdecimal()]
    return ".".join(segments[numbers[0] + 1 :]) if numbers else part.name


def _alike(layers: Sequence[Layer]) -> Iterable[list[Layer]]:
    """Runs of neighbouring layers whose rows would read the same."""
    for _, run in groupby(layers, key=lambda layer: [_row(p, _inner(p)) for p in layer.parts]):
        yield list(run)


def _title(run: Sequence[Layer]) -> str:
    first, last = run[0], run[-1]
    stack = f"{first.stack}." if first.stack else ""
    if first is last:
        return f"{stack}layers[{first.index}]"
    shared = len(first.parts[0].layers) > 1
    count = "share one set of weights" if shared else f"{len(run)} alike"
    return f"{stack}layers[{first.index}:{last.index + 1}]  {count}"

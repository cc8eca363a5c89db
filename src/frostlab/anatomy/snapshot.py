"""A snapshot of a model's anatomy: what users hold and ask."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from frostlab.anatomy.parts import Part, State
from frostlab.anatomy.selection import select


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
        from frostlab.anatomy.table import as_text

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

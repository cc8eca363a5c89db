"""The anatomy of a model as users see it: parts, layers, counts, selections and a table.

A part is a parameter, or the rows of a parameter that have one role, such as query. A stack is a
sequence of layers; an encoder-decoder has two.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any, Literal

from frostlab.roles.parts import Part, State
from frostlab.roles.selection import names_everything, select
from frostlab.text import columns, counted


@dataclass(frozen=True)
class Layer:
    """One layer of a stack, with its parts."""

    stack: str  # such as "encoder"; empty if the model has one stack
    index: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Evidence:
    """How an anatomy was found: by a table, or by a probe, which is a watched forward pass.

    What the probe shows is then tested in further passes.
    """

    method: Literal["table", "probe"] = "table"
    attentions: int = 0  # number of attentions that the probe saw
    passes: int = 0  # forward passes of the test, with changed weights; all agreed with the anatomy
    unreached: tuple[str, ...] = ()  # parameters without an effect on the probe's outputs
    copied: bool = False  # whether the probe ran a small copy of the model, built from its config

    def __str__(self) -> str:
        if self.method == "table":
            return "read from a table"
        tested = f"tested in {counted(self.passes, 'passes')} with changed weights"
        left = f"; {counted(len(self.unreached), 'parameters')} not used" if self.unreached else ""
        seen = counted(self.attentions, "attentions") + (" of a small copy" if self.copied else "")
        return f"found by a probe of {seen}, {tested}{left}"


@dataclass(frozen=True, repr=False)
class Anatomy:
    """The parts of a model and their states at one moment, in the order of the model.

    A part is trainable, frozen (by the user or by PEFT), or fixed: the architecture never trains
    it, or PEFT does not use it (an inactive adapter, the original of a module that PEFT copied).
    """

    model: str
    parts: tuple[Part, ...]
    evidence: Evidence = Evidence()

    def __repr__(self) -> str:
        counts = f"{len(self.layers)} layers, {len(self.parts)} parts"
        learns = f"{self.count('trainable'):,} of {self.count():,} parameters trainable"
        return f"Anatomy({self.model}: {counts}, {learns})"

    def _repr_html_(self) -> str:
        """Return the table as HTML, which notebooks show."""
        from frostlab.html import fragment  # here, because only notebooks need it

        total = self.count()
        shares = [f"{self.count(state):,} {state}" for state in ("trainable", "frozen", "fixed")
                  if self.count(state)]  # fmt: skip
        rows = [(title, *row) for title, rows in _blocks(self) for row in rows]
        about = f"{total:,} parameters: {', '.join(shares)}"
        return fragment(self.model, about, ("where", *_HEADER), rows)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of every stack, in order; layers that share weights list the same parts."""
        stacks: dict[str, dict[int, list[Part]]] = {}
        for part in self.parts:
            for index in part.layers:
                stacks.setdefault(part.stack, {}).setdefault(index, []).append(part)
        return tuple(
            Layer(stack, index, tuple(parts))
            for stack, layers in stacks.items()
            for index, parts in sorted(layers.items())
        )

    def select(self, *selections: str) -> tuple[Part, ...]:
        """Return the parts that match the selections (syntax: docs/freezing.md)."""
        return select(self.parts, selections, self.model)

    def with_frozen(self, *selections: str) -> "Anatomy":
        """Return this anatomy with only the selected parts frozen; the model is not changed.

        Without selections no part is frozen. Fixed parts stay fixed. If the model has adapters,
        parts that are already frozen stay frozen, too, unless one selection is `all` or all are
        negative, such as `!adapter`: such selections decide about every part.
        """
        if not selections:
            return self.with_state(())
        frozen = {part.key for part in self.select(*selections)}
        if self.has_adapters and not names_everything(selections):
            frozen |= {part.key for part in self.parts if part.state == "frozen"}
        return self.with_state(frozen)

    def with_state(self, frozen: Collection[str]) -> "Anatomy":
        """Return this anatomy with only the parts with these keys frozen; fixed ones stay fixed."""

        def state(part: Part) -> State:
            if part.state == "fixed":
                return "fixed"
            return "frozen" if part.key in frozen else "trainable"

        return replace(self, parts=tuple(replace(p, state=state(p)) for p in self.parts))

    def count(self, *states: State) -> int:
        """Count the parameters in these states (default: all states)."""
        return sum(p.parameters for p in self.parts if not states or p.state in states)

    @property
    def fixed(self) -> tuple[Part, ...]:
        """The parts that are never trained."""
        return tuple(p for p in self.parts if p.state == "fixed")

    @property
    def has_adapters(self) -> bool:
        """Whether PEFT added weights to the model."""
        return any(part.role == "adapter" for part in self.parts)

    def table(self, width: int | None = None) -> str:
        """Return the anatomy as text; adjacent layers that are alike are shown once.

        If the text is wider than `width`, it has no column `layout`, and long names are shortened.
        """
        return _as_text(self, width)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "model": self.model,
            "parameters": self.count(),
            "trainable": self.count("trainable"),
            "frozen": self.count("frozen"),
            "fixed": self.count("fixed"),
            "layers": len(self.layers),
            "evidence": asdict(self.evidence),
            "parts": [part.to_dict() for part in self.parts],
        }


_HEADER = ("role", "shape", "heads", "layout", "parameters", "state", "weight")
_RIGHT = (4,)  # right-aligned columns: parameters


def _as_text(anatomy: Anatomy, width: int | None) -> str:
    """Return the table: parts outside the layers, then the layers, then the totals."""
    blocks = _blocks(anatomy)
    table = [_HEADER, *(row for _, rows in blocks for row in rows)]
    aligned = columns(table, right=_RIGHT)
    if width is not None and max(map(len, aligned)) > width - 2:
        aligned = _narrow(table, width - 2)
    indented = (f"  {line}" for line in aligned)
    lines = [anatomy.model, "", next(indented)]
    for title, rows in blocks:
        lines += ["", title, *islice(indented, len(rows))]
    return "\n".join([*lines, "", *_totals(anatomy)])


def _blocks(anatomy: Anatomy) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return titles and rows of the table: parts outside the layers, then runs of equal layers."""
    blocks: list[tuple[str, list[tuple[str, ...]]]] = []
    outside = [part for part in anatomy.parts if not part.layers]
    if outside:
        blocks.append(("outside the layers", [_row(part, part.name) for part in outside]))
    for _, layers in groupby(anatomy.layers, key=lambda layer: layer.stack):
        for alike in _runs_of_equal_layers(list(layers)):
            blocks.append((_title(alike), [_row(p, _local_name(p)) for p in alike[0].parts]))
    return blocks


def _narrow(table: Sequence[Sequence[str]], width: int) -> list[str]:
    """Align a table without its column `layout`.

    A weight's name that is too long loses its remark `(also …)` and, if need be, its beginning.
    """
    place = _HEADER.index("layout")
    rows = [(*row[:place], *row[place + 1 : -1]) for row in table]
    lines = columns(rows, right=(rows[0].index("parameters"),))
    widest = max(map(len, lines))
    room = max(width - widest - 2, 12)
    names = [row[-1] for row in table]
    names = [name if len(name) <= room else name.partition("  (also")[0] for name in names]
    names = [name if len(name) <= room else f"…{name[1 - room :]}" for name in names]
    return [f"{line:{widest}}  {name}" for line, name in zip(lines, names, strict=True)]


def _totals(anatomy: Anatomy) -> list[str]:
    """Return the parameter counts as text: total, trainable, and other states that occur."""
    total = anatomy.count()
    lines = [f"{'parameters':<12}{total:>16,}"]
    for state in ("trainable", "frozen", "fixed"):
        count = anatomy.count(state)
        if count or state == "trainable":
            lines.append(f"{state:<12}{count:>16,}  {count / max(total, 1):.1%}")
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


def _local_name(part: Part) -> str:
    """Return a part's name within its layer: the path after the layer index."""
    segments = part.name.split(".")
    numbers = [i for i, segment in enumerate(segments) if segment.isdecimal()]
    return ".".join(segments[numbers[0] + 1 :]) if numbers else part.name


def _runs_of_equal_layers(layers: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Yield runs of adjacent layers that have the same rows in the table."""
    for _, run in groupby(layers, key=lambda layer: [_row(p, _local_name(p)) for p in layer.parts]):
        yield list(run)


def _title(run: Sequence[Layer]) -> str:
    first, last = run[0], run[-1]
    stack = f"{first.stack}." if first.stack else ""
    if first is last:
        return f"{stack}layers[{first.index}]"
    shared = len(first.parts[0].layers) > 1
    remark = "share one set of weights" if shared else f"{len(run)} alike"
    return f"{stack}layers[{first.index}:{last.index + 1}]  {remark}"

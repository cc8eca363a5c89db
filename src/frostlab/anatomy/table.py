"""The anatomy as text: a line a part, layers that are alike drawn once."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from frostlab.anatomy.parts import Part
from frostlab.anatomy.snapshot import Anatomy, Layer

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

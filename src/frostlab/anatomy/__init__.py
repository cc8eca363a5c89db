"""Which parameter, or rows of a fused one, plays which role, in which layer, for which head."""

from frostlab.anatomy.description import describe, fused, known_types
from frostlab.anatomy.parts import ROLES, Heads, Part, Piece, Slot
from frostlab.anatomy.read import anatomy, survey, unwrapped
from frostlab.anatomy.rows import Rows, join
from frostlab.anatomy.snapshot import Anatomy, Layer

__all__ = [
    "ROLES",
    "Anatomy",
    "Heads",
    "Layer",
    "Part",
    "Piece",
    "Rows",
    "Slot",
    "anatomy",
    "describe",
    "fused",
    "join",
    "known_types",
    "survey",
    "unwrapped",
]

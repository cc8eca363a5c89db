"""Surgery: which weights learn, and what they start from."""

from frostlab.surgery.auditing import Audit, audit
from frostlab.surgery.delta import load_trainable, save_trainable
from frostlab.surgery.exporting import export
from frostlab.surgery.freezing import freeze, thaw
from frostlab.surgery.growing import Growth, grow
from frostlab.surgery.orthogonal import orthogonalize, randomize

__all__ = [
    "Audit",
    "Growth",
    "audit",
    "export",
    "freeze",
    "grow",
    "load_trainable",
    "orthogonalize",
    "randomize",
    "save_trainable",
    "thaw",
]

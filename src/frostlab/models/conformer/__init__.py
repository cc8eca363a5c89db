"""The Conformer: EEG to speech envelope."""

from frostlab.models.conformer.building import build_conformer
from frostlab.models.conformer.config import ConformerConfig
from frostlab.models.conformer.importance import electrode_importance
from frostlab.models.conformer.layer import ConformerLayer
from frostlab.models.conformer.model import UNSEEN, Conformer

__all__ = [
    "UNSEEN",
    "Conformer",
    "ConformerConfig",
    "ConformerLayer",
    "build_conformer",
    "electrode_importance",
]

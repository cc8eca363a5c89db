"""The Conformer a recipe asks for."""

import torch

from frostlab.models.conformer.config import ConformerConfig
from frostlab.models.conformer.model import Conformer
from frostlab.recipe.conformer import ConformerModel


def build_conformer(settings: ConformerModel, channels: int, subjects: int, seed: int) -> Conformer:
    """Build it on the CPU for so many EEG channels and training subjects; a seed, its weights."""
    torch.manual_seed(seed)
    return Conformer(
        ConformerConfig(
            channels=channels,
            subjects=subjects,
            width=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            hidden=settings.hidden or 4 * settings.width,
            kernel=settings.kernel,
            dropout=settings.dropout,
            residual=settings.residual,
            gate_bias=settings.gate_bias,
            gradient_scale=settings.gradient_scale,
            head=settings.head,
            norm=settings.norm,
            attention=settings.attention,
            unseen=settings.unseen,
        )
    )

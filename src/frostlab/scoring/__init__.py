"""Scoring: predicted speech envelopes against what was heard, chance, and a linear baseline."""

from frostlab.scoring.measuring import score_recordings
from frostlab.scoring.page import eeg_page
from frostlab.scoring.ridge import fit_ridge
from frostlab.scoring.scores import EnvelopeScores
from frostlab.scoring.stitching import stitch, window_starts
from frostlab.scoring.table import scores_table

__all__ = [
    "EnvelopeScores",
    "eeg_page",
    "fit_ridge",
    "score_recordings",
    "scores_table",
    "stitch",
    "window_starts",
]

"""A tiny classification set whose examples differ in length."""

import numpy as np

from frostlab.data.tokens import Tokens


def uneven_tokens() -> Tokens:
    """Make eight examples of different lengths."""
    lengths = np.array([3, 9, 5, 12, 4, 7, 12, 6])
    stops = np.cumsum(lengths)
    ids = np.random.default_rng(0).integers(5, 400, int(stops[-1])).astype(np.int32)
    return Tokens(ids, stops - lengths, stops, np.arange(8) % 2, None, None, "uneven")

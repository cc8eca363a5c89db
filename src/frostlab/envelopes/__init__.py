"""Scores and figures of decoded speech envelopes, and a linear decoder to compare with."""

"""Envelopes: predicted speech envelopes scored against real ones, and a linear baseline."""

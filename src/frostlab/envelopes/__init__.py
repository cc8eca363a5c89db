"""Envelopes: scores of decoded speech envelopes, and a linear baseline."""

"""Quantities that a comparison measures in addition to its verdicts, and their page sections."""

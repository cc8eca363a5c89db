"""Timing: clocks, interleaved measurements, and the work that bounds a step."""

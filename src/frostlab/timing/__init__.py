"""Timing: clocks, interleaved measurements, and lower bounds on the time of a step."""

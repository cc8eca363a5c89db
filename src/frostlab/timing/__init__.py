"""Timing: clocks, interleaved measurements, and bounds on the time and memory of a step."""

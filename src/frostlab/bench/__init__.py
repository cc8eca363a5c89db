"""Benchmarks: whole training steps against other ways to take them, interleaved, with ceilings."""

"""Benchmarks: whole training steps of two sides, interleaved, with the ceiling beside them."""

from frostlab.bench.catalogue import BENCHMARKS, Benchmark, NotAvailable, Target, chosen

__all__ = ["BENCHMARKS", "Benchmark", "NotAvailable", "Target", "chosen"]

"""Use of trained runs: load them, evaluate, predict, generate and export."""

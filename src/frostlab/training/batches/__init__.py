"""Batches: the examples of a step as tensors: padded, packed, or past a cached prefix."""

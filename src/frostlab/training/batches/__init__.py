"""Batches: the examples of a step as tensors, padded or packed, and a cache of layer outputs."""

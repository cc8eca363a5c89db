"""Batches: the examples of a step as tensors, padded, packed or with cached layer outputs."""

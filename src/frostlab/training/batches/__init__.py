"""Batches: the examples of a step as padded, packed or prefix-cached tensors."""

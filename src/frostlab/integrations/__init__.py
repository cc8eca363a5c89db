"""Callbacks for other training loops, and TensorBoard."""

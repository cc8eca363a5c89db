"""Callbacks that measure gradient flow in other trainers, and TensorBoard output."""

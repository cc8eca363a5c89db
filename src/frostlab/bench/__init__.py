"""Benchmarks of whole training steps against other training loops and the device's peak speed."""

"""Training: one loop, its clocks and its stages."""

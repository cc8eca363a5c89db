"""Training: the loop, its setup, stages and evaluations."""

"""Many runs: one queue for comparisons and matrices, on devices, a Ray cluster or Slurm."""

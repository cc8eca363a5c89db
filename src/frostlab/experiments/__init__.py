"""Groups of experiments: their comparisons carried out one after another, and their summaries."""

"""Reports of several comparisons."""

"""Recipes: typed definitions of runs, read from YAML files that hold what differs from defaults."""

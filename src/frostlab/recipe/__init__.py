"""Recipes: typed definitions of runs, read from YAML files that hold the non-default settings."""

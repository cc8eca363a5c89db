"""Recipes: typed definitions of runs, read from YAML files; other settings have defaults."""

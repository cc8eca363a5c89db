"""Recipes: what a run is, typed, as YAML that says only what differs from the defaults."""

"""The built-in groups, one YAML file each; most of their experiments are from published studies."""

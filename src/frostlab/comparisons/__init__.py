"""The comparisons that ship, one YAML file each."""

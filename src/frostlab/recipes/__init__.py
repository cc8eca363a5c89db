"""The recipes that ship, one YAML file each."""

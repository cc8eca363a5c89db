"""The groups of the experiments that the sources ran or proposed, one YAML file each."""

"""Surgery on models: freezing, splitting, growing, initialising, auditing and saving weights."""

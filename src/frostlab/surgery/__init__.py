"""Surgery on models: freezing, splitting, growing and initialising weights."""

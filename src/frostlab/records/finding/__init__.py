"""Finding, showing, comparing, marking and cleaning the runs and comparisons in a folder."""

"""The report of one comparison: its figures, its tables, and the order of its sections."""

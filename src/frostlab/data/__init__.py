"""Data: text and synthetic tasks as token arrays, EEG recordings as windows, and their splits."""

"""Surgery: which weights learn, and what they start from."""

"""Chinese and Japanese: the sentences of verdicts, and the fixed texts of pages."""

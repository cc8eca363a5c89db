"""Records: what a run leaves behind, and how it is found and read again."""

"""Reports of runs and comparisons: a page, a record in Markdown, figures and tables."""

"""The check of a pipeline's first step against the unsplit model, and of changes of that model before every step."""

"""A recorded run: the report as page, text and plots, and the live view of a run in progress."""

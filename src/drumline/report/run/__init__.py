"""A recorded run to look at: the report and its page, text and plots, and the run while it goes on."""

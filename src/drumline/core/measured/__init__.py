"""What ranks record while they run: the records, one clock for all of them, the timeline, and the folder on disk."""

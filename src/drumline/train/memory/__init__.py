"""What each rank of a training run will hold, and what it really holds."""

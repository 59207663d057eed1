"""What a user holds: the pipeline, its optimizer, local ranks, and the comparison with one process."""

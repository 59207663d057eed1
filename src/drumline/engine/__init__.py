"""What runs the steps of a pipeline on this process: its ranks, stages, tensors, programs, losses and updates."""

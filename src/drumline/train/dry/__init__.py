"""What a run will be, without running it: its stages, proof, simulated step, and memory."""

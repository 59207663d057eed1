"""What a run will be, without running it: its stages, proof, simulated step, and a forecast of every rank's memory."""

"""Proof against one process: the model by itself, the comparison, the check at the first step, agreement of ranks."""

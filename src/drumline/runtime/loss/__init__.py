"""The parts of a loss, and how much each counts in a microbatch."""

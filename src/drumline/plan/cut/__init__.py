"""Where to cut a chain of blocks into stages: exactly where that is quick, then by the simulator."""

"""Where to cut a chain of blocks into stages: exactly if that is fast, then with the simulator."""

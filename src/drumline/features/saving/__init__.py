"""How a running pipeline saves and loads its state, for any cut, schedule and number of ranks."""

"""Load a service and measure it: closed and open loops, percentiles, queueing against computing."""

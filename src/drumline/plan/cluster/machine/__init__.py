"""A cluster as numbers: devices, links, the seconds of single kernels, and machines by name."""

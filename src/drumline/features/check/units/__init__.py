"""A checked microbatch that runs in several units: slices of its sequences, which together are compared with it."""

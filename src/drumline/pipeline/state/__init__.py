"""Parameters, buffers, optimizers and scales: who holds them, and how to store, update and return them."""

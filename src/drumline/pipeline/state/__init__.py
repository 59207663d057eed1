"""Parameters, buffers, optimizers and scales: who holds them, and how they are kept, updated and given back."""

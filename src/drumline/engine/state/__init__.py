"""Parameters and buffers: who holds them, under which names, and how to store and return them."""

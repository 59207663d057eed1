"""How a backward is run: whole, or split into I and W, eagerly or compiled."""

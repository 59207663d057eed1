"""Functions that call the model themselves, such as the loss of a trainer: what they ask of it, and what they draw."""

"""The lines of a mesh: who is in which, what they tell each other, and which part of a tensor each holds."""

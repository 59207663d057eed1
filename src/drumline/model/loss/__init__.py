"""The parts of a loss that a model or a function computes: what each counts, and by what it is multiplied."""

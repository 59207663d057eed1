"""Training runs: the loop over steps, optimizers by name, rates, evaluation, samples and progress."""

"""Complete training jobs: the model, its data, and the results."""

"""Steps of unequal microbatches: what each size takes, and the order that serves them best."""

"""Steps of unequal microbatches: a program for each bucket of lengths, and the order that serves them best."""

"""The front of a service: takes requests, batches them, sends microbatches through the stages, and answers."""

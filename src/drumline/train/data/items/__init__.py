"""What data are made of: batches, documents, their order and fingerprints."""

"""Runs programs: stages, the channel between ranks, the executor, and what it records."""

"""Decisions about a running pipeline, as values and pure functions: they know neither pipelines nor training loops."""

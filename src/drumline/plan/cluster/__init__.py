"""Transformers on clusters as numbers: what a layout takes in seconds and bytes."""

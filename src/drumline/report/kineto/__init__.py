"""Analyse other people's runs: from PyTorch profiler files to a timeline with causes."""

"""Faults injected into real runs of `drumline train`: run.py starts them, cases.py lists them, user.py strikes."""

"""Adapters beside a frozen model: how `drumline train` makes, saves and merges them, and whether they fit a card."""

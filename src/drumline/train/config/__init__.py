"""What a training run is told: settings as values, read from TOML, a Python function or flags, and checked at once."""

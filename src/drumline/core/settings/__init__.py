"""Settings as fields of dataclasses: each states its default, its meaning and what it accepts in one place."""

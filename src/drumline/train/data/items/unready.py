"""What keeps data from being trained on, but not a run from being forecast: too few rows, no tokenizer, no template."""

from __future__ import annotations

from drumline.core.errors import UsageError


class Unready(UsageError):
    """There are too few rows for a step, or nothing says how texts become tokens: `--dry-run` goes on without them."""

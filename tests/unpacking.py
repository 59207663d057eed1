"""Packed columns as numbers again, as the page's own script reads them."""

from __future__ import annotations

from base64 import b64decode

import numpy as np


def unpacked(text: str) -> list[float]:
    """Return the numbers that `packed` made into text, as the page's own script does.

    >>> unpacked("u1:AAEC")
    [0, 1, 2]
    """
    kind, _, coded = text.partition(":")
    numbers: list[float] = np.frombuffer(b64decode(coded), f"<{kind}").tolist()
    return numbers

"""What gives something else at every use: iterators, files, the system's randomness."""

from __future__ import annotations

import random
from io import IOBase
from typing import Any

from drumline.model.watch.surroundings import is_known


def can_be_used_up(value: Any) -> bool:
    """Whether every use gives something else, and none can be taken back.

    An iterator of the user's own class has fields, which can.

    >>> can_be_used_up(iter([1])), can_be_used_up([1]), can_be_used_up(random.SystemRandom())
    (True, False, True)
    """
    if isinstance(value, IOBase):
        return not value.closed and value.readable()
    kind = type(value)
    return isinstance(value, random.SystemRandom) or (hasattr(kind, "__next__") and is_known(kind))

"""The state of Python's global generator as bytes: reading and writing it takes a tenth of Python's own way.

Where the generator keeps its 624 words and the place among them is seen, not assumed. If they are not there, states are
Python's own.
"""

from __future__ import annotations

import random
from ctypes import Array, c_uint32, memmove, sizeof
from functools import cache
from typing import Any

_NUM_WORDS = 624
_generator: Any = getattr(random, "_inst", None)  # of which `random.random` and all others are methods


def pythons_state() -> tuple[Any, ...]:
    """Return the state of Python's global generator, to be compared and to be put back.

    >>> before = pythons_state()
    >>> before == pythons_state()
    True
    >>> drawn = random.random()
    >>> before == pythons_state()
    False
    >>> put_pythons_state(before); random.random() == drawn
    True
    """
    words = _words()
    return random.getstate() if words is None else (bytes(words), _generator.gauss_next)


def put_pythons_state(state: tuple[Any, ...]) -> None:
    """Let Python's global generator go on from a state, also of another process."""
    words = _words()
    if not isinstance(state[0], bytes):
        random.setstate(state)
    elif words is None:
        place, *key = (c_uint32 * (_NUM_WORDS + 1)).from_buffer_copy(state[0])
        random.setstate((3, (*key, place), state[1]))
    else:
        memmove(words, state[0], sizeof(words))
        _generator.gauss_next = state[1]


@cache
def _words() -> Array[Any] | None:
    """Return where the generator keeps its place and its words, if that is behind its head."""
    if _generator is None or not hasattr(_generator, "gauss_next"):
        return None
    words = (c_uint32 * (_NUM_WORDS + 1)).from_address(id(_generator) + object.__basicsize__)
    version, (*key, place), _ = random.getstate()
    return words if version == 3 and [*words] == [place, *key] else None

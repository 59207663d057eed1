"""The numbers of NumPy's global generator as bytes: reading and writing them takes a fiftieth of NumPy's own way.

NumPy tells where its generators keep them, for code in C; that they are 624 words and a position is seen, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array, c_uint32, memmove, sizeof
from functools import cache
from typing import Any

import numpy as np

_NUM_WORDS = 624


def numpys_words() -> bytes | None:
    """Return the words from which NumPy's global generator draws, and its place among them; None if they are unknown.

    They do not tell whether the second of two normal numbers is in store.

    >>> before = numpys_words()
    >>> before == numpys_words()
    True
    >>> drawn = np.random.rand()
    >>> before is not None and before == numpys_words()
    False
    """
    generator = _get_generator()
    words = _words_of(id(generator))
    return None if words is None else bytes(words[0])


def put_numpys_words(words: bytes) -> bool:
    """Let NumPy's global generator draw from these words, with no second normal number in store; whether it could.

    >>> before = numpys_words()
    >>> drawn = np.random.rand()
    >>> before is None or (put_numpys_words(before) and np.random.rand() == drawn)
    True
    """
    known = _words_of(id(_get_generator()))
    if known is None or len(words) != sizeof(known[0]):
        return False
    np.random.seed(0)  # which takes a number out of the store
    memmove(known[0], words, len(words))
    return True


_get_generator: Callable[[], Any] = getattr(np.random, "get_bit_generator", lambda: None)  # since NumPy 1.24


@cache
def _words_of(_number: int) -> tuple[Array[Any], object] | None:
    """Return where the words of the global generator of that number are, with the generator, which then lives on."""
    generator = _get_generator()
    if not isinstance(generator, np.random.MT19937):
        return None
    words = (c_uint32 * (_NUM_WORDS + 1)).from_address(generator.ctypes.state_address)
    _, key, position, *_ = tuple(np.random.get_state())
    is_as_said = [*words] == [*map(int, key), int(position)]
    return (words, generator) if is_as_said else None

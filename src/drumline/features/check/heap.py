"""What the C library does with freed memory: keep it for the next tensor, or give it back to the system.

glibc keeps large freed blocks once a few of them were freed. A process that frees gradients of one size and then needs
tensors of another grows by the gaps, up to half as large again. Elsewhere nothing is known to need this.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_LARGE = 1 << 20  # bytes of a block that goes back at once while memory is short
_LARGEST = 32 << 20  # the value that glibc itself arrives at after some steps; larger ones always go back


@contextmanager
def giving_back() -> Iterator[None]:
    """Give large blocks back to the system as they are freed.

    >>> with giving_back():
    ...     block = bytearray(1 << 22)
    """
    tell = _mallopt()
    tell(_MMAP, _LARGE)
    try:
        yield
    finally:
        tell(_MMAP, _LARGEST)
        tell(_TRIM, 2 * _LARGEST)


@cache
def _mallopt() -> Any:
    function = getattr(ctypes.CDLL(None), "mallopt", None)
    return (lambda *_: 0) if function is None else function

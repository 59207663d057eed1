"""Shuffling without a list: where each number goes is computed, from a key alone.

A Feistel network permutes the numbers below a power of four; those that land outside of the range go through it again
until they are inside. Every place can be asked for by itself, so a shuffle of a billion rows takes no memory, and goes
on anywhere.

    left, right  ->  right, left ^ mixed(right, key of the round)        eight rounds
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Indices = NDArray[np.int64]


class Shuffle:
    """A permutation of 0 .. size - 1 that depends on `key` and `size` alone.

    >>> value = Shuffle(10, key=(0, 3))
    >>> sorted(value.at(0, 10).tolist()) == list(range(10))
    True
    >>> value.at(0, 10).tolist()[4:6] == value.at(4, 6).tolist()
    True
    """

    def __init__(self, size: int, *, key: tuple[int, ...]) -> None:
        self.size = size
        self._half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
        state = np.zeros(1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            for number in key:
                state = _mixed((state ^ np.uint64(number % 2**64)) + _ODD)
            rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _ODD
            self._keys = _mixed(rounds ^ state)

    def at(self, start: int, stop: int) -> Indices:
        """Return where the places from `start` to before `stop` go."""
        values = np.arange(start, stop, dtype=np.uint64)
        outside = np.ones(values.shape, dtype=bool)
        while outside.any():
            values[outside] = self._once(values[outside])
            outside = values >= np.uint64(self.size)
        return values.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, low = np.uint64(self._half), np.uint64(2**self._half - 1)
        left, right = values >> half, values & low
        with np.errstate(over="ignore"):
            for key in self._keys:
                left, right = right, left ^ (_mixed(right + key) & low)
        return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return numbers of which every bit depends on all bits of those given."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))
